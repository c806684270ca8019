"""Compiled loop that finds the pages of column chunks by their headers.

It follows the format's specification (apache/parquet-format: parquet.thrift). What it does not know
(pages of version 2, other encodings) and what is broken it refuses; Arrow then reads the file or
reports what is wrong. No number in a header is trusted: none leads out of the column chunk.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types

from nvt_torchrec.base.kernels import compiled, pointer
from nvt_torchrec.base.parquet.footer import MISSING, read_structs, structs_path


def int64_record(names: str) -> np.dtype:
    """Return the type of records of int64 fields."""
    return np.dtype([(name, np.int64) for name in names.split()])


#: A column chunk: its address and bytes; its values; whether they are floats that may be negative
#: (1 or 0).
CHUNK = int64_record("address size values signed")
#: A page: its kind; the address of what follows the header, and its bytes; its values; their
#: encoding; the CRC-32 of the bytes, or -1.
PAGE = int64_record("kind body bytes count encoding checksum")
CHUNKS, PAGES = numba.from_dtype(CHUNK)[::1], numba.from_dtype(PAGE)[::1]

#: Kinds of pages and encodings, by parquet.thrift.
DATA_PAGE, DICTIONARY_PAGE = 0, 2
#: Values and bytes that no page has: so many that sums and products stay in 64 bits.
_MAX_VALUE = 1 << 31
PLAIN, RLE_DICTIONARY = 0, 8

#: What is read of a page's header: its kind, bytes in the file, checksum; a data page's values and
#: their encoding; a dictionary's values and encoding.
_FIELDS = ((1,), (3,), (4,), (5, 1), (5, 2), (7, 1), (7, 2))
_HEADER = np.array([structs_path(*fields) for fields in _FIELDS])


@compiled(types.int64(PAGES, types.int64[::1], CHUNKS))
def find_pages(pages, first_page, chunks):
    """Find the pages of column chunks.

    Args:
        pages: A result: the pages, as many as it holds.
        first_page: int64 [chunks + 1], a result: the first page of each chunk, and the number of
            pages.
        chunks: The column chunks.

    Returns:
        The number of pages, which may be more than ``pages`` holds; -1 if they cannot be read here.
    """
    header = np.empty((1, len(_HEADER)), np.int64)
    count = 0
    for c in range(len(chunks)):
        chunk = chunks[c]
        first_page[c] = count
        end = chunk.size
        memory = numba.carray(pointer(chunk.address), (end,), np.uint8)
        at = values = np.int64(0)
        while values < chunk.values:
            at, _ = read_structs(memory, at, end, 0, _HEADER, header)
            if at < 0:
                return -1
            kind, size, checksum, number, encoding = header[0, :5]
            if kind == DICTIONARY_PAGE:
                number, encoding = header[0, 5], header[0, 6]
            elif kind != DATA_PAGE:
                return -1
            if not 0 <= size <= end - at:
                return -1
            for value in (number, encoding):
                if not 0 <= value < _MAX_VALUE:
                    return -1
            if count < len(pages):
                page = pages[count]
                page.kind, page.body, page.bytes = kind, chunk.address + at, size
                page.count, page.encoding = number, encoding
                page.checksum = -1 if checksum == MISSING else checksum & 0xFFFFFFFF
            count += 1
            at += size
            if kind == DATA_PAGE:
                values += number
        if values != chunk.values:
            return -1
    first_page[len(chunks)] = count
    return count
