"""Encode a column of a row group: its pages, and their description in the footer.

A column with few distinct values gets a dictionary, and indices of a few bits each. The pages of
other columns are the values themselves, which are not copied. The specification is
apache/parquet-format: parquet.thrift and Encodings.md.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from isal import isal_zlib

from nvt_torchrec.base.parquet import compact_protocol as thrift
from nvt_torchrec.base.parquet.compact_protocol import Value
from nvt_torchrec.base.parquet.encode_kernels import (
    DICTIONARY_ENTRIES,
    PACKED_BYTES,
    PACKED_MARGIN,
    find_float_range,
    find_range,
    index_values,
    pack_indices,
    pack_pages,
    rank_values,
)

#: The approximate number of values of a page; a page of lists has whole rows. Such a page fits the
#: second-level cache of a core, and libcudf decodes the pages of a column in parallel.
PAGE_VALUES = 16 << 10
#: Parquet's numbers of types.
TYPES = {np.dtype(np.int32): 1, np.dtype(np.float32): 4}
#: Parquet's numbers of encodings.
_PLAIN = 0
_RLE = 3
_RLE_DICTIONARY = 8
#: Parquet's number of the codec.
_UNCOMPRESSED = 0
#: Parquet's numbers of page types.
_DATA_PAGE = 0
_DICTIONARY_PAGE = 2

#: A piece of a file.
Bytes: TypeAlias = bytes | memoryview


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The values of a column in a row group.

    Attributes:
        path: The names of the fields from the root to the leaf.
        values: float32 or int32 [n], contiguous.
        rows: The number of rows, at least one.
        offsets: For lists, integers [rows + 1]: row i has ``values[offsets[i]:offsets[i + 1]]``.
            The first is 0, the last n. None if each row has one value.
    """

    path: tuple[str, ...]
    values: np.ndarray
    rows: int
    offsets: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class ColumnChunk:
    """An encoded column of a row group.

    Attributes:
        leaf: The values.
        limits: The smallest and the largest value, as :func:`_find_limits` returns them.
        dictionary: The page of the dictionary, in pieces; empty without a dictionary.
        pages: The pages of the values, in pieces.
        page_count: The number of pages of values.
        levels: The number of values and empty lists.
    """

    leaf: Leaf
    limits: np.ndarray | None
    dictionary: Sequence[Bytes]
    pages: Sequence[Bytes]
    page_count: int
    levels: int

    @property
    def buffers(self) -> list[Bytes]:
        """The bytes of the chunk, in pieces."""
        return [*self.dictionary, *self.pages]

    @property
    def size(self) -> int:
        """The number of bytes."""
        return sum(map(len, self.buffers))

    def describe(self, begin: int) -> Value:
        """Return parquet's ``ColumnChunk`` for this chunk at the offset ``begin`` of the file."""
        encodings, page_encodings = _describe_encodings(bool(self.dictionary), self.page_count)
        data_begin = begin + sum(map(len, self.dictionary))
        size = self.size
        metadata = {
            1: thrift.i32(TYPES[self.leaf.values.dtype]),
            2: encodings,
            3: thrift.list_value([thrift.binary(name.encode()) for name in self.leaf.path]),
            4: thrift.i32(_UNCOMPRESSED),
            5: thrift.i64(self.levels),
            6: thrift.i64(size),
            7: thrift.i64(size),
            9: thrift.i64(data_begin),
        }
        if self.dictionary:
            metadata[11] = thrift.i64(begin)
        metadata[12] = _describe_limits(self.limits, self.levels - len(self.leaf.values))
        metadata[13] = page_encodings
        # field 2, file_offset, is deprecated and must be 0
        return thrift.struct({2: thrift.i64(0), 3: thrift.struct(metadata)})


@functools.lru_cache(64)
def _describe_encodings(has_dictionary: bool, pages: int) -> tuple[Value, Value]:
    """Return the encodings of a chunk, and those of its pages (``PageEncodingStats``)."""
    if has_dictionary:
        encodings = [_PLAIN, _RLE, _RLE_DICTIONARY]
        page_encodings = [
            _describe_pages(_DICTIONARY_PAGE, _PLAIN, 1),
            _describe_pages(_DATA_PAGE, _RLE_DICTIONARY, pages),
        ]
    else:
        encodings = [_PLAIN, _RLE]
        page_encodings = [_describe_pages(_DATA_PAGE, _PLAIN, pages)]
    return thrift.list_value([thrift.i32(number) for number in encodings]), thrift.list_value(
        page_encodings
    )


