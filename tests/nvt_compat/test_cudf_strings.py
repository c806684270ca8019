"""What is mended for strings on cuDF, on stand-ins; ``test_rapids.py`` looks at cuDF itself."""

from __future__ import annotations

import functools

from nvt_torchrec.nvt_compat.cudf_names import allow_size, keep_strings

import numpy as np
import pandas as pd


def test_sizes_of_groups_of_strings():
    @functools.singledispatch
    def is_unsupported(dtype, aggregation):
        return False

    is_unsupported.register(pd.StringDtype, lambda dtype, aggregation: aggregation != "min")
    allow_size(is_unsupported)
    text = pd.StringDtype(na_value=np.nan)
    assert [is_unsupported(text, name) for name in ("size", "min", "sum")] == [False, False, True]
    assert not is_unsupported(np.dtype("int64"), "sum")


def test_lists_of_strings():
    class ListDtype:
        def __init__(self, element_type):
            self.element_type = element_type

        @classmethod
        def deserialize(cls, header, frames):
            return cls(np.dtype(header["element-type"]))

    keep_strings(ListDtype)
    found = ListDtype.deserialize({"element-type": "str"}, []).element_type
    assert isinstance(found, pd.StringDtype)
    assert ListDtype.deserialize({"element-type": "int32"}, []).element_type == np.dtype("int32")
