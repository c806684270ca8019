"""Saved workflow + checkpoint → click probabilities.

:class:`Predictor` and :func:`write_bundle` are imported on first use, because they need torch,
which takes 1 to 4 seconds to import and which the command line and the server's parent process do
without. Nothing here imports NVTabular, Dask or pandas, except the benchmark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvt_torchrec import __version__
from nvt_torchrec.clicklog.in_memory.errors import InvalidRowError, MissingColumnError

if TYPE_CHECKING:
    from nvt_torchrec.inference.model.bundle import write_bundle
    from nvt_torchrec.inference.predictor import Predictor

__all__ = ["InvalidRowError", "MissingColumnError", "Predictor", "__version__", "write_bundle"]


def __getattr__(name: str) -> Any:
    if name == "Predictor":
        from nvt_torchrec.inference.predictor import Predictor

        return Predictor
    if name == "write_bundle":
        from nvt_torchrec.inference.model.bundle import write_bundle

        return write_bundle
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