def _describe_pages(kind: int, encoding: int, count: int) -> Value:
    """Return parquet's ``PageEncodingStats`` of ``count`` pages."""
    return thrift.struct({1: thrift.i32(kind), 2: thrift.i32(encoding), 3: thrift.i32(count)})


class ChunkEncoder:
    """Encodes columns of row groups, reusing its buffers."""

    def __init__(self) -> None:
        self._indices = np.empty(0, np.uint16)
        self._packed = np.empty(0, np.uint8)

    def encode(self, leaf: Leaf) -> ColumnChunk:
        """Encode a column; its bytes are valid until the next call."""
        limits = _find_limits(leaf.values)
        divided = _divide(leaf)
        self._make_room(len(leaf.values))
        dictionary = _make_dictionary(leaf.values, limits, self._indices)
        pages: list[Bytes] = []
        dictionary_page: list[Bytes] = []
        if dictionary is None:
            encoding = _PLAIN
            content = _as_bytes(leaf.values)
            ends = 4 * divided.cuts[1:]
        else:
            body = [_as_bytes(dictionary)]
            dictionary_page = _make_page(_DICTIONARY_PAGE, body, len(dictionary), _PLAIN)
            encoding = _RLE_DICTIONARY
            content = _as_bytes(self._packed)
            ends = np.empty(len(divided.levels), np.int64)
            pack_pages(self._indices, divided.cuts, self._packed, ends)
        begin = 0
        for end, levels, encoded in zip(
            ends.tolist(), divided.levels, divided.encoded_levels, strict=True
        ):
            pages += _make_page(_DATA_PAGE, [*encoded, content[begin:end]], levels, encoding)
            begin = end
        return ColumnChunk(leaf, limits, dictionary_page, pages, len(ends), sum(divided.levels))

    def _make_room(self, values: int) -> None:
        """Grow the buffers for the indices of a number of values, and for the packed indices."""
        if len(self._indices) < values + 8:
            self._indices = np.empty(values + 8, np.uint16)
            self._packed = np.empty(PACKED_BYTES * values + PACKED_MARGIN, np.uint8)
        # The last group may have fewer than eight indices. It is filled up with zeros, not with
        # indices of the previous column, so that the same rows always give the same bytes.
        self._indices[values : values + 8] = 0


def _as_bytes(values: np.ndarray) -> memoryview:
    return memoryview(values).cast("B")  # type: ignore[arg-type]


# ---- pages


def _make_page(kind: int, body: Sequence[Bytes], count: int, encoding: int) -> list[Bytes]:
    """Return the pieces of a page: its header with the checksum, and its body."""
    size = 0
    checksum = 0
    for piece in body:
        size += len(piece)
        checksum = isal_zlib.crc32(piece, checksum)
    _, encoded_checksum = thrift.i32(checksum - (1 << 32) if checksum >> 31 else checksum)
    begin, end = _make_header(kind, size, count, encoding)
    return [begin + encoded_checksum + end, *body]


@functools.lru_cache(1024)
def _make_header(kind: int, size: int, count: int, encoding: int) -> tuple[bytes, bytes]:
    """Return the parts of a ``PageHeader`` before and after its checksum.

    Cached, because many pages share these, and building a header takes longer than writing a page.
    """
    numbers = {1: thrift.i32(count), 2: thrift.i32(encoding)}
    if kind == _DATA_PAGE:
        numbers |= {3: thrift.i32(_RLE), 4: thrift.i32(_RLE)}  # encodings of the levels
    fields = {1: thrift.i32(kind), 2: thrift.i32(size), 3: thrift.i32(size), 4: thrift.i32(0)}
    # The last field so far is the checksum: 0 takes one byte, and so does the end of the struct.
    before = len(thrift.struct(fields)[1]) - 2
    page_header = 5 if kind == _DATA_PAGE else 7  # data_page_header, dictionary_page_header
    fields[page_header] = thrift.struct(numbers)
    header = thrift.struct(fields)[1]
    return header[:before], header[before + 1 :]


@dataclasses.dataclass(frozen=True)
class _Division:
    """The division of a column into pages.

    Attributes:
        cuts: int64 [pages + 1], the positions in the values where pages begin and end.
        levels: The number of values and empty lists of each page.
        encoded_levels: The encoded levels of each page, see :func:`_encode_levels`; () without
            lists.
    """

    cuts: np.ndarray
    levels: Sequence[int]
    encoded_levels: Sequence[Sequence[Bytes]]


