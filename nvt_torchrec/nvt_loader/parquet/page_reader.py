"""Read rows from parquet pages by compiled loops: what the ETL writes.

The loops read columns of the loader's own types with one value a row, of which the schema says that
none is missing, in pages that are plain or hold indices and are not compressed. All columns are
read in one call without the interpreter lock. Where there is a dictionary, its values are checked
instead of those of each row. Anything else, and anything broken, is left to
:mod:`nvt_loader.parquet.decoder`.
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


class PageReader:
    """Opens a split's row groups. Several threads may use it at the same time."""

    def __init__(self, files: ParquetFiles, checker: Checker) -> None:
        self._files, self._checker = files, checker
        self._bytes, self._values = Buffers(), Buffers()

    def open(self, row_group: int) -> OpenRowGroup | None:
        """Open the columns of a row group that can be read here, before their first row.

        Which ones these are follows from the footer. None if there are none, or if the pages of one
        cannot be read after all.

        Raises:
            OSError: The file cannot be read.
        """
        numbers, chunks, byte_ranges = self._column_chunks(row_group)
        if not len(numbers):
            return None
        file = self._files.row_groups[row_group].file
        memory = self._bytes.take(sum(size for _, size in byte_ranges))
        if not _read(self._files.path(file), byte_ranges, memory):
            return None
        chunks["address"] += memory.ctypes.data
        table, first_page = _find_pages(chunks)
        if table is None or not _verify_checksums(table, memory):
            return None
        state = np.zeros(len(chunks), CURSOR), table, first_page, chunks
        largest = np.empty(len(chunks), np.uint64)
        if not open_columns(state, largest):
            return None
        where, checked = str(self._files.paths[file]), largest >= self._checker.limits[numbers]
        return OpenRowGroup(self._checker, numbers, where, state, checked, memory, self._values)

    def _column_chunks(
        self, row_group: int
    ) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]:
        """Return the column chunks of a row group that can be read here.

        Returns:
            int64 [chunks], which of the schema's columns each is; the chunks, whose addresses here
            count from the first byte that is read; and the parts of the file to read, first byte
            and number of bytes.
        """
        files, checker, footer = self._files, self._checker, self._files.footer(row_group)
        group = files.row_groups[row_group]
        described = []
        for number, leaf in checker.plain_leaves(footer).items():
            codec, values, _, size, begin, dictionary = footer.chunks[group.index, leaf].tolist()
            if dictionary > 0:
                begin = min(begin, dictionary)
            inside = 0 < begin <= begin + size <= files.status[group.file].st_size
            if codec == _UNCOMPRESSED and inside and values == group.rows:
                signed = number < len(checker.signed) and checker.signed[number]
                described.append((begin, number, (size, values, signed)))
        described.sort()
        byte_ranges: list[tuple[int, int]] = []
        chunks, place = np.empty(len(described), pages.CHUNK), 0
        for i, (begin, _, (size, *rest)) in enumerate(described):
            chunks[i] = place, size, *rest
            place += size
            if byte_ranges and begin == sum(byte_ranges[-1]):
                begin, size = byte_ranges[-1][0], byte_ranges.pop()[1] + size
            byte_ranges.append((begin, size))
        return np.array([number for _, number, _ in described]), chunks, byte_ranges


@dataclasses.dataclass
class OpenRowGroup:
    """Hands out the rows of a row group, from the first to the last.

    Attributes:
        checker: The checks of the columns.
        numbers: int64 [chunks], the schema's columns that are read here.
        where: The name of the row group's file.
        state: Cursors, pages, first pages and column chunks, as the loops take them.
        checked: bool [chunks], the columns whose values are checked row by row.
        owner: The pages' memory.
        buffers: Memory for decoded values.
        broken: Whether rows could not be read; then none can be any more.
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
        """Whether these are all of the schema's columns."""
        return len(self.numbers) == len(self.checker.limits)

    def skip(self, rows: int) -> bool:
        """Skip the next rows; False if they cannot be read here."""
        none = np.zeros(len(self.numbers), np.int64)
        largest = none.astype(np.uint64)
        return self._can(read_rows, none, largest, self.state, none, self.checked, rows)

    def read(self, rows: int) -> RowChunk | None:
        """Read the next rows; None if they cannot be read here.

        Raises:
            SchemaError: Infinity or NaN, or an id outside its table.
        """
        columns = len(self.numbers)
        memory = self.buffers.take(4 * rows * columns)
        targets = memory.ctypes.data + 4 * rows * np.arange(columns)
        places, largest = np.empty(columns, np.int64), np.zeros(columns, np.uint64)
        if not self._can(read_rows, places, largest, self.state, targets, self.checked, rows):
            return None
        addresses, none = np.zeros((2, len(self.checker.limits)), np.int64)
        addresses[self.numbers] = places
        chunk = RowChunk(rows, addresses, none, [self.owner, memory])
        for number in self.numbers[largest >= self.limits].tolist():
            values = chunk.column(number, self.checker.dtype(number))
            self.checker.check(values, number, self.where)
        return chunk

    def read_into(self, target: Target, first: int, rows: int) -> bool:
        """Read the next rows of all columns into a block; ``first`` is the number of the first one
        in its source. False if they cannot be read here, or do not pass the checks."""
        where = first, rows, np.argsort(self.numbers), self.limits
        return self._can(read_into, tuple(target), *where, self.state, self.checked)

    def _can(self, kernel: Callable[..., bool], *arguments: object) -> bool:
        """Call a kernel; return whether it could read its rows. After one failure none can."""
        self.broken = self.broken or not kernel(*arguments)
        return not self.broken


def _read(path: Path | RemoteFile, byte_ranges: list[tuple[int, int]], memory: np.ndarray) -> bool:
    """Read parts of a file into memory; False if the file is too short."""
    place = 0
    file: Any
    with open_file(path) as file:
        for begin, size in byte_ranges:
            file.seek(begin)
            if file.readinto(memory[place : place + size]) < size:
                return False
            place += size
    return True


def _find_pages(chunks: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    """Return the pages of column chunks (None: not readable here) and the first page of each."""
    first_page = np.empty(len(chunks) + 1, np.int64)
    count = 8 * len(chunks)
    while True:
        table = np.empty(count, pages.PAGE)
        count = pages.find_pages(table, first_page, chunks)
        if count <= len(table):
            return (None if count < 0 else table[:count]), first_page


def _verify_checksums(table: np.ndarray, memory: np.ndarray) -> bool:
    """Whether the pages in a file's bytes have the CRC-32 in their headers, where there is one."""
    content, begin = memoryview(memory), memory.ctypes.data  # type: ignore[arg-type]
    return all(
        checksum < 0 or isal_zlib.crc32(content[body - begin : body - begin + size]) == checksum
        for body, size, checksum in table[["body", "bytes", "checksum"]].tolist()
    )
