"""Read the files of a table, and store its rows by their keys.

What is stored is described in :mod:`formats.table_files`. A column is read and derived as one of
the log is; its ids and its transform come later, with the rows of the log that take it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import string_parts, to_arrow, to_numpy
from nvt_torchrec.base.errors import BadInputError, BadRowError
from nvt_torchrec.base.files.atomic import new_directory
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.readers.log_format import UnparsedRows, format_of
from nvt_torchrec.clicklog.text.assemble import hash_keys, take
from nvt_torchrec.etl.tables.table_spec import key_columns, make_table_spec
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.table_rules import TableRule
from nvt_torchrec.formats.rows import (
    NO_TIME,
    CategoryValues,
    Jagged,
    RawRows,
    is_missing,
    repeat_lists,
)
from nvt_torchrec.formats.table_files import KEYS, STARTS
from nvt_torchrec.workflows.stored_tables import StoredTable

log = logging.getLogger(__name__)

#: Bytes of a file that are parsed at once.
_BLOCK_BYTES = 8 << 20
#: Rows of a table that were left out, beside its arrays until the run ends.
REJECTED_FILE = "rejected.tsv"


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Some rows of a file.

    Attributes:
        spec: By which the rows were read.
        path: The file.
        first_line: The number of the first row, as messages count it.
        rows: The rows, without malformed ones.
        keys: int64 [n], the hashes of their keys.
        starts: int64 [n], from when each is known; 0 without versions.
    """

    spec: FeatureSpec
    path: str
    first_line: int
    rows: RawRows
    keys: np.ndarray
    starts: np.ndarray


def store_table(
    rule: TableRule,
    spec: FeatureSpec,
    files: Sequence[DayFile],
    directory: Path,
    *,
    earlier: StoredTable | None = None,
    threads: int = 1,
    reject: bool = False,
    report: Callable[[float], object] = lambda rows: None,
) -> None:
    """Store a table in a directory, unless it is there.

    Args:
        rule: The table.
        spec: The columns of the log and of its tables.
        files: The files of the table; they may be none if there is an earlier one.
        directory: The directory.
        earlier: The table as of the days before: rows stay unless the files have another one of the
            same key and, with versions, the same time.
        threads: How many pieces of a file are parsed at once.
        reject: Whether malformed rows are left out.
        report: Called with the number of rows read since the last call.

    Raises:
        BadRowError: A row is malformed, or has no key.
        BadInputError: A file cannot be read, or has a key twice.
        OutputError: The directory cannot be written.
    """
    if directory.exists():
        return
    pieces: list[_Piece] = []
    rejected: list[bytes] = []
    for file in files:
        for piece, bad in _read_file(rule, spec, file, threads, reject):
            pieces.append(piece)
            rejected += bad
            report(piece.rows.lines)
    keys = [piece.keys for piece in pieces]
    starts = [piece.starts for piece in pieces]
    if earlier is not None:
        keys.append(earlier.keys)
        starts.append(np.zeros_like(earlier.keys) if earlier.starts is None else earlier.starts)
    every_key, every_start = np.concatenate(keys), np.concatenate(starts)
    if not len(every_key):
        paths = ", ".join(file.source for file in files)
        raise BadInputError(f"table {rule.name}: {paths}: no rows", "pass a table with rows")
    order = _order_rows(rule, pieces, every_key, every_start)
    log.info("table %s: %d rows", rule.name, len(order))
    with new_directory(directory) as temporary:
        _save(temporary / KEYS, every_key[order])
        if rule.valid_from:
            _save(temporary / STARTS, every_start[order])
        for column in spec.columns_of(rule.name):
            read = [_find_column(piece, column.name) for piece in pieces]
            if earlier is not None:
                read.append(earlier.take(column.name, np.arange(len(earlier))))
            values = concatenate_values([values for values, _ in read])
            missing = np.concatenate([absent for _, absent in read])
            arrays = _to_arrays(column, take_values(values, order), missing[order])
            for kind, array in arrays.items():
                _save(temporary / f"{column.name}.{kind}.npy", array)
        if rejected:
            (temporary / REJECTED_FILE).write_bytes(b"".join(rejected))


