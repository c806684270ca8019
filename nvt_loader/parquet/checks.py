"""Columns that are what the schema says: types, nulls, numbers that are none, ids in their tables.

All of it before a model sees the rows, and from the values themselves: a footer's minimum and
maximum say what was written, not what the pages hold now. It costs one reduction for each chunk,
or, where pages are indices, for each dictionary.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clicklog.errors import SchemaError
from nvt_loader.kernels import largest, largest_magnitude
from nvt_loader.parquet.columns import find_leaves, is_list
from nvt_loader.parquet.dataset import Dataset
from nvt_loader.parquet.row_chunks import RowChunk

log = logging.getLogger(__name__)

#: From here on, a float32's magnitude as bits is infinite or not a number.
INFINITY_BITS = 0x7F800000

#: First ids of every table that hashing leaves alone: padding, null, out of vocabulary.
RESERVED_IDS = 3

FILL_REMEDY = "the ETL fills missing values; run it again"


class Checker:
    """Converts and checks the columns of a split's files; safe for use by several threads."""

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
        #: What a column's numbers have to stay below: ids unsigned, floats their magnitude's bits.
        self.limits = np.array([INFINITY_BITS] * self._first_id + [*schema.table_sizes], np.uint64)
        self._lock = threading.Lock()

    def plain_leaves(self, footer: pq.FileMetaData) -> dict[int, tuple[int, int]]:
        """The columns of the loader's own types: which of the file's leaves each is, and whether
        its values may be missing."""
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
        """Whether a column of this type is what the loader hands out, but for nulls."""
        lists = number >= self._first_id and self._is_list[number - self._first_id]
        return not lists and kind == self._types[number]

    def column(self, column: pa.Array, number: int, file: int) -> pa.Array:
        """A column of a file, without nulls and in the type that the loader hands out."""
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
        """Integers of another width as ids; those outside the table are assigned with before."""
        flat = column.flatten() if self._is_list[i] else column
        ids = flat.to_numpy(zero_copy_only=False)
        ids = pa.array(self.inside(ids, i, file).astype(self._dataset.id_dtype))
        if not self._is_list[i]:
            return ids
        offsets = column.offsets.to_numpy()
        return pa.ListArray.from_arrays(pa.array(offsets - offsets[0]), ids)

    def inside(self, ids: np.ndarray, i: int, file: int) -> np.ndarray:
        """Ids that are in the table of categorical column ``i``: hashed if asked to, or refused.

        Raises:
            SchemaError: naming file, column, id and table size.
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
                "table sizes come from .merlin/schema.json: it and the data are of two ETL runs; "
                "--hash_indices maps such ids into the table",
            )
        if size <= RESERVED_IDS:
            raise SchemaError(
                f"column {name}: a table of {size} rows has none to map ids to",
                f"hashing leaves the first {RESERVED_IDS} ids alone; enlarge the table",
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
        """Refuse (or hash) what is no number and what is no id of its table.

        Args:
            chunk: the rows.
            arrays: its list columns.
            numbers: of the columns to look at.
            file: where it is from.
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
        """Refuse a column, no list, that has a number at its limit or above (or hash its ids).

        Raises:
            SchemaError: naming file, column and value.
        """
        if number < self._first_id:
            name = self._dataset.schema.columns[number]
            refuse_non_finite(chunk.column(number, np.float32), name, self._dataset.files[file])
        self._replace(chunk, None, number, file)

    def _replace(self, chunk: RowChunk, array: pa.Array | None, number: int, file: int) -> None:
        """Put ids that are in the table in place of a column's, which may be the list ``array``."""
        i = number - self._first_id
        if array is None:
            ids = self.inside(chunk.column(number, self._dataset.id_dtype), i, file)
            chunk.addresses[number] = ids.ctypes.data
        else:  # as long as all elements, so that the offsets stay right
            begin, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
            ids = array.values.to_numpy().copy()
            ids[begin:end] = self.inside(ids[begin:end], i, file)
            chunk.values[number] = ids.ctypes.data
        chunk.owner.append(ids)

    def weights(
        self, column: pa.Array, lists: pa.Array, name: str, owner: list[Any], file: int
    ) -> int:
        """The address of a list column's float32 weights, by the offsets of its ids ``lists``."""
        if not pa.types.is_list(column.type):
            column = column.cast(pa.list_(column.type.value_type))
        self._refuse_nulls(column, name, file)
        offsets, own = lists.offsets.to_numpy(), column.offsets.to_numpy()
        if not np.array_equal(np.diff(offsets), np.diff(own)):
            row = int(np.flatnonzero(np.diff(offsets) != np.diff(own))[0])
            raise SchemaError(
                f"{self._dataset.files[file]}: column {name} has {np.diff(own)[row]} weights for "
                f"{np.diff(offsets)[row]} ids",
                "each id needs a weight",
            )
        values = column.values.slice(own[0], own[-1] - own[0]).cast(pa.float32(), safe=False)
        owner.append(values)
        weights = values.to_numpy()
        if weights.size and not np.isfinite(weights).all():
            refuse_non_finite(weights, name, self._dataset.files[file])
        return weights.ctypes.data - 4 * int(offsets[0])


def refuse_non_finite(column: np.ndarray, name: str, path: Path) -> NoReturn:
    """Refuse infinities and NaN, which one step spreads over the whole model.

    Raises:
        SchemaError: naming file, column and value.
    """
    broken = column[~np.isfinite(column)]
    raise SchemaError(
        f"{path}: column {name} holds {broken[0]} (in {broken.size} of {column.size} values)",
        "the ETL writes finite numbers only; run it again",
    )
