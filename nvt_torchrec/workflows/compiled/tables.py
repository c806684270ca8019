"""Hash tables from values to ids, as regions of one array of 64-bit words.

Open addressing with linear probing at a load of at most one half. A slot is

* narrow: one word, ``id << 32 | value``, for values of 32 bits without sign;
* wide: two words, the value (int64) or the hash of a string, and the id; for strings see
  :mod:`workflows.compiled.text_tables`.

No value has id 0 (padding), so a slot whose id is 0 is empty. Values are inserted by ascending id,
those of generation 0 by falling frequency: frequent values lie where their hash points and are
found with one access. What later generations add is inserted after them.

Lookups in large tables wait for memory, so the slot of a later row is prefetched, which halves
their time, as measured on 1–40 M values. Lookups in small tables wait for mispredicted branches, so
these tables have more room, and fewer collisions; the first slot of a narrow table is reserved for
the value 0, which is the placeholder of missing values.

The arrays may be mapped from files that other programs can change at any time, so kernels do not
trust their contents: every access lies within a place, which is checked when the workflow is
opened, ids outside of the vocabulary are ignored, and strings must lie in their array.

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
        byte_pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
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
def eight_bytes(typing_context, array, index):
    """Load ``array[index:index + 8]`` of a uint8 array as one word; it need not be aligned."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.gep(data, [arguments[1]])
        word = builder.bitcast(address, ir.IntType(64).as_pointer())
        return builder.load(word, align=1)

    return types.uint64(array, index), generate


#: Words of a cache line, at which tables begin and end.
LINE_WORDS = 8
_MIN_SLOTS = 1 << 10
AHEAD = 16  # how many rows ahead a slot is prefetched; 8 is slower, 32 is no faster
_CACHED_WORDS = 1 << 14  # tables up to this size stay in the cache and need no prefetching

#: Fields of a place: int64 [7], the description of one column for kernels.
PLACE_BEGIN, PLACE_SLOTS, PLACE_WIDE, PLACE_OOV_IDS, PLACE_FIRST_ID, PLACE_VALUES, PLACE_TEXT = (
    range(7)
)
PLACE_FIELDS = 7

_M1, _M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
NULL_ID32, OOV_ID32 = np.int32(NULL_ID), np.int32(FIRST_OOV_ID)


def slots_for(values: int) -> int:
    """Return the number of slots of a table; small tables have more room for each value."""
    return max(_MIN_SLOTS, (8 if values <= 4096 else 2) * values)


