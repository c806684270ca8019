"""Saved workflow + checkpoint → click probabilities.

Names are imported on first use, because :class:`Predictor` and :func:`write_bundle` need torch,
which takes 1 to 4 seconds to import and which the command line and the server's parent process do
without. Nothing here imports NVTabular, Dask or pandas, except the benchmark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvt_torchrec import __version__

if TYPE_CHECKING:
    from nvt_torchrec.clicklog.in_memory.errors import InvalidRowError, MissingColumnError
    from nvt_torchrec.inference.model.bundle import write_bundle
    from nvt_torchrec.inference.predictor import Predictor

__all__ = ["InvalidRowError", "MissingColumnError", "Predictor", "__version__", "write_bundle"]
_MODULES = {
    "InvalidRowError": "nvt_torchrec.clicklog.in_memory.errors",
    "MissingColumnError": "nvt_torchrec.clicklog.in_memory.errors",
    "Predictor": "nvt_torchrec.inference.predictor",
    "write_bundle": "nvt_torchrec.inference.model.bundle",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        from nvt_torchrec.base.versions import import_name

        return import_name(_MODULES[name], name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
