"""Arrays that are mapped from ``.npy`` files: opened at once, shared by processes, read as needed.

When a mapped file is truncated, the next access beyond its new end is a SIGBUS, which ends the
process. So programs call :meth:`MappedArray.check` before each batch, which raises an error that
says what happened. A file that is truncated while a batch is processed still ends in SIGBUS; the
commands that map files enable :mod:`faulthandler`, which prints "Bus error" and where. Replacing a
file by renaming another over it is safe.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from pathlib import Path
from typing import IO, Any

import numpy as np

from nvt_torchrec.base.errors import BadInputError


class MappedArray:
    """An array in a file.

    Args:
        path: A ``.npy`` file, version 1, in C order.
        dtype: The type that the array must have.
        dimensions: The number of dimensions that the array must have.
        writable: Make the array writable, as PyTorch requires; nothing is written to the file.

    Attributes:
        values: The array.

    Raises:
        OSError: The file cannot be opened.
        ValueError: The file holds something else.
    """

    def __init__(
        self, path: Path, dtype: np.dtype | type, dimensions: int, *, writable: bool = False
    ) -> None:
        self._path = path
        self._descriptor: int | None = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        with open(path, "rb", opener=lambda *_: os.dup(self._descriptor)) as file:
            shape, begin = _header(file, np.dtype(dtype), dimensions)
        self._stamp = _stamp(self._descriptor)
        if begin + math.prod(shape) * np.dtype(dtype).itemsize != self._stamp[0]:
            raise ValueError(f"has {self._stamp[0]} bytes, not those of an array {list(shape)}")
        access = mmap.ACCESS_COPY if writable else mmap.ACCESS_READ
        mapped = mmap.mmap(self._descriptor, 0, access=access)
        self.values = np.ndarray(shape, dtype, buffer=mapped, offset=begin)

    def check(self) -> None:
        """Raise :class:`BadInputError` if the file was written to since it was opened."""
        if self._descriptor is not None and _stamp(self._descriptor) != self._stamp:
            raise BadInputError(
                f"{self._path}: written to, or cut short, while it is in use",
                "start the program again; to replace files in use, rename others over them",
            )

    def __getstate__(self) -> dict[str, Any]:
        """State of a copy, as in another process: its values are not mapped from the file."""
        return self.__dict__ | {"_descriptor": None}


def _header(file: IO[bytes], dtype: np.dtype, dimensions: int) -> tuple[tuple[int, ...], int]:
    """Shape, and where the array begins."""
    try:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f".npy of version {version}")
        shape, by_column, found = np.lib.format.read_array_header_1_0(file)
    except Exception as error:  # NumPy parses it as Python, which raises anything
        raise ValueError(f"is not an .npy file: {error!r:.200}") from None
    if found != dtype or len(shape) != dimensions or (by_column and dimensions > 1):
        raise ValueError(f"holds {found} {shape}, not {dtype} in {dimensions} dimensions")
    return shape, file.tell()


def _stamp(descriptor: int) -> tuple[int, int]:
    """Size and time of the last change."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns
