"""Hash tables from values to ids, as regions of one array of 64-bit words.

Open addressing with linear probing at a load of at most one half. A slot is

* narrow: one word, ``id << 32 | value``, for values of 32 bits without sign;
* wide: two words, the value (int64) or the hash of a string, and the id; for strings see
  :mod:`workflows.compiled.text_tables`.

No value has id 0 (padding), so a slot whose id is 0 is empty. Values are inserted by ascending id,
which in generation 0 means by falling frequency: frequent values get the slot that their hash
points to and are found with one access. Values of later generations are inserted after them.

Lookups in large tables wait for memory. Prefetching the slot of a later row halves their time, as
measured with 1–40 M values. Lookups in small tables wait for mispredicted branches, so these tables
have more slots for each value, and fewer collisions. The first slot of a narrow table is reserved
for the value 0, the placeholder of missing values.

The arrays may be mapped from files that other programs can change at any time, so kernels do not
trust their contents: every access lies within a region, which is checked when the workflow is
opened; ids outside of the vocabulary are ignored; and strings must lie in their array.

Kernels have explicit signatures: they are compiled once, at import (or read from the cache), never
during a request. LLVM inlines the functions that they call (``forceinline``): Numba's own
``inline="always"`` takes twice as long to compile and is no faster.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from nvt_torchrec.base.hashing import hash_murmur3_int
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.formats.feature_spec.columns import FIRST_OOV_ID, NULL_ID


@intrinsic
def prefetch(typing_context, array, index):
    """Start loading ``array[index]`` into the cache."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte_pointer = ir.IntType(8).as_pointer()
        number = ir.IntType(32)
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte_pointer)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch",
            [byte_pointer],
            ir.FunctionType(ir.VoidType(), [byte_pointer, number, number, number]),
        )
        builder.call(function, [address, number(0), number(3), number(1)])  # read, keep, data
        return context.get_dummy_value()

    return types.void(array, index), generate


