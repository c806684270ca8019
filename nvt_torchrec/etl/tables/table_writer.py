"""Read the files of a table, and store its rows by their keys.

What is stored is described in :mod:`formats.table_files`. A column is read and derived as one of
the log is; its ids and its transform come later, with the rows of the log that take it.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import string_parts, to_arrow, to_numpy, to_offsets
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.atomic import new_directory
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.readers.log_format import UnparsedRows, get_format
from nvt_torchrec.etl.tables.columns_on_disk import ColumnsOnDisk
from nvt_torchrec.etl.tables.keyed_rows import parse_keyed, refuse_empty
from nvt_torchrec.etl.tables.table_spec import make_table_spec
from nvt_torchrec.etl.tables.vector_writer import RowOrder, VectorNumbers, VectorsOnDisk
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.table_rules import TableRule
from nvt_torchrec.formats.feature_spec.vector_columns import VectorColumn
from nvt_torchrec.formats.rows import (
    NO_TIME,
    CategoryValues,
    Jagged,
    RawRows,
    is_missing,
    repeat_lists,
)
from nvt_torchrec.formats.table_files import KEYS, STARTS
from nvt_torchrec.formats.vectors import IN_WORKFLOW, link_vectors
from nvt_torchrec.workflows.stored_tables import StoredTable

log = logging.getLogger(__name__)

#: Bytes of a file that are parsed at once.
_BLOCK_BYTES = 8 << 20
#: The directory of the columns in the order in which they were read, until they are stored.
_UNORDERED = "unordered"
#: Rows of a table that were left out, beside its arrays until the run ends.
REJECTED_FILE = "rejected.tsv"


@dataclasses.dataclass(frozen=True)
class RowKeys:
    """The keys of some rows of a file of a table.

    Attributes:
        path: The file.
        lines: int64 [n], the number of each row in the file, as messages count it.
        keys: int64 [n], the hashes of their keys.
        starts: int64 [n], from when each is known; 0 without versions.
    """

    path: str
    lines: np.ndarray
    keys: np.ndarray
    starts: np.ndarray


@dataclasses.dataclass(frozen=True)
class TablePiece:
    """Some rows of a file of a table.

    Attributes:
        spec: By which the rows were read.
        rows: The rows, without malformed ones.
        row_keys: Their keys.
    """

    spec: FeatureSpec
    rows: RawRows
    row_keys: RowKeys


def store_table(
    rule: TableRule,
    spec: FeatureSpec,
    files: Sequence[DayFile],
    directory: Path,
    *,
    earlier: StoredTable | None = None,
    earlier_vectors: Path | None = None,
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
        earlier_vectors: The directory of the vectors that it has, with ``NAME/FIRST`` below it.
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
    with new_directory(directory) as temporary:
        columns = spec.table_columns(rule.name)
        on_disk = ColumnsOnDisk(temporary / _UNORDERED)
        (temporary / _UNORDERED).mkdir()
        vectors: dict[str, VectorsOnDisk] = {}
        for vector in spec.table_vectors(rule.name):
            file_name = temporary / _UNORDERED / f"{vector.name}.bin"
            vectors[vector.name] = VectorsOnDisk(file_name, vector.stored)
        read: list[RowKeys] = []
        rejected: list[bytes] = []
        for file in files:
            for piece, bad in read_table_file(rule, spec, file, threads, reject):
                for column in columns:
                    on_disk.append(column.name, *find_column(piece.rows, piece.spec, column.name))
                for name, of_vector in vectors.items():
                    of_vector.append(*find_column(piece.rows, piece.spec, name))
                read.append(piece.row_keys)
                rejected += bad
                report(piece.rows.lines)
        ordered = _order_rows(rule, read, earlier)
        order = ordered.positions
        if not len(order):
            paths = [file.source for file in files]
            raise refuse_empty(f"table {rule.name}", paths, rejected)
        log.info("table %s: %d rows", rule.name, len(order))
        save_array(temporary / KEYS, ordered.keys)
        if rule.valid_from:
            save_array(temporary / STARTS, ordered.starts)
        for column in columns:
            pieces = on_disk.load(column.name)
            if earlier is not None:
                pieces.append(earlier.take(column.name, np.arange(len(earlier))))
            values = concatenate_values([values for values, _ in pieces])
            missing = np.concatenate([absent for _, absent in pieces])
            arrays = to_arrays(column, take_values(values, order), missing[order])
            for kind, array in arrays.items():
                save_array(temporary / f"{column.name}.{kind}.npy", array)
        for vector in spec.table_vectors(rule.name):
            of_rows = vectors[vector.name]
            _store_vectors(vector, ordered, of_rows, temporary, earlier, earlier_vectors)
        shutil.rmtree(temporary / _UNORDERED)
        if rejected:
            (temporary / REJECTED_FILE).write_bytes(b"".join(rejected))


def _store_vectors(
    vector: VectorColumn,
    order: RowOrder,
    read: VectorsOnDisk,
    directory: Path,
    earlier: StoredTable | None,
    earlier_vectors: Path | None,
) -> None:
    """Store the vectors of a table's rows, and their numbers.

    Args:
        vector: The vector.
        order: The rows.
        read: The vectors of those that were read.
        directory: The directory of the table.
        earlier: See :func:`store_table`; so is ``earlier_vectors``.
    """
    before = None
    if earlier is not None and earlier_vectors is not None:
        link_vectors(earlier_vectors, directory / IN_WORKFLOW, vector.name)
        before = earlier, earlier_vectors
    numbers = VectorNumbers(vector.stored, order, read, before)
    save_array(directory / f"{vector.name}.codes.npy", numbers.write(directory / IN_WORKFLOW))
    save_array(directory / f"{vector.name}.missing.npy", numbers.missing.astype(np.uint8))


def read_table_file(
    rule: TableRule,
    spec: FeatureSpec,
    file: DayFile,
    threads: int,
    reject: bool,
    columns: Sequence[DenseColumn | CategoricalColumn] | None = None,
) -> Iterator[tuple[TablePiece, list[bytes]]]:
    """Yield pieces of a file, and lines that describe their malformed rows.

    Args:
        rule: The table.
        spec: The columns of the log and of its tables.
        file: The file.
        threads: How many pieces are parsed at once.
        reject: Whether malformed rows are left out.
        columns: See :func:`.table_spec.make_table_spec`.
    """
    table_spec = make_table_spec(rule, spec, file.path, columns)

    def parse(unparsed: UnparsedRows) -> tuple[TablePiece, list[bytes]]:
        what = f"table {rule.name}"
        found = parse_keyed(unparsed, file.source, what, rule.own_key, reject=reject)
        starts = np.zeros(len(found.keys), np.int64)
        if found.times is not None:
            # without a time, a version counts from the beginning
            starts = np.where(found.times != NO_TIME, found.times + rule.delay, NO_TIME)
        lines = found.first_line + found.rows.line
        row_keys = RowKeys(file.source, lines, found.keys, starts)
        return TablePiece(table_spec, found.rows, row_keys), found.rejected

    pieces = get_format(table_spec).stream(file.path, _BLOCK_BYTES)
    yield from map_in_order(parse, pieces, threads, "tables")


def _order_rows(rule: TableRule, read: list[RowKeys], earlier: StoredTable | None) -> RowOrder:
    """Order rows by key and start; leave those of an earlier table out that were read again.

    Args:
        rule: The table.
        read: The keys of the rows that were read.
        earlier: See :func:`store_table`; its rows are counted after those that were read.

    Raises:
        BadInputError: Two rows that were read are alike.
    """
    all_keys = [part.keys for part in read]
    all_starts = [part.starts for part in read]
    if earlier is not None:
        all_keys.append(earlier.keys)
        no_starts = np.zeros_like(earlier.keys)
        all_starts.append(no_starts if earlier.starts is None else earlier.starts)
    num_read = sum(len(part.keys) for part in read)
    if not all_keys:
        none = np.empty(0, np.int64)
        return RowOrder(none, none, none, num_read, none)
    keys = np.concatenate(all_keys)
    starts = np.concatenate(all_starts)
    order = np.lexsort((starts, keys))  # is stable
    keys, starts = keys[order], starts[order]
    is_repeated = np.zeros(len(order), np.bool_)
    is_repeated[1:] = (keys[1:] == keys[:-1]) & (starts[1:] == starts[:-1])
    read_twice = np.flatnonzero(is_repeated & (order < num_read))
    if len(read_twice):
        first, second = order[read_twice[0] - 1], order[read_twice[0]]
        what = ", ".join(rule.own_key)
        remedy = "keep one row for each key"
        if rule.valid_from:
            what = f"{what} and {rule.valid_from}"
            remedy = "keep one row for each key and time"
        raise BadInputError(
            f"table {rule.name}: {what} of {_describe_position(read, int(second))} are those of "
            f"{_describe_position(read, int(first))}, too",
            remedy,
        )
    replaced = np.full(len(order), -1)
    if is_repeated.any():
        left_out = np.flatnonzero(is_repeated)
        replaced[left_out - 1] = order[left_out]
        keys, starts, order = keys[~is_repeated], starts[~is_repeated], order[~is_repeated]
        replaced = replaced[~is_repeated]
    return RowOrder(keys, starts, order, num_read, replaced)


def _describe_position(read: list[RowKeys], row: int) -> str:
    """Return the file and line of a row, counted over all that were read."""
    for part in read:
        if row < len(part.keys):
            return f"{part.path}, line {part.lines[row]}"
        row -= len(part.keys)
    raise IndexError(row)


def find_column(rows: RawRows, spec: FeatureSpec, name: str) -> tuple[CategoryValues, np.ndarray]:
    """Return the values [n] of a column of rows, dense ones float64, and where they are missing."""
    if name in spec.dense_names:
        j = spec.dense_names.index(name)
        return rows.dense[j].astype(np.float64), is_missing(rows.dense_missing, j)
    j = spec.categorical_names.index(name)
    return rows.categorical[j], is_missing(rows.categorical_missing, j)


def to_arrays(
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
        # Hashing all values and sorting the distinct ones is faster than sorting all.
        hashed = pa.array(values).dictionary_encode()
        found = to_numpy(hashed.dictionary)
        order = np.argsort(found)
        ranks = np.empty(len(found), np.int32)
        ranks[order] = np.arange(len(found))
        arrays["values"] = found[order].astype(RAW_TYPES[column.raw].dtype)
        return arrays | {"codes": ranks[to_numpy(hashed.indices)]}
    encoded = values.dictionary_encode()
    offsets, data = string_parts(encoded.dictionary)
    begin, end = int(offsets[0]), int(offsets[-1])
    arrays["texts"] = offsets.astype(np.int64) - begin
    arrays["values"] = data[begin:end]
    return arrays | {"codes": to_numpy(encoded.indices).astype(np.int32)}


def save_array(file: Path, array: np.ndarray) -> None:
    """Write an array; the directory is made durable as a whole."""
    with open(file, "wb") as opened:
        np.save(opened, np.ascontiguousarray(array), allow_pickle=False)


def concatenate_values(pieces: Sequence[CategoryValues]) -> CategoryValues:
    """Return the values of pieces, one after the other; texts as large strings."""
    lists = [piece for piece in pieces if isinstance(piece, Jagged)]
    if lists:
        lengths = np.concatenate([np.diff(piece.offsets) for piece in lists])
        items = concatenate_values([piece.values for piece in lists])
        assert not isinstance(items, Jagged)
        return Jagged(to_offsets(lengths), items)
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
