"""Operators on dictionaries of NumPy arrays, as Triton's servers call them.

NVTabular has a C++ extension for Categorify and FillMissing there. The released one reads NumPy 1's
dtypes ("unhandled dtype i0", "Unhandled floating point width for FillTransform0"), imports a name
that merlin-core never had, and ignores ``num_buckets``: all out-of-vocabulary values get id 2. Here
the operator's own ``transform`` is used, so ids equal the workflow's.
"""

from __future__ import annotations

from nvt_torchrec.nvt_compat.patching import replace

import numpy as np
import pandas as pd


class OnArrays:
    """A fitted operator that transforms each column separately."""

    def __init__(self, operator) -> None:
        from merlin.dag import DataFormats, Supports

        self._operator = operator
        self.supports = Supports.CPU_DICT_ARRAY
        self.supported_formats = DataFormats.NUMPY_DICT_ARRAY

    def transform(self, col_selector, tensors: dict) -> dict:
        """Transform ``{column: array [n], or for lists (values, offsets)}``."""
        return {name: self._column(name, value) for name, value in tensors.items()}

    def _column(self, name: str, value):
        from merlin.dag import ColumnSelector

        values, *offsets = value if isinstance(value, tuple) else (value,)
        frame = pd.DataFrame({name: np.ravel(values)})
        result = self._operator.transform(ColumnSelector([name]), frame)[name].to_numpy()
        return (result, *offsets) if isinstance(value, tuple) else result


def _categorify(self, columns, inference_config) -> OnArrays | None:
    """Return None, to transform frames, for a combination of columns, which needs all of them."""
    return None if self.encode_type == "combo" else OnArrays(self)


def _fill_missing(self, col_selector, inference_config) -> OnArrays | None:
    """Return None, to transform frames, where the result has more columns than arrays."""
    return None if self.add_binary_cols else OnArrays(self)


def apply() -> None:
    """Replace the methods that use the C++ extension."""
    from nvtabular.ops import Categorify, FillMissing

    for operator, function in ((Categorify, _categorify), (FillMissing, _fill_missing)):
        replace(operator, "inference_initialize", function, expect="nvtabular_cpp.inference")
