"""Compiled loops that read the values of parquet pages: plain ones, and indices of a dictionary.

Indices are written in runs: one index and how often it repeats, or packed ones of a few bits each
(apache/parquet-format: Encodings.md, RLE/bit-packing hybrid). Like :mod:`nvt_loader.parquet.pages`,
the loops refuse what they do not know and what is broken.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types

from nvt_torchrec.base.kernels import compiled, pointer
from nvt_torchrec.base.parquet.footer import varint
from nvt_torchrec.nvt_loader.parquet import pages as headers
from nvt_torchrec.nvt_loader.parquet.parquet_kernels import copy_rows, largest_of

#: Indices of at most so many bits are unpacked eight at a time: four, and a shift, fit a word.
_EIGHT_BITS = 14

#: Indices unpacked before their values are looked up: as many as fit a core's first-level cache.
_INDICES = 2048

#: The reading position in a column: the page; rows left in it; where its next bytes lie and where
#: they end; in a page of indices the bits of an index (-1 in others), the values left in the run,
#: whether the run is packed, and the run's index or the bits already read of it; the dictionary's
#: address and number of values.
CURSOR = headers.int64_record("page left next end bits run packed state words entries")

#: The arguments of the loops that read: cursors, pages, the first page of each chunk, chunks.
_STATE = types.Tuple(
    (numba.from_dtype(CURSOR)[::1], headers.PAGES, types.int64[::1], headers.CHUNKS)
)
#: A block: labels, weights, dense, ids, the copies, and the rows of a batch.
_WORDS = types.int32[:, ::1]
_TARGET = types.Tuple((_WORDS, _WORDS, _WORDS, types.int32[::1], types.int64[:, ::1], types.int64))
_INTS, _BITS, _FLAGS = types.int64[::1], types.uint64[::1], types.boolean[::1]

#: Rows decoded before they are copied to a block: as many as fit a core's second-level cache.
DECODED_ROWS = 1024

#: Rows of other ranks from which on they are skipped: fewer are decoded faster than skipped.
_SKIPPED_ROWS = 64


@numba.njit
def _begin_run(cursor):
    size = cursor.end - cursor.next
    memory = numba.carray(pointer(cursor.next), (size,), np.uint8)
    header, at = varint(memory, np.int64(0), size)
    if at < 0 or header >= np.uint64(1 << 32):
        return False
    cursor.run = np.int64(header >> np.uint64(1))
    cursor.packed = np.int64(header & np.uint64(1))
    cursor.state = 0
    if cursor.packed:
        cursor.run *= 8
    else:
        size_of_index = (cursor.bits + 7) >> 3
        if at + size_of_index > size:
            return False
        for i in range(size_of_index):
            cursor.state |= np.int64(memory[at + i]) << (8 * i)
        at += size_of_index
    cursor.next += at
    return cursor.run > 0


@numba.njit
def _unpack_eights(to, base, begin, size, bits, count):
    """Unpack indices from bit ``begin`` on, eight at a time while there are whole words to load.

    Of a word of 64 bits the first four indices are used. Returns how many were unpacked.
    """
    high = begin + 4 * bits
    eights = min(count >> 3, (size - 8 - (high >> 3)) // bits + 1)
    shift, high_shift = np.uint64(begin & 7), np.uint64(high & 7)
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    once, twice, thrice = np.uint64(bits), np.uint64(2 * bits), np.uint64(3 * bits)
    first, second = base + (begin >> 3), base + (high >> 3)
    for i in range(eights):
        low_word = numba.carray(pointer(first + i * bits), (1,), np.uint64)[0] >> shift
        word = numba.carray(pointer(second + i * bits), (1,), np.uint64)[0] >> high_shift
        indices = numba.carray(pointer(to + 32 * i), (8,), np.uint32)
        indices[0] = low_word & mask
        indices[1] = (low_word >> once) & mask
        indices[2] = (low_word >> twice) & mask
        indices[3] = (low_word >> thrice) & mask
        indices[4] = word & mask
        indices[5] = (word >> once) & mask
        indices[6] = (word >> twice) & mask
        indices[7] = (word >> thrice) & mask
    return max(eights, 0) * 8


@numba.njit
def _unpack(to, cursor, begin, count):
    """Read ``count`` values of a packed run from its bit ``begin`` on; False if an index lies
    outside the dictionary."""
    bits, size = cursor.bits, cursor.end - cursor.next
    done = np.int64(0)
    if 0 < bits <= _EIGHT_BITS:
        done = _unpack_eights(to, cursor.next, begin, size, bits, count)
    memory = numba.carray(pointer(cursor.next), (size,), np.uint8)
    indices = numba.carray(pointer(to), (1,), np.uint32)
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for i in range(done, count):
        bit = begin + i * bits
        if (bit >> 3) + 8 <= size:
            word = numba.carray(pointer(cursor.next + (bit >> 3)), (1,), np.uint64)[0]
            indices[i] = (word >> np.uint64(bit & 7)) & mask
            continue
        word = np.uint64(0)
        for k in range(min(size - (bit >> 3), 5)):
            word |= np.uint64(memory[(bit >> 3) + k]) << np.uint64(8 * k)
        indices[i] = (word >> np.uint64(bit & 7)) & mask
    maximum = np.uint32(0)
    for i in range(count):
        maximum = max(maximum, indices[i])
    if np.int64(maximum) >= cursor.entries:
        return False
    words = numba.carray(pointer(cursor.words), (1,), np.uint32)
    for i in range(count):
        indices[i] = words[indices[i]]
    return True


@numba.njit
def _repeat(to, source, count):
    target = numba.carray(pointer(to), (1,), np.uint32)
    value = numba.carray(pointer(source), (1,), np.uint32)[0]
    for i in range(count):
        target[i] = value


@numba.njit
def read_indices(to, cursor, count):
    """Read ``count`` values by their indices in the dictionary, or skip them if ``to`` is 0; False
    if they cannot be read."""
    while count > 0:
        if cursor.run == 0 and not _begin_run(cursor):
            return False
        number = min(count, cursor.run, _INDICES)
        if cursor.packed:
            first = cursor.state
            cursor.state += number * cursor.bits
            if (cursor.state + 7) >> 3 > cursor.end - cursor.next:
                return False
            if to and not _unpack(to, cursor, first, number):
                return False
        elif cursor.state >= cursor.entries:
            return False
        elif to:
            _repeat(to, cursor.words + cursor.state * 4, number)
        cursor.run -= number
        if cursor.run == 0 and cursor.packed:
            cursor.next += (cursor.state + 7) >> 3
        if to:
            to += number * 4
        count -= number
    return True


@compiled(types.boolean(_STATE, _BITS))
def open_columns(state, largest):
    """Look through pages: dictionaries, sizes.

    Args:
        state: Cursors of zeros, set to before the first row; pages as :func:`find_pages` finds
            them, first pages and chunks.
        largest: uint64 [chunks], the result: the largest number in the dictionary of a column
            whose pages are all indices (of floats, the bits of the magnitude); of others 2**64 - 1.

    Returns:
        Whether the pages can be read here.
    """
    cursors, pages, first_page, chunks = state
    for c in range(len(chunks)):
        cursor = cursors[c]
        cursor.page = first_page[c] - 1
        indices = True
        for p in range(first_page[c], first_page[c + 1]):
            page = pages[p]
            encoding = page.encoding
            if page.kind == headers.DICTIONARY_PAGE:
                if encoding != headers.PLAIN or p != first_page[c] or page.count * 4 > page.bytes:
                    return False
                cursor.words, cursor.entries = page.body, page.count
                continue
            if encoding == headers.PLAIN:
                indices = False
                if page.count * 4 != page.bytes:
                    return False
            elif encoding != headers.RLE_DICTIONARY:
                return False
        largest[c] = np.uint64(0xFFFFFFFFFFFFFFFF)
        if indices:
            largest[c] = largest_of(cursor.words, cursor.entries, chunks[c].signed)
    return True


@numba.njit
def _turn_page(cursor, pages, end):
    """Go to the next page; False if there is none or it cannot be read."""
    cursor.page += 1
    if cursor.page >= end:
        return False
    page = pages[cursor.page]
    if page.kind != headers.DATA_PAGE:
        return True
    cursor.left, cursor.next, cursor.end = page.count, page.body, page.body + page.bytes
    cursor.bits = -1
    if page.encoding != headers.PLAIN and page.count > 0:
        if page.bytes == 0:
            return False
        cursor.bits = numba.carray(pointer(page.body), (1,), np.uint8)[0]
        cursor.next += 1
        cursor.run = 0
        return cursor.bits <= 32
    return True


@numba.njit
def _copy(to, source, count):
    target = numba.carray(pointer(to), (1,), np.uint32)
    values = numba.carray(pointer(source), (1,), np.uint32)
    for i in range(count):
        target[i] = values[i]


@compiled(types.boolean(_INTS, _BITS, _STATE, _INTS, _FLAGS, types.int64))
def read_rows(addresses, largest, state, targets, checked, rows):
    """Read the next ``rows`` rows of all columns.

    Args:
        addresses: int64 [chunks], a result: where the rows of each column lie. Rows of one plain
            page lie in that page, others are written to the column's target.
        largest: uint64 [chunks], a result: the largest number of these rows, as in
            :func:`open_columns`.
        state: As :func:`open_columns` has set it.
        targets: int64 [chunks], addresses of memory for ``rows`` values. With 0 everywhere the rows
            are skipped.
        checked: bool [chunks], the columns whose largest number is needed.
        rows: The number of rows, at most as many as are left.

    Returns:
        Whether the rows could be read.
    """
    cursors, pages, first_page, chunks = state
    for c in range(len(chunks)):
        cursor, target = cursors[c], targets[c]
        addresses[c] = target
        done = np.int64(0)
        while done < rows:
            if cursor.left == 0:
                if not _turn_page(cursor, pages, first_page[c + 1]):
                    return False
                continue
            count = min(rows - done, cursor.left)
            to = target + done * 4 if target else np.int64(0)
            if cursor.bits < 0:
                if count == rows:
                    addresses[c] = cursor.next
                elif target:
                    _copy(to, cursor.next, count)
                cursor.next += count * 4
            elif not read_indices(to, cursor, count):
                return False
            cursor.left -= count
            done += count
        if target and checked[c]:
            largest[c] = largest_of(addresses[c], rows, chunks[c].signed)
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


@compiled(types.boolean(_TARGET, types.int64, types.int64, _INTS, _BITS, _STATE, _FLAGS))
def read_into(target, first, rows, order, limits, state, checked):
    """Read the next ``rows`` rows of all columns and copy them to their places in a block.

    Args:
        target: Labels, weights, dense, ids, copies and batch, as
            :func:`nvt_loader.parquet.parquet_kernels.copy_rows` takes them.
        first, rows: Which rows of the source.
        order: int64 [columns], the column chunk of each of the schema's columns.
        limits: uint64 [chunks], the bound that each column's numbers must stay below.
        state, checked: As :func:`read_rows` takes them.

    Returns:
        Whether the rows could be read and all numbers are below their limits. If not, the block is
        incomplete.
    """
    labels, weights, dense, ids, copies, batch = target
    chunks = state[3]
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
        if not read_rows(addresses, largest, state, none, checked, begin - at):  # of other ranks
            return False
        if not read_rows(found, largest, state, targets, checked, end - begin):
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
