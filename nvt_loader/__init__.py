"""Training batches from the parquet that the ETL writes: one stream of batches per rank.

:class:`KJTLoader` is imported on first use, because TorchRec takes seconds to import and
:mod:`nvt_loader.plan` and :mod:`nvt_loader.parquet.dataset` do without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvt_loader.loader import KJTLoader

__all__ = ["KJTLoader"]


def __getattr__(name: str) -> object:
    if name == "KJTLoader":
        from nvt_loader.loader import KJTLoader

        return KJTLoader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
