"""Read rows straight from the pages of parquet files as the ETL writes them, by compiled loops.

The loops read columns of the loader's own types: one value per row, no nulls, uncompressed pages of
plain values or of indices into a dictionary. All columns are read in one call without the
interpreter lock. If a column has a dictionary, the values of the dictionary are checked instead of
the value of each row. Everything else, including damaged files, is left to Arrow
(:mod:`nvt_loader.parquet.decoder`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from isal import isal_zlib

from nvt_torchrec.base.files.remote import RemoteFile, open_file
from nvt_torchrec.nvt_loader.parquet import pages
from nvt_torchrec.nvt_loader.parquet.checks import Checker
from nvt_torchrec.nvt_loader.parquet.files import ParquetFiles
from nvt_torchrec.nvt_loader.parquet.page_values import CURSOR, open_columns, read_into, read_rows
from nvt_torchrec.nvt_loader.parquet.row_chunks import Buffers, RowChunk, Target

#: The codec of uncompressed chunks, by parquet.thrift.
_UNCOMPRESSED = 0
#: The expected maximum number of pages of a column chunk: the ETL writes fewer.
_USUAL_PAGES = 8


class PageReader:
    """Opens the row groups of a split. It is thread-safe."""

    def __init__(self, files: ParquetFiles, checker: Checker) -> None:
        self._files = files
        self._checker = checker
        self._bytes = Buffers()
        self._values = Buffers()

    def open(self, row_group: int) -> OpenRowGroup | None:
        """Open the supported columns of a row group, positioned before the first row.

        Returns:
            The row group, or None if by its footer no column is supported, or if a page of a
            supported column turns out to be unsupported or damaged.

        Raises:
            OSError: The file cannot be read.
        """
        file_chunks = self._find_chunks(row_group)
        if not file_chunks:
            return None
        file = self._files.row_groups[row_group].file
        memory = self._bytes.take(sum(chunk.size for chunk in file_chunks))
        if not _read(self._files.find_path(file), _merge_ranges(file_chunks), memory):
            return None
        # In memory the chunks are contiguous, even if the file has gaps between them.
        chunks = np.empty(len(file_chunks), pages.CHUNK)
        address = memory.ctypes.data
        for i, chunk in enumerate(file_chunks):
            chunks[i] = address, chunk.size, chunk.values, chunk.signed
            address += chunk.size
        page_table, first_page = _find_pages(chunks)
        if page_table is None or not _verify_checksums(page_table, memory):
            return None
        state = np.zeros(len(chunks), CURSOR), page_table, first_page, chunks
        largest = np.empty(len(chunks), np.uint64)
        if not open_columns(state, largest):
            return None
        numbers = np.array([chunk.number for chunk in file_chunks])
        # If all values of the dictionary are below the limit, the value of each row is, too.
        checked = largest >= self._checker.limits[numbers]
        where = str(self._files.paths[file])
        return OpenRowGroup(self._checker, numbers, where, state, checked, memory, self._values)

    def _find_chunks(self, row_group: int) -> list[_FileChunk]:
        """Return the supported column chunks of a row group, in the order of the file."""
        files = self._files
        checker = self._checker
        footer = files.read_footer(row_group)
        group = files.row_groups[row_group]
        found = []
        for number, leaf in checker.find_plain_leaves(footer).items():
            codec, values, _, size, begin, dictionary = footer.chunks[group.index, leaf].tolist()
            if dictionary > 0:
                begin = min(begin, dictionary)
            is_inside = 0 < begin <= begin + size <= files.status[group.file].st_size
            if codec == _UNCOMPRESSED and is_inside and values == group.rows:
                signed = number < len(checker.signed) and bool(checker.signed[number])
                found.append(_FileChunk(begin, size, number, values, signed))
        return sorted(found)


@dataclasses.dataclass(frozen=True, order=True)
class _FileChunk:
    """A column chunk in a file.

    Attributes:
        begin: The offset of its first byte in the file.
        size: Its size in bytes.
        number: The index of its column in the schema.
        values: The number of its values.
        signed: Whether the values are floats that may be negative.
    """

    begin: int
    size: int
    number: int
    values: int
    signed: bool


def _merge_ranges(chunks: list[_FileChunk]) -> list[tuple[int, int]]:
    """Return the byte ranges (offset, size) to read; adjacent chunks are merged into one range."""
    merged: list[tuple[int, int]] = []
    for chunk in chunks:
        begin = chunk.begin
        size = chunk.size
        if merged and begin == sum(merged[-1]):
            begin, previous_size = merged.pop()
            size += previous_size
        merged.append((begin, size))
    return merged


@dataclasses.dataclass
class OpenRowGroup:
    """Hands out the rows of a row group, from the first to the last.

    Attributes:
        checker: The checks of the columns.
        numbers: int64 [chunks], the index in the schema of each column that is read from pages.
        where: The name of the row group's file.
        state: Cursors, pages, first pages and column chunks, as the loops take them.
        checked: bool [chunks], whether the values of a column must be checked row by row.
        owner: The memory of the pages.
        buffers: The memory for decoded values.
        broken: Whether a kernel failed to read rows. The cursors are then undefined, so no more
            rows can be read.
    """

    checker: Checker
    numbers: np.ndarray
    where: str
    state: tuple[np.ndarray, ...]
    checked: np.ndarray
    owner: np.ndarray
    buffers: Buffers
    broken: bool = False

    @property
    def limits(self) -> np.ndarray:
        """The exclusive upper bound of each column's values: uint64 [chunks]."""
        return self.checker.limits[self.numbers]

    @property
    def complete(self) -> bool:
        """Whether all columns of the schema are read from pages."""
        return len(self.numbers) == len(self.checker.limits)

    def skip(self, rows: int) -> bool:
        """Skip the next rows; return False if their pages cannot be read."""
        no_targets = np.zeros(len(self.numbers), np.int64)
        addresses = no_targets.copy()
        largest = no_targets.astype(np.uint64)
        return self._call_kernel(
            read_rows, addresses, largest, self.state, no_targets, self.checked, rows
        )

    def read(self, rows: int) -> RowChunk | None:
        """Read the next rows; return None if their pages cannot be read.

        Raises:
            SchemaError: A value is infinite or NaN, or an id is outside its table.
        """
        num_read = len(self.numbers)
        memory = self.buffers.take(4 * rows * num_read)
        targets = memory.ctypes.data + 4 * rows * np.arange(num_read)
        read_addresses = np.empty(num_read, np.int64)
        largest = np.zeros(num_read, np.uint64)
        is_read = self._call_kernel(
            read_rows, read_addresses, largest, self.state, targets, self.checked, rows
        )
        if not is_read:
            return None
        addresses, values_of_lists = np.zeros((2, len(self.checker.limits)), np.int64)
        addresses[self.numbers] = read_addresses
        chunk = RowChunk(rows, addresses, values_of_lists, [self.owner, memory])
        for number in self.numbers[largest >= self.limits].tolist():
            values = chunk.view_column(number, self.checker.find_dtype(number))
            self.checker.check(values, number, self.where)
        return chunk

    def read_into(self, target: Target, first: int, rows: int) -> bool:
        """Read the next rows of all columns into a block.

        Args:
            target: The block.
            first: The index of the first row in its source.
            rows: The number of rows.

        Returns:
            False if the pages of the rows cannot be read or a value fails its check.
        """
        order = np.argsort(self.numbers)
        return self._call_kernel(
            read_into, tuple(target), first, rows, order, self.limits, self.state, self.checked
        )

    def _call_kernel(self, kernel: Callable[..., bool], *arguments: object) -> bool:
        """Call a kernel unless an earlier call failed; return whether it read its rows."""
        if not self.broken:
            self.broken = not kernel(*arguments)
        return not self.broken


