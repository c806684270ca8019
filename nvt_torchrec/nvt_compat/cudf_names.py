"""Names removed from cuDF and dask-cuDF between 23.8 and 26.10, changed calls, and strings.

Nothing is patched if cuDF is not installed, or if Merlin finds no GPU and so does not use cuDF.
Strings have pandas' dtype ``str``, which caused two errors:

* Groups of strings could not be counted by ``agg("size")``, which all vocabularies need: cuDF
  compares the lower-case name of the aggregation with upper-case names.
* Lists of strings could not be sent between processes: cuDF sends the name of the elements' dtype,
  ``str``, which pandas reads as NumPy's dtype because ``future.infer_string`` is off.

``tests/gpu`` runs these patches on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from nvt_torchrec.nvt_compat.patching import check_source, edit, supply

import numpy as np
import pandas as pd


def apply() -> None:
    """Supply the names, then patch ``merlin.core.dispatch``, which everything else imports."""
    if find_spec("cudf") is None:
        return
    from merlin.core.has_gpu import HAS_GPU

    if not HAS_GPU:
        return
    import cudf
    import dask_cudf
    from cudf.core.groupby import groupby

    _supply_columns()
    supply(cudf.DataFrame, from_pandas=staticmethod(cudf.from_pandas))
    # `chunksize` was renamed to `blocksize`, and `to_backend` now converts between libraries.
    dask_cudf.read_csv = _read_csv_with_chunksize(dask_cudf.read_csv)
    supply(dask_cudf, from_dask_dataframe=lambda ddf: ddf.to_backend("cudf"))
    supply(dask_cudf.DataFrame, to_dask_dataframe=lambda self: self.to_backend("pandas"))
    patch_dispatch()
    is_unsupported = groupby._is_unsupported_agg_for_type
    check_source(is_unsupported.dispatch(pd.StringDtype), "_STRING_AGGS")
    allow_size(is_unsupported)
    check_source(cudf.ListDtype.deserialize, 'header["element-type"]')
    keep_strings(cudf.ListDtype)


def _supply_columns() -> None:
    """Supply ``build_column`` and the offsets of list columns."""
    import cudf
    import pylibcudf as plc
    from cudf.core import column
    from cudf.core.column import ColumnBase, ListColumn

    def build_column(data: Any, dtype: Any, *, size: int, children: Any) -> Any:
        """Build a list column, the only kind that Merlin builds, from offsets and elements."""
        offsets, elements = (child.plc_column for child in children)
        kind = plc.DataType(plc.TypeId.LIST)
        return ColumnBase.create(
            plc.Column(kind, size, None, None, 0, 0, [offsets, elements]), dtype
        )

    def offsets(self: Any) -> Any:
        """Return offsets int32 [rows + 1] from 0; libcudf's are those of the unsliced column."""
        plain = ColumnBase.create(self.plc_column.list_view().offsets(), np.dtype("int32"))
        first = self.plc_column.offset()
        own = cudf.Series._from_column(plain).iloc[first : first + len(self) + 1]
        if not len(own):  # an empty column may have no offsets
            return cudf.Series([0], dtype="int32")._column
        return (own - own.iloc[0]).astype("int32")._column

    # merlin.io imports build_categorical_column without calling it.
    supply(column, build_categorical_column=None, build_column=build_column)
    supply(ListColumn, offsets=property(offsets))


def _read_csv_with_chunksize(read_csv: Callable) -> Callable:
    """Return ``read_csv`` with the argument ``chunksize``, the old name of ``blocksize``."""

    @functools.wraps(read_csv)
    def wrapper(*args: Any, chunksize: Any = None, **kwargs: Any) -> Any:
        if chunksize is not None:
            kwargs["blocksize"] = chunksize
        return read_csv(*args, **kwargs)

    return wrapper


def patch_dispatch() -> None:
    """Patch the functions of ``merlin.core.dispatch`` that use cuDF columns.

    :mod:`nvt_compat.dispatch` patches other functions of the same module.
    """
    from merlin.core import dispatch

    edit(
        dispatch.create_multihot_col,
        # dtypes must now be objects, not names
        ('as_column(offsets, dtype="int32")', 'as_column(offsets, dtype=np.dtype("int32"))'),
        # a Series can no longer be made of a column directly
        ("cudf.Series(col)", "cudf.Series._from_column(col)"),
    )
    edit(
        dispatch.make_series,
        (
            "return cudf.Series(_like_ser)",
            "return cudf.Series._from_column(_like_ser) "
            "if hasattr(_like_ser, 'plc_column') else cudf.Series(_like_ser)",
        ),
    )
    # Strings have the dtype `str`, not `object`.
    edit(
        dispatch.hex_to_int,
        (
            'if s.dtype == "object":\n            s = s.str.htoi()',
            'if s.dtype.kind == "O":\n            s = s.str.htoi()',
        ),
    )


def allow_size(is_unsupported: Any) -> None:
    """Make cuDF's check, a ``functools.singledispatch``, allow "size" for strings."""
    by_name = is_unsupported.dispatch(pd.StringDtype)

    def check(dtype: pd.StringDtype, aggregation: str) -> bool:
        return aggregation != "size" and by_name(dtype, aggregation)

    is_unsupported.register(pd.StringDtype, check)


def keep_strings(list_dtype: Any) -> None:
    """Let lists of strings keep their type when they are deserialized."""
    by_name = list_dtype.deserialize.__func__

    def deserialize(cls: type, header: dict, frames: list) -> Any:
        if isinstance(header["element-type"], str) and header["element-type"] == "str":
            return cls(pd.StringDtype(na_value=np.nan))
        return by_name(cls, header, frames)

    list_dtype.deserialize = classmethod(deserialize)
