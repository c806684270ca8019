"""Compiled loops that look up a column's values by their indices in a dictionary.

Indices are written in runs: one index and how often it repeats, or packed ones of a few bits each
(apache/parquet-format: Encodings.md, RLE/bit-packing hybrid). Like :mod:`nvt_loader.parquet.pages`,
the loops refuse what they do not know and what is broken.
"""

from __future__ import annotations

import numba
import numpy as np

from nvt_torchrec.base.parquet_footer import varint
from nvt_torchrec.nvt_loader.parquet.pages import int64_record
from nvt_torchrec.nvt_loader.parquet.parquet_kernels import pointer

#: Indices of at most so many bits are unpacked eight at a time: four, and a shift, fit a word.
_EIGHT_BITS = 14

#: Indices unpacked before their values are looked up: as many as fit a core's first-level cache.
_INDICES = 2048

#: The reading position in a column: the page; rows left in it; where its next bytes lie and where
#: they end; in a page of indices the bits of an index (-1 in others), the values left in the run,
#: whether the run is packed, and the run's index or the bits already read of it; the dictionary's
#: address and number of values.
CURSOR = int64_record("page left next end bits run packed state words entries")


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
    most = np.uint32(0)
    for i in range(count):
        most = max(most, indices[i])
    if np.int64(most) >= cursor.entries:
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
