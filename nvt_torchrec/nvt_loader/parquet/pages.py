"""Compiled loop that finds the pages of column chunks by their headers.

It follows the format's specification (apache/parquet-format: parquet.thrift). What it does not know
(pages of version 2, other encodings, nulls) and what is broken it refuses; Arrow then reads the
file or reports what is wrong. No number in a header is trusted: none leads out of the column chunk.
"""

from __future__ import annotations

import numba
import numpy as np

from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.base.parquet_footer import MISSING, read_structs, structs_path, varint
from nvt_torchrec.nvt_loader.parquet.parquet_kernels import pointer

#: A column chunk is a row of int64: its address and bytes; its values; whether values may be
#: missing, are floats that may be negative, are compressed with Snappy (1 or 0).
ADDRESS, SIZE, VALUES, OPTIONAL, SIGNED, SNAPPY = range(6)

#: A page is a row of int64: its kind; the address of what follows the header, its bytes in the
#: file, and decompressed; its values; their encoding; the CRC-32 of the bytes in the file, or -1.
KIND, BODY, BYTES, WHOLE, COUNT, ENCODING, CHECKSUM = range(7)
PAGE_FIELDS = 7

#: Kinds of pages and encodings, by parquet.thrift.
DATA_PAGE, DICTIONARY_PAGE = 0, 2
#: Values and bytes that no page has: so many that sums and products stay in 64 bits.
_MOST = 1 << 31
PLAIN, PLAIN_DICTIONARY, RLE, RLE_DICTIONARY = 0, 2, 3, 8

#: What is read of a page's header: its kind, bytes decompressed and in the file, checksum; a data
#: page's values, their encoding, that of its definition levels; a dictionary's values and encoding.
_FIELDS = ((1,), (2,), (3,), (4,), (5, 1), (5, 2), (5, 3), (7, 1), (7, 2))
_HEADER = np.array([structs_path(*fields) for fields in _FIELDS])


@compiled("int64(int64[:, ::1], int64[::1], int64[:, ::1])")
def find_pages(pages, first_page, chunks):
    """Find the pages of column chunks.

    Args:
        pages: int64 [most, PAGE_FIELDS], a result: the pages, as many as it holds.
        first_page: int64 [chunks + 1], a result: the first page of each chunk, and the number of
            pages.
        chunks: int64 [chunks, 6], see :data:`ADDRESS`.

    Returns:
        The number of pages, which may be more than ``pages`` holds; -1 if they cannot be read here.
    """
    header = np.empty((1, len(_HEADER)), np.int64)
    count = 0
    for c in range(len(chunks)):
        first_page[c] = count
        end = chunks[c, SIZE]
        memory = numba.carray(pointer(chunks[c, ADDRESS]), (end,), np.uint8)
        at = values = np.int64(0)
        while values < chunks[c, VALUES]:
            at, _ = read_structs(memory, at, end, 0, _HEADER, header)
            if at < 0:
                return -1
            kind, whole, size, checksum, number, encoding, levels = header[0, :7]
            if kind == DICTIONARY_PAGE:
                number, encoding = header[0, 7], header[0, 8]
            elif kind != DATA_PAGE:
                return -1
            if not 0 <= size <= end - at:
                return -1
            for value in (whole, number, encoding):
                if not 0 <= value < _MOST:
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
                page[CHECKSUM] = -1 if checksum == MISSING else checksum & 0xFFFFFFFF
            count += 1
            at += size
            if kind == DATA_PAGE:
                values += number
        if values != chunks[c, VALUES]:
            return -1
    first_page[len(chunks)] = count
    return count
