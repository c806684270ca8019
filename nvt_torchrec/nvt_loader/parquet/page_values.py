"""Compiled loops that read the values of parquet pages: plain values, and dictionary indices.

Indices are stored in runs of two kinds: a repeated index with a count, or indices packed with a few
bits each (apache/parquet-format: Encodings.md, RLE/bit-packing hybrid). Like
:mod:`nvt_loader.parquet.pages`, the loops refuse malformed and unsupported pages.

Every value takes four bytes and is moved as an unsigned 32-bit integer, floats as their bits.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types

from nvt_torchrec.base.kernels import compiled, pointer
from nvt_torchrec.base.parquet.footer import read_varint
from nvt_torchrec.nvt_loader.parquet import pages as headers
from nvt_torchrec.nvt_loader.parquet.parquet_kernels import copy_rows, find_largest

#: The maximum width in bits of indices that are unpacked eight at a time. Four of them are taken
#: from a 64-bit word; the first may begin at any bit of a byte, and 7 + 4 · 14 bits fit in a word.
_MAX_BITS_BY_EIGHTS = 14

#: The number of indices unpacked before their values are looked up: they fit in a core's
#: first-level cache.
_INDICES_AT_ONCE = 2048

#: The reading position in a column:
#:
#: - page, left: the index of the page, and the number of rows left in it;
#: - next, end: the address of the page's next byte, and the address of its end;
#: - bits: the width of each index in bits; -1 in a page of plain values;
#: - run, packed: the number of values left in the run of indices, and whether the run is packed;
#: - state: in a packed run, the number of bits already read; otherwise the repeated index;
#: - words, entries: the address of the dictionary, and the number of its values.
CURSOR = headers.make_record_dtype("page left next end bits run packed state words entries")

#: The state of the reading loops: cursors, pages, the first page of each chunk, chunks.
_STATE = types.Tuple(
    (numba.from_dtype(CURSOR)[::1], headers.PAGES, types.int64[::1], headers.CHUNKS)
)
#: A block (:class:`.row_chunks.Target`): labels, weights, dense, ids, copies, rows per batch.
_WORDS = types.int32[:, ::1]
_TARGET = types.Tuple((_WORDS, _WORDS, _WORDS, types.int32[::1], types.int64[:, ::1], types.int64))
_INTS = types.int64[::1]
_BITS = types.uint64[::1]
_FLAGS = types.boolean[::1]

#: The number of rows decoded before they are copied to a block: they fit in a core's second-level
#: cache.
DECODED_ROWS = 1024

#: The minimum number of rows of other ranks that are skipped. Decoding a shorter gap together with
#: the rows around it is faster.
_MIN_SKIPPED_ROWS = 64


@numba.njit
def _begin_run(cursor):
    """Read the header of the next run of indices; return False if it is malformed."""
    size = cursor.end - cursor.next
    memory = numba.carray(pointer(cursor.next), (size,), np.uint8)
    # The lowest bit of the header says whether the run is packed. The other bits are the number of
    # its values, counted in groups of eight if it is packed.
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
    """Unpack indices eight at a time, as long as whole words can be loaded.

    Eight indices of ``bits`` bits take ``bits`` bytes. So every group of eight begins at the same
    bit of a byte, and the shifts are constants of the loop. For each group two words are loaded, of
    which the lowest four indices are used. The compiler turns this into vector instructions.

    Args:
        to: The address where the indices are written, as uint32.
        base: The address of the packed run.
        size: The number of bytes from there to the end of the page.
        begin: The offset of the first index in the run, in bits.
        bits: The width of each index in bits, at most ``_MAX_BITS_BY_EIGHTS``.
        count: The number of indices to unpack.

    Returns:
        The number of indices unpacked, a multiple of eight.
    """
    high_begin = begin + 4 * bits
    # The last load, of the upper four indices, must not reach beyond the page.
    num_groups = min(count >> 3, (size - 8 - (high_begin >> 3)) // bits + 1)
    low_shift = np.uint64(begin & 7)
    high_shift = np.uint64(high_begin & 7)
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    once = np.uint64(bits)
    twice = np.uint64(2 * bits)
    thrice = np.uint64(3 * bits)
    low_address = base + (begin >> 3)
    high_address = base + (high_begin >> 3)
    for i in range(num_groups):
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
    return max(num_groups, 0) * 8


@numba.njit
def _unpack(to, cursor, begin, count):
    """Read ``count`` values of a packed run, whose indices begin at bit ``begin`` of the run.

    Return False if an index is outside the dictionary.
    """
    bits = cursor.bits
    size = cursor.end - cursor.next
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
        # A whole word would reach beyond the page. An index of at most 32 bits, which may begin at
        # any bit of a byte, spans at most 5 bytes.
        word = np.uint64(0)
        for k in range(min(size - (bit >> 3), 5)):
            word |= np.uint64(memory[(bit >> 3) + k]) << np.uint64(8 * k)
        indices[i] = (word >> np.uint64(bit & 7)) & mask
    # One maximum over all indices instead of a check at each lookup, so that both loops are
    # vectorized.
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
    """Write the value at address ``source`` ``count`` times, beginning at address ``to``."""
    target = numba.carray(pointer(to), (1,), np.uint32)
    value = numba.carray(pointer(source), (1,), np.uint32)[0]
    for i in range(count):
        target[i] = value


@numba.njit
def read_indices(to, cursor, count):
    """Look ``count`` indices up in the dictionary and write the values; only skip if ``to`` is 0.

    Return False if the page is malformed.
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
        state: Cursors of zeros, which are set to the position before the first row; the pages and
            first pages, from :func:`find_pages`; the chunks.
        largest: Output, uint64 [chunks]. If all pages of a column hold indices: the largest value
            of its dictionary (for signed floats, the bits of the largest magnitude). If a page
            holds plain values, whose rows must be checked one by one: 2**64 - 1.

    Returns:
        Whether the pages are well-formed and supported.
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
                cursor.words = page.body
                cursor.entries = page.count
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
def _open_next_page(cursor, pages, end):
    """Move the cursor to the next page, before page ``end``.

    Return False if no page is left or the page is malformed.
    """
    cursor.page += 1
    if cursor.page >= end:
        return False
    page = pages[cursor.page]
    if page.kind != headers.DATA_PAGE:
        return True
    cursor.left = page.count
    cursor.next = page.body
    cursor.end = page.body + page.bytes
    cursor.bits = -1
    if page.encoding != headers.PLAIN and page.count > 0:
        # A page of indices begins with one byte, the width of each index in bits.
        if page.bytes == 0:
            return False
        cursor.bits = numba.carray(pointer(page.body), (1,), np.uint8)[0]
        cursor.next += 1
        cursor.run = 0
        return cursor.bits <= 32
    return True


