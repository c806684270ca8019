"""Join the columns of tables to rows: what is known of the key of each row.

:mod:`formats.table_files` describes the files. They are opened by the ETL, which counts and encodes
the columns as if the log held them, and with a saved workflow, where rows to score take what the
last day of the ETL knew.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import string_array, to_offsets
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.artifact import check_digests, check_sizes
from nvt_torchrec.base.files.mapping import MappedArray
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.rows import NO_TIME, CategoryValues, Jagged, RawRows, add_missing
from nvt_torchrec.formats.table_files import (
    DIRECTORY,
    KEYS,
    STARTS,
    table_arrays,
    table_files,
)
from nvt_torchrec.formats.vectors import NO_VECTOR
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.event_groups import cut_times
from nvt_torchrec.workflows.table_kernels import (
    copy_texts,
    find_rows,
    find_versions,
    make_buckets,
    measure_values,
    take_missing,
    take_numbers,
)

#: About how many rows a bucket of keys has: as many as a line of the cache has keys.
_BUCKET_ROWS = 8
#: For fewer keys, those of a request, dividing a table into small buckets, which reads all of its
#: keys, would take longer than finding them.
_MANY_KEYS = 4096
_COPY_AGAIN = "copy the whole workflow again, or run the ETL again"


@dataclasses.dataclass(frozen=True)
class TableCodes:
    """Which distinct values a categorical column of a table has at ``n`` rows.

    Attributes:
        values: int32 [n] or, of lists, the codes of all items.
        offsets: Of lists int64 [n + 1], where the items of each row begin; else None.
        missing: bool [n], where the column is missing.
        no_value: bool, which of ``values`` stand for no value.
    """

    values: np.ndarray
    offsets: np.ndarray | None
    missing: np.ndarray
    no_value: np.ndarray


class StoredTable:
    """A table, opened: finds keys, and takes columns at the rows that were found. Thread-safe.

    Args:
        directory: The directory of its files.
        spec: The columns.
        name: The name of the table.

    Attributes:
        keys: int64 [rows], the hashes of its keys, rising.
        starts: int64 [rows], from when each version is known, rising for each key; None of a table
            without versions.

    Raises:
        BadInputError: A file is missing or damaged.
    """

    def __init__(self, directory: Path, spec: FeatureSpec, name: str) -> None:
        self._directory = directory
        arrays = table_arrays(spec, name)
        try:
            self._arrays = {
                file: MappedArray(directory / file, dtype, 1) for file, dtype in arrays.items()
            }
            self.keys = self._arrays[KEYS].values
            self.starts = self._arrays[STARTS].values if STARTS in arrays else None
            if self.starts is not None and len(self.starts) != len(self.keys):
                raise ValueError(f"{STARTS} has {len(self.starts)} values")
            self._columns = {column.name: column for column in spec.table_columns(name)}
            for column in self._columns.values():
                self._check_lengths(column)
            for vector in spec.table_vectors(name):
                self._check_length(vector.name, "missing", len(self.keys))
                self._check_length(vector.name, "codes", len(self.keys))
        except (OSError, ValueError) as error:
            raise BadInputError(f"{directory}: damaged: {error}", _COPY_AGAIN) from error

    def _check_lengths(self, column: DenseColumn | CategoricalColumn) -> None:
        """Check that the arrays of a column have as many rows as the table. Raises ValueError."""
        rows = len(self.keys)
        expected = {"missing": rows}
        if isinstance(column, DenseColumn):
            expected["values"] = rows
        elif column.multi_hot:
            expected["lists"] = rows + 1
        else:
            expected["codes"] = rows
        for kind, length in expected.items():
            self._check_length(column.name, kind, length)

    def _check_length(self, name: str, kind: str, length: int) -> None:
        """Check the length of an array. Raises ValueError."""
        found = len(self._array(name, kind))
        if found != length:
            raise ValueError(f"{name}.{kind}.npy has {found} values, not {length}")

    def __len__(self) -> int:
        return len(self.keys)

    def check(self) -> None:
        """Raise :class:`BadInputError` if a file was written to since it was opened."""
        for array in self._arrays.values():
            array.check()

    def find(self, keys: np.ndarray, cuts: np.ndarray | None = None) -> np.ndarray:
        """Return the row of each key, int64 [n]; -1 for a key that is missing or not there.

        Args:
            keys: The hashes of the keys, int64 [n], 0 where a key is missing.
            cuts: Of a table with versions int64 [n], the time before which a version must have been
                known: the newest of these is found. None: the newest of all.
        """
        keys = np.ascontiguousarray(keys)
        buckets = self._two_buckets if len(keys) < _MANY_KEYS else self._small_buckets
        if self.starts is None:
            return find_rows(self.keys, *buckets, keys)
        if cuts is None:
            cuts = np.full(len(keys), np.iinfo(np.int64).max)
        return find_versions(self.keys, self.starts, *buckets, keys, cuts)

    @functools.cached_property
    def _small_buckets(self) -> tuple[np.ndarray, int]:
        """Buckets for many keys, see :func:`make_buckets`."""
        return make_buckets(self.keys, _BUCKET_ROWS)

    @functools.cached_property
    def _two_buckets(self) -> tuple[np.ndarray, int]:
        """The fewest buckets that :func:`make_buckets` makes: it reads hardly any keys."""
        return make_buckets(self.keys, max(1, len(self.keys)))

    def take(self, name: str, rows: np.ndarray) -> tuple[CategoryValues, np.ndarray]:
        """Return the values of a column at some rows, and where they are missing, bool [n].

        Args:
            name: The name of the column.
            rows: int64 [n], which must be rows of the table; -1 for none, where it is missing.

        Raises:
            BadInputError: The file is damaged: values that are not there.
        """
        column = self._columns[name]
        if isinstance(column, DenseColumn):
            missing = take_missing(self._array(name, "missing"), rows)
            return self._take_numbers(name, "values", rows, missing), missing
        codes = self.take_codes(name, rows)
        values = self._take_distinct(name, codes.values, codes.no_value)
        return (values if codes.offsets is None else Jagged(codes.offsets, values)), codes.missing

    def take_codes(self, name: str, rows: np.ndarray) -> TableCodes:
        """Return which distinct values a categorical column has at some rows.

        Args:
            name: The name of the column.
            rows: See :meth:`take`.

        Raises:
            BadInputError: The file is damaged: values that are not there.
        """
        column = self._columns[name]
        missing = take_missing(self._array(name, "missing"), rows)
        if not isinstance(column, CategoricalColumn) or not column.multi_hot:
            codes = self._take_numbers(name, "codes", rows, missing)
            return TableCodes(codes, None, missing, missing)
        offsets, items = self._expand_lists(name, rows, missing)
        each = np.zeros(len(items), np.bool_)
        codes = self._take_numbers(name, "codes", items, each)
        return TableCodes(codes, offsets, missing, each)

    def take_vectors(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return the number of the vector of some rows, int32 [n]; -1 for none.

        Args:
            name: The name of the vector.
            rows: See :meth:`take`.
        """
        missing = take_missing(self._array(name, "missing"), rows)
        numbers = self._take_numbers(name, "codes", rows, missing)
        numbers[missing] = NO_VECTOR
        return numbers

    def distinct(self, name: str) -> np.ndarray | pa.StringArray:
        """Return the distinct values of a categorical column, by their codes."""
        kind = "texts" if f"{name}.texts.npy" in self._arrays else "values"
        count = len(self._array(name, kind)) - (kind == "texts")
        return self._take_distinct(name, np.arange(count), np.zeros(count, np.bool_))

    def find_missing(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return where a column is missing at some rows, bool [n]."""
        return take_missing(self._array(name, "missing"), rows)

    def _array(self, name: str, kind: str) -> np.ndarray:
        return self._arrays[f"{name}.{kind}.npy"].values

    def _take_numbers(
        self, name: str, kind: str, rows: np.ndarray, missing: np.ndarray
    ) -> np.ndarray:
        """Return the numbers of an array at some places, 0 where they are missing."""
        values = self._array(name, kind)
        taken = np.zeros(len(rows), values.dtype)
        if not take_numbers(values, rows, missing, taken):
            raise self._damaged(name)
        return taken

    def _expand_lists(
        self, name: str, rows: np.ndarray, missing: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the offsets, int64 [n + 1], of lists at some rows, and the indices of their items.

        Raises:
            BadInputError: The file is damaged.
        """
        num_items = len(self._array(name, "codes"))
        ends = np.empty(len(rows), np.int64)
        lengths = np.empty(len(rows), np.int64)
        if not measure_values(self._array(name, "lists"), num_items, rows, missing, ends, lengths):
            raise self._damaged(name)
        offsets = to_offsets(lengths)
        return offsets, np.arange(offsets[-1]) + np.repeat(ends - offsets[1:], lengths)

    def _take_distinct(
        self, name: str, codes: np.ndarray, missing: np.ndarray
    ) -> np.ndarray | pa.StringArray:
        """Return the values of some codes, 0 or "" where they are missing."""
        if f"{name}.texts.npy" not in self._arrays:
            return self._take_numbers(name, "values", codes, missing)
        data = self._array(name, "values")
        ends, lengths = np.empty(len(codes), np.int64), np.empty(len(codes), np.int64)
        texts = self._array(name, "texts")
        if not measure_values(texts, len(data), codes, missing, ends, lengths):
            raise self._damaged(name)
        total = int(lengths.sum())
        if total > np.iinfo(np.int32).max:
            raise BadInputError(
                f"{self._directory}: column {name}: texts of {total} bytes for {len(codes)} rows",
                "score fewer rows at once, or shorten the texts of the table",
            )
        offsets = to_offsets(lengths).astype(np.int32)
        taken = np.empty(total, np.uint8)
        copy_texts(data, ends - lengths, offsets, taken)
        return string_array(offsets, taken)

    def _damaged(self, name: str) -> BadInputError:
        what = f"{self._directory}: damaged: column {name} has values that are not there"
        return BadInputError(what, _COPY_AGAIN)


class StoredTables:
    """The tables of a spec, opened. Thread-safe.

    Args:
        directory: The directory of the tables' directories.
        spec: The columns.

    Attributes:
        by_name: The tables that columns are joined from.

    Raises:
        BadInputError: A file is missing or damaged.
    """

    def __init__(self, directory: Path, spec: FeatureSpec) -> None:
        self.by_name = {
            rule.name: StoredTable(directory / rule.name, spec, rule.name)
            for rule in spec.joined_tables
        }

    @classmethod
    def open_beside(
        cls, description: WorkflowDescription, *, verify: bool = False
    ) -> StoredTables | None:
        """Open the tables beside a saved workflow; None for a spec without.

        Args:
            description: Of the workflow; it lists the files.
            verify: Read the files, and compare their digests.

        Raises:
            BadInputError: A file is missing or damaged.
        """
        spec = description.spec
        if not spec.joined_tables:
            return None
        files = {name: description.files[name] for name in table_files(spec)}
        check_sizes(description.path, files, _COPY_AGAIN)
        if verify:
            check_digests(description.path, files, _COPY_AGAIN)
        return cls(description.path / DIRECTORY, spec)

    def look_up(
        self, rows: RawRows, spec: FeatureSpec, categories: Collection[str] = ()
    ) -> RawRows:
        """Return rows with the rows of the tables that have their keys, and what is taken of them.

        These are the dense columns, the numbers of vectors, and where columns are missing.
        Categories stay empty, as :meth:`StoredTable.take_codes` finds them faster.

        Args:
            rows: The rows, with the hashes of their keys.
            spec: By which they were read: all tables are among those that were opened.
            categories: Categorical columns that are taken nevertheless.

        Raises:
            BadInputError: A file is damaged, or was written to since it was opened.
        """
        if rows.table_keys is None:
            return rows
        cuts = self._find_cuts(rows, spec)
        found = np.empty(rows.table_keys.shape, np.int64)
        by_table = {}
        for number, rule in enumerate(spec.joined_tables):
            table = self.by_name[rule.name]
            table.check()
            found[number] = by_table[rule.name] = table.find(rows.table_keys[number], cuts)
        dense, dense_missing = rows.dense.copy(), rows.dense_missing.copy()
        for j, column in enumerate(spec.dense):
            if column.table:
                table = self.by_name[column.table]
                dense[j], missing = table.take(column.name, by_table[column.table])
                add_missing(dense_missing, j, missing)
        categorical, categorical_missing = [*rows.categorical], rows.categorical_missing.copy()
        for k, category in enumerate(spec.categorical):
            if not category.table:
                continue
            table, places = self.by_name[category.table], by_table[category.table]
            if category.name in categories:
                categorical[k], missing = table.take(category.name, places)
            else:
                missing = table.find_missing(category.name, places)
            add_missing(categorical_missing, k, missing)
        vector_rows = None
        if spec.vectors:
            vector_rows = np.empty((len(spec.vectors), len(rows)), np.int32)
            for v, vector in enumerate(spec.vectors):
                table = self.by_name[vector.table]
                vector_rows[v] = table.take_vectors(vector.name, by_table[vector.table])
        return dataclasses.replace(
            rows,
            dense=dense,
            dense_missing=dense_missing,
            categorical=categorical,
            categorical_missing=categorical_missing,
            table_keys=None,
            table_rows=found,
            join_times=None,
            vector_rows=vector_rows,
        )

    def join(self, rows: RawRows, spec: FeatureSpec) -> RawRows:
        """Return rows with all columns of tables; see :meth:`look_up`."""
        if rows.table_keys is None:
            return rows
        joined = self.look_up(rows, spec, spec.categorical_names)
        return dataclasses.replace(joined, table_rows=None)

    def look_up_all(
        self, pieces: Iterable[RawRows], spec: FeatureSpec, categories: Collection[str] = ()
    ) -> Iterator[RawRows]:
        """Yield pieces of rows with the rows of the tables; see :meth:`look_up`."""
        for rows in pieces:
            yield self.look_up(rows, spec, categories)

    def _find_cuts(self, rows: RawRows, spec: FeatureSpec) -> np.ndarray | None:
        """Return the time before which versions count for each row, int64 [n]; None without."""
        if rows.join_times is None:
            return None
        cuts = cut_times(spec, rows.join_times) if spec.events else rows.join_times
        # a row without a time takes what is known last
        return np.where(rows.join_times == NO_TIME, np.iinfo(np.int64).max, cuts)
