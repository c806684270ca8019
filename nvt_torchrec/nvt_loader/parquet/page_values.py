"""Compiled loops that read the values of parquet pages: plain ones, and indices of a dictionary.

Like :mod:`nvt_loader.parquet.pages`, they refuse what they do not know and what is broken.
"""

from __future__ import annotations

import numba
import numpy as np

from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.base.parquet_footer import varint
from nvt_torchrec.nvt_loader.parquet.dictionary_indices import (
    BITS,
    END,
    ENTRIES,
    LEFT,
    NEXT,
    PAGE,
    RUN,
    WORDS,
    read_indices,
)
from nvt_torchrec.nvt_loader.parquet.pages import (
    BODY,
    BYTES,
    COUNT,
    DATA_PAGE,
    DICTIONARY_PAGE,
    ENCODING,
    KIND,
    OPTIONAL,
    PLAIN,
    PLAIN_DICTIONARY,
    RLE_DICTIONARY,
    SIGNED,
)
from nvt_torchrec.nvt_loader.parquet.parquet_kernels import copy_rows, largest_of, pointer

#: Rows decoded before they are copied to a block: as many as fit a core's second-level cache.
DECODED_ROWS = 1024

#: Rows of other ranks from which on they are skipped: fewer are decoded faster than skipped.
_SKIPPED_ROWS = 64


@numba.njit
def _pass_levels(page):
    """Move a page's start past its definition levels; False if they say that a value is missing."""
    size = page[BYTES]
    memory = numba.carray(pointer(page[BODY]), (size,), np.uint8)
    if size < 4:
        return False
    end = np.int64(4)
    for i in range(4):
        end += np.int64(memory[i]) << (8 * i)
    if end > size:
        return False
    at, left = np.int64(4), page[COUNT]
    while left > 0:
        header, at = varint(memory, at, end)
        if at < 0 or at >= end or header < np.uint64(2) or header >= np.uint64(1 << 32):
            return False
        run = np.int64(header >> np.uint64(1))
        if header & np.uint64(1):  # groups of eight bits
            for i in range(min(run, (left + 7) >> 3)):
                wanted = (np.int64(1) << min(left - 8 * i, 8)) - 1
                if at + i >= end or np.int64(memory[at + i]) & wanted != wanted:
                    return False
            at += run
            left -= 8 * run
        else:
            if memory[at] != 1:
                return False
            at += 1
            left -= run
    page[BODY] += end
    page[BYTES] -= end
    return True


@compiled("boolean(int64[:, ::1], uint64[::1], int64[:, ::1], int64[::1], int64[:, ::1])")
def open_columns(cursors, largest, pages, first_page, chunks):
    """Look through decompressed pages: levels, dictionaries, sizes.

    Args:
        cursors: int64 [chunks, CURSOR_FIELDS], set to before the first row.
        largest: uint64 [chunks], the result: the largest number in the dictionary of a column
            whose pages are all indices (of floats, the bits of the magnitude); of others 2**64 - 1.
        pages: From :func:`find_pages`; BODY and BYTES are moved past the levels.
        first_page, chunks: As :func:`find_pages` takes them.

    Returns:
        Whether the pages can be read here.
    """
    cursors[:] = 0
    for c in range(len(chunks)):
        cursor = cursors[c]
        cursor[PAGE] = first_page[c] - 1
        indices = True
        for p in range(first_page[c], first_page[c + 1]):
            page = pages[p]
            encoding = page[ENCODING]
            if page[KIND] == DICTIONARY_PAGE:
                if encoding != PLAIN and encoding != PLAIN_DICTIONARY:
                    return False
                if p != first_page[c] or page[COUNT] * 4 > page[BYTES]:
                    return False
                cursor[WORDS], cursor[ENTRIES] = page[BODY], page[COUNT]
                continue
            if chunks[c, OPTIONAL] and not _pass_levels(page):
                return False
            if encoding == PLAIN:
                indices = False
                if page[COUNT] * 4 != page[BYTES]:
                    return False
            elif encoding != RLE_DICTIONARY and encoding != PLAIN_DICTIONARY:
                return False
        largest[c] = np.uint64(0xFFFFFFFFFFFFFFFF)
        if indices:
            largest[c] = largest_of(cursor[WORDS], cursor[ENTRIES], chunks[c, SIGNED])
    return True


@numba.njit
def _turn_page(cursor, pages, end):
    """Go to the next page; False if there is none or it cannot be read."""
    cursor[PAGE] += 1
    if cursor[PAGE] >= end:
        return False
    page = pages[cursor[PAGE]]
    if page[KIND] != DATA_PAGE:
        return True
    cursor[LEFT], cursor[NEXT], cursor[END] = page[COUNT], page[BODY], page[BODY] + page[BYTES]
    cursor[BITS] = -1
    if page[ENCODING] != PLAIN and page[COUNT] > 0:
        if page[BYTES] == 0:
            return False
        cursor[BITS] = numba.carray(pointer(page[BODY]), (1,), np.uint8)[0]
        cursor[NEXT] += 1
        cursor[RUN] = 0
        return cursor[BITS] <= 32
    return True


@numba.njit
def _copy(to, source, count):
    target = numba.carray(pointer(to), (1,), np.uint32)
    values = numba.carray(pointer(source), (1,), np.uint32)
    for i in range(count):
        target[i] = values[i]


@compiled(
    "boolean(int64[::1], uint64[::1], int64[:, ::1], int64[:, ::1], int64[::1], int64[:, ::1],"
    " int64[::1], boolean[::1], int64)"
)
def read_rows(addresses, largest, cursors, pages, first_page, chunks, targets, checked, rows):
    """Read the next ``rows`` rows of all columns.

    Args:
        addresses: int64 [chunks], a result: where the rows of each column lie. Rows of one plain
            page lie in that page, others are written to the column's target.
        largest: uint64 [chunks], a result: the largest number of these rows, as in
            :func:`open_columns`.
        cursors, pages, first_page, chunks: As :func:`open_columns` takes them.
        targets: int64 [chunks], addresses of memory for ``rows`` values. With 0 everywhere the rows
            are skipped.
        checked: bool [chunks], the columns whose largest number is needed.
        rows: The number of rows, at most as many as are left.

    Returns:
        Whether the rows could be read.
    """
    for c in range(len(chunks)):
        cursor, target = cursors[c], targets[c]
        addresses[c] = target
        done = np.int64(0)
        while done < rows:
            if cursor[LEFT] == 0:
                if not _turn_page(cursor, pages, first_page[c + 1]):
                    return False
                continue
            count = min(rows - done, cursor[LEFT])
            to = target + done * 4 if target else np.int64(0)
            if cursor[BITS] < 0:
                if count == rows:
                    addresses[c] = cursor[NEXT]
                elif target:
                    _copy(to, cursor[NEXT], count)
                cursor[NEXT] += count * 4
            elif not read_indices(to, cursor, count):
                return False
            cursor[LEFT] -= count
            done += count
        if target and checked[c]:
            largest[c] = largest_of(addresses[c], rows, chunks[c, SIGNED])
    return True


@numba.njit
def _next_copies(copies, copy, row):
    """Find what is read next: the first copy from number ``copy`` on that ends after ``row``, the
    last one that lies close enough to be read with it, and the row where that one ends."""
    while copy < len(copies) and copies[copy, 2] + copies[copy, 3] <= row:
        copy += 1
    if copy == len(copies):
        return copy, copy, row
    last, begin = copy, max(copies[copy, 2], row)
    end = copies[copy, 2] + copies[copy, 3]
    while (
        end - begin < DECODED_ROWS
        and last + 1 < len(copies)
        and copies[last + 1, 2] - end < _SKIPPED_ROWS
    ):
        last += 1
        end = copies[last, 2] + copies[last, 3]
    return copy, last, end


@compiled(
    "boolean(int32[:, ::1], int32[:, ::1], int32[:, ::1], int32[::1], int64[:, ::1], int64, int64,"
    " int64, int64[::1], uint64[::1], int64[:, ::1], int64[:, ::1], int64[::1], int64[:, ::1],"
    " boolean[::1])"
)
def read_into(
    labels,
    weights,
    dense,
    ids,
    copies,
    batch,
    first,
    rows,
    order,
    limits,
    cursors,
    pages,
    first_page,
    chunks,
    checked,
):
    """Read the next ``rows`` rows of all columns and copy them to their places in a block.

    Args:
        labels, weights, dense, ids, copies, batch, first, rows: As
            :func:`nvt_loader.parquet.parquet_kernels.copy_rows` takes them.
        order: int64 [columns], the column chunk of each of the schema's columns.
        limits: uint64 [chunks], the bound that each column's numbers must stay below.
        cursors, pages, first_page, chunks, checked: As :func:`read_rows` takes them.

    Returns:
        Whether the rows could be read and all numbers are below their limits. If not, the block is
        incomplete.
    """
    found = np.empty(len(chunks), np.int64)
    targets = np.empty(len(chunks), np.int64)
    addresses = np.empty(len(chunks), np.int64)
    largest = np.zeros(len(chunks), np.uint64)
    tile = np.empty(DECODED_ROWS * len(chunks), np.uint32)
    for c in range(len(chunks)):
        targets[c] = tile.ctypes.data + c * DECODED_ROWS * 4
    none = np.zeros(len(chunks), np.int64)
    at = last = np.int64(0)  # the next row, counted from ``first``; a copy that begins before it
    while at < rows:
        begin = end = rows
        copy, last, stop = _next_copies(copies, last, first + at)
        if copy < len(copies):
            begin = min(max(copies[copy, 2] - first, at), rows)
            end = min(stop - first, begin + DECODED_ROWS, rows)
        if not read_rows(  # skip the rows of other ranks
            addresses, largest, cursors, pages, first_page, chunks, none, checked, begin - at
        ) or not read_rows(
            found, largest, cursors, pages, first_page, chunks, targets, checked, end - begin
        ):
            return False
        for c in range(len(chunks)):
            if largest[c] >= limits[c]:
                return False
            addresses[c] = found[order[c]]
        own = copies[copy : last + 1]
        where = batch, first + begin, end - begin
        copy_rows(labels, weights, dense, ids, addresses, own, *where)
        at = end
    tile[:1] = 0  # an address does not keep the array alive; this use does, until here
    return True