@numba.njit
def _copy(to, source, count):
    """Copy ``count`` values from address ``source`` to address ``to``."""
    target = numba.carray(pointer(to), (1,), np.uint32)
    values = numba.carray(pointer(source), (1,), np.uint32)
    for i in range(count):
        target[i] = values[i]


@compiled(types.boolean(_INTS, _BITS, _STATE, _INTS, _FLAGS, types.int64))
def read_rows(addresses, largest, state, targets, checked, rows):
    """Read the next ``rows`` rows of all columns.

    Args:
        addresses: Output, int64 [chunks]: the address of the rows of each column. Rows within a
            single plain page are not copied; other rows are written to the column's target.
        largest: Output, uint64 [chunks]: the largest value of the rows, as in
            :func:`open_columns`. Only written for columns in ``checked``.
        state: The state that :func:`open_columns` has initialized.
        targets: int64 [chunks], the address of memory for ``rows`` values per column; 0 for all
            columns to skip the rows.
        checked: bool [chunks], whether the largest value of a column is needed.
        rows: The number of rows, at most the number of rows left.

    Returns:
        False if a page is malformed.
    """
    cursors, pages, first_page, chunks = state
    for c in range(len(chunks)):
        cursor = cursors[c]
        target = targets[c]
        addresses[c] = target
        done = np.int64(0)
        while done < rows:
            if cursor.left == 0:
                if not _open_next_page(cursor, pages, first_page[c + 1]):
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
def _find_next_copies(copies, copy, row):
    """Find the next copies, from ``row`` on, that are close enough to be read together.

    Returns:
        The index of the first such copy (the first one from index ``copy`` on that ends after
        ``row``), the index of the last one, and the row where the last one ends.
    """
    while copy < len(copies) and copies[copy, 2] + copies[copy, 3] <= row:
        copy += 1
    if copy == len(copies):
        return copy, copy, row
    last = copy
    begin = max(copies[copy, 2], row)
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
        first: The index of the first row in the source.
        rows: The number of rows.
        order: int64 [columns], the index of the column chunk of each column of the schema.
        limits: uint64 [chunks], the exclusive upper bound of each column's values.
        state: The state that :func:`open_columns` has initialized.
        checked: bool [chunks], whether the values of a column are compared with its limit.

    Returns:
        False, with the block incomplete, if a page is malformed or a value is not below its limit.
    """
    labels, weights, dense, ids, copies, batch = target
    chunks = state[3]
    read_addresses = np.empty(len(chunks), np.int64)
    targets = np.empty(len(chunks), np.int64)
    addresses = np.empty(len(chunks), np.int64)
    largest = np.zeros(len(chunks), np.uint64)
    # Rows are decoded into a tile, which stays in the cache until it is copied to the block.
    tile = np.empty(DECODED_ROWS * len(chunks), np.uint32)
    for c in range(len(chunks)):
        targets[c] = tile.ctypes.data + c * DECODED_ROWS * 4
    no_targets = np.zeros(len(chunks), np.int64)
    done = np.int64(0)  # the number of rows read or skipped, counted from ``first``
    last = np.int64(0)  # the last copy read; it begins before row ``first + done``
    while done < rows:
        begin = end = rows
        copy, last, copies_end = _find_next_copies(copies, last, first + done)
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
    tile[:1] = 0  # addresses do not keep the array alive; this last use does
    return True
