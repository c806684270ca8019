"""Strings on cuDF 26.10, whose dtype is pandas' ``str``. Nothing is patched without cuDF.

* Groups of strings could not be counted by ``agg("size")``, which makes all vocabularies: cuDF
  compares the lower-case name with upper-case names.
* Lists of strings could not be sent between processes: cuDF sends the elements' dtype as its name,
  ``str``, which pandas reads as NumPy's dtype, because :mod:`nvt_compat.settings` has turned
  ``future.infer_string`` off.
"""

from __future__ import annotations

import inspect

from nvt_torchrec.nvt_compat.cudf_names import on_gpu
from nvt_torchrec.nvt_compat.patching import PatchError

import numpy as np
import pandas as pd


def apply() -> None:
    """Patch both, where Merlin uses cuDF."""
    if not on_gpu():
        return
    import cudf
    from cudf.core.groupby import groupby

    is_unsupported = groupby._is_unsupported_agg_for_type
    _expect(is_unsupported.dispatch(pd.StringDtype), "_STRING_AGGS")
    allow_size(is_unsupported)
    _expect(cudf.ListDtype.deserialize, 'header["element-type"]')
    keep_strings(cudf.ListDtype)


def allow_size(is_unsupported) -> None:
    """Make cuDF's check, a ``functools.singledispatch``, allow "size" for strings."""
    by_name = is_unsupported.dispatch(pd.StringDtype)

    def check(dtype: pd.StringDtype, aggregation: str) -> bool:
        return aggregation != "size" and by_name(dtype, aggregation)

    is_unsupported.register(pd.StringDtype, check)


def keep_strings(list_dtype: type) -> None:
    """Make lists of strings keep their type when they are deserialized."""
    by_name = list_dtype.deserialize.__func__

    def deserialize(cls: type, header: dict, frames: list):
        if isinstance(header["element-type"], str) and header["element-type"] == "str":
            return cls(pd.StringDtype(na_value=np.nan))
        return by_name(cls, header, frames)

    list_dtype.deserialize = classmethod(deserialize)


def _expect(function, text: str) -> None:
    if text not in inspect.getsource(function):
        raise PatchError(f"nvt_compat: cuDF's {function.__qualname__} is not as expected: {text!r}")
