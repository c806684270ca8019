"""Compiled loops that read the values of parquet pages: plain ones, and indices of a dictionary.

As :mod:`nvt_loader.parquet.pages`, they refuse what they do not know or what is broken.
"""

from __future__ import annotations

import numba
import numpy as np

from clicklog.kernels import compiled
from nvt_loader.kernels import copy_rows, largest_of
from nvt_loader.native import pointer
from nvt_loader.parquet.pages import (
    BODY,
    BYTES,
    COUNT,
    DATA_PAGE,
    DICTIONARY_PAGE,
    ENCODING,
    FLOAT,
    KIND,
    OPTIONAL,
    PLAIN,
    PLAIN_DICTIONARY,
    RLE_DICTIONARY,
    WIDTH,
    varint,
)

#: Indices of so many bits are unpacked eight at a time: four, and a shift, fit a word.
_EIGHT_BITS = 14

#: Indices that are unpacked before their values are looked up: what fits a core's first cache.
_INDICES = 2048

#: Rows that are decoded before they are copied to a block: what fits a core's second cache.
DECODED_ROWS = 1024

#: Rows of other ranks that are passed over: fewer are decoded faster than that.
_PASSED_ROWS = 64

#: Where reading a column is, a row of int64: its page; rows left there; where its next bytes lie
#: and where its bytes end; of a dictionary page, bits of an index, values left in the run, whether
#: the run is packed, and the run's one index or the bits read of it; the dictionary's address and
#: values.
PAGE, LEFT, NEXT, END, BITS, RUN, PACKED, STATE, WORDS, ENTRIES = range(10)
CURSOR_FIELDS = 10


@numba.njit
def _pass_levels(page):
    """Move a page's beginning past its definition levels, if they say that no value is missing."""
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
        cursors: int64 [chunks, CURSOR_FIELDS], set before the first row.
        largest: uint64 [chunks], written to: of a column whose pages are all indices the largest
            number in its dictionary (of floats the magnitude, as bits); of others 2**64 - 1.
        pages: of :func:`find_pages`; BODY and BYTES are moved past the levels.
        first_page, chunks: as there.

    Returns:
        whether it can be read here.
    """
    cursors[:] = 0
    for c in range(len(chunks)):
        cursor, width = cursors[c], chunks[c, WIDTH]
        cursor[PAGE] = first_page[c] - 1
        indices = True
        for p in range(first_page[c], first_page[c + 1]):
            page = pages[p]
            encoding = page[ENCODING]
            if page[KIND] == DICTIONARY_PAGE:
                if encoding != PLAIN and encoding != PLAIN_DICTIONARY:
                    return False
                if p != first_page[c] or page[COUNT] * width > page[BYTES]:
                    return False
                cursor[WORDS], cursor[ENTRIES] = page[BODY], page[COUNT]
                continue
            if chunks[c, OPTIONAL] and not _pass_levels(page):
                return False
            if encoding == PLAIN:
                indices = False
                if page[COUNT] * width > page[BYTES]:
                    return False
            elif encoding != RLE_DICTIONARY and encoding != PLAIN_DICTIONARY:
                return False
        largest[c] = np.uint64(0xFFFFFFFFFFFFFFFF)
        if indices:
            largest[c] = largest_of(cursor[WORDS], cursor[ENTRIES], width, chunks[c, FLOAT])
    return True


@numba.njit
def _turn_page(cursor, pages, end):
    """Go to the next data page; whether there is one that can be read."""
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
def _copy(to, source, size):
    target = numba.carray(pointer(to), (1,), np.uint8)
    values = numba.carray(pointer(source), (1,), np.uint8)
    for i in range(size):
        target[i] = values[i]


@numba.njit
def _begin_run(cursor):
    size = cursor[END] - cursor[NEXT]
    memory = numba.carray(pointer(cursor[NEXT]), (size,), np.uint8)
    header, at = varint(memory, np.int64(0), size)
    if at < 0 or header >= np.uint64(1 << 32):
        return False
    cursor[RUN] = np.int64(header >> np.uint64(1))
    cursor[PACKED] = np.int64(header & np.uint64(1))
    cursor[STATE] = 0
    if cursor[PACKED]:
        cursor[RUN] *= 8
    else:
        size_of_index = (cursor[BITS] + 7) >> 3
        if at + size_of_index > size:
            return False
        for i in range(size_of_index):
            cursor[STATE] |= np.int64(memory[at + i]) << (8 * i)
        at += size_of_index
    cursor[NEXT] += at
    return cursor[RUN] > 0


@numba.njit
def _unpack_eights(to, base, begin, size, bits, count):
    """Unpack indices from bit ``begin`` on, eight by eight as long as there are whole words to
    load; how many. Of a word of 64 bits the first four indices are used."""
    high = begin + 4 * bits
    eights = min(count >> 3, (size - 8 - (high >> 3)) // bits + 1)
    shift, high_shift = np.uint64(begin & 7), np.uint64(high & 7)
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    one, two, three = np.uint64(bits), np.uint64(2 * bits), np.uint64(3 * bits)
    first, second = base + (begin >> 3), base + (high >> 3)
    for i in range(eights):
        low_word = numba.carray(pointer(first + i * bits), (1,), np.uint64)[0] >> shift
        word = numba.carray(pointer(second + i * bits), (1,), np.uint64)[0] >> high_shift
        indices = numba.carray(pointer(to + 32 * i), (8,), np.uint32)
        indices[0] = low_word & mask
        indices[1] = (low_word >> one) & mask
        indices[2] = (low_word >> two) & mask
        indices[3] = (low_word >> three) & mask
        indices[4] = word & mask
        indices[5] = (word >> one) & mask
        indices[6] = (word >> two) & mask
        indices[7] = (word >> three) & mask
    return max(eights, 0) * 8


@numba.njit
def _unpack(to, cursor, begin, count, width):
    """Read ``count`` values of a packed run from its bit ``begin`` on; whether the dictionary has
    them."""
    bits, size = cursor[BITS], cursor[END] - cursor[NEXT]
    done = np.int64(0)
    if 0 < bits <= _EIGHT_BITS:
        done = _unpack_eights(to, cursor[NEXT], begin, size, bits, count)
    memory = numba.carray(pointer(cursor[NEXT]), (size,), np.uint8)
    indices = numba.carray(pointer(to), (1,), np.uint32)
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for i in range(done, count):
        bit = begin + i * bits
        if (bit >> 3) + 8 <= size:
            word = numba.carray(pointer(cursor[NEXT] + (bit >> 3)), (1,), np.uint64)[0]
            indices[i] = (word >> np.uint64(bit & 7)) & mask
            continue
        word = np.uint64(0)
        for k in range(min(size - (bit >> 3), 5)):
            word |= np.uint64(memory[(bit >> 3) + k]) << np.uint64(8 * k)
        indices[i] = (word >> np.uint64(bit & 7)) & mask
    most = np.uint32(0)
    for i in range(count):
        most = max(most, indices[i])
    if np.int64(most) >= cursor[ENTRIES]:
        return False
    if width == 4:
        words = numba.carray(pointer(cursor[WORDS]), (1,), np.uint32)
        for i in range(count):
            indices[i] = words[indices[i]]
    else:  # from the end, because the values overwrite the indices
        wide_words = numba.carray(pointer(cursor[WORDS]), (1,), np.uint64)
        wide_target = numba.carray(pointer(to), (1,), np.uint64)
        for i in range(count - 1, -1, -1):
            wide_target[i] = wide_words[indices[i]]
    return True


@numba.njit
def _repeat(to, source, count, width):
    if width == 4:
        target = numba.carray(pointer(to), (1,), np.uint32)
        value = numba.carray(pointer(source), (1,), np.uint32)[0]
        for i in range(count):
            target[i] = value
    else:
        wide_target = numba.carray(pointer(to), (1,), np.uint64)
        wide_value = numba.carray(pointer(source), (1,), np.uint64)[0]
        for i in range(count):
            wide_target[i] = wide_value


@numba.njit
def _read_indices(to, cursor, count, width):
    """Read ``count`` values by their indices in the dictionary, or pass over them (``to`` = 0);
    whether that can be done."""
    while count > 0:
        if cursor[RUN] == 0 and not _begin_run(cursor):
            return False
        number = min(count, cursor[RUN], _INDICES)
        if cursor[PACKED]:
            first = cursor[STATE]
            cursor[STATE] += number * cursor[BITS]
            if (cursor[STATE] + 7) >> 3 > cursor[END] - cursor[NEXT]:
                return False
            if to and not _unpack(to, cursor, first, number, width):
                return False
        elif cursor[STATE] >= cursor[ENTRIES]:
            return False
        elif to:
            _repeat(to, cursor[WORDS] + cursor[STATE] * width, number, width)
        cursor[RUN] -= number
        if cursor[RUN] == 0 and cursor[PACKED]:
            cursor[NEXT] += (cursor[STATE] + 7) >> 3
        if to:
            to += number * width
        count -= number
    return True


@compiled(
    "boolean(int64[::1], uint64[::1], int64[:, ::1], int64[:, ::1], int64[::1], int64[:, ::1],"
    " int64[::1], boolean[::1], int64)"
)
def read_rows(addresses, largest, cursors, pages, first_page, chunks, targets, checked, rows):
    """Read the next ``rows`` rows of all columns.

    Args:
        addresses: int64 [chunks], written to: where the rows of each column lie. Those of a plain
            page lie in it, others are written to the column's target.
        largest: uint64 [chunks], written to: as :func:`open_columns`, of these rows.
        cursors, pages, first_page, chunks: of :func:`open_columns`.
        targets: int64 [chunks], addresses of memory for ``rows`` values. All 0: the rows are
            passed over.
        checked: bool [chunks], of which columns the largest number is wanted.
        rows: there must be as many.

    Returns:
        whether they could be read.
    """
    for c in range(len(chunks)):
        cursor, width, target = cursors[c], chunks[c, WIDTH], targets[c]
        addresses[c] = target
        done = np.int64(0)
        while done < rows:
            if cursor[LEFT] == 0:
                if not _turn_page(cursor, pages, first_page[c + 1]):
                    return False
                continue
            count = min(rows - done, cursor[LEFT])
            to = target + done * width if target else np.int64(0)
            if cursor[BITS] < 0:
                if count == rows:
                    addresses[c] = cursor[NEXT]
                elif target:
                    _copy(to, cursor[NEXT], count * width)
                cursor[NEXT] += count * width
            elif not _read_indices(to, cursor, count, width):
                return False
            cursor[LEFT] -= count
            done += count
        if target and checked[c]:
            largest[c] = largest_of(addresses[c], rows, width, chunks[c, FLOAT])
    return True


@numba.njit
def _next_runs(runs, run, row):
    """The first run from ``run`` on that ends behind ``row``, the last that is read with it because
    it lies close by, and where that one ends."""
    while run < len(runs) and runs[run, 2] + runs[run, 3] <= row:
        run += 1
    if run == len(runs):
        return run, run, row
    last, begin = run, max(runs[run, 2], row)
    end = runs[run, 2] + runs[run, 3]
    while (
        end - begin < DECODED_ROWS
        and last + 1 < len(runs)
        and runs[last + 1, 2] - end < _PASSED_ROWS
    ):
        last += 1
        end = runs[last, 2] + runs[last, 3]
    return run, last, end


@compiled(
    "boolean(int32[::1], int32[::1], int32[::1], int64[:, ::1], int64, int64, int64, int64[::1],"
    " uint64[::1], int64[:, ::1], int64[:, ::1], int64[::1], int64[:, ::1], boolean[::1])",
    "boolean(int32[::1], int32[::1], int64[::1], int64[:, ::1], int64, int64, int64, int64[::1],"
    " uint64[::1], int64[:, ::1], int64[:, ::1], int64[::1], int64[:, ::1], boolean[::1])",
)
def read_into(
    labels,
    dense,
    ids,
    runs,
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
    """Read the next ``rows`` rows of all columns and copy them to where they belong in a block.

    Args:
        labels, dense, ids, runs, batch, first, rows: as :func:`nvt_loader.kernels.copy_rows`.
        order: int64 [columns], which chunk is each of the schema's columns.
        limits: uint64 [chunks], what numbers have to stay below.
        cursors, pages, first_page, chunks, checked: as :func:`read_rows`.

    Returns:
        whether they could be read and stay below their limits; else the block is not complete.
    """
    found = np.empty(len(chunks), np.int64)
    targets = np.empty(len(chunks), np.int64)
    addresses = np.empty(len(chunks), np.int64)
    largest = np.zeros(len(chunks), np.uint64)
    tile = np.empty(DECODED_ROWS * chunks[:, WIDTH].sum(), np.uint8)
    place = tile.ctypes.data
    for c in range(len(chunks)):
        targets[c] = place
        place += DECODED_ROWS * chunks[c, WIDTH]
    none = np.zeros(len(chunks), np.int64)
    at = last = np.int64(0)  # the next row, counted from ``first``; a run that is not behind it
    while at < rows:
        begin = end = rows
        run, last, stop = _next_runs(runs, last, first + at)
        if run < len(runs):
            begin = min(max(runs[run, 2] - first, at), rows)
            end = min(stop - first, begin + DECODED_ROWS, rows)
        if not read_rows(  # what lies between is another rank's
            addresses, largest, cursors, pages, first_page, chunks, none, checked, begin - at
        ) or not read_rows(
            found, largest, cursors, pages, first_page, chunks, targets, checked, end - begin
        ):
            return False
        for c in range(len(chunks)):
            if largest[c] >= limits[c]:
                return False
            addresses[c] = found[order[c]]
        own = runs[run : last + 1]
        copy_rows(labels, dense, ids, addresses, own, batch, first + begin, end - begin)
        at = end
    tile[:1] = 0  # an address does not keep an array: it is used until here
    return True
