"""Keep the columns of a table on disk after reading, until they are stored in another order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import string_array, string_parts, to_offsets
from nvt_torchrec.etl.tables.coded_values import CodedValues, encode_values, join_distinct
from nvt_torchrec.formats.rows import CategoryValues

#: The names of the arrays that a column is written as.
_MISSING = "missing"
_NUMBERS = "numbers"
_CODES = "codes"
_LIST_LENGTHS = "list_lengths"
_DISTINCT = "distinct"
_DISTINCT_TEXTS = "distinct_texts"
_TEXT_LENGTHS = "text_lengths"


class ColumnsOnDisk:
    """Columns that are written piece by piece, and then read one at a time.

    So the memory that a table takes does not grow with the number of its columns. A file is open
    only while it is written, because a process may not have so many files open.

    Categorical values are written as codes and the distinct values of their piece. So a string that
    many rows have is hashed while it is in the cache, and is then neither copied nor reordered.

    Args:
        directory: A directory for the files; it must be empty.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._dtypes: dict[tuple[str, str], np.dtype] = {}
        #: By column, the number of codes and the number of distinct values of each piece.
        self._sizes: dict[str, list[tuple[int, int]]] = {}

    def append_dense(self, name: str, values: np.ndarray, missing: np.ndarray) -> None:
        """Write the next values of a dense column, and the mask of missing ones, bool [n].

        Raises:
            OSError: A file cannot be written.
        """
        self._append(name, {_NUMBERS: values, _MISSING: missing})

    def append_categories(self, name: str, values: CategoryValues, missing: np.ndarray) -> None:
        """Write the next values of a categorical column; see :meth:`append_dense`."""
        coded = encode_values(values)
        parts = {_CODES: coded.codes, _MISSING: missing}
        if coded.offsets is not None:
            parts[_LIST_LENGTHS] = np.diff(coded.offsets)
        if isinstance(coded.distinct, np.ndarray):
            parts[_DISTINCT] = coded.distinct
        else:
            offsets, data = string_parts(coded.distinct)
            parts[_TEXT_LENGTHS] = np.diff(offsets).astype(np.int64)
            parts[_DISTINCT_TEXTS] = data[offsets[0] : offsets[-1]]
        self._append(name, parts)
        sizes = len(coded.codes), len(coded.distinct)
        self._sizes.setdefault(name, []).append(sizes)

    def load_dense(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return all values of a dense column, and the mask of missing ones; both may be empty."""
        parts = self._load(name)
        if not parts:
            return np.empty(0), np.empty(0, np.bool_)
        return parts[_NUMBERS], parts[_MISSING]

    def load_categories(self, name: str) -> tuple[CodedValues, np.ndarray] | None:
        """Return all values of a categorical column, and the mask of missing ones.

        None if nothing was written.
        """
        parts = self._load(name)
        if not parts:
            return None
        distinct: np.ndarray | pa.Array
        if _DISTINCT in parts:
            distinct = parts[_DISTINCT]
        else:
            text_offsets = to_offsets(parts[_TEXT_LENGTHS])
            distinct = string_array(text_offsets, parts[_DISTINCT_TEXTS])
        list_offsets = None
        if _LIST_LENGTHS in parts:
            list_offsets = to_offsets(parts[_LIST_LENGTHS])
        joined = join_distinct(parts[_CODES], list_offsets, distinct, self._sizes[name])
        return joined, parts[_MISSING]

    def _append(self, name: str, parts: dict[str, np.ndarray]) -> None:
        for part, array in parts.items():
            kind = self._dtypes.setdefault((name, part), array.dtype)
            with open(self._directory / f"{name}.{part}", "ab") as file:
                # The error of np.ndarray.tofile would not say that the disk is full.
                file.write(np.ascontiguousarray(array, kind).data)

    def _load(self, name: str) -> dict[str, np.ndarray]:
        parts = {}
        for (column, part), kind in self._dtypes.items():
            if column == name:
                parts[part] = np.fromfile(self._directory / f"{name}.{part}", kind)
        return parts
