"""Arrays that do not fit into memory, and are written to files piece by piece."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from types import TracebackType

import numpy as np

from nvt_torchrec.base.files.atomic import TEMPORARY, atomic_path, get_writer_id, output_errors
from nvt_torchrec.base.files.mapping import HEADERS, write_header

#: The number of bytes that are copied at once.
_COPIED = 1 << 20


def create_array(path: Path, shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Create a file with an array of zeros, and map it; assignments change the file.

    The space on the disk is reserved, because writing to a mapped file when the disk is full would
    kill the process.

    Raises:
        OutputError: The file cannot be written, or the disk is full.
    """
    with output_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if 0 in shape:  # such an array cannot be mapped
            array = np.empty(shape, dtype)
            with open(path, "wb") as file:
                np.save(file, array)
            return array
        with HEADERS:
            array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        with open(path, "rb+") as file:
            os.posix_fallocate(file.fileno(), 0, array.offset + array.nbytes)
    return array.view(np.ndarray)


class GrowingArray:
    """An array [n] or [rows, n] in a ``.npy`` file that grows along its last axis.

    Each row is a separate file until the end of the context, which joins them. If several processes
    write the same array at the same time, the last one wins::

        with GrowingArray(path, np.int64, rows=2) as array:
            array.append(np.zeros((2, 5), np.int64))

    Args:
        path: The file, which is written atomically.
        dtype: The type of the values.
        rows: The number of rows; None for one dimension.

    Raises:
        OutputError: The file cannot be written.
    """

    def __init__(self, path: Path, dtype: np.dtype | type, rows: int | None = None) -> None:
        self._path = path
        self._dtype = np.dtype(dtype)
        self._rows = rows
        self.length = 0
        self._stack = contextlib.ExitStack()
        self._files = []
        with output_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            for row in range(1 if rows is None else rows):
                part = path.with_name(f".{path.name}.{row}.{get_writer_id()}{TEMPORARY}")
                self._stack.callback(part.unlink, missing_ok=True)
                file = open(part, "wb+")  # noqa: SIM115
                self._files.append(self._stack.enter_context(file))

    def __enter__(self) -> GrowingArray:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._stack:
            if kind is None:
                self._finish()

    def close(self) -> None:
        """Join the rows, if the array is not used as a context manager."""
        with self._stack:
            self._finish()

    def append(self, values: np.ndarray) -> None:
        """Append values, [n] or [rows, n]."""
        values = np.atleast_2d(values)
        with output_errors(self._path):
            for file, row in zip(self._files, values, strict=True):
                file.write(np.ascontiguousarray(row, self._dtype).data)
        self.length += values.shape[1]

    def _finish(self) -> None:
        """Write the header, then the rows."""
        shape = (self.length,) if self._rows is None else (self._rows, self.length)
        with atomic_path(self._path) as temporary, open(temporary, "wb") as target:
            write_header(target, self._dtype, shape)
            for file in self._files:
                file.seek(0)
                shutil.copyfileobj(file, target, _COPIED)
                file.truncate(0)  # free the space, so that only one row is on the disk twice
