"""Load training batches from the parquet files of the ETL, one stream of batches per rank.

:class:`KJTLoader` is imported on first use, because importing torch and TorchRec takes 4 to
13 seconds. :mod:`nvt_loader.plan` and :mod:`nvt_loader.parquet.dataset` do not need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvt_torchrec.base import __version__
from nvt_torchrec.base.links import follow_link

if TYPE_CHECKING:
    from nvt_torchrec.nvt_loader.loader import KJTLoader

__all__ = ["KJTLoader", "__version__"]

follow_link(__name__)


def __getattr__(name: str) -> type[KJTLoader]:
    if name == "KJTLoader":
        from nvt_torchrec.base.versions import import_name

        return import_name("nvt_torchrec.nvt_loader.loader", name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
