"""Read the files of a table, and store its rows by key.

:mod:`formats.table_files` describes the stored files. Columns are read and derived like those of
the log. They are encoded and transformed later, with the rows of the log to which they are joined.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import to_arrow, to_offsets
from nvt_torchrec.base.files.atomic import new_directory
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.readers.log_format import UnparsedRows, get_format
from nvt_torchrec.etl.tables.coded_values import (
    concatenate_coded,
    encode_values,
    make_categorical_arrays,
)
from nvt_torchrec.etl.tables.columns_on_disk import ColumnsOnDisk
from nvt_torchrec.etl.tables.keyed_rows import make_no_rows_error, parse_keyed
from nvt_torchrec.etl.tables.row_order import RowKeys, RowOrder, order_rows
from nvt_torchrec.etl.tables.table_spec import make_table_spec
from nvt_torchrec.etl.tables.vector_writer import VectorNumbers, VectorsOnDisk
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
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
from nvt_torchrec.workflows.stored_table import StoredTable

log = logging.getLogger(__name__)

#: Bytes of a file that are parsed at once. With pieces of half the size, memory fragments, and the
#: peak grows with the number of columns of the table.
_BLOCK_BYTES = 8 << 20
#: The directory of the columns in the order in which they were read, until they are stored.
_UNORDERED = "unordered"
#: The file of rejected rows, alongside the table's arrays until the run ends.
REJECTED_FILE = "rejected.tsv"


@dataclasses.dataclass(frozen=True)
class TablePiece:
    """A piece of a table's file.

    Attributes:
        spec: The spec by which the rows were read.
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
    """Store a table in a directory, unless the directory exists.

    Args:
        rule: The table.
        spec: The columns of the log and of its tables.
        files: The files of the table; may be empty if ``earlier`` is given.
        directory: The directory.
        earlier: The table as of the earlier days. Its rows are kept unless the files have a row
            with the same key and, with versions, the same time.
        earlier_vectors: The directory of its vectors, which has ``NAME/FIRST``.
        threads: Number of pieces of a file that are parsed at once.
        reject: Whether malformed rows are left out.
        report: Called with the number of rows read since the last call.

    Raises:
        BadRowError: A row is malformed, or has no key.
        BadInputError: A file cannot be read, or two rows have the same key and time.
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
                    values, missing = find_column(piece.rows, piece.spec, column.name)
                    if isinstance(column, DenseColumn):
                        assert isinstance(values, np.ndarray)
                        on_disk.append_dense(column.name, values, missing)
                    else:
                        on_disk.append_categories(column.name, values, missing)
                for name, vectors_on_disk in vectors.items():
                    vectors_on_disk.append(*find_column(piece.rows, piece.spec, name))
                read.append(piece.row_keys)
                rejected += bad
                report(piece.rows.lines)
        ordered = order_rows(rule, read, earlier)
        order = ordered.positions
        if not len(order):
            paths = [file.source for file in files]
            raise make_no_rows_error(f"table {rule.name}", paths, rejected)
        log.info("table %s: %d rows", rule.name, len(order))
        save_array(temporary / KEYS, ordered.keys)
        if rule.valid_from:
            save_array(temporary / STARTS, ordered.starts)
        for column in columns:
            if isinstance(column, DenseColumn):
                arrays = _order_dense(column, on_disk, earlier, order)
            else:
                arrays = _order_categories(column, on_disk, earlier, order)
            for kind, array in arrays.items():
                save_array(temporary / f"{column.name}.{kind}.npy", array)
        for vector in spec.table_vectors(rule.name):
            read_vectors = vectors[vector.name]
            _store_vectors(vector, ordered, read_vectors, temporary, earlier, earlier_vectors)
        shutil.rmtree(temporary / _UNORDERED)
        if rejected:
            (temporary / REJECTED_FILE).write_bytes(b"".join(rejected))


def _order_dense(
    column: DenseColumn, on_disk: ColumnsOnDisk, earlier: StoredTable | None, order: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the arrays of a dense column, in the order of the table's rows.

    Args:
        column: The column.
        on_disk: The values that were read.
        earlier: See :func:`store_table`.
        order: int64 [rows], see :attr:`.RowOrder.positions`.
    """
    values, missing = on_disk.load_dense(column.name)
    if earlier is not None:
        more_values, more_missing = earlier.take(column.name, np.arange(len(earlier)))
        assert isinstance(more_values, np.ndarray)
        values = np.concatenate([values, more_values])
        missing = np.concatenate([missing, more_missing])
    return to_arrays(column, values[order], missing[order])