def _read_file(
    rule: TableRule, spec: FeatureSpec, file: DayFile, threads: int, reject: bool
) -> Iterator[tuple[_Piece, list[bytes]]]:
    """Yield pieces of a file, and lines that describe their malformed rows."""
    table_spec = make_table_spec(rule, spec, file.path)

    def parse(unparsed: UnparsedRows) -> tuple[_Piece, list[bytes]]:
        rows = unparsed.drop_label().parse(reject=reject)
        columns = [
            (rows.categorical[j], is_missing(rows.categorical_missing, j))
            for j in key_columns(table_spec, rule)
        ]
        keys = hash_keys([columns], len(rows))
        assert keys is not None
        has_key = keys[0] != 0
        rejected = _describe_rejected(rule, file.source, unparsed.first_line, rows, has_key)
        if not has_key.all() and not reject:
            line = unparsed.first_line + int(rows.line[np.argmin(has_key)])
            raise BadRowError(
                f"{file.source}, {unparsed.format.unit} {line}: {_describe_missing_key(rule)}",
                "correct the file, or leave such rows out with --on_bad_rows quarantine",
            )
        kept = rows if has_key.all() else take(rows, has_key)
        starts = np.zeros(len(kept), np.int64)
        if kept.join_times is not None:
            # without a time, a version counts from the beginning
            is_dated = kept.join_times != NO_TIME
            starts = np.where(is_dated, kept.join_times + rule.delay, NO_TIME)
        piece = _Piece(table_spec, file.source, unparsed.first_line, kept, keys[0][has_key], starts)
        return piece, rejected

    pieces = format_of(table_spec).stream(file.path, _BLOCK_BYTES)
    yield from map_in_order(parse, pieces, threads, "tables")


def _describe_missing_key(rule: TableRule) -> str:
    return f"table {rule.name}: a row without its key, {', '.join(rule.own_key)}"


def _describe_rejected(
    rule: TableRule, path: str, first_line: int, rows: RawRows, has_key: np.ndarray
) -> list[bytes]:
    """Return a line of the file of rejected rows for each row that is left out."""
    described = [(row.line, row.reason, row.text) for row in rows.bad]
    for row in np.flatnonzero(~has_key).tolist():
        described.append((int(rows.line[row]), _describe_missing_key(rule), b""))
    return format_rejected(path, first_line, described)


def format_rejected(
    path: str, first_line: int, described: list[tuple[int, str, bytes]]
) -> list[bytes]:
    """Return lines of a file of rejected rows.

    Args:
        path: The file that has them.
        first_line: The number of the first row that was read, as messages count it.
        described: Of each row its number from there, why it is left out, and its text.
    """
    lines = []
    for line, reason, text in sorted(described):
        shown = text.replace(b"\r", b"").replace(b"\n", b"\\n")
        lines.append(f"{path}\t{first_line + line}\t{reason}\t".encode() + shown + b"\n")
    return lines


