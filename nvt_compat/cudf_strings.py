"""Strings on cuDF 26.10, whose dtype is pandas' ``str``. Nothing happens without cuDF.

* Groups of strings could not be counted by ``agg("size")``, which all vocabularies are made with:
  cuDF compares the name in small letters with capitals.
* Lists of strings did not survive a way between processes: cuDF sends the elements' dtype by its
  name, ``str``, which pandas reads as NumPy's once :mod:`nvt_compat.settings` has turned
  ``future.infer_string`` off.
"""

from __future__ import annotations

import inspect

from nvt_compat.cudf_names import on_gpu
from nvt_compat.patching import PatchError

import numpy as np
import pandas as pd


def apply() -> None:
    """Mend both, where Merlin uses cuDF."""
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
    """Let cuDF's check, a ``functools.singledispatch``, pass "size" for strings."""
    by_name = is_unsupported.dispatch(pd.StringDtype)

    def check(dtype: pd.StringDtype, aggregation: str) -> bool:
        return aggregation != "size" and by_name(dtype, aggregation)

    is_unsupported.register(pd.StringDtype, check)


def keep_strings(list_dtype: type) -> None:
    """Let lists of strings be lists of strings when they arrive."""
    by_name = list_dtype.deserialize.__func__

    def deserialize(cls: type, header: dict, frames: list):
        if isinstance(header["element-type"], str) and header["element-type"] == "str":
            return cls(pd.StringDtype(na_value=np.nan))
        return by_name(cls, header, frames)

    list_dtype.deserialize = classmethod(deserialize)


def _expect(function, text: str) -> None:
    if text not in inspect.getsource(function):
        raise PatchError(f"nvt_compat: cuDF's {function.__qualname__} is not as expected: {text!r}")