def _order_categories(
    column: CategoricalColumn,
    on_disk: ColumnsOnDisk,
    earlier: StoredTable | None,
    order: np.ndarray,
) -> dict[str, np.ndarray]:
    """Return the arrays of a categorical column; see :func:`_order_dense`."""
    pieces = []
    loaded = on_disk.load_categories(column.name)
    if loaded is not None:
        pieces.append(loaded)
    if earlier is not None:
        values, missing = earlier.take(column.name, np.arange(len(earlier)))
        pieces.append((encode_values(values), missing))
    coded, missing = pieces[0]
    for more, more_missing in pieces[1:]:
        coded = concatenate_coded(coded, more)
        missing = np.concatenate([missing, more_missing])
    return make_categorical_arrays(column, coded.take(order), missing[order])


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
        read: The vectors of the rows that were read.
        directory: The directory of the table.
        earlier, earlier_vectors: See :func:`store_table`.
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
        threads: Number of pieces that are parsed at once.
        reject: Whether malformed rows are left out.
        columns: See :func:`.table_spec.make_table_spec`.
    """
    table_spec = make_table_spec(rule, spec, file.path, columns)

    def parse(unparsed: UnparsedRows) -> tuple[TablePiece, list[bytes]]:
        what = f"table {rule.name}"
        found = parse_keyed(unparsed, file.source, what, rule.file_key, reject=reject)
        starts = np.zeros(len(found.keys), np.int64)
        if found.times is not None:
            # A version without a time counts from the beginning.
            starts = np.where(found.times != NO_TIME, found.times + rule.delay, NO_TIME)
        lines = found.first_line + found.rows.line
        row_keys = RowKeys(file.source, lines, found.keys, starts)
        return TablePiece(table_spec, found.rows, row_keys), found.rejected

    pieces = get_format(table_spec).stream(file.path, _BLOCK_BYTES)
    yield from map_in_order(parse, pieces, threads, "tables")


def find_column(rows: RawRows, spec: FeatureSpec, name: str) -> tuple[CategoryValues, np.ndarray]:
    """Return the values [n] of a column, float64 if dense, and the mask of missing ones, bool."""
    if name in spec.dense_names:
        j = spec.dense_names.index(name)
        return rows.dense[j].astype(np.float64), is_missing(rows.dense_missing, j)
    j = spec.categorical_names.index(name)
    return rows.categorical[j], is_missing(rows.categorical_missing, j)


def to_arrays(
    column: DenseColumn | CategoricalColumn, values: CategoryValues, missing: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the arrays of a column, by their kinds in :mod:`formats.table_files`."""
    if isinstance(column, DenseColumn):
        return {"missing": missing.astype(np.uint8), "values": np.asarray(values, np.float64)}
    return make_categorical_arrays(column, encode_values(values), missing)


def save_array(file: Path, array: np.ndarray) -> None:
    """Write an array without fsync: the caller makes the whole directory durable."""
    with open(file, "wb") as opened:
        np.save(opened, np.ascontiguousarray(array), allow_pickle=False)


def concatenate_values(pieces: Sequence[CategoryValues]) -> CategoryValues:
    """Concatenate values; strings become large strings."""
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
    """Return the values at the given indices, int64 [n]."""
    if isinstance(values, Jagged):
        return repeat_lists(values, index)
    if isinstance(values, np.ndarray):
        return values[index]
    return values.take(to_arrow(index))
