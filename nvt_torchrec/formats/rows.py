"""Rows of a raw log as typed columns, which every reader returns, with masks of missing values.

A mask has one bit for each column of a row, in words of 64 columns: it is uint64 [words, n], and
column j is bit j % 64 of word j // 64. There is at least one word.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import to_arrow, to_offsets
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.columns import WORD_BITS
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.given_vectors import GivenVectors


@dataclasses.dataclass(frozen=True)
class Jagged:
    """A list of values in each of ``n`` rows.

    Attributes:
        offsets: Integers [n + 1]: row i holds ``values[offsets[i]:offsets[i + 1]]``. The first is
            0, the last the number of values. int64 in raw rows.
        values: The values of all rows, one after the other.
    """

    offsets: np.ndarray
    values: np.ndarray | pa.StringArray

    def __len__(self) -> int:
        return len(self.offsets) - 1


_ONE = np.uint64(1)
#: The time of a row without one: before all others, and far enough from the end of int64 that it
#: stays so when something is added to it.
NO_TIME = -(2**62)
#: Where more rows of a block are bad than may be left out, so many are described, and further ones
#: are only counted.
DESCRIBED_BAD_ROWS = 100
#: About how many bytes a :class:`BadRow` takes beside its texts.
_BAD_ROW_BYTES = 200
#: The number of bad rows that may be left out (``max_bad_rows``) if there is no limit.
UNLIMITED = sys.maxsize

#: uint32 [n] (raw hex32), int64 [n] (int), string array [n] without nulls (string), or lists.
CategoryValues: TypeAlias = np.ndarray | pa.StringArray | Jagged


def get_flat_values(values: CategoryValues) -> np.ndarray | pa.StringArray:
    """Return the values of a column, of lists those of all rows."""
    return values.values if isinstance(values, Jagged) else values


def repeat_lists(lists: Jagged, index: np.ndarray, newest: int | None = None) -> Jagged:
    """Return the lists at some positions.

    Args:
        lists: Different lists [m].
        index: int64 [n], the list of each row.
        newest: The most values that are taken from the end of a list; None for all.
    """
    lengths = np.diff(lists.offsets)
    if newest is not None:
        lengths = np.minimum(lengths, newest)
    lengths = lengths[index]
    offsets = to_offsets(lengths)
    # consecutive numbers, moved for each row by the distance between the two ends of its list
    ends = lists.offsets[1:][index]
    indices = np.arange(offsets[-1]) + np.repeat(ends - offsets[1:], lengths)
    values = lists.values
    if isinstance(values, np.ndarray):
        return Jagged(offsets, values[indices])
    return Jagged(offsets, values.take(to_arrow(indices)))


@dataclasses.dataclass(slots=True)
class BadRow:
    """A row that breaks the spec.

    Attributes:
        line: Index of the line (in parquet, of the row) within the block, from 0.
        what: The column, its value and what was expected.
        column: Name of the column; "" if the row as a whole is wrong.
        text: The raw line without its end (of a line that is too long, the beginning); of parquet,
            the row's columns as JSON.
        remedy: What to do about it, where it is more than to correct the row.
    """

    line: int
    what: str
    column: str = ""
    text: bytes = b""
    remedy: str = ""

    @property
    def reason(self) -> str:
        """What is wrong, and what to do about it, in one line."""
        return f"{self.what} -> {self.remedy}" if self.remedy else self.what

    def move_to(self, line: int) -> BadRow:
        """Return the row with another line; there may be millions of them."""
        return BadRow(line, self.what, self.column, self.text, self.remedy)


@dataclasses.dataclass
class RawRows:
    """Typed columns of ``n`` well-formed rows, in the order of the file.

    Attributes:
        labels: uint8 [labels, n], 0 or 1, the main label first; [0, n] for rows without labels.
        dense: [dense columns, n]; int32 if all of them are, else float64; 0 where missing.
        dense_missing: uint64 [words, n], the mask of missing values.
        categorical: By column, the values (:data:`CategoryValues`); 0, "" or the empty list where
            missing. For specs with ``is_criteo_format`` uint32 [categorical columns, n].
        categorical_missing: uint64 [words, n], likewise.
        line: int64 [n], the line of each row, from 0; lines of bad rows are not in it.
        bad: Bad rows, which are in none of the columns; only the first ones if there are more than
            may be left out.
        bad_count: Number of bad rows.
        lines: Lines of the text, or rows of parquet, counted independently of parsing, so that a
            reader that loses rows is noticed.
        weight: float32 [n], finite and not negative; None if the spec has no weight, or the rows
            have no labels.
        key: int64 [n], what the split goes by: the hash of a text
            (:func:`clicklog.text.assemble.hash_texts`) or microseconds since 1970 UTC; None if the
            split goes by no column, or the rows have no labels.
        times: int64 [2, n], microseconds since 1970 UTC: when the event happened, and from when it
            is known. Of rows without labels [1, n], when they are to be scored, :data:`NO_TIME`
            where that is missing. None if the spec has no events.
        groups: int64 [groups, n], the hash of the key of each group of events, of rows that are
            events of each of :attr:`FeatureSpec.event_keys`; 0 where a column of it is missing.
            None if the spec has no events, or what happened before was added.
        amounts: float64 [amounts, n], the numbers of columns that aggregates are of, NaN where
            missing; None if the spec has no events, or the rows are to be scored.
        table_keys: int64 [tables, n], the hash of the key of each table that has columns; 0 where a
            column of it is missing. None if the spec has no tables, or their columns were joined.
        table_rows: int64 [tables, n], the row of each table that has the key; -1 for none. None
            until it was looked for, and where the columns of tables were joined.
        join_times: int64 [n], the time of each row, :data:`NO_TIME` where it is missing, if tables
            have versions; else None.
        negative_keys: int64 [2, n], the hashes of the item and of the user of rows that negatives
            are drawn for, 0 where missing; None once they were drawn, and of other rows.
        negative_times: int64 [n], the time of these rows, :data:`NO_TIME` where it is missing, if
            the spec names one; else None.
        log_q_correction: float32 [n], what training may add to the logit of each row, because items
            were drawn by their popularity (docs/negatives.md); None unless they were.
        drawn: bool [n], which rows are negatives that were drawn: they are in no file, and are no
            events; None of a spec without negatives.
        label_keys: int64 [labels, n], the hash of the key of each label from another file; 0 where
            a column of it is missing. None if there is no such label, or labels were added.
        label_times: int64 [n], the time of each row, if there are such labels; else None.
        pointers: int32 [2 histories, n], the columns of the parquet that point to the events of
            each history, see :mod:`formats.histories`; None where nobody needs them.
        vector_rows: int32 [vectors, n], the number of each row's vector, -1 for none, see
            :mod:`formats.vectors`. None until tables were looked up, and of a spec without vectors.
        given_vectors: By name, the vectors that rows to score hold themselves, in the place of
            those of tables.
        has_aggregates: Whether the aggregates of the rows were added.
        waiting: Rows that were left out because their clicks may still come, see
            :mod:`etl.labels`.
        done: Rows that were left out because days before have them; no malformed rows are in
            ``bad`` then.
    """

    labels: np.ndarray
    dense: np.ndarray
    dense_missing: np.ndarray
    categorical: np.ndarray | Sequence[CategoryValues]
    categorical_missing: np.ndarray
    line: np.ndarray
    bad: list[BadRow] = dataclasses.field(default_factory=list)
    bad_count: int = 0
    lines: int = 0
    weight: np.ndarray | None = None
    key: np.ndarray | None = None
    times: np.ndarray | None = None
    groups: np.ndarray | None = None
    amounts: np.ndarray | None = None
    table_keys: np.ndarray | None = None
    table_rows: np.ndarray | None = None
    join_times: np.ndarray | None = None
    negative_keys: np.ndarray | None = None
    negative_times: np.ndarray | None = None
    drawn: np.ndarray | None = None
    log_q_correction: np.ndarray | None = None
    pointers: np.ndarray | None = None
    label_keys: np.ndarray | None = None
    label_times: np.ndarray | None = None
    vector_rows: np.ndarray | None = None
    given_vectors: Mapping[str, GivenVectors] = dataclasses.field(default_factory=dict)
    has_aggregates: bool = False
    waiting: int = 0
    done: int = 0

    def __len__(self) -> int:
        return self.dense_missing.shape[1]


def count_bytes(rows: RawRows) -> int:
    """Return about how much memory some rows take, with those that are malformed."""
    total = 0
    for row in rows.bad:
        total += _BAD_ROW_BYTES + len(row.text) + len(row.what)
    columns = [getattr(rows, field.name) for field in dataclasses.fields(rows)]
    if not isinstance(rows.categorical, np.ndarray):
        columns += rows.categorical
    for column in columns:
        if isinstance(column, Jagged):
            total += column.offsets.nbytes
            column = column.values
        if isinstance(column, np.ndarray | pa.StringArray):
            total += column.nbytes
    return total


def count_mask_words(columns: int) -> int:
    """Return the number of words of a mask for so many columns."""
    return max(1, -(-columns // WORD_BITS))


def make_empty_mask(columns: int, rows: int) -> np.ndarray:
    """Return a mask in which no value is missing."""
    return np.zeros((count_mask_words(columns), rows), np.uint64)


def get_bit(column: int) -> np.uint64:
    """Return the position of a column's bit in its word."""
    return np.uint64(column % WORD_BITS)