def _divide(leaf: Leaf) -> _Division:
    """Divide a column into pages of about :data:`PAGE_VALUES`."""
    # the number of rows with PAGE_VALUES values on average
    page_rows = max(1, PAGE_VALUES * leaf.rows // max(len(leaf.values), leaf.rows))
    rows = np.append(np.arange(0, leaf.rows, page_rows), leaf.rows)
    if leaf.offsets is None:
        levels = np.diff(rows).tolist()
        return _Division(rows, levels, [()] * len(levels))
    levels = []
    encoded = []
    for first, last in itertools.pairwise(rows.tolist()):
        count, buffers = _encode_levels(np.diff(leaf.offsets[first : last + 1]))
        levels.append(count)
        encoded.append(buffers)
    return _Division(leaf.offsets[rows].astype(np.int64), levels, encoded)


def _encode_levels(lengths: np.ndarray) -> tuple[int, list[Bytes]]:
    """Encode the structure of lists by levels, as Dremel does.

    A value has two levels of 0 or 1: whether it continues the list of the previous value
    (repetition), and whether it exists (definition), which is 0 for an empty list only.

    Args:
        lengths: Integers [rows], the length of each list.

    Returns:
        The number of values and empty lists, and their levels as a page of version 1 has them.
    """
    counts = np.maximum(lengths, 1)
    starts = np.cumsum(counts) - counts
    levels = int(counts.sum())
    encoded: list[Bytes] = []
    for zeros in (starts, starts[lengths == 0]):
        indices = np.zeros(levels + 8, np.uint16)
        indices[:levels] = 1
        indices[zeros] = 0
        packed = np.empty(PACKED_BYTES * levels + PACKED_MARGIN, np.uint8)
        size = pack_indices(indices, 0, levels, 1, packed, 0)
        encoded += [size.to_bytes(4, "little"), _as_bytes(packed[:size])]
    return levels, encoded


# ---- dictionaries


def _make_dictionary(
    values: np.ndarray, limits: np.ndarray | None, indices: np.ndarray
) -> np.ndarray | None:
    """Find the distinct values, and the index of each value among them.

    Args:
        values: float32 or int32 [n].
        limits: The smallest and the largest value, as :func:`_find_limits` returns them.
        indices: The result, uint16 [n or more].

    Returns:
        The distinct values; None if a dictionary would not save space.
    """
    dictionary = np.empty(DICTIONARY_ENTRIES, values.dtype)
    count = -1
    if values.dtype == np.int32 and limits is not None:
        smallest, largest = limits.tolist()
        if largest - smallest < DICTIONARY_ENTRIES:
            count = rank_values(values, smallest, largest, indices, dictionary)
    if count < 0:
        count = index_values(values.view(np.uint32), indices, dictionary.view(np.uint32))
    if count < 0:
        return None
    dictionary_bytes = 4 * count
    index_bytes = len(values) * (count - 1).bit_length() // 8
    saves_bytes = dictionary_bytes + index_bytes < 4 * len(values)
    return dictionary[:count] if saves_bytes else None


# ---- statistics


def _find_limits(values: np.ndarray) -> np.ndarray | None:
    """Return the smallest and the largest of values [n] that are not NaN: [2]; None without any.

    A float zero becomes -0.0 as the smallest and 0.0 as the largest value (parquet.thrift:
    ``ColumnOrder``).
    """
    limits = np.empty(2, values.dtype)
    if not len(values):
        return None
    if values.dtype == np.int32:
        find_range(values, limits)
        return limits
    if not find_float_range(values.view(np.int32), limits.view(np.int32)):
        return None
    limits[limits == 0] = np.array([-0.0, 0.0], np.float32)[limits == 0]
    return limits


def _describe_limits(limits: np.ndarray | None, nulls: int) -> Value:
    """Return parquet's ``Statistics``; ``nulls`` is the number of empty lists."""
    fields = {3: thrift.i64(nulls)}
    if limits is not None:
        is_exact = thrift.boolean(True)
        fields |= {
            5: thrift.binary(limits[1].tobytes()),
            6: thrift.binary(limits[0].tobytes()),
            7: is_exact,
            8: is_exact,
        }
    return thrift.struct(fields)
