"""What is mended for strings on cuDF, on stand-ins and, where it is installed, on cuDF itself."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from importlib.util import find_spec

from nvt_torchrec.nvt_compat.cudf_names import allow_size, keep_strings

import numpy as np
import pandas as pd
import pytest


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


@pytest.mark.skipif(find_spec("cudf") is None, reason="needs RAPIDS, but no GPU")
def test_strings_on_cudf() -> None:
    """Its own checks and dtypes, which are plain Python."""
    code = """
import merlin.core.has_gpu
merlin.core.has_gpu.HAS_GPU = True
import nvt_torchrec.nvt_compat, cudf, numpy as np, pandas as pd
from cudf.core.abc import Serializable
from cudf.core.groupby import groupby
text = pd.StringDtype(na_value=np.nan)
refused = {a for a in ("size", "sum", "mean") if groupby._is_unsupported_agg_for_type(text, a)}
assert refused == {"sum", "mean"}, refused
for dtype in (text, np.dtype("int64"), cudf.ListDtype("int32")):
    sent = cudf.ListDtype(dtype).device_serialize()
    assert Serializable.device_deserialize(*sent).element_type == dtype
"""
    environment = os.environ | {"RAPIDS_NO_INITIALIZE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_edits_fit_merlin_and_leave_pandas_alone() -> None:
    """They are made on machines with a GPU only; here in a process of its own."""
    code = """
import nvt_torchrec.nvt_compat, numpy as np, pandas as pd
from nvt_torchrec.nvt_compat.cudf_names import patch_dispatch
patch_dispatch()
from merlin.core import dispatch
lists = dispatch.create_multihot_col(pd.Series([0, 2, 3]), pd.Series([7, 8, 9]))
assert [list(row) for row in lists] == [[7, 8], [9]]
assert dispatch.make_series([1, 2]).tolist() == [1, 2]
assert dispatch.hex_to_int(pd.Series(["ff", None])).tolist() == [255, pd.NA]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
