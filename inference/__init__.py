"""Saved workflow + checkpoint → click probabilities.

Importing this package imports neither NVTabular nor torch; using :class:`Predictor` imports torch.
Nothing here imports NVTabular, Dask or pandas, the benchmark aside.
"""

from __future__ import annotations

import importlib

_HOME = {
    "InvalidRowError": "inference.inputs.values",
    "MissingColumnError": "inference.inputs.values",
    "Predictor": "inference.predictor",
    "write_bundle": "inference.model.bundle",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
