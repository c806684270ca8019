"""Names that left cuDF and dask-cuDF between 23.8 and 26.10; nothing happens without cuDF.

Written against the sources of cudf 26.10; not yet run on a GPU.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec

from nvt_compat.patching import edit, supply


def apply() -> None:
    """Supply the names, then mend ``merlin.core.dispatch``, which everything else imports."""
    if find_spec("cudf") is None:
        return
    import cudf
    import dask_cudf

    _supply_columns()
    supply(cudf.DataFrame, from_pandas=staticmethod(cudf.from_pandas))
    # `chunksize` became `blocksize`; a move between libraries is `to_backend`.
    dask_cudf.read_csv = _read_csv_with_chunksize(dask_cudf.read_csv)
    supply(dask_cudf, from_dask_dataframe=lambda ddf: ddf.to_backend("cudf"))
    supply(dask_cudf.DataFrame, to_dask_dataframe=lambda self: self.to_backend("pandas"))
    _mend_dispatch()


def _supply_columns() -> None:
    import numpy as np
    import pylibcudf as plc
    from cudf.core import column
    from cudf.core.column import ColumnBase, ListColumn

    def build_column(data, dtype, *, size, children):
        """A list column; Merlin builds no other. ``children``: offsets, elements."""
        offsets, elements = (child.plc_column for child in children)
        kind = plc.DataType(plc.TypeId.LIST)
        return ColumnBase.create(
            plc.Column(kind, size, None, None, 0, 0, [offsets, elements]), dtype
        )

    def offsets(self):
        return ColumnBase.create(self.plc_column.list_view().offsets(), np.dtype("int32"))

    # merlin.io imports build_categorical_column and never calls it.
    supply(column, build_categorical_column=None, build_column=build_column)
    supply(ListColumn, offsets=property(offsets))


def _read_csv_with_chunksize(read_csv):
    @functools.wraps(read_csv)
    def wrapper(*args, chunksize=None, **kwargs):
        if chunksize is not None:
            kwargs["blocksize"] = chunksize
        return read_csv(*args, **kwargs)

    return wrapper


def _mend_dispatch() -> None:
    from merlin.core import dispatch

    # A Series is no longer made of a bare column.
    edit(dispatch.create_multihot_col, ("cudf.Series(col)", "cudf.Series._from_column(col)"))
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
