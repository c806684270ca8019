"""Operators on dictionaries of NumPy arrays, which Triton's servers hand over one by one.

NVTabular has a C++ extension for Categorify and FillMissing there. As released it reads NumPy 1's
dtypes ("unhandled dtype i0", "Unhandled floating point width for FillTransform0") and asks
merlin-core for a name it never had; and it gives values out of vocabulary id 2, whatever
``num_buckets`` says. Here the operator's own ``transform`` does it, so ids are the workflow's.
"""

from __future__ import annotations

from nvt_compat.patching import replace

import numpy as np
import pandas as pd


class OnArrays:
    """A fitted operator, each column of which is transformed by itself."""

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
    """None stands for: transform frames. A combination of columns needs all of them at once."""
    return None if self.encode_type == "combo" else OnArrays(self)


def _fill_missing(self, col_selector, inference_config) -> OnArrays | None:
    """None stands for: transform frames. Then there are more columns than arrays."""
    return None if self.add_binary_cols else OnArrays(self)


def apply() -> None:
    """Replace what starts the C++ extension."""
    from nvtabular.ops import Categorify, FillMissing

    for operator, function in ((Categorify, _categorify), (FillMissing, _fill_missing)):
        replace(operator, "inference_initialize", function, expect="nvtabular_cpp.inference")
