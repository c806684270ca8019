"""The functions that a workflow's operators call, by name.

A saved workflow names them (``graph.json``: module and qualified name); loading takes them from
:data:`NAMED` and from nowhere else. A foreign NVTabular imports this module by its name.
"""

from __future__ import annotations

import numpy as np

from workflows.dense import DENSE_SHIFT


def log_of_shifted(column):
    """log(x + 3) in float64; x ≥ −2 keeps it ≥ 0."""
    return np.log(column.astype("float64") + DENSE_SHIFT)


def as_float32(column):
    """The training parquet holds float32."""
    return column.astype("float32")


NAMED = {function.__name__: function for function in (log_of_shifted, as_float32)}
