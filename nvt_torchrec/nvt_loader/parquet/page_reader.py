"""Read rows straight from the pages of a parquet file as the ETL writes it, by compiled loops.

The loops read columns of the loader's own types with one value a row, without nulls, in
uncompressed pages that hold plain values or indices of a dictionary. All columns are read in one
call without the interpreter lock. Where there is a dictionary, its values are checked instead of
those of each row. Anything else, and anything broken, is left to :mod:`nvt_loader.parquet.decoder`.
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

#: The codec of chunks that are not compressed, in parquet.thrift.
_UNCOMPRESSED = 0
#: Pages of a column chunk for which there is room at the first try: the ETL writes fewer.
_USUAL_PAGES = 8


class PageReader:
    """Opens a split's row groups. Several threads may use it at the same time."""

    def __init__(self, files: ParquetFiles, checker: Checker) -> None:
        self._files, self._checker = files, checker
        self._bytes, self._values = Buffers(), Buffers()

    def open(self, row_group: int) -> OpenRowGroup | None:
        """Open the columns of a row group that can be read here, before their first row.

        The footer says which columns. None is returned if there is no such column, or if the pages
        of one turn out to be unreadable.

        Raises:
            OSError: The file cannot be read.
        """
        found = self._find_chunks(row_group)
        if not found:
            return None
        file = self._files.row_groups[row_group].file
        memory = self._bytes.take(sum(chunk.size for chunk in found))
        if not _read(self._files.path(file), _merge_ranges(found), memory):
            return None
        # The chunks follow one another in memory, also those with gaps between them in the file.
        chunks = np.empty(len(found), pages.CHUNK)
        address = memory.ctypes.data
        for i, chunk in enumerate(found):
            chunks[i] = address, chunk.size, chunk.values, chunk.signed
            address += chunk.size
        table, first_page = _find_pages(chunks)
        if table is None or not _verify_checksums(table, memory):
            return None
        state = np.zeros(len(chunks), CURSOR), table, first_page, chunks
        largest = np.empty(len(chunks), np.uint64)
        if not open_columns(state, largest):
            return None
        numbers = np.array([chunk.number for chunk in found])
        # Where the whole dictionary is within the limits, so is each row.
        checked = largest >= self._checker.limits[numbers]
        where = str(self._files.paths[file])
        return OpenRowGroup(self._checker, numbers, where, state, checked, memory, self._values)

    def _find_chunks(self, row_group: int) -> list[_FileChunk]:
        """Return the column chunks of a row group that can be read here, in the file's order."""
        files, checker, footer = self._files, self._checker, self._files.footer(row_group)
        group = files.row_groups[row_group]
        found = []
        for number, leaf in checker.find_plain_leaves(footer).items():
            codec, values, _, size, begin, dictionary = footer.chunks[group.index, leaf].tolist()
            if dictionary > 0:
                begin = min(begin, dictionary)
            inside = 0 < begin <= begin + size <= files.status[group.file].st_size
            if codec == _UNCOMPRESSED and inside and values == group.rows:
                signed = number < len(checker.signed) and bool(checker.signed[number])
                found.append(_FileChunk(begin, size, number, values, signed))
        return sorted(found)


@dataclasses.dataclass(frozen=True, order=True)
class _FileChunk:
    """A column chunk in a file.

    Attributes:
        begin, size: Its first byte, and the number of its bytes.
        number: The schema's column that it holds.
        values: The number of its values.
        signed: Whether they are floats that may be negative.
    """

    begin: int
    size: int
    number: int
    values: int
    signed: bool


def _merge_ranges(chunks: list[_FileChunk]) -> list[tuple[int, int]]:
    """Return the parts of a file to read (first byte, number of bytes): adjacent chunks at once."""
    merged: list[tuple[int, int]] = []
    for chunk in chunks:
        begin, size = chunk.begin, chunk.size
        if merged and begin == sum(merged[-1]):
            begin, before = merged.pop()
            size += before
        merged.append((begin, size))
    return merged


