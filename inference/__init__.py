"""Saved workflow + checkpoint → click probabilities.

Importing this package imports neither NVTabular nor torch; using :class:`Predictor` does.
"""

from __future__ import annotations

import importlib

__all__ = ["Predictor"]


def __getattr__(name: str):
    if name == "Predictor":
        return importlib.import_module("inference.predictor").Predictor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
