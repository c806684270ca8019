"""Compiled loops that encode a column: its dictionary, its packed indices, its statistics.

Values are 32 bits each; floats are handled as their bits. Indices are written in runs, as the
format specifies (apache/parquet-format: Encodings.md, RLE/bit-packing hybrid).
"""

from __future__ import annotations

import numba
import numpy as np

from nvt_torchrec.base.kernels import compiled, pointer

#: The largest number of entries of a dictionary. Its 16 KiB fit a reader's first-level cache, and
#: its indices of 12 bits the fast loops of readers; for more values, packing saves little.
DICTIONARY_ENTRIES = 4096
#: The bits of a slot's index in the hash table of a dictionary, which is at most half full.
_SLOT_BITS = 13
#: The multiplier of Fibonacci hashing: 2**32 divided by the golden ratio.
_MULTIPLIER = 0x9E3779B1
#: The largest number of bytes that :func:`pack_indices` writes for each value.
PACKED_BYTES = 4
#: The largest number of bytes that it writes after those of the last value.
PACKED_MARGIN = 64

#: All bits of a float32 except its sign.
_ABSOLUTE = 0x7FFFFFFF
#: The bits of infinity; those of NaN are above them.
_INFINITY = 0x7F800000


@compiled("int64(uint32[::1], uint16[::1], uint32[::1])")
def index_values(values, indices, dictionary):
    """Number the distinct values in the order in which they first occur.

    Args:
        values: uint32 [n].
        indices: The result, uint16 [n], the number of each value.
        dictionary: The result, uint32 [:data:`DICTIONARY_ENTRIES`], the distinct values.

    Returns:
        The number of distinct values; -1 if they do not fit the dictionary.
    """
    # A slot holds a value and, in the high half, its number plus one, so that 0 is an empty slot.
    slots = np.zeros(1 << _SLOT_BITS, np.uint64)
    mask = np.uint32((1 << _SLOT_BITS) - 1)
    high = np.uint64(32)
    count = 0
    for i in range(len(values)):
        value = values[i]
        slot = np.uint32(value * np.uint32(_MULTIPLIER)) >> np.uint32(32 - _SLOT_BITS)
        while True:
            held = slots[slot]
            if held == np.uint64(0):
                if count == len(dictionary):
                    return -1
                dictionary[count] = value
                count += 1
                held = np.uint64(count) << high | np.uint64(value)
                slots[slot] = held
            if np.uint32(held) == value:
                break
            slot = (slot + np.uint32(1)) & mask
        indices[i] = (held >> high) - np.uint64(1)
    return count


@compiled("int64(int32[::1], int64, int64, uint16[::1], int32[::1])")
def rank_values(values, smallest, largest, indices, dictionary):
    """Number the distinct integers of a narrow range in ascending order, without a hash table.

    Args:
        values: int32 [n].
        smallest: The smallest value.
        largest: The largest value.
        indices: The result, uint16 [n], the number of each value.
        dictionary: The result, int32, the distinct values; it has room for the whole range.

    Returns:
        The number of distinct values.
    """
    ranks = np.zeros(largest - smallest + 1, np.uint16)
    for i in range(len(values)):
        ranks[np.uint64(values[i] - smallest)] = 1
    count = 0
    for i in range(len(ranks)):
        if ranks[i]:
            dictionary[count] = smallest + i
            ranks[i] = count
            count += 1
    if count == len(ranks):  # no gaps: without the table, LLVM can vectorize the loop
        for i in range(len(values)):
            indices[i] = values[i] - smallest
    else:
        for i in range(len(values)):
            indices[i] = ranks[np.uint64(values[i] - smallest)]
    return count


@numba.njit(inline="always")
def _write_varint(memory, at, number):
    """Write an unsigned integer in groups of 7 bits, the lowest first; return its end."""
    while number > 127:
        memory[at] = number & 127 | 128
        at += 1
        number >>= 7
    memory[at] = number
    return at + 1


@numba.njit(inline="always")
def _is_run(address):
    """Return whether the eight indices at an address are equal."""
    words = numba.carray(pointer(address), (2,), np.uint64)
    first = words[0]
    # four indices are equal if rotating them by one changes nothing
    rotated = first >> np.uint64(16) | first << np.uint64(48)
    return first == words[1] and first == rotated


@numba.njit
def _write_groups(source, groups, bits, packed, at):
    """Pack groups of eight indices from an address on; return their end in ``packed``.

    A group takes as many bytes as an index has bits. Two words, 16 bytes, are written for each
    group, which is faster than writing single bytes; the next group overwrites the excess.
    """
    if groups == 0:
        return at
    at = _write_varint(packed, at, groups << 1 | 1)
    target = packed.ctypes.data + at
    once = np.uint64(bits)
    twice = np.uint64(2 * bits)
    thrice = np.uint64(3 * bits)
    half = np.uint64(4 * bits)
    rest = np.uint64(64 - 4 * bits)
    for group in range(groups):
        index = numba.carray(pointer(source + 16 * group), (8,), np.uint16)
        low = np.uint64(index[0]) | np.uint64(index[1]) << once
        low |= np.uint64(index[2]) << twice | np.uint64(index[3]) << thrice
        high = np.uint64(index[4]) | np.uint64(index[5]) << once
        high |= np.uint64(index[6]) << twice | np.uint64(index[7]) << thrice
        words = numba.carray(pointer(target + bits * group), (2,), np.uint64)
        words[0] = low | high << half
        words[1] = high >> rest
    return at + groups * bits


