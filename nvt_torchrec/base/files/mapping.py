"""Arrays that are memory-mapped from ``.npy`` files: opened instantly, shared by processes.

If a mapped file is truncated, the next access beyond its new end raises SIGBUS, which kills the
process. So programs call :meth:`MappedArray.check` before each batch, which raises an error with
the cause. Truncating a file while a batch is processed still raises SIGBUS; the commands that map
files enable :mod:`faulthandler`, which prints "Bus error" and the stack. Replacing a file by
renaming another one over it is safe.
"""

from __future__ import annotations

import os
import threading
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.atomic import atomic_path
from nvt_torchrec.base.files.validation import open_regular

#: NumPy parses headers with ``ast``, which can raise a SystemError in Python 3.11 ("AST constructor
#: recursion depth mismatch") if threads do so at the same time.
HEADERS = threading.Lock()


class MappedArray:
    """An array in a file.

    Args:
        path: A ``.npy`` file, in C order.
        dtype: The type that the array must have.
        dimensions: The number of dimensions that the array must have.
        writable: Make the array writable, as PyTorch requires; nothing is written to the file.

    Attributes:
        values: The array.

    Raises:
        OSError: The file cannot be opened, or is not a regular one.
        ValueError: The file does not hold such an array.
    """

    def __init__(
        self, path: Path, dtype: np.dtype | type, dimensions: int, *, writable: bool = False
    ) -> None:
        self._path = path
        with open_regular(path) as file:
            self._descriptor: int | None = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self._stamp = _stamp(self._descriptor)
        try:  # opened by the descriptor, because the path may lead to another file by now
            with HEADERS:
                mapped = np.lib.format.open_memmap(
                    f"/proc/self/fd/{self._descriptor}", mode="c" if writable else "r"
                )
        except Exception as error:  # parsing a damaged header can raise any error
            raise ValueError(f"is not an .npy file: {error!r:.200}") from None
        held = mapped.dtype
        shape = mapped.shape
        if held != dtype or len(shape) != dimensions or not mapped.flags.c_contiguous:
            raise ValueError(
                f"holds {held} {shape}, not {np.dtype(dtype)} in {dimensions} dimensions"
            )
        if mapped.offset + mapped.nbytes != self._stamp[0]:
            raise ValueError(
                f"has {self._stamp[0]} bytes, which does not fit an array {list(shape)}"
            )
        self.values = mapped.view(np.ndarray)

    def check(self) -> None:
        """Raise :class:`BadInputError` if the file was written to since it was opened."""
        if self._descriptor is not None and _stamp(self._descriptor) != self._stamp:
            raise BadInputError(
                f"{self._path}: was written to or truncated while in use",
                "start the program again; to replace files in use, rename others over them",
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling; the copy's values are in memory, not mapped."""
        return self.__dict__ | {"_descriptor": None}


def write_array(path: Path, array: np.ndarray) -> None:
    """Write an array for :class:`MappedArray` durably. Raises :class:`OutputError`."""
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        np.save(file, np.ascontiguousarray(array), allow_pickle=False)


def map_array(path: Path, *, write: bool = False) -> np.ndarray:
    """Map an array that this program has written.

    Assignments change the memory only, or with ``write`` also the file.
    """
    with HEADERS:
        return np.load(path, mmap_mode="r+" if write else "c").view(np.ndarray)


def write_header(file: IO[bytes], dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """Write the header of a ``.npy`` file, whose size does not depend on the length."""
    described = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, described)


class ArrayWriter:
    """Appends to a ``.npy`` file that is open for writing.

    Args:
        file: The file.
        dtype: The type of its values.
        width: The number of values of a row; None for an array of one dimension.

    Attributes:
        length: The number of values or rows.
        checksum: The CRC-32 of the values.
    """

    def __init__(self, file: IO[bytes], dtype: np.dtype | type, width: int | None = None) -> None:
        self.length = 0
        self._row_shape = () if width is None else (width,)
        self.checksum = 0
        self._file = file
        self._dtype = np.dtype(dtype)
        self.finish()  # reserves room for the header, which is overwritten at the end

    def append(self, values: np.ndarray | Sequence[int]) -> None:
        """Append values [n], or rows [n, width]."""
        array = np.ascontiguousarray(values, self._dtype)
        self._file.write(array.data)
        self.checksum = zlib.crc32(array.data, self.checksum)
        self.length += len(array)

    def finish(self) -> None:
        """Write the header with the current length."""
        self._file.seek(0)
        write_header(self._file, self._dtype, (self.length, *self._row_shape))


def _stamp(descriptor: int) -> tuple[int, int]:
    """Return the size of an open file and the time of its last change, in nanoseconds."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns
