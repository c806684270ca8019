"""Compiled loop that finds the pages of column chunks by their headers.

It follows the format's specification (apache/parquet-format: parquet.thrift). Unsupported pages
(version 2, other encodings) and malformed ones are refused; Arrow then reads the file or reports
the error. Every number in a header is checked before it is used, so that a malformed header cannot
lead to a read outside the column chunk.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types

from nvt_torchrec.base.kernels import compiled, pointer
from nvt_torchrec.base.parquet.footer import MISSING, join_path, read_structs


def make_record_dtype(names: str) -> np.dtype:
    """Return the dtype of records of int64 fields, whose names are separated by spaces."""
    return np.dtype([(name, np.int64) for name in names.split()])


#: A column chunk in memory: its address and its size in bytes; the number of its values; and 1 if
#: they are floats that may be negative, else 0.
CHUNK = make_record_dtype("address size values signed")
CHUNKS = numba.from_dtype(CHUNK)[::1]
#: A page: its kind; the address and number of the bytes after its header; the number and the
#: encoding of its values; the CRC-32 of the bytes, or -1 if the header has none.
PAGE = make_record_dtype("kind body bytes count encoding checksum")
PAGES = numba.from_dtype(PAGE)[::1]

#: Kinds of pages, by parquet.thrift.
DATA_PAGE = 0
DICTIONARY_PAGE = 2
#: Encodings, by parquet.thrift.
PLAIN = 0
RLE_DICTIONARY = 8
#: An exclusive limit for the number of values and for the encoding in a header. Sums and products
#: of numbers below it cannot overflow an int64.
_MAX_VALUE = 1 << 31

#: The fields of a page's header that are read, by their numbers in parquet.thrift.
_FIELDS = (
    (1,),  # kind
    (3,),  # bytes in the file
    (4,),  # checksum
    (5, 1),  # number of values of a data page
    (5, 2),  # their encoding
    (7, 1),  # number of values of a dictionary page
    (7, 2),  # their encoding
)
_HEADER = np.array([join_path(*fields) for fields in _FIELDS])


@compiled(types.int64(PAGES, types.int64[::1], CHUNKS))
def find_pages(pages, first_page, chunks):
    """Find the pages of column chunks.

    Args:
        pages: Output: the pages, as many as fit.
        first_page: Output, int64 [chunks + 1]: the index of the first page of each chunk, followed
            by the number of pages.
        chunks: The column chunks.

    Returns:
        The number of pages, which may exceed the length of ``pages``; -1 if a page is malformed or
        unsupported.
    """
    header = np.empty((1, len(_HEADER)), np.int64)
    num_pages = 0
    for c in range(len(chunks)):
        chunk = chunks[c]
        first_page[c] = num_pages
        end = chunk.size
        memory = numba.carray(pointer(chunk.address), (end,), np.uint8)
        offset = values = np.int64(0)
        while values < chunk.values:
            offset, _ = read_structs(memory, offset, end, 0, _HEADER, header)
            if offset < 0:
                return -1
            kind, size, checksum, count, encoding = header[0, :5]
            if kind == DICTIONARY_PAGE:
                count = header[0, 5]
                encoding = header[0, 6]
            elif kind != DATA_PAGE:
                return -1
            if not 0 <= size <= end - offset:
                return -1
            if not 0 <= count < _MAX_VALUE or not 0 <= encoding < _MAX_VALUE:
                return -1
            if num_pages < len(pages):
                page = pages[num_pages]
                page.kind = kind
                page.body = chunk.address + offset
                page.bytes = size
                page.count = count
                page.encoding = encoding
                # Thrift stores the unsigned 32 bits as a signed integer.
                page.checksum = -1 if checksum == MISSING else checksum & 0xFFFFFFFF
            num_pages += 1
            offset += size
            if kind == DATA_PAGE:
                values += count
        if values != chunk.values:
            return -1
    first_page[len(chunks)] = num_pages
    return num_pages
