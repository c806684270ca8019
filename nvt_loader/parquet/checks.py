"""Convert columns and check their values: nulls, infinity and NaN, ids outside their tables.

Everything is checked before a model sees the rows, and on the values themselves: a footer's minimum
and maximum say what was written, not what the pages hold now. A check costs one reduction for each
chunk or, where pages hold indices, for each dictionary.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset, find_leaves, is_list
from nvt_torchrec.nvt_loader.parquet.kernels import largest, largest_magnitude
from nvt_torchrec.nvt_loader.parquet.row_chunks import RowChunk

log = logging.getLogger(__name__)

#: From this number on, the bits of a float32's magnitude mean infinity or NaN.
INFINITY_BITS = 0x7F800000

#: First ids of every table that hashing does not map to: padding, null, out of vocabulary.
RESERVED_IDS = 3

FILL_REMEDY = "the ETL fills missing values; run it again"


class Checker:
    """Converts and checks the columns of a split's files. Several threads may use it at once."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        schema = dataset.schema
        self._first_id = 1 + len(schema.dense)
        self._sizes = np.array(schema.table_sizes, dtype=np.int64)
        lists = set(schema.multi_hot)
        self._is_list = np.array([name in lists for name in schema.categorical], dtype=bool)
        ids = pa.from_numpy_dtype(dataset.id_dtype)
        self._types = [pa.float32()] * self._first_id + [ids] * len(self._sizes)
        self._warned: set[str] = set()
        self._known: tuple[pq.ParquetSchema | None, dict[int, tuple[int, int]]] = (None, {})
        #: What each number must stay below: an unsigned id, or the bits of a magnitude.
        self.limits = np.array([INFINITY_BITS] * self._first_id + [*schema.table_sizes], np.uint64)
        self._lock = threading.Lock()

    def plain_leaves(self, footer: pq.FileMetaData) -> dict[int, tuple[int, int]]:
        """Find the columns of the loader's own types: for each the number of its leaf in the file,
        and whether its values may be missing."""
        schema = footer.schema
        with self._lock:
            known, leaves = self._known
        if known is None or not known.equals(schema):  # most files are alike
            types = schema.to_arrow_schema()
            leaves = {}
            found = find_leaves(footer, self._dataset.schema.columns)
            for number, (name, leaf) in enumerate(found.items()):
                if self.is_plain(types.field(name).type, number):
                    leaves[number] = leaf, schema.column(leaf).max_definition_level
            with self._lock:
                self._known = schema, leaves
        return leaves

    def is_plain(self, kind: pa.DataType, number: int) -> bool:
        """Whether a column of this type needs no conversion."""
        lists = number >= self._first_id and self._is_list[number - self._first_id]
        return not lists and kind == self._types[number]

    def column(self, column: pa.Array, number: int, file: int) -> pa.Array:
        """Convert a column of a file to the type that the loader hands out; refuse nulls."""
        name = self._dataset.schema.columns[number]
        if is_list(column.type) and not pa.types.is_list(column.type):
            column = column.cast(pa.list_(column.type.value_type))
        self._refuse_nulls(column, name, file)
        kind = column.type.value_type if pa.types.is_list(column.type) else column.type
        if kind == self._types[number]:
            return column
        if number >= self._first_id:
            return self._to_ids(column, number - self._first_id, file)
        return column.cast(pa.float32(), safe=False)

    def _refuse_nulls(self, column: pa.Array, name: str, file: int) -> None:
        nulls = column.null_count
        if pa.types.is_list(column.type) and not nulls:
            nulls = column.flatten().null_count if column.values.null_count else 0
        if nulls:
            raise SchemaError(
                f"{self._dataset.files[file]}: column {name} holds {nulls} null values", FILL_REMEDY
            )

    def _to_ids(self, column: pa.Array, i: int, file: int) -> pa.Array:
        """Convert integers of another width to ids, after mapping those outside the table."""
        flat = column.flatten() if self._is_list[i] else column
        ids = flat.to_numpy(zero_copy_only=False)
        ids = pa.array(self.into_table(ids, i, file).astype(self._dataset.id_dtype))
        if not self._is_list[i]:
            return ids
        offsets = column.offsets.to_numpy()
        return pa.ListArray.from_arrays(pa.array(offsets - offsets[0]), ids)

    def into_table(self, ids: np.ndarray, i: int, file: int) -> np.ndarray:
        """Return the ids of categorical column ``i`` with those outside its table mapped into it.

        Raises:
            SchemaError: An id is outside the table and ``hash_indices`` is off. The message names
                file, column, id and table size.
        """
        name, size = self._dataset.schema.categorical[i], int(self._sizes[i])
        bad = (ids < 0) | (ids >= size)
        if not bad.any():
            return ids
        if not self._dataset.hash_indices:
            outside = ids[bad]
            raise SchemaError(
                f"{self._dataset.files[file]}: column {name} holds id {outside[0]}, outside its "
                f"table of {size} rows (in {outside.size} of {ids.size} ids)",
                "table sizes come from .merlin/schema.json, which belongs to another ETL run than "
                "the data; run the ETL again, or let --hash_indices map such ids into the table",
            )
        if size <= RESERVED_IDS:
            raise SchemaError(
                f"column {name}: a table of {size} rows has no row to map ids to",
                f"hashing does not map to the first {RESERVED_IDS} ids; enlarge the table",
            )
        with self._lock:
            warned = name in self._warned
            self._warned.add(name)
        if not warned:
            log.warning(
                "%s: ids of column %s outside its table of %d rows, as %d, are mapped into it "
                "(hash_indices)",
                self._dataset.files[file],
                name,
                size,
                ids[bad][0],
            )
        wide = ids[bad].astype(np.uint64 if ids.dtype.kind == "u" else np.int64)
        wide = (wide - wide.dtype.type(RESERVED_IDS)) % wide.dtype.type(size - RESERVED_IDS)
        hashed = ids.copy()
        hashed[bad] = wide + wide.dtype.type(RESERVED_IDS)
        return hashed

    def check(
        self,
        chunk: RowChunk,
        arrays: dict[int, pa.Array],
        numbers: np.ndarray,
        file: int,
    ) -> None:
        """Refuse infinity and NaN; refuse or map ids outside their tables.

        Args:
            chunk: The rows.
            arrays: The chunk's list columns.
            numbers: Which columns to check.
            file: The number of the file that the rows are from.
        """
        if not chunk.rows:
            return
        floats = numbers[numbers < self._first_id]
        found = np.empty(len(floats), np.uint64)
        largest_magnitude(found, chunk.addresses[floats], chunk.rows)
        for i in floats[found >= self.limits[floats]].tolist():
            self.refuse(chunk, i, file)
        ids = numbers[numbers >= self._first_id]
        is_list, width = self._is_list[ids - self._first_id], self._dataset.id_dtype.itemsize
        flat = ids[~is_list]
        if flat.size:
            most = np.empty(flat.size, np.uint64)
            largest(most, chunk.addresses[flat], chunk.rows, width)
            for i in flat[most >= self.limits[flat]].tolist():
                self.refuse(chunk, i, file)
        for i in ids[is_list].tolist():
            array = arrays[i]
            begin, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
            if begin == end:
                continue
            most = np.empty(1, np.uint64)
            address = chunk.values[i] + begin * width
            largest(most, np.array([address]), end - begin, width)
            if most[0] >= self.limits[i]:
                self._replace(chunk, array, i, file)

    def refuse(self, chunk: RowChunk, number: int, file: int) -> None:
        """Refuse a flat column that has a number at its limit or above, or map its ids.

        Raises:
            SchemaError: The message names file, column and value.
        """
        if number < self._first_id:
            name = self._dataset.schema.columns[number]
            refuse_non_finite(chunk.column(number, np.float32), name, self._dataset.files[file])
        self._replace(chunk, None, number, file)

    def _replace(self, chunk: RowChunk, array: pa.Array | None, number: int, file: int) -> None:
        """Map a column's ids into its table; ``array`` is the column if it is a list."""
        i = number - self._first_id
        if array is None:
            ids = self.into_table(chunk.column(number, self._dataset.id_dtype), i, file)
            chunk.addresses[number] = ids.ctypes.data
        else:  # a copy of all elements, so that the offsets stay valid
            begin, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
            ids = array.values.to_numpy().copy()
            ids[begin:end] = self.into_table(ids[begin:end], i, file)
            chunk.values[number] = ids.ctypes.data
        chunk.owner.append(ids)


def refuse_non_finite(column: np.ndarray, name: str, path: Path) -> NoReturn:
    """Refuse infinity and NaN, which one training step spreads over the whole model.

    Raises:
        SchemaError: The message names file, column and value.
    """
    found = column[~np.isfinite(column)]
    raise SchemaError(
        f"{path}: column {name} holds {found[0]} (in {found.size} of {column.size} values)",
        "the ETL writes finite numbers only; run it again",
    )