@dataclasses.dataclass
class OpenRowGroup:
    """Hands out the rows of a row group, from the first to the last.

    Attributes:
        checker: The checks of the columns.
        numbers: int64 [chunks], the schema's columns that are read here.
        where: The name of the row group's file.
        state: Cursors, pages, first pages and column chunks, as the loops take them.
        checked: bool [chunks], the columns whose values are checked row by row.
        owner: The memory of the pages.
        buffers: Memory for decoded values.
        broken: Whether rows could not be read. The cursors are then in an undefined state, so no
            further rows can be read.
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
        """The bound that each column's numbers must stay below: uint64 [chunks]."""
        return self.checker.limits[self.numbers]

    @property
    def complete(self) -> bool:
        """Whether all of the schema's columns are read here."""
        return len(self.numbers) == len(self.checker.limits)

    def skip(self, rows: int) -> bool:
        """Skip the next rows; False if they cannot be read here."""
        no_targets = np.zeros(len(self.numbers), np.int64)
        addresses, largest = no_targets.copy(), no_targets.astype(np.uint64)
        arguments = addresses, largest, self.state, no_targets, self.checked, rows
        return self._call_kernel(read_rows, *arguments)

    def read(self, rows: int) -> RowChunk | None:
        """Read the next rows; None if they cannot be read here.

        Raises:
            SchemaError: Infinity or NaN, or an id outside its table.
        """
        num_read = len(self.numbers)
        memory = self.buffers.take(4 * rows * num_read)
        targets = memory.ctypes.data + 4 * rows * np.arange(num_read)
        read_addresses = np.empty(num_read, np.int64)
        largest = np.zeros(num_read, np.uint64)
        arguments = read_addresses, largest, self.state, targets, self.checked, rows
        if not self._call_kernel(read_rows, *arguments):
            return None
        addresses, values_of_lists = np.zeros((2, len(self.checker.limits)), np.int64)
        addresses[self.numbers] = read_addresses
        chunk = RowChunk(rows, addresses, values_of_lists, [self.owner, memory])
        for number in self.numbers[largest >= self.limits].tolist():
            values = chunk.column(number, self.checker.find_dtype(number))
            self.checker.check(values, number, self.where)
        return chunk

    def read_into(self, target: Target, first: int, rows: int) -> bool:
        """Read the next rows of all columns into a block.

        Args:
            target: The block.
            first: The number of the first row in its source.
            rows: The number of rows.

        Returns:
            False if the rows cannot be read here, or do not pass the checks.
        """
        order = np.argsort(self.numbers)
        arguments = tuple(target), first, rows, order, self.limits, self.state, self.checked
        return self._call_kernel(read_into, *arguments)

    def _call_kernel(self, kernel: Callable[..., bool], *arguments: object) -> bool:
        """Call a kernel, unless an earlier one failed; return whether it could read its rows."""
        if not self.broken:
            self.broken = not kernel(*arguments)
        return not self.broken


def _read(path: Path | RemoteFile, byte_ranges: list[tuple[int, int]], memory: np.ndarray) -> bool:
    """Read parts of a file into memory; False if the file is too short."""
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
        The pages, or None if they cannot be read here; int64 [chunks + 1], the first page of each
        chunk, and the number of pages.
    """
    first_page = np.empty(len(chunks) + 1, np.int64)
    # If the table is too small, the loop returns how many pages it needs room for.
    count = _USUAL_PAGES * len(chunks)
    while True:
        table = np.empty(count, pages.PAGE)
        count = pages.find_pages(table, first_page, chunks)
        if count < 0:
            return None, first_page
        if count <= len(table):
            return table[:count], first_page


def _verify_checksums(table: np.ndarray, memory: np.ndarray) -> bool:
    """Return whether all pages match the CRC-32 in their headers, where there is one.

    Args:
        table: The pages.
        memory: The bytes that they lie in.
    """
    content = memoryview(memory)  # type: ignore[arg-type]
    start = memory.ctypes.data  # once: NumPy makes an object for it each time
    for address, size, checksum in table[["body", "bytes", "checksum"]].tolist():
        begin = address - start
        if checksum >= 0 and isal_zlib.crc32(content[begin : begin + size]) != checksum:
            return False
    return True
