"""Convert an estimator's rows to Arrow tables, in the same way for training and scoring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.sparse import issparse

from nvt_torchrec.base.arrays import to_arrow
from nvt_torchrec.base.errors import SchemaError


def has_columns(rows: Any) -> bool:
    """Return whether rows have named columns; otherwise they are a matrix of numbers.

    A pandas frame whose column names are numbers is a matrix, too.
    """
    if hasattr(rows, "iloc"):
        return all(isinstance(name, str) for name in getattr(rows, "columns", [0]))
    if issparse(rows):  # checked first, because one class of sparse matrices is a Mapping
        return False
    if isinstance(rows, pa.Table | pa.RecordBatch | Mapping):
        return True
    return hasattr(rows, "__arrow_c_stream__") or type(rows).__name__ == "LazyFrame"


def make_table(columns: Any) -> pa.Table:
    """Convert a pandas or Polars frame, an Arrow table or stream, or a dict of columns to a table.

    The index of a pandas frame is ignored.

    Raises:
        SchemaError: A column cannot be converted, two columns have the same name, or the rows are
            a Polars LazyFrame, which is a query that has not run.
    """
    if type(columns).__name__ == "LazyFrame":
        raise SchemaError("rows of type LazyFrame: a query that has not run", "pass X.collect()")
    try:
        if hasattr(columns, "iloc"):
            table = pa.Table.from_pandas(columns, preserve_index=False)
        elif isinstance(columns, pa.RecordBatch):
            table = pa.Table.from_batches([columns])
        else:
            table = pa.table(columns)
    except (ValueError, TypeError) as error:  # Arrow's errors derive from these two
        reason = " ".join(map(str, error.args))
        raise SchemaError(
            f"the frame cannot be converted to Arrow: {reason}",
            "give each column values of a single type, such as X['a'].astype(str), and a unique "
            "name",
        ) from None
    repeated = {name for name in table.column_names if table.column_names.count(name) > 1}
    if repeated:
        raise SchemaError(
            f"columns with the same name: {', '.join(sorted(repeated))}",
            "rename or drop all but one of each",
        )
    return table.replace_schema_metadata(None)


def matrix_to_table(matrix: np.ndarray, names: Sequence[str]) -> pa.Table:
    """Convert a matrix of numbers [rows, columns] to a table of float64 columns."""
    columns = [to_arrow(column) for column in matrix.T.astype(np.float64)]
    return pa.table(dict(zip(names, columns, strict=True)))


def set_column(table: pa.Table, name: str, values: np.ndarray) -> pa.Table:
    """Return the table with a column of integers, which replaces a column with the same name."""
    column = to_arrow(values)
    if name in table.column_names:
        return table.set_column(table.column_names.index(name), name, column)
    return table.append_column(name, column)
