"""Compiled loops that read the values of parquet pages: plain ones, and indices of a dictionary.

Indices are written in runs: one index and how often it repeats, or packed ones of a few bits each
(apache/parquet-format: Encodings.md, RLE/bit-packing hybrid). Like :mod:`nvt_loader.parquet.pages`,
the loops refuse pages that are broken or of a kind that they do not know.

Every value takes four bytes and is moved as an unsigned number of 32 bits, floats as their bits.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types

from nvt_torchrec.base.kernels import compiled, pointer
from nvt_torchrec.base.parquet.footer import read_varint
from nvt_torchrec.nvt_loader.parquet import pages as headers
from nvt_torchrec.nvt_loader.parquet.parquet_kernels import copy_rows, find_largest

#: Indices of at most so many bits are unpacked eight at a time, four from each word of 64 bits:
#: these may begin at any of a byte's 8 bits, and 7 + 4 · 14 bits fit a word.
_MAX_BITS_BY_EIGHTS = 14

#: Indices unpacked before their values are looked up: as many as fit a core's first-level cache.
_INDICES_AT_ONCE = 2048

#: The reading position in a column:
#:
#: - page, left: the number of the page, and the rows left in it;
#: - next, end: the addresses of its next byte and of its end;
#: - bits: in a page of indices the bits of each index; -1 in a page of plain values;
#: - run, packed: the values left in a run of indices, and whether the run is packed;
#: - state: of a packed run the bits already read, of another run its index;
#: - words, entries: the address of the dictionary, and the number of its values.
CURSOR = headers.int64_record("page left next end bits run packed state words entries")

#: The arguments of the loops that read: cursors, pages, the first page of each chunk, chunks.
_STATE = types.Tuple(
    (numba.from_dtype(CURSOR)[::1], headers.PAGES, types.int64[::1], headers.CHUNKS)
)
#: A block: labels, weights, dense, ids, the copies, and the rows of a batch.
_WORDS = types.int32[:, ::1]
_TARGET = types.Tuple((_WORDS, _WORDS, _WORDS, types.int32[::1], types.int64[:, ::1], types.int64))
_INTS = types.int64[::1]
_BITS = types.uint64[::1]
_FLAGS = types.boolean[::1]

#: Rows decoded before they are copied to a block: as many as fit a core's second-level cache.
DECODED_ROWS = 1024

#: A gap of fewer rows of other ranks is decoded with the rows around it, which is faster than
#: skipping it.
_MIN_SKIPPED_ROWS = 64


@numba.njit
def _begin_run(cursor):
    """Read the header of the next run of indices; False if it is broken."""
    size = cursor.end - cursor.next
    memory = numba.carray(pointer(cursor.next), (size,), np.uint8)
    # The lowest bit of the header says whether the run is packed; the others count its values, of a
    # packed run in eights.
    header, offset = read_varint(memory, np.int64(0), size)
    if offset < 0 or header >= np.uint64(1 << 32):
        return False
    cursor.run = np.int64(header >> np.uint64(1))
    cursor.packed = np.int64(header & np.uint64(1))
    cursor.state = 0
    if cursor.packed:
        cursor.run *= 8
    else:
        index_bytes = (cursor.bits + 7) >> 3
        if offset + index_bytes > size:
            return False
        for i in range(index_bytes):
            cursor.state |= np.int64(memory[offset + i]) << (8 * i)
        offset += index_bytes
    cursor.next += offset
    return cursor.run > 0


@numba.njit
def _unpack_eights(to, base, begin, size, bits, count):
    """Unpack indices eight at a time, while there are whole words to load.

    Eight indices of ``bits`` bits take ``bits`` bytes, so all eights begin at the same bit of a
    byte, and the shifts are constants of the loop. Two words are loaded for each eight, of which
    the lowest four indices are used: the compiler turns this into vector instructions.

    Args:
        to: The address of the indices, uint32.
        base, size: The address and number of the packed run's bytes.
        begin: The bit of the first index.
        bits: The bits of each index, at most ``_MAX_BITS_BY_EIGHTS``.
        count: The number of indices to unpack.

    Returns:
        How many were unpacked.
    """
    high_begin = begin + 4 * bits
    # The last load of the upper four indices must end inside the run.
    eights = min(count >> 3, (size - 8 - (high_begin >> 3)) // bits + 1)
    low_shift, high_shift = np.uint64(begin & 7), np.uint64(high_begin & 7)
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    once, twice, thrice = np.uint64(bits), np.uint64(2 * bits), np.uint64(3 * bits)
    low_address, high_address = base + (begin >> 3), base + (high_begin >> 3)
    for i in range(eights):
        low = numba.carray(pointer(low_address + i * bits), (1,), np.uint64)[0] >> low_shift
        high = numba.carray(pointer(high_address + i * bits), (1,), np.uint64)[0] >> high_shift
        indices = numba.carray(pointer(to + 32 * i), (8,), np.uint32)
        indices[0] = low & mask
        indices[1] = (low >> once) & mask
        indices[2] = (low >> twice) & mask
        indices[3] = (low >> thrice) & mask
        indices[4] = high & mask
        indices[5] = (high >> once) & mask
        indices[6] = (high >> twice) & mask
        indices[7] = (high >> thrice) & mask
    return max(eights, 0) * 8


@numba.njit
def _unpack(to, cursor, begin, count):
    """Read ``count`` values of a packed run from its bit ``begin`` on.

    Returns False if an index lies outside the dictionary.
    """
    bits, size = cursor.bits, cursor.end - cursor.next
    done = np.int64(0)
    if 0 < bits <= _MAX_BITS_BY_EIGHTS:
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
        # A whole word would reach beyond the page. An index of at most 32 bits that may begin at
        # any bit of a byte lies in at most 5 bytes.
        word = np.uint64(0)
        for k in range(min(size - (bit >> 3), 5)):
            word |= np.uint64(memory[(bit >> 3) + k]) << np.uint64(8 * k)
        indices[i] = (word >> np.uint64(bit & 7)) & mask
    # One maximum of all indices instead of a comparison at each look-up: both loops are vectorized.
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
    """Write the value at the address ``source`` ``count`` times from the address ``to`` on."""
    target = numba.carray(pointer(to), (1,), np.uint32)
    value = numba.carray(pointer(source), (1,), np.uint32)[0]
    for i in range(count):
        target[i] = value


@numba.njit
def read_indices(to, cursor, count):
    """Read ``count`` values by their indices in the dictionary, or skip them if ``to`` is 0.

    Returns False if they cannot be read.
    """
    while count > 0:
        if cursor.run == 0 and not _begin_run(cursor):
            return False
        num_read = min(count, cursor.run, _INDICES_AT_ONCE)
        if cursor.packed:
            first_bit = cursor.state
            cursor.state += num_read * cursor.bits
            if (cursor.state + 7) >> 3 > cursor.end - cursor.next:
                return False
            if to and not _unpack(to, cursor, first_bit, num_read):
                return False
        elif cursor.state >= cursor.entries:
            return False
        elif to:
            _repeat(to, cursor.words + cursor.state * 4, num_read)
        cursor.run -= num_read
        if cursor.run == 0 and cursor.packed:
            cursor.next += (cursor.state + 7) >> 3
        if to:
            to += num_read * 4
        count -= num_read
    return True


@compiled(types.boolean(_STATE, _BITS))
def open_columns(state, largest):
    """Find the dictionaries of column chunks, and check the sizes and encodings of their pages.

    Args:
        state: Cursors of zeros, which are set to the position before the first row; pages as
            :func:`find_pages` finds them, first pages, and chunks.
        largest: uint64 [chunks], the result: the largest number in the dictionary of a column whose
            pages are all indices (of floats, the bits of the magnitude); 2**64 - 1 for a column
            with a plain page, whose rows must be checked one by one.

    Returns:
        Whether the pages can be read here.
    """
    cursors, pages, first_page, chunks = state
    for c in range(len(chunks)):
        cursor = cursors[c]
        cursor.page = first_page[c] - 1
        all_indices = True
        for p in range(first_page[c], first_page[c + 1]):
            page = pages[p]
            encoding = page.encoding
            if page.kind == headers.DICTIONARY_PAGE:
                if encoding != headers.PLAIN or p != first_page[c] or page.count * 4 > page.bytes:
                    return False
                cursor.words, cursor.entries = page.body, page.count
            elif encoding == headers.PLAIN:
                all_indices = False
                if page.count * 4 != page.bytes:
                    return False
            elif encoding != headers.RLE_DICTIONARY:
                return False
        largest[c] = np.uint64(0xFFFFFFFFFFFFFFFF)
        if all_indices:
            largest[c] = find_largest(cursor.words, cursor.entries, chunks[c].signed)
    return True


@numba.njit
def _turn_page(cursor, pages, end):
    """Go to the next page, before page ``end``; False if there is none or it cannot be read."""
    cursor.page += 1
    if cursor.page >= end:
        return False
    page = pages[cursor.page]
    if page.kind != headers.DATA_PAGE:
        return True
    cursor.left, cursor.next, cursor.end = page.count, page.body, page.body + page.bytes
    cursor.bits = -1
    if page.encoding != headers.PLAIN and page.count > 0:
        # A page of indices begins with one byte: the bits of each index.
        if page.bytes == 0:
            return False
        cursor.bits = numba.carray(pointer(page.body), (1,), np.uint8)[0]
        cursor.next += 1
        cursor.run = 0
        return cursor.bits <= 32
    return True


@numba.njit
def _copy(to, source, count):
    """Copy ``count`` values from the address ``source`` to the address ``to``."""
    target = numba.carray(pointer(to), (1,), np.uint32)
    values = numba.carray(pointer(source), (1,), np.uint32)
    for i in range(count):
        target[i] = values[i]


@compiled(types.boolean(_INTS, _BITS, _STATE, _INTS, _FLAGS, types.int64))
def read_rows(addresses, largest, state, targets, checked, rows):
    """Read the next ``rows`` rows of all columns.

    Args:
        addresses: int64 [chunks], a result: the address of the rows of each column. Rows that lie
            in a single plain page are not copied; others are written to the column's target.
        largest: uint64 [chunks], a result: the largest number of the rows read, as in
            :func:`open_columns`.
        state: As :func:`open_columns` has set it.
        targets: int64 [chunks], addresses of memory for ``rows`` values; 0 for all columns to skip
            the rows.
        checked: bool [chunks], the columns whose largest number is needed.
        rows: The number of rows, not more than are left.

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
            largest[c] = find_largest(addresses[c], rows, chunks[c].signed)
    return True


@numba.njit
def _next_copies(copies, copy, row):
    """Find the copies that are read together next, from ``row`` on.

    Returns:
        The number of the first copy, from ``copy`` on, that ends after ``row``; that of the last
        one which is close enough to be read with it; and the row where that one ends.
    """
    while copy < len(copies) and copies[copy, 2] + copies[copy, 3] <= row:
        copy += 1
    if copy == len(copies):
        return copy, copy, row
    last, begin = copy, max(copies[copy, 2], row)
    end = copies[copy, 2] + copies[copy, 3]
    while (
        end - begin < DECODED_ROWS
        and last + 1 < len(copies)
        and copies[last + 1, 2] - end < _MIN_SKIPPED_ROWS
    ):
        last += 1
        end = copies[last, 2] + copies[last, 3]
    return copy, last, end


@compiled(types.boolean(_TARGET, types.int64, types.int64, _INTS, _BITS, _STATE, _FLAGS))
def read_into(target, first, rows, order, limits, state, checked):
    """Read the next ``rows`` rows of all columns and copy them to their positions in a block.

    Args:
        target: Labels, weights, dense, ids, copies and batch, as
            :func:`nvt_loader.parquet.parquet_kernels.copy_rows` takes them.
        first, rows: The number of the first row in the source, and the number of rows.
        order: int64 [columns], the column chunk of each of the schema's columns.
        limits: uint64 [chunks], the bound that each column's numbers must stay below.
        state, checked: As :func:`read_rows` takes them.

    Returns:
        Whether the rows could be read and all numbers are below their limits. If not, the block is
        incomplete.
    """
    labels, weights, dense, ids, copies, batch = target
    chunks = state[3]
    read_addresses = np.empty(len(chunks), np.int64)
    targets = np.empty(len(chunks), np.int64)
    addresses = np.empty(len(chunks), np.int64)
    largest = np.zeros(len(chunks), np.uint64)
    # Rows are decoded into a tile that stays in the cache until they are copied to the block.
    tile = np.empty(DECODED_ROWS * len(chunks), np.uint32)
    for c in range(len(chunks)):
        targets[c] = tile.ctypes.data + c * DECODED_ROWS * 4
    no_targets = np.zeros(len(chunks), np.int64)
    done = np.int64(0)  # rows, counted from ``first``
    last = np.int64(0)  # a copy that begins before row ``first + done``
    while done < rows:
        begin = end = rows
        copy, last, copies_end = _next_copies(copies, last, first + done)
        if copy < len(copies):
            begin = min(max(copies[copy, 2] - first, done), rows)
            end = min(copies_end - first, begin + DECODED_ROWS, rows)
        # Rows [done, begin) belong to other ranks and are skipped.
        if not read_rows(addresses, largest, state, no_targets, checked, begin - done):
            return False
        if not read_rows(read_addresses, largest, state, targets, checked, end - begin):
            return False
        for c in range(len(chunks)):
            if largest[c] >= limits[c]:
                return False
            addresses[c] = read_addresses[order[c]]
        own = copies[copy : last + 1]
        count = end - begin
        copy_rows(labels, weights, dense, ids, addresses, own, batch, first + begin, count)
        done = end
    tile[:1] = 0  # an address does not keep the array alive; this use does, until here
    return True