def _order_rows(
    rule: TableRule, pieces: list[_Piece], keys: np.ndarray, starts: np.ndarray
) -> np.ndarray:
    """Return the order of rows by key and start; of two alike, the later row is left out.

    Args:
        rule: The table.
        pieces: The rows that were read.
        keys: int64 [n], their keys, and behind them those of an earlier table.
        starts: int64 [n], from when they are known.

    Raises:
        BadInputError: Two rows that were read are alike.
    """
    order = np.lexsort((starts, keys))  # is stable
    is_repeated = np.zeros(len(order), np.bool_)
    is_repeated[1:] = keys[order[1:]] == keys[order[:-1]]
    is_repeated[1:] &= starts[order[1:]] == starts[order[:-1]]
    num_read = sum(len(piece.keys) for piece in pieces)
    read_twice = np.flatnonzero(is_repeated & (order < num_read))
    if len(read_twice):
        first, second = order[read_twice[0] - 1], order[read_twice[0]]
        what = ", ".join(rule.own_key)
        remedy = "keep one row for each key"
        if rule.valid_from:
            what = f"{what} and {rule.valid_from}"
            remedy = "keep one row for each key and time"
        raise BadInputError(
            f"table {rule.name}: {what} of {_place_of(pieces, int(second))} are those of "
            f"{_place_of(pieces, int(first))}, too",
            remedy,
        )
    return order[~is_repeated]


def _place_of(pieces: list[_Piece], row: int) -> str:
    """Return the file and line of a row, counted over all pieces."""
    for piece in pieces:
        if row < len(piece.keys):
            return f"{piece.path}, line {piece.first_line + int(piece.rows.line[row])}"
        row -= len(piece.keys)
    raise IndexError(row)


def _find_column(piece: _Piece, name: str) -> tuple[CategoryValues, np.ndarray]:
    """Return the values [n] of a column, and where they are missing, bool [n]."""
    rows, dense = piece.rows, piece.spec.dense_names
    if name in dense:
        j = dense.index(name)
        return rows.dense[j].astype(np.float64), is_missing(rows.dense_missing, j)
    j = piece.spec.categorical_names.index(name)
    return rows.categorical[j], is_missing(rows.categorical_missing, j)


def _to_arrays(
    column: DenseColumn | CategoricalColumn, values: CategoryValues, missing: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the arrays of a column, by their kinds in :mod:`formats.table_files`."""
    arrays: dict[str, np.ndarray] = {"missing": missing.astype(np.uint8)}
    if isinstance(column, DenseColumn):
        return arrays | {"values": np.asarray(values, np.float64)}
    if isinstance(values, Jagged):
        arrays["lists"] = values.offsets.astype(np.int64)
        values = values.values
    if isinstance(values, np.ndarray):
        distinct, codes = np.unique(values, return_inverse=True)
        arrays["values"] = distinct.astype(RAW_TYPES[column.raw].dtype)
        return arrays | {"codes": codes.reshape(-1).astype(np.int32)}
    encoded = values.dictionary_encode()
    offsets, data = string_parts(encoded.dictionary)
    begin, end = int(offsets[0]), int(offsets[-1])
    arrays["texts"] = offsets.astype(np.int64) - begin
    arrays["values"] = data[begin:end]
    return arrays | {"codes": to_numpy(encoded.indices).astype(np.int32)}


def _save(file: Path, array: np.ndarray) -> None:
    with open(file, "wb") as opened:
        np.save(opened, np.ascontiguousarray(array), allow_pickle=False)


def concatenate_values(pieces: Sequence[CategoryValues]) -> CategoryValues:
    """Return the values of pieces, one after the other; texts as large strings."""
    lists = [piece for piece in pieces if isinstance(piece, Jagged)]
    if lists:
        lengths = np.concatenate([np.diff(piece.offsets) for piece in lists])
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        items = concatenate_values([piece.values for piece in lists])
        assert not isinstance(items, Jagged)
        return Jagged(offsets, items)
    numbers = [piece for piece in pieces if isinstance(piece, np.ndarray)]
    if numbers:
        return np.concatenate(numbers)
    texts = [piece.cast(pa.large_string()) for piece in pieces if isinstance(piece, pa.Array)]
    return pa.concat_arrays(texts)


def take_values(values: CategoryValues, index: np.ndarray) -> CategoryValues:
    """Return the values at some positions, int64 [n]."""
    if isinstance(values, Jagged):
        return repeat_lists(values, index)
    if isinstance(values, np.ndarray):
        return values[index]
    return values.take(to_arrow(index))
