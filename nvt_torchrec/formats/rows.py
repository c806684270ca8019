"""Rows of a raw log as typed columns with masks of missing values, as every reader returns them.

A mask is uint64 [words, n] and has one bit for each column of a row: column j is bit j % 64 of
word j // 64. There is at least one word.
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
        offsets: Integers [n + 1], int64 in raw rows: row i holds
            ``values[offsets[i]:offsets[i + 1]]``. The first offset is 0, the last one is the number
            of values.
        values: The values of all rows, one row after the other.
    """

    offsets: np.ndarray
    values: np.ndarray | pa.StringArray

    def __len__(self) -> int:
        return len(self.offsets) - 1


_ONE = np.uint64(1)
#: The time of a row without one: earlier than all others, and far enough from the limits of int64
#: that adding a duration to it does not overflow.
NO_TIME = -(2**62)
#: If a block has more bad rows than are allowed, this many are described; the rest is only counted.
DESCRIBED_BAD_ROWS = 100
#: The approximate size of a :class:`BadRow` in bytes, without its texts.
_BAD_ROW_BYTES = 200
#: ``max_bad_rows`` without a limit.
UNLIMITED = sys.maxsize

#: uint32 [n] (raw hex32), int64 [n] (int), string array [n] without nulls (string), or lists.
CategoryValues: TypeAlias = np.ndarray | pa.StringArray | Jagged


def get_flat_values(values: CategoryValues) -> np.ndarray | pa.StringArray:
    """Return the values of a column; for lists, the values of all rows, one row after the other."""
    return values.values if isinstance(values, Jagged) else values


def repeat_lists(lists: Jagged, index: np.ndarray, newest: int | None = None) -> Jagged:
    """Return the list of each row, given the distinct lists.

    Args:
        lists: The distinct lists [m].
        index: int64 [n], the index of each row's list.
        newest: Keep only this many values at the end of each list; None to keep all.
    """
    lengths = np.diff(lists.offsets)
    if newest is not None:
        lengths = np.minimum(lengths, newest)
    lengths = lengths[index]
    offsets = to_offsets(lengths)
    # The indices of a row's values are consecutive numbers, shifted by the distance between the
    # end of its list in the result and in ``lists``.
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
        line: The index of the line (in parquet, of the row) within the block, from 0.
        what: The column, its value and what was expected.
        column: The name of the column; "" if the row as a whole is wrong.
        text: The raw line without its line break (only its beginning if it is too long); for
            parquet, the row's columns as JSON.
        remedy: What to do about it; "" if the only remedy is to correct the row.
    """

    line: int
    what: str
    column: str = ""
    text: bytes = b""
    remedy: str = ""

    @property
    def reason(self) -> str:
        """The error and its remedy, in one line."""
        return f"{self.what} -> {self.remedy}" if self.remedy else self.what

    def move_to(self, line: int) -> BadRow:
        """Return the row with another line."""
        # not dataclasses.replace, which is slow, because there may be millions of bad rows
        return BadRow(line, self.what, self.column, self.text, self.remedy)


@dataclasses.dataclass
class RawRows:
    """Typed columns of ``n`` well-formed rows, in the order of the file.

    Attributes:
        labels: uint8 [labels, n], 0 or 1, the main label first; [0, n] for rows without labels.
        dense: int32 [dense columns, n] if all columns are int32, else float64; 0 where missing.
        dense_missing: uint64 [words, n], the mask of missing dense values.
        categorical: The values of each column (:data:`CategoryValues`); 0, "" or an empty list
            where missing. For specs with ``is_criteo_format``, uint32 [categorical columns, n].
        categorical_missing: uint64 [words, n], the mask of missing categorical values.
        line: int64 [n], the line of each row, from 0; bad rows do not count.
        bad: The bad rows, which the columns do not have; only the first ones if there are more than
            are allowed.
        bad_count: The number of bad rows.
        lines: The number of lines of text, or rows of parquet, counted independently of parsing, to
            notice a reader that loses rows.
        weight: float32 [n], finite and not negative; None if the spec has no weight, or the rows
            have no labels.
        key: int64 [n], the value by which rows are split: the hash of a string
            (:func:`clicklog.text.assemble.hash_texts`) or microseconds since 1970 UTC. None if the
            split uses no column, or the rows have no labels.
        times: int64 [2, n], microseconds since 1970 UTC: when the event happened, and when it
            becomes known. For rows without labels [1, n], the time of the row, :data:`NO_TIME`
            where it is missing. None if the spec has no events.
        groups: int64 [keys, n], the hash of each event key; 0 where a column of the key is missing.
            The keys are :attr:`FeatureSpec.row_keys` if the rows are events, else
            :attr:`FeatureSpec.groups`. None if the spec has no events, or after the features of
            events were added.
        amounts: float64 [amounts, n], the numbers that are aggregated, NaN where missing; None if
            the spec has no events, or the rows are to be scored.
        table_keys: int64 [tables, n], the hash of the key of each joined table; 0 where a column of
            the key is missing. None if the spec has no tables, or after they were joined.
        table_rows: int64 [tables, n], the row of each table that has the key; -1 for none. None
            before tables are looked up, and after they were joined.
        join_times: int64 [n], the time of each row, :data:`NO_TIME` where it is missing, if tables
            have versions; else None.
        negative_keys: int64 [2, n], the hashes of the item and the user of rows that negatives are
            drawn for, 0 where missing; None for other rows, and after negatives were drawn.
        negative_times: int64 [n], the time of these rows, :data:`NO_TIME` where it is missing, if
            the spec names one; else None.
        drawn: bool [n], whether a row is a drawn negative, which is in no file and is no event;
            None if the spec has no negatives.
        log_q_correction: float32 [n], the correction that training may add to the logit of a row,
            if items are drawn by popularity (docs/negatives.md); else None.
        pointers: int32 [2 * histories, n], the columns of the parquet that point to the events of
            each history, see :mod:`formats.histories`; None if they are not needed.
        label_keys: int64 [labels, n], the hash of the key of each label from another file; 0 where
            a column of the key is missing. None if there is no such label, or after they were
            added.
        label_times: int64 [n], the time of each row, if there are such labels; else None.
        vector_rows: int32 [vectors, n], the number of each row's vector, -1 for none, see
            :mod:`formats.vectors`. None if the spec has no vectors, or before tables are looked up.
        given_vectors: The vectors, by name, that rows to score hold themselves, instead of those of
            tables.
        has_aggregates: Whether the dense columns include the aggregates of the rows.
        waiting: The number of rows that were left out because their clicks may still come, see
            :mod:`etl.labels`.
        done: The number of rows that were left out because earlier days have them; ``bad`` is then
            empty.
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
    """Return the approximate size of rows in memory, bad rows included."""
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
    """Return the number of words of a mask for a number of columns."""
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
    """Return where a column is missing according to a mask, bool [n]."""
    return (get_word(mask, column) >> get_bit(column)) & _ONE != 0


