"""An open table that columns are joined from: find the rows of keys, and read columns there.

:mod:`formats.table_files` describes the files.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import string_array, to_offsets
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.mapping import MappedArray
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.rows import CategoryValues, Jagged
from nvt_torchrec.formats.table_files import KEYS, STARTS, list_table_arrays
from nvt_torchrec.formats.vectors import NO_VECTOR
from nvt_torchrec.workflows.table_kernels import (
    copy_texts,
    count_codes,
    encode_codes,
    find_rows,
    find_versions,
    make_buckets,
    mark_missing,
    measure_values,
    take_missing,
    take_numbers,
    take_present,
)

#: About how many rows a bucket of keys has. The keys of so few rows fill one or two cache lines,
#: and the bounds of the buckets still take less memory than the keys.
_BUCKET_ROWS = 4
#: Small buckets are made only for lookups of at least this many keys. Making them reads all keys of
#: the table, which takes longer than finding the few keys of a request without them.
_MANY_KEYS = 4096
#: The remedy for damaged files.
COPY_AGAIN = "copy the whole workflow again, or run the ETL again"


@dataclasses.dataclass(frozen=True)
class TableCodes:
    """A categorical column at ``n`` rows, as codes: indices into its distinct values.

    Attributes:
        values: int32 [n], or for a list column the codes of all items.
        offsets: For a list column int64 [n + 1], where the items of each row begin; else None.
        missing: bool [n], True where the column is missing.
        no_value: bool, True for each of ``values`` that stands for a missing value.
    """

    values: np.ndarray
    offsets: np.ndarray | None
    missing: np.ndarray
    no_value: np.ndarray


class StoredTable:
    """An open table: finds the rows of keys, and reads columns at these rows. Thread-safe.

    Args:
        directory: The directory of its files.
        spec: The columns.
        name: The name of the table.

    Attributes:
        keys: int64 [rows], the hashes of its keys, ascending.
        starts: int64 [rows], the time from which each version is known, ascending within a key;
            None for a table without versions.

    Raises:
        BadInputError: A file is missing or damaged.
    """

    def __init__(self, directory: Path, spec: FeatureSpec, name: str) -> None:
        self._directory = directory
        arrays = list_table_arrays(spec, name)
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
            raise BadInputError(f"{directory}: damaged: {error}", COPY_AGAIN) from error

    def _check_lengths(self, column: DenseColumn | CategoricalColumn) -> None:
        """Raise ValueError unless the arrays of a column have as many rows as the table."""
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
        """Raise ValueError if an array has another length."""
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
        """Return the row of each key, int64 [n]; -1 for a key that is missing or not in the table.

        Args:
            keys: The hashes of the keys, int64 [n]; 0 for a missing key.
            cuts: For a table with versions, int64 [n]: the newest version known before this time is
                found. None: the newest version of all.
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
        """The buckets for many keys, see :func:`make_buckets`."""
        return make_buckets(self.keys, _BUCKET_ROWS)

    @functools.cached_property
    def _two_buckets(self) -> tuple[np.ndarray, int]:
        """Only two buckets, which :func:`make_buckets` makes without reading many keys."""
        return make_buckets(self.keys, max(1, len(self.keys)))

    def take(self, name: str, rows: np.ndarray) -> tuple[CategoryValues, np.ndarray]:
        """Return the values of a column at the given rows, and the mask of missing ones, bool [n].

        Args:
            name: The name of the column.
            rows: int64 [n], rows of the table; -1 for no row, where the value is missing.

        Raises:
            BadInputError: The file is damaged: a code or an offset is out of range.
        """
        column = self._columns[name]
        if isinstance(column, DenseColumn):
            values = np.empty(len(rows))
            self.write_dense(name, rows, values)
            return values, take_missing(self._array(name, "missing"), rows)
        codes = self.take_codes(name, rows)
        values = self._take_distinct(name, codes.values, codes.no_value)
        return (values if codes.offsets is None else Jagged(codes.offsets, values)), codes.missing

    def take_codes(self, name: str, rows: np.ndarray) -> TableCodes:
        """Return the codes of a categorical column at the given rows.

        Args:
            name: The name of the column.
            rows: See :meth:`take`.

        Raises:
            BadInputError: The file is damaged: a code or an offset is out of range.
        """
        missing = take_missing(self._array(name, "missing"), rows)
        if not self._has_lists(name):
            codes = self._take_numbers(name, "codes", rows, missing)
            return TableCodes(codes, None, missing, missing)
        offsets, items = self._expand_lists(name, rows, missing)
        no_value = np.zeros(len(items), np.bool_)
        codes = self._take_numbers(name, "codes", items, no_value)
        return TableCodes(codes, offsets, missing, no_value)

    def take_vector_numbers(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return the number of each row's vector, int32 [n]; -1 for none.

        Args:
            name: The name of the vector.
            rows: See :meth:`take`.
        """
        missing = take_missing(self._array(name, "missing"), rows)
        numbers = self._take_numbers(name, "codes", rows, missing)
        numbers[missing] = NO_VECTOR
        return numbers

    def list_distinct(self, name: str) -> np.ndarray | pa.StringArray:
        """Return the distinct values of a categorical column, in the order of their codes."""
        if f"{name}.texts.npy" in self._arrays:
            count = len(self._array(name, "texts")) - 1
        else:
            count = len(self._array(name, "values"))
        return self._take_distinct(name, np.arange(count), np.zeros(count, np.bool_))

    def write_dense(self, name: str, rows: np.ndarray, values: np.ndarray) -> None:
        """Write the values of a dense column at the given rows; 0 where it is missing.

        Args:
            name: The name of the column.
            rows: See :meth:`take`.
            values: float64 or int32 [n], the result.
        """
        take_present(self._array(name, "values"), self._array(name, "missing"), rows, values)

    def mark_missing(self, name: str, rows: np.ndarray, words: np.ndarray, bit: np.uint64) -> None:
        """Set a column's bit in the mask of missing values where it is missing.

        Args:
            name: The name of the column.
            rows: See :meth:`take`.
            words: uint64 [n], the words of the mask that hold the column's bit; changed in place.
            bit: The position of the bit.
        """
        mark_missing(self._array(name, "missing"), rows, words, bit)

    def count_values(self, name: str, rows: np.ndarray, num_distinct: int) -> np.ndarray:
        """Count each distinct value of a categorical column at the given rows: int64 [distinct].

        Every item of a list counts.

        Args:
            name: The name of the column.
            rows: See :meth:`take`.
            num_distinct: Number of distinct values of the column.

        Raises:
            BadInputError: The file is damaged: a code or an offset is out of range.
        """
        if self._has_lists(name):
            items = self._take_items(name, rows, num_distinct)
            return np.bincount(items.values, minlength=num_distinct)
        counts = np.zeros(num_distinct, np.int64)
        arrays = self._array(name, "codes"), self._array(name, "missing")
        if not count_codes(*arrays, rows, counts):
            raise self._make_damaged_error(name)
        return counts

    def encode(
        self,
        name: str,
        rows: np.ndarray,
        ids_by_code: np.ndarray,
        bounds: tuple[int, int, int],
        tally: np.ndarray,
    ) -> np.ndarray | Jagged:
        """Return the ids of a categorical column at the given rows: int32 [n], or lists of int32.

        Args:
            name: The name of the column.
            rows: See :meth:`take`.
            ids_by_code: The ids of the distinct values, int32 [distinct].
            bounds: The id of a missing value, the first out-of-vocabulary id, and the first id of
                the vocabulary.
            tally: int64 [2], to which the numbers of rows where the column is missing and of
                out-of-vocabulary ids are added.

        Raises:
            BadInputError: The file is damaged: a code or an offset is out of range.
        """
        if not self._has_lists(name):
            ids = np.empty(len(rows), np.int32)
            arrays = self._array(name, "codes"), self._array(name, "missing")
            if not encode_codes(*arrays, rows, ids_by_code, bounds, ids, tally):
                raise self._make_damaged_error(name)
            return ids
        items = self._take_items(name, rows, len(ids_by_code))
        assert items.offsets is not None
        ids = ids_by_code[items.values]
        _, first_oov, first_known = bounds
        tally[0] += np.count_nonzero(items.missing)
        tally[1] += np.count_nonzero((ids >= first_oov) & (ids < first_known))
        return Jagged(items.offsets, ids)

    def _take_items(self, name: str, rows: np.ndarray, num_distinct: int) -> TableCodes:
        """Return the codes of a list column at the given rows, all less than ``num_distinct``.

        Raises:
            BadInputError: The file is damaged: a code or an offset is out of range.
        """
        codes = self.take_codes(name, rows)
        if len(codes.values):
            lowest = codes.values.min()
            highest = codes.values.max()
            if lowest < 0 or highest >= num_distinct:
                raise self._make_damaged_error(name)
        return codes

    def _has_lists(self, name: str) -> bool:
        column = self._columns[name]
        return isinstance(column, CategoricalColumn) and column.multi_hot

    def _array(self, name: str, kind: str) -> np.ndarray:
        return self._arrays[f"{name}.{kind}.npy"].values

    def _take_numbers(
        self, name: str, kind: str, rows: np.ndarray, missing: np.ndarray
    ) -> np.ndarray:
        """Return the values of an array at the given indices, 0 where ``missing`` is True."""
        values = self._array(name, kind)
        taken = np.zeros(len(rows), values.dtype)
        if not take_numbers(values, rows, missing, taken):
            raise self._make_damaged_error(name)
        return taken

    def _expand_lists(
        self, name: str, rows: np.ndarray, missing: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the lists at the given rows: offsets, int64 [n + 1], and the indices of the items.

        Raises:
            BadInputError: The file is damaged.
        """
        num_items = len(self._array(name, "codes"))
        ends = np.empty(len(rows), np.int64)
        lengths = np.empty(len(rows), np.int64)
        if not measure_values(self._array(name, "lists"), num_items, rows, missing, ends, lengths):
            raise self._make_damaged_error(name)
        offsets = to_offsets(lengths)
        return offsets, np.arange(offsets[-1]) + np.repeat(ends - offsets[1:], lengths)

    def _take_distinct(
        self, name: str, codes: np.ndarray, missing: np.ndarray
    ) -> np.ndarray | pa.StringArray:
        """Return the values of codes, 0 or "" where ``missing`` is True."""
        if f"{name}.texts.npy" not in self._arrays:
            return self._take_numbers(name, "values", codes, missing)
        data = self._array(name, "values")
        texts = self._array(name, "texts")
        ends = np.empty(len(codes), np.int64)
        lengths = np.empty(len(codes), np.int64)
        if not measure_values(texts, len(data), codes, missing, ends, lengths):
            raise self._make_damaged_error(name)
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

    def _make_damaged_error(self, name: str) -> BadInputError:
        return BadInputError(
            f"{self._directory}: damaged: column {name} has an index out of range", COPY_AGAIN
        )