def _read(path: Path | RemoteFile, byte_ranges: list[tuple[int, int]], memory: np.ndarray) -> bool:
    """Read byte ranges of a file into contiguous memory; return False if the file is too short."""
    done = 0
    file: Any
    with open_file(path) as file:
        for begin, size in byte_ranges:
            file.seek(begin)
            if file.readinto(memory[done : done + size]) < size:
                return False
            done += size
    return True


def _find_pages(chunks: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    """Find the pages of column chunks.

    Returns:
        The pages, or None if one is malformed or unsupported; and int64 [chunks + 1], the index of
        the first page of each chunk, followed by the number of pages.
    """
    first_page = np.empty(len(chunks) + 1, np.int64)
    # If the table is too small, the kernel returns the required size.
    count = _USUAL_PAGES * len(chunks)
    while True:
        page_table = np.empty(count, pages.PAGE)
        count = pages.find_pages(page_table, first_page, chunks)
        if count < 0:
            return None, first_page
        if count <= len(page_table):
            return page_table[:count], first_page


def _verify_checksums(page_table: np.ndarray, memory: np.ndarray) -> bool:
    """Return whether all pages match the CRC-32 in their headers; pages without one pass.

    Args:
        page_table: The pages.
        memory: The memory that contains them.
    """
    content = memoryview(memory)  # type: ignore[arg-type]
    start = memory.ctypes.data  # read once: NumPy makes an object for it on every access
    for address, size, checksum in page_table[["body", "bytes", "checksum"]].tolist():
        begin = address - start
        if checksum >= 0 and isal_zlib.crc32(content[begin : begin + size]) != checksum:
            return False
    return True
