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

from nvt_torchrec.base.arrays import string_parts, to_arrow
from nvt_torchrec.base.errors import BadInputError, BadRowError
from nvt_torchrec.base.files.atomic import new_directory
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.readers.log_format import UnparsedRows, format_of
from nvt_torchrec.clicklog.text.assemble import hash_keys
from nvt_torchrec.etl.tables.table_spec import key_columns, make_table_spec
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.table_rules import TableRule
from nvt_torchrec.formats.rows import CategoryValues, Jagged, RawRows, is_missing, repeat_lists
from nvt_torchrec.formats.table_files import KEYS
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
        path: The file.
        first_line: The number of the first row, as messages count it.
        rows: The rows, without malformed ones.
        keys: int64 [n], the hashes of their keys.
    """

    path: str
    first_line: int
    rows: RawRows
    keys: np.ndarray


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
        earlier: The table as of the days before: rows whose keys are not in the files stay.
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
    keys = np.concatenate([np.empty(0, np.int64), *(piece.keys for piece in pieces)])
    order = np.argsort(keys, kind="stable")
    _check_unique(rule, pieces, keys, order)
    kept = np.empty(0, np.int64)
    if earlier is not None:
        kept = np.flatnonzero(np.isin(earlier.keys, keys, invert=True))
        keys = np.concatenate([keys, earlier.keys[kept]])
        order = np.argsort(keys, kind="stable")
    if not len(keys):
        paths = ", ".join(file.source for file in files)
        raise BadInputError(f"table {rule.name}: {paths}: no rows", "pass a table with rows")
    log.info("table %s: %d rows", rule.name, len(keys))
    dense = [column for column in spec.columns_of(rule.name) if isinstance(column, DenseColumn)]
    with new_directory(directory) as temporary:
        _save(temporary / KEYS, keys[order])
        for number, column in enumerate(spec.columns_of(rule.name)):
            is_dense = number < len(dense)
            j = number if is_dense else number - len(dense)
            read = [_column_of(piece.rows, j, is_dense=is_dense) for piece in pieces]
            if earlier is not None:
                read.append(earlier.take(column.name, kept))
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
        piece = _Piece(file.source, unparsed.first_line, rows, keys[0])
        without_key = np.flatnonzero(piece.keys == 0)
        if len(without_key) and not reject:
            line = unparsed.first_line + int(rows.line[without_key[0]])
            raise BadRowError(
                f"{file.source}, {unparsed.format.unit} {line}: table {rule.name}: a row without "
                f"its key, {', '.join(rule.own_key)}",
                "correct the file, or leave such rows out with --on_bad_rows quarantine",
            )
        return piece, _describe_rejected(piece, without_key, rule)

    pieces = format_of(table_spec).stream(file.path, _BLOCK_BYTES)
    yield from map_in_order(parse, pieces, threads, "tables")


def _describe_rejected(piece: _Piece, without_key: np.ndarray, rule: TableRule) -> list[bytes]:
    """Return a line of the file of rejected rows for each row that is left out."""
    described = [(row.line, row.reason, row.text) for row in piece.rows.bad]
    reason = f"a row without its key, {', '.join(rule.own_key)}"
    described += [(int(piece.rows.line[row]), reason, b"") for row in without_key]
    lines = []
    for line, why, text in sorted(described):
        shown = text.replace(b"\r", b"").replace(b"\n", b"\\n")
        source = f"{piece.path}\t{piece.first_line + line}\t{why}\t".encode()
        lines.append(source + shown + b"\n")
    return lines


def _check_unique(
    rule: TableRule, pieces: list[_Piece], keys: np.ndarray, order: np.ndarray
) -> None:
    """Check that no key is there twice. Raises :class:`BadInputError`."""
    in_order = keys[order]
    same = np.flatnonzero((in_order[1:] == in_order[:-1]) & (in_order[1:] != 0))
    if not len(same):
        return
    first, second = sorted(order[same[0] : same[0] + 2].tolist())
    raise BadInputError(
        f"table {rule.name}: the key {', '.join(rule.own_key)} of {_place_of(pieces, first)} is "
        f"that of {_place_of(pieces, second)}, too",
        "keep one row for each key",
    )


def _place_of(pieces: list[_Piece], row: int) -> str:
    """Return the file and line of a row, counted over all pieces."""
    for piece in pieces:
        if row < len(piece.keys):
            return f"{piece.path}, line {piece.first_line + int(piece.rows.line[row])}"
        row -= len(piece.keys)
    raise IndexError(row)


def _column_of(rows: RawRows, j: int, *, is_dense: bool) -> tuple[CategoryValues, np.ndarray]:
    """Return the values [n] of a column, and where they are missing, bool [n]."""
    if is_dense:
        return rows.dense[j].astype(np.float64), is_missing(rows.dense_missing, j)
    return rows.categorical[j], is_missing(rows.categorical_missing, j)


def _to_arrays(
    column: DenseColumn | CategoricalColumn, values: CategoryValues, missing: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the arrays of a column, by their kinds in :mod:`formats.table_files`."""
    arrays = {"missing": missing.astype(np.uint8)}
    if isinstance(values, Jagged):
        arrays["lists"] = values.offsets.astype(np.int64)
        values = values.values
    if isinstance(values, np.ndarray):
        dtype = np.float64
        if isinstance(column, CategoricalColumn):
            dtype = np.dtype(RAW_TYPES[column.raw].dtype).type
        return arrays | {"values": values.astype(dtype)}
    offsets, data = string_parts(values)
    begin, end = int(offsets[0]), int(offsets[-1])
    return arrays | {"texts": offsets.astype(np.int64) - begin, "values": data[begin:end]}


def _save(file: Path, array: np.ndarray) -> None:
    with open(file, "wb") as opened:
        np.save(opened, np.ascontiguousarray(array), allow_pickle=False)


def concatenate_values(pieces: Sequence[CategoryValues]) -> CategoryValues:
    """Return the values of pieces, one after the other; texts as large strings."""
    first = pieces[0]
    if isinstance(first, Jagged):
        lists = [piece for piece in pieces if isinstance(piece, Jagged)]
        lengths = np.concatenate([np.diff(piece.offsets) for piece in lists])
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        items = concatenate_values([piece.values for piece in lists])
        assert not isinstance(items, Jagged)
        return Jagged(offsets, items)
    if isinstance(first, np.ndarray):
        return np.concatenate(pieces)
    return pa.concat_arrays([piece.cast(pa.large_string()) for piece in pieces])


def take_values(values: CategoryValues, index: np.ndarray) -> CategoryValues:
    """Return the values at some positions, int64 [n]."""
    if isinstance(values, Jagged):
        return repeat_lists(values, index)
    if isinstance(values, np.ndarray):
        return values[index]
    return values.take(to_arrow(index))