def add_missing(mask: np.ndarray, column: int, absent: np.ndarray) -> None:
    """Mark a column as missing where ``absent``, bool [n], is true."""
    mask[column // WORD_BITS] |= absent.astype(np.uint64) << get_bit(column)


def set_missing(mask: np.ndarray, column: int, absent: np.ndarray) -> None:
    """Mark a column as missing where ``absent``, bool [n], is true, and nowhere else."""
    mask[column // WORD_BITS] &= ~(_ONE << get_bit(column))
    add_missing(mask, column, absent)


def make_mask(bits: list[int], columns: int) -> np.ndarray:
    """Make a mask from one integer per row, which has bit j set if column j is missing."""
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
    """Return zero rows, with the types that rows of this spec have."""
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
    """Add bad rows that were removed before parsing, such as lines that are too long.

    Args:
        rows: The parsed rows; their line numbers do not count the added rows.
        bad: The bad rows in order; their line numbers count all lines.
    """
    # the number of parsed lines before each added row
    parsed_before = np.array([row.line - i for i, row in enumerate(bad)], np.int64)

    def renumber(line: np.ndarray) -> np.ndarray:
        """Return line numbers that count the added rows, too."""
        return line + np.searchsorted(parsed_before, line, side="right")

    described = list(bad)
    for row in rows.bad:
        described.append(row.move_to(int(renumber(np.array(row.line)))))
    return dataclasses.replace(
        rows,
        line=renumber(rows.line),
        bad=sorted(described, key=lambda row: row.line),
        bad_count=rows.bad_count + len(bad),
        lines=rows.lines + len(bad),
    )