def get_word(mask: np.ndarray, column: int) -> np.ndarray:
    """Return the words that hold a column's bit, uint64 [n]."""
    return mask[column // WORD_BITS]


def is_missing(mask: np.ndarray, column: int) -> np.ndarray:
    """Return where a column is missing, bool [n]."""
    return (get_word(mask, column) >> get_bit(column)) & _ONE != 0


def add_missing(mask: np.ndarray, column: int, absent: np.ndarray) -> None:
    """Mark a column as missing where ``absent``, bool [n], is true."""
    mask[column // WORD_BITS] |= absent.astype(np.uint64) << get_bit(column)


def set_missing(mask: np.ndarray, column: int, absent: np.ndarray) -> None:
    """Mark a column as missing where ``absent``, bool [n], is true, and nowhere else."""
    mask[column // WORD_BITS] &= ~(_ONE << get_bit(column))
    add_missing(mask, column, absent)


def make_mask(bits: list[int], columns: int) -> np.ndarray:
    """Return the mask of integers that have bit j set where column j of a row is missing."""
    if columns <= WORD_BITS:
        return np.array(bits, np.uint64)[np.newaxis]
    full = 2**WORD_BITS - 1
    words = []
    for word in range(count_mask_words(columns)):
        words.append([row >> (WORD_BITS * word) & full for row in bits])
    return np.array(words, np.uint64)


def get_dense_dtype(spec: FeatureSpec) -> type:
    """Return the dtype of ``RawRows.dense``: int32 if all dense columns are int32, else float64."""
    dtypes = {RAW_TYPES[column.raw].dtype for column in spec.dense}
    return np.int32 if dtypes <= {"int32"} else np.float64


def make_empty_rows(spec: FeatureSpec, *, label: bool = True) -> RawRows:
    """Return no rows, with the types that rows of this spec have."""
    plan = spec.read_plan(label=label)
    columns: list[Any] = []
    for column in spec.categorical:
        values = RAW_TYPES[column.raw].array([])
        columns.append(Jagged(np.zeros(1, np.int64), values) if column.multi_hot else values)
    return RawRows(
        labels=np.empty((len(spec.labels) if label else 0, 0), np.uint8),
        dense=np.empty((len(spec.dense), 0), get_dense_dtype(spec)),
        dense_missing=make_empty_mask(len(spec.dense), 0),
        categorical=np.stack(columns) if spec.is_criteo_format else columns,
        categorical_missing=make_empty_mask(len(spec.categorical), 0),
        line=np.empty(0, np.int64),
        lines=0,
        weight=np.empty(0, np.float32) if label and spec.weight else None,
        key=np.empty(0, np.int64) if label and spec.split.column else None,
        times=np.empty((1 + label, 0), np.int64) if spec.events else None,
        groups=np.empty((len(plan.groups), 0), np.int64) if spec.events else None,
        amounts=np.empty((len(plan.amounts), 0)) if spec.events and label else None,
        join_times=np.empty(0, np.int64) if spec.join_time else None,
        label_keys=np.empty((len(plan.label_keys), 0), np.int64) if plan.label_keys else None,
        label_times=np.empty(0, np.int64) if plan.label_keys else None,
        table_keys=np.empty((len(spec.joined_tables), 0), np.int64) if spec.joined_tables else None,
        negative_keys=np.empty((2, 0), np.int64) if plan.negatives else None,
        negative_times=np.empty(0, np.int64) if plan.negative_time is not None else None,
    )


def add_bad_rows(rows: RawRows, bad: Sequence[BadRow]) -> RawRows:
    """Add bad rows that the parser did not see.

    Args:
        rows: The parsed rows; their line numbers do not count the bad rows.
        bad: The bad rows in order; their line numbers count all lines.
    """
    # how many of the parsed lines come before each bad row
    parsed_before = np.array([row.line - i for i, row in enumerate(bad)], np.int64)

    def count_all(line: np.ndarray) -> np.ndarray:
        """Return line numbers that count the bad rows, too."""
        return line + np.searchsorted(parsed_before, line, side="right")

    described = list(bad)
    for row in rows.bad:
        described.append(row.move_to(int(count_all(np.array(row.line)))))
    return dataclasses.replace(
        rows,
        line=count_all(rows.line),
        bad=sorted(described, key=lambda row: row.line),
        bad_count=rows.bad_count + len(bad),
        lines=rows.lines + len(bad),
    )
