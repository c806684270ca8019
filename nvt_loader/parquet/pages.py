"""Compiled loop that finds the pages of column chunks by their headers.

It follows the format's specification (apache/parquet-format: parquet.thrift; Thrift's compact
protocol). What it does not know (pages of version 2, other encodings, nulls) and what is broken it
refuses; Arrow then reads the file or reports what is wrong. No number in a header is trusted: none
leads out of the column chunk.
"""

from __future__ import annotations

import numba
import numpy as np

from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.nvt_loader.parquet.kernels import pointer

#: A column chunk is a row of int64: its address and bytes; its values; bytes of a value; whether
#: values may be missing, are floats, are compressed with Snappy (1 or 0).
ADDRESS, SIZE, VALUES, WIDTH, OPTIONAL, FLOAT, SNAPPY = range(7)
CHUNK_FIELDS = 7

#: A page is a row of int64: its kind; the address of what follows the header, its bytes in the
#: file, and decompressed; its values; their encoding; the CRC-32 of the bytes in the file, or -1.
KIND, BODY, BYTES, WHOLE, COUNT, ENCODING, CHECKSUM = range(7)
PAGE_FIELDS = 7

#: Kinds of pages and encodings, by parquet.thrift.
DATA_PAGE, DICTIONARY_PAGE = 0, 2
PLAIN, PLAIN_DICTIONARY, RLE, RLE_DICTIONARY = 0, 2, 3, 8

#: Thrift's compact protocol: types of fields.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY = range(1, 9)
_STRUCT = 12

#: Structs in structs in a page's header: its own fields, those of its kind, their statistics.
_DEPTH = 3

#: The value of a field that a header does not have.
_NONE = np.int64(-(1 << 40))


@numba.njit(inline="always")
def varint(memory, at, end):
    """Read an unsigned integer of 7 bits a byte; return it and where it ends, -1 if it does not."""
    value, shift = np.uint64(0), np.uint64(0)
    while at < end and shift < np.uint64(64):
        byte = np.uint64(memory[at])
        at += 1
        value |= (byte & np.uint64(127)) << shift
        shift += np.uint64(7)
        if byte < np.uint64(128):
            return value, at
    return value, -1


@numba.njit(inline="always")
def _signed(value):
    return np.int64(value >> np.uint64(1)) ^ -np.int64(value & np.uint64(1))


@numba.njit
def _read_header(memory, at, end, found):
    """Read a PageHeader at ``memory[at]``; return where it ends, -1 if it cannot be read.

    ``found`` is the result, int64 [7], with ``_NONE`` for missing fields: kind, uncompressed bytes,
    compressed bytes, checksum, values, their encoding, the encoding of the definition levels.
    """
    found[:] = _NONE
    field = np.zeros(_DEPTH, np.int64)
    depth = 0
    while at < end:
        byte = np.int64(memory[at])
        at += 1
        if byte == 0:
            depth -= 1
            if depth < 0:
                return at
            continue
        kind, step = byte & 15, byte >> 4
        if step:
            field[depth] += step
        else:
            value, at = varint(memory, at, end)
            if at < 0:
                return -1
            field[depth] = _signed(value)
        wanted = np.int64(-1)  # place in ``found``
        if depth == 0 and 1 <= field[0] <= 4:
            wanted = field[0] - 1
        elif depth == 1 and field[0] in (5, 7) and 1 <= field[1] <= 3:
            wanted = field[1] + 3
        if kind == _STRUCT:
            depth += 1
            if depth >= _DEPTH or wanted >= 0:
                return -1
            field[depth] = 0
        elif kind in (_BYTE, _DOUBLE):
            at += 1 if kind == _BYTE else 8
        elif _I16 <= kind <= _BINARY:
            value, at = varint(memory, at, end)
            if at < 0:
                return -1
            if kind == _BINARY:
                if value > np.uint64(end - at):
                    return -1
                at += np.int64(value)
            if wanted >= 0:  # 32 bits, so that no sum or product of such numbers overflows
                number = _signed(value)
                if kind != _I32 or not -(1 << 31) <= number < 1 << 31:
                    return -1
                found[wanted] = number
        elif kind not in (_TRUE, _FALSE):
            return -1
    return -1


@compiled("int64(int64[:, ::1], int64[::1], int64[:, ::1])")
def find_pages(pages, first_page, chunks):
    """Find the pages of column chunks.

    Args:
        pages: int64 [most, PAGE_FIELDS], a result: the pages, as many as it holds.
        first_page: int64 [chunks + 1], a result: the first page of each chunk, and the number of
            pages.
        chunks: int64 [chunks, CHUNK_FIELDS].

    Returns:
        The number of pages, which may be more than ``pages`` holds; -1 if they cannot be read here.
    """
    header = np.empty(7, np.int64)
    count = 0
    for c in range(len(chunks)):
        first_page[c] = count
        end = chunks[c, SIZE]
        memory = numba.carray(pointer(chunks[c, ADDRESS]), (end,), np.uint8)
        at = values = np.int64(0)
        while values < chunks[c, VALUES]:
            at = _read_header(memory, at, end, header)
            if at < 0:
                return -1
            kind, whole, size, checksum, number, encoding, levels = header
            if kind != DATA_PAGE and kind != DICTIONARY_PAGE:
                return -1
            if not 0 <= size <= end - at or whole < 0 or number < 0:
                return -1
            if kind == DATA_PAGE and chunks[c, OPTIONAL] and levels != RLE:
                return -1
            if chunks[c, SNAPPY]:
                length, _ = varint(memory, at, at + size)
                if np.int64(length) != whole:
                    return -1
            if count < len(pages):
                page = pages[count]
                page[KIND], page[BODY], page[BYTES] = kind, chunks[c, ADDRESS] + at, size
                page[WHOLE], page[COUNT], page[ENCODING] = whole, number, encoding
                page[CHECKSUM] = -1 if checksum == _NONE else checksum & 0xFFFFFFFF
            count += 1
            at += size
            if kind == DATA_PAGE:
                values += number
        if values != chunks[c, VALUES]:
            return -1
    first_page[len(chunks)] = count
    return count
