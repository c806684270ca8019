"""Keep the columns of a table on disk between reading them and storing them in another order."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nvt_torchrec.base.arrays import string_array, string_parts, to_offsets
from nvt_torchrec.formats.rows import CategoryValues, Jagged

#: The names of the arrays that a column is written as.
_MISSING = "missing"
_NUMBERS = "numbers"
_TEXTS = "texts"
_TEXT_LENGTHS = "text_lengths"
_LIST_LENGTHS = "list_lengths"


class ColumnsOnDisk:
    """Columns that are written piece by piece, and then read one at a time.

    So the memory that a table takes does not grow with the number of its columns. A file is open
    only while it is written: there may be more than a process may have open.

    Args:
        directory: A directory for the files; it must be empty.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._dtypes: dict[tuple[str, str], np.dtype] = {}

    def append(self, name: str, values: CategoryValues, missing: np.ndarray) -> None:
        """Write the next values of a column, and where they are missing, bool [n].

        Raises:
            OSError: A file cannot be written.
        """
        parts = _divide(values)
        parts[_MISSING] = missing
        for part, array in parts.items():
            kind = self._dtypes.setdefault((name, part), array.dtype)
            with open(self._directory / f"{name}.{part}", "ab") as file:
                # Not tofile, whose error does not say that the disk is full.
                file.write(np.ascontiguousarray(array, kind).data)

    def load(self, name: str) -> list[tuple[CategoryValues, np.ndarray]]:
        """Return all values of a column as one piece, and where they are missing; [] for none."""
        parts = {}
        for (column, part), kind in self._dtypes.items():
            if column == name:
                parts[part] = np.fromfile(self._directory / f"{name}.{part}", kind)
        if not parts:
            return []
        return [(_join(parts), parts[_MISSING])]


def _divide(values: CategoryValues) -> dict[str, np.ndarray]:
    """Return values as arrays that can be appended to."""
    if isinstance(values, Jagged):
        return {_LIST_LENGTHS: np.diff(values.offsets), **_divide(values.values)}
    if isinstance(values, np.ndarray):
        return {_NUMBERS: values}
    offsets, data = string_parts(values)
    texts = data[offsets[0] : offsets[-1]]
    return {_TEXT_LENGTHS: np.diff(offsets).astype(np.int64), _TEXTS: texts}


def _join(parts: dict[str, np.ndarray]) -> CategoryValues:
    """Return what :func:`_divide` divided; texts as large strings."""
    if _NUMBERS in parts:
        values = parts[_NUMBERS]
    else:
        values = string_array(to_offsets(parts[_TEXT_LENGTHS]), parts[_TEXTS])
    if _LIST_LENGTHS in parts:
        return Jagged(to_offsets(parts[_LIST_LENGTHS]), values)
    return values
