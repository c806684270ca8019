"""The functions that a workflow's operators call.

A saved workflow (``graph.json``) refers to them by module and qualified name, so these must not
change. This package looks names up in :data:`NAMED` only; NVTabular's own loader imports this
module.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nvt_torchrec.formats.feature_spec.transforms import LOG_SHIFT, Log1pNormalize, LogPlus2


def log_of_shifted(column: Any) -> Any:
    """Return log(x + 3) in float64, which is at least 0 for x ≥ −2."""
    return np.log(column.astype("float64") + LOG_SHIFT)


def log_of_plus_2(column: Any) -> Any:
    """Return log(x + 2) in float64, which is at least 0 for x ≥ −1."""
    return np.log(column.astype("float64") + LogPlus2.shift)


def log_of_plus_1(column: Any) -> Any:
    """Return log(x + 1) in float64, which is at least 0 for x ≥ 0."""
    return np.log(column.astype("float64") + Log1pNormalize.shift)


def as_float32(column: Any) -> Any:
    """Return float32, the dtype of the training parquet."""
    return column.astype("float32")


NAMED = {f.__name__: f for f in (log_of_shifted, log_of_plus_2, log_of_plus_1, as_float32)}