@intrinsic
def load_eight_bytes(typing_context, array, index):
    """Load ``array[index:index + 8]`` of a uint8 array as one word; it need not be aligned."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.gep(data, [arguments[1]])
        word = builder.bitcast(address, ir.IntType(64).as_pointer())
        return builder.load(word, align=1)

    return types.uint64(array, index), generate


#: Words of a cache line. Tables begin and end at multiples of it.
LINE_WORDS = 8
_MIN_SLOTS = 1 << 10
#: How many rows ahead a slot is prefetched; measured: 8 is slower, 32 is no faster.
AHEAD = 16
#: Tables up to this size stay in the cache and need no prefetching.
_CACHED_WORDS = 1 << 14

# Fields of a region: int64 [REGION_FIELDS], the table of one column and its ids, for kernels.
REGION_BEGIN = 0  # first word of the table
REGION_SLOTS = 1  # number of slots
REGION_WIDE = 2  # 1 if a slot has two words
REGION_OOV_IDS = 3  # number of out-of-vocabulary ids
REGION_FIRST_ID = 4  # id of the first value
REGION_VALUES = 5  # number of values
REGION_TEXT = 6  # index of the first string; -1 for numbers
REGION_FIELDS = 7

# Odd multipliers of the hash.
_M1 = np.uint64(0x9E3779B97F4A7C15)
_M2 = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
NULL_ID32 = np.int32(NULL_ID)
OOV_ID32 = np.int32(FIRST_OOV_ID)


def count_slots(values: int) -> int:
    """Return the number of slots of a table; small tables have more slots for each value."""
    slots_per_value = 8 if values <= 4096 else 2
    return max(_MIN_SLOTS, slots_per_value * values)


def count_words(slots: int, *, wide: bool) -> int:
    """Return the number of words of a table."""
    words = slots * (2 if wide else 1)
    return -(-words // LINE_WORDS) * LINE_WORDS  # rounded up


@numba.njit(forceinline=True)
def mix64(key):
    """Hash 64 bits (multiply, xor-shift: after Steele, Lea, Flood, SplitMix, 2014)."""
    x = np.uint64(key) * _M1
    x ^= x >> _HALF
    x *= _M2
    return x ^ (x >> _HALF)


@numba.njit(forceinline=True)
def find_slot(hashed, slots):
    """Return the slot of a hash: its upper half, scaled to any number of slots (Lemire 2019)."""
    return ((hashed >> _HALF) * slots) >> _HALF


@numba.njit(forceinline=True)
def find_home_narrow(key, slots):
    """Return the slot of a 32-bit value; only the value 0 has slot 0.

    One product suffices as a hash: its upper half depends on all bits of the value.
    """
    return find_slot(np.uint64(key) * _M1, slots - np.uint64(1)) + np.uint64(key != 0)


@numba.njit(forceinline=True)
def _find_home_wide(key, slots):
    return np.uint64(2) * find_slot(mix64(key), slots)


WORDS = types.Array(types.uint64, 1, "C")
READ_WORDS = types.Array(types.uint64, 1, "C", readonly=True)
IDS = types.Array(types.int32, 1, "A")
REGION = types.Array(types.int64, 1, "C", readonly=True)
TALLY = types.Array(types.int64, 1, "C")


def read_only_array(kind: types.Type, dimensions: int = 1) -> types.Array:
    """Return the type of an array that a kernel only reads; it need not be contiguous."""
    return types.Array(kind, dimensions, "A", readonly=True)


_INSERT = types.int64(WORDS, types.int64, read_only_array(types.int64), types.int64)


@compiled(_INSERT)
def insert_narrow(words, slots, values, first_id):
    """Insert values [n], each in [0, 2³²), with the ids ``first_id``, ``first_id`` + 1, …

    The table must have room for all of them. Return −1, or the index of a value that occurs twice.
    """
    size = np.uint64(slots)
    for i in range(len(values)):
        if i + AHEAD < len(values):
            prefetch(words, find_home_narrow(values[i + AHEAD], size))
        key = np.uint64(values[i])
        at = find_home_narrow(key, size)
        while words[at] >> _HALF != 0:
            if words[at] & _LOW == key:
                return i
            at = at + np.uint64(1) if at + np.uint64(1) < size else np.uint64(1)
        words[at] = key | (np.uint64(first_id + i) << _HALF)
    return -1


@compiled(_INSERT)
def insert_wide(words, slots, values, first_id):
    """Insert values [n], any int64, into a wide table, like :func:`insert_narrow`."""
    size = np.uint64(slots)
    for i in range(len(values)):
        if i + AHEAD < len(values):
            prefetch(words, _find_home_wide(values[i + AHEAD], size))
        key = np.uint64(values[i])
        at = find_slot(mix64(key), size)
        while words[np.uint64(2) * at + np.uint64(1)] != 0:
            if words[np.uint64(2) * at] == key:
                return i
            at = at + np.uint64(1) if at + np.uint64(1) < size else np.uint64(0)
        words[np.uint64(2) * at] = key
        words[np.uint64(2) * at + np.uint64(1)] = np.uint64(first_id + i)
    return -1


@numba.njit(forceinline=True)
def _probe_narrow(words, begin, size, key):
    """Return the id of a value, 0 if it has none. Terminates in damaged tables, too."""
    if key >> _HALF != 0:
        return np.int32(0)
    at = begin + find_home_narrow(key, size)
    word = words[at]
    left = size
    # The product is 0 for an empty slot and for the value: one branch for both ends of the search.
    while (word >> _HALF) * ((word & _LOW) ^ key) != 0:
        at += np.uint64(1)
        if at == begin + size:
            at = begin + np.uint64(1)
        left -= np.uint64(1)
        if left == 0:
            return np.int32(0)
        word = words[at]
    return np.int32(word >> _HALF)


@numba.njit(forceinline=True)
def _probe_wide(words, begin, size, key):
    home = begin + _find_home_wide(key, size)
    at = home
    while (words[at + np.uint64(1)] != 0) & (words[at] != key):
        at += np.uint64(2)
        if at == begin + np.uint64(2) * size:
            at = begin
        if at == home:
            return np.int32(0)
    return np.int32(words[at + np.uint64(1)])


@numba.njit(forceinline=True)
def _probe(words, begin, size, value, wide):
    if wide:
        return _probe_wide(words, begin, size, np.uint64(value))
    return _probe_narrow(words, begin, size, np.uint64(value))


@numba.njit(forceinline=True)
def _encode_numbers(values, missing, bit, words, region, wide, out, tally):
    begin = np.uint64(region[REGION_BEGIN])
    size = np.uint64(region[REGION_SLOTS])
    slot_words = np.uint64(2) if wide else np.uint64(1)
    oov_ids = np.uint32(region[REGION_OOV_IDS])
    first_id = np.int32(region[REGION_FIRST_ID])
    ids = np.uint32(region[REGION_VALUES])
    shift = np.uint64(bit)
    masked = len(missing) > 0
    rows = len(values)
    prefetched = max(0, rows - AHEAD) if size * slot_words > _CACHED_WORDS else 0
    for i in range(prefetched):
        if wide:
            prefetch(words, begin + _find_home_wide(values[i + AHEAD], size))
        else:
            prefetch(words, begin + find_home_narrow(values[i + AHEAD], size))
        out[i] = _probe(words, begin, size, values[i], wide)
    for i in range(prefetched, rows):
        out[i] = _probe(words, begin, size, values[i], wide)
    # No branches here: if half of the values are missing, half of the branches are mispredicted.
    # One unsigned comparison finds ids below first_id, too, as their difference wraps around.
    nulls = 0
    oov = 0
    for i in range(rows):
        null = masked and (missing[i] >> shift) & np.uint64(1) != 0
        unknown = (np.uint32(out[i] - first_id) >= ids) & ~null
        out[i] = NULL_ID32 if null else (OOV_ID32 if unknown else out[i])
        nulls += null
        oov += unknown
    if oov and oov_ids > 1:
        for i in range(rows):
            if out[i] == OOV_ID32:
                out[i] += np.int32(hash_murmur3_int(np.int64(values[i])) % oov_ids)
    tally[0] += nulls
    tally[1] += oov


@compiled(
    types.void(
        read_only_array(types.uint32, 2),
        read_only_array(types.uint64),
        types.int64,
        READ_WORDS,
        types.Array(types.int64, 2, "C", readonly=True),
        types.Array(types.int32, 2, "C"),
        types.Array(types.int64, 2, "C"),
    )
)
def encode_hex(values, missing, bit, words, regions, out, tallies):
    """Look up the ids of columns of 32-bit values whose missing bits are in one word.

    Args:
        values: uint32 [columns, n].
        missing: uint64 [n], with a bit set where a value is missing; [0] if none is missing.
        bit: The first column's bit; the other columns have the bits after it.
        words: uint64, all tables.
        regions: int64 [columns, ``REGION_FIELDS``], the regions of the columns' tables.
        out: int32 [columns, n], the result: 1 where missing, 2 or more where out of vocabulary.
        tallies: int64 [columns, 2], to which the numbers of missing and out-of-vocabulary values
            are added.
    """
    bits = np.ascontiguousarray(missing)
    for j in range(values.shape[0]):
        column = np.ascontiguousarray(values[j])  # loops over a contiguous copy are much faster
        _encode_numbers(column, bits, bit + j, words, regions[j], False, out[j], tallies[j])


@compiled(
    types.void(
        read_only_array(types.int64),
        read_only_array(types.uint64),
        types.int64,
        READ_WORDS,
        REGION,
        IDS,
        TALLY,
    )
)
def encode_int(values, missing, bit, words, region, out, tally):
    """Look up the ids of one column [n] of int64, like :func:`encode_hex`.

    The table may be narrow or wide.
    """
    if region[REGION_WIDE]:
        _encode_numbers(values, missing, bit, words, region, True, out, tally)
    else:
        _encode_numbers(values, missing, bit, words, region, False, out, tally)
