"""A scikit-learn estimator: from a frame to probabilities, in one process.

``ClickModel`` guesses a feature spec, runs the ETL, trains and predicts. It is imported on first
use, because only it needs scikit-learn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvt_torchrec.base.versions import import_name

if TYPE_CHECKING:
    from nvt_torchrec.estimator.classifier import ClickModel

__all__ = ["ClickModel"]


def __getattr__(name: str) -> Any:
    if name == "ClickModel":
        return import_name("nvt_torchrec.estimator.classifier", name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
