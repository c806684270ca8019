"""Rows that a workflow has encoded, and their conversion to a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import to_arrow
from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.formats.given_vectors import GivenVectors
from nvt_torchrec.formats.ids import Ids
from nvt_torchrec.formats.schema import TableSchema


@dataclasses.dataclass
class EncodedRows:
    """``n`` rows transformed by a workflow.

    Attributes:
        labels: float32 [labels, n]; [0, n] if the rows had no labels.
        dense: float32 [dense columns, n].
        ids: The ids of the categorical columns, int32.
        null: int64 [categorical columns], the number of rows in which each was missing (a missing
            list becomes an empty one, any other missing value id 1).
        oov: int64 [categorical columns], the number of out-of-vocabulary ids; for a hashed column
            all but the null ones.
        weight: float32 [n]; None if the rows had no weight.
        log_q_correction: float32 [n], see :class:`formats.rows.RawRows`.
        pointers: See :class:`formats.rows.RawRows`.
        vector_rows: int32 [vectors, n], the number of each row's vector, -1 for none, see
            :mod:`formats.vectors`; None for a spec without vectors.
        given_vectors: The vectors that rows to score bring themselves, by name.
    """

    labels: np.ndarray
    dense: np.ndarray
    ids: Ids
    null: np.ndarray
    oov: np.ndarray
    weight: np.ndarray | None = None
    log_q_correction: np.ndarray | None = None
    pointers: np.ndarray | None = None
    vector_rows: np.ndarray | None = None
    given_vectors: Mapping[str, GivenVectors] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return self.dense.shape[1]


def split_rows(rows: EncodedRows, size: int) -> list[EncodedRows]:
    """Split rows to score into parts of up to ``size`` rows.

    The first part keeps the counts of null and out-of-vocabulary ids of all rows, and the others
    have zeros, so that nothing is counted twice.
    """
    if len(rows) <= size:
        return [rows]
    zeros = np.zeros_like(rows.null)
    parts = []
    for begin in range(0, len(rows), size):
        end = begin + size
        given = {name: vectors.slice(begin, end) for name, vectors in rows.given_vectors.items()}
        parts.append(
            EncodedRows(
                labels=rows.labels[:, begin:end],
                dense=rows.dense[:, begin:end],
                ids=rows.ids.slice(begin, end),
                null=rows.null if begin == 0 else zeros,
                oov=rows.oov if begin == 0 else zeros,
                vector_rows=None if rows.vector_rows is None else rows.vector_rows[:, begin:end],
                given_vectors=given,
            )
        )
    return parts


def join_rows(parts: Sequence[EncodedRows]) -> tuple[np.ndarray, Ids]:
    """Concatenate parts: return dense values, float32 [columns, n], and ids."""
    if len(parts) == 1:
        return parts[0].dense, parts[0].ids
    dense = np.concatenate([rows.dense for rows in parts], axis=1)
    return dense, Ids.concatenate([rows.ids for rows in parts])


def to_table(rows: EncodedRows, schema: TableSchema) -> pa.Table:
    """Convert rows to a table of :attr:`TableSchema.arrow`, without a copy.

    Raises:
        SchemaError: The schema has columns that the rows lack, such as labels.
    """
    fields = schema.arrow
    if len(rows.labels) != len(schema.labels) or (schema.weight and rows.weight is None):
        raise SchemaError("rows without labels", "read them with their labels to write them")
    floats = [*rows.labels]
    if schema.weight:
        floats.append(rows.weight)
    if schema.log_q_correction:
        if rows.log_q_correction is None:
            raise SchemaError("rows without negatives", "the ETL draws them")
        floats.append(rows.log_q_correction)
    columns = [*map(to_arrow, (*floats, *rows.dense))]
    for j, kind in enumerate(fields.types[len(columns) :][: len(schema.categorical)]):
        ids = to_arrow(rows.ids.column(j))
        if rows.ids.offsets is not None and pa.types.is_list(kind):
            offsets = pa.py_buffer(rows.ids.offsets[j] - rows.ids.offsets[j, 0])
            ids = pa.ListArray.from_buffers(kind, len(rows), [None, offsets], children=[ids])
        columns.append(ids)
    if schema.histories:
        if rows.pointers is None:
            raise SchemaError("rows without histories", "the ETL makes them")
        columns += map(to_arrow, rows.pointers)
    if schema.vectors:
        if rows.vector_rows is None:
            raise SchemaError("rows without vectors", "the ETL finds them by the keys of tables")
        columns += map(to_arrow, rows.vector_rows)
    return pa.Table.from_arrays(columns, schema=fields)