def words_for(slots: int, *, wide: bool) -> int:
    """Return the number of words of a table."""
    words = slots * (2 if wide else 1)
    return -(-words // LINE_WORDS) * LINE_WORDS


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
def home_narrow(key, slots):
    """Return the slot of a 32-bit value; only the value 0 has slot 0.

    One product suffices as a hash: its upper half depends on all bits of the value.
    """
    return find_slot(np.uint64(key) * _M1, slots - np.uint64(1)) + np.uint64(key != 0)


@numba.njit(forceinline=True)
def _home_wide(key, slots):
    return np.uint64(2) * find_slot(mix64(key), slots)


WORDS = types.Array(types.uint64, 1, "C")
READ_WORDS = types.Array(types.uint64, 1, "C", readonly=True)
IDS = types.Array(types.int32, 1, "A")
PLACE = types.Array(types.int64, 1, "C", readonly=True)
TALLY = types.Array(types.int64, 1, "C")


def read_only(kind: types.Type, dimensions: int = 1) -> types.Array:
    """The type of an array that a kernel only reads; it need not be contiguous."""
    return types.Array(kind, dimensions, "A", readonly=True)


_INSERT = types.int64(WORDS, types.int64, read_only(types.int64), types.int64)


@compiled(_INSERT)
def insert_narrow(words, slots, values, first_id):
    """Insert values [n], each in [0, 2³²), with the ids ``first_id``, + 1, …

    The table must have room for all of them. Returns −1, or the index of a value that occurs twice.
    """
    size = np.uint64(slots)
    for i in range(len(values)):
        if i + AHEAD < len(values):
            prefetch(words, home_narrow(values[i + AHEAD], size))
        key = np.uint64(values[i])
        at = home_narrow(key, size)
        while words[at] >> _HALF != 0:
            if words[at] & _LOW == key:
                return i
            at = at + np.uint64(1) if at + np.uint64(1) < size else np.uint64(1)
        words[at] = key | (np.uint64(first_id + i) << _HALF)
    return -1


@compiled(_INSERT)
def insert_wide(words, slots, values, first_id):
    """As :func:`insert_narrow`, for any int64."""
    size = np.uint64(slots)
    for i in range(len(values)):
        if i + AHEAD < len(values):
            prefetch(words, _home_wide(values[i + AHEAD], size))
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
    """Return the id of a value, 0 if it has none. Terminates in damaged tables too."""
    if key >> _HALF != 0:
        return np.int32(0)
    at = begin + home_narrow(key, size)
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
    home = begin + _home_wide(key, size)
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
def _encode_numbers(values, missing, bit, words, place, wide, out, tally):
    begin, size = np.uint64(place[PLACE_BEGIN]), np.uint64(place[PLACE_SLOTS])
    slot_words = np.uint64(2) if wide else np.uint64(1)
    oov_ids = np.uint32(place[PLACE_OOV_IDS])
    first_id, ids = np.int32(place[PLACE_FIRST_ID]), np.uint32(place[PLACE_VALUES])
    shift, masked = np.uint64(bit), len(missing) > 0
    rows = len(values)
    prefetched = max(0, rows - AHEAD) if size * slot_words > _CACHED_WORDS else 0
    for i in range(prefetched):
        if wide:
            prefetch(words, begin + _home_wide(values[i + AHEAD], size))
        else:
            prefetch(words, begin + home_narrow(values[i + AHEAD], size))
        out[i] = _probe(words, begin, size, values[i], wide)
    for i in range(prefetched, rows):
        out[i] = _probe(words, begin, size, values[i], wide)
    # Without branches, because half of the branches on nulls would be mispredicted.
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
    types.void(read_only(types.uint32, 2), read_only(types.uint64), types.int64, READ_WORDS,
               types.Array(types.int64, 2, "C", readonly=True),
               types.Array(types.int32, 2, "C"), types.Array(types.int64, 2, "C")),
)  # fmt: skip
def encode_hex(values, missing, bit, words, places, out, tallies):
    """Look up the ids of some columns of 32-bit values, whose bits are in one word.

    Args:
        values: [columns, n].
        missing: uint64 [n], with a bit set where a value is missing; [0] if none is missing.
        bit: The first column's bit; the others follow.
        words: All tables.
        places: int64 [columns, ``PLACE_FIELDS``], the places of the columns' tables.
        out: int32 [columns, n], the result: 1 where missing, 2 … where out of vocabulary.
        tallies: int64 [columns, 2], to which the numbers of missing and out-of-vocabulary values
            are added.
    """
    bits = np.ascontiguousarray(missing)
    for j in range(values.shape[0]):
        column = np.ascontiguousarray(values[j])  # copying makes the rest much faster
        _encode_numbers(column, bits, bit + j, words, places[j], False, out[j], tallies[j])


@compiled(
    types.void(read_only(types.int64), read_only(types.uint64), types.int64, READ_WORDS, PLACE, IDS,
               TALLY),
)  # fmt: skip
def encode_int(values, missing, bit, words, place, out, tally):
    """As :func:`encode_hex`, of one column [n] of int64; the table may be narrow or wide."""
    if place[PLACE_WIDE]:
        _encode_numbers(values, missing, bit, words, place, True, out, tally)
    else:
        _encode_numbers(values, missing, bit, words, place, False, out, tally)