@compiled("int64(uint16[::1], int64, int64, int64, uint8[::1], int64)")
def pack_indices(indices, begin, end, bits, packed, at):
    """Write indices as runs: one index and how often it repeats, or groups of eight packed ones.

    Args:
        indices: uint16, below ``2**bits``.
        begin: The first index to write.
        end: The end of the indices to write; at least seven more exist, which may fill the last
            group.
        bits: The bits of an index, from 1 to 12.
        packed: The result, uint8, with room for :data:`PACKED_BYTES` for each index and
            :data:`PACKED_MARGIN` more.
        at: The position in ``packed`` to write at.

    Returns:
        The position in ``packed`` after the written bytes.
    """
    source = indices.ctypes.data
    # A shorter run takes about as many bytes as its packed indices, and is read more slowly.
    min_run = max(8, 64 // bits)
    i = begin  # from here on, ``begin`` is the first index that is not written yet
    while i + 8 <= end:
        if not _is_run(source + 2 * i):
            i += 8
            continue
        stop = i + 8
        while stop < end and indices[stop] == indices[i]:
            stop += 1
        if stop - i < min_run:
            i += 8
            continue
        at = _write_groups(source + 2 * begin, (i - begin) >> 3, bits, packed, at)
        at = _write_varint(packed, at, (stop - i) << 1)
        packed[at] = indices[i] & 255
        packed[at + 1] = indices[i] >> 8
        at += (bits + 7) >> 3
        begin = i = stop
    return _write_groups(source + 2 * begin, (end - begin + 7) >> 3, bits, packed, at)


@compiled("void(uint16[::1], int64[::1], uint8[::1], int64[::1])")
def pack_pages(indices, cuts, packed, ends):
    """Write indices as the bodies of pages: the bits of an index, then runs.

    Args:
        indices: uint16 [n + 8], below :data:`DICTIONARY_ENTRIES`.
        cuts: int64 [pages + 1], the positions in ``indices`` where pages begin and end.
        packed: The result, uint8, as in :func:`pack_indices`.
        ends: The result, int64 [pages], the end of each page in ``packed``.
    """
    at = np.int64(0)
    for page in range(len(ends)):
        begin, end = cuts[page], cuts[page + 1]
        # Each page has its own width, so values that occur only in later pages do not widen it.
        largest = np.uint16(0)
        page_indices = indices[begin:end]
        for i in range(len(page_indices)):  # LLVM vectorizes the loop only if it begins at 0
            largest = max(largest, page_indices[i])
        bits = np.int64(1)  # also for a single value: readers disagree about indices of 0 bits
        while largest >> bits:
            bits += 1
        packed[at] = bits
        at = pack_indices(indices, begin, end, bits, packed, at + 1)
        ends[page] = at


@compiled("void(int32[::1], int32[::1])")
def find_range(values, found):
    """Find the smallest and the largest of integers, at least one: int32 [n] → int32 [2]."""
    smallest = largest = values[0]
    for i in range(len(values)):
        smallest = min(smallest, values[i])
        largest = max(largest, values[i])
    found[0] = smallest
    found[1] = largest


@numba.njit(inline="always")
def _ordered(bits):
    """Map the bits of a float, int32, to an integer with the same order; its own inverse."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(_ABSOLUTE))


@compiled("boolean(int32[::1], int32[::1])")
def find_float_range(values, found):
    """Find the smallest and the largest of floats that are not NaN, by their bits.

    The loop compares integers, which LLVM can vectorize; they order -0.0 before 0.0.

    Args:
        values: int32 [n], the bits of at least one float.
        found: The result, int32 [2].

    Returns:
        Whether there is a value that is not NaN.
    """
    infinity = np.int32(_INFINITY)
    smallest = largest = _ordered(values[0])
    for i in range(len(values)):
        value = _ordered(values[i])
        smallest = min(smallest, value)
        largest = max(largest, value)
    if largest > infinity or smallest < ~infinity:  # there is a NaN
        smallest = np.int32(_ABSOLUTE)
        largest = ~np.int32(_ABSOLUTE)
        for i in range(len(values)):
            value = _ordered(values[i])
            if ~infinity <= value <= infinity:
                smallest = min(smallest, value)
                largest = max(largest, value)
    found[0] = _ordered(smallest)
    found[1] = _ordered(largest)
    return smallest <= largest
