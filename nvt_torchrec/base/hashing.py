"""Hash functions: MurmurHash3 (Appleby, public domain, 2011) and SplitMix64.

The hash of a value is the one that cuDF's ``Series.hash_values()`` computes: MurmurHash3_x86_32
with seed 0, of the 8 little-endian bytes of an int64 or the UTF-8 bytes of a string (libcudf,
``cudf::hashing::murmurhash3_x86_32`` of a table of one column). So a value is in the same bucket on
a CPU and on a GPU. Categories of the raw types hex32 and int are hashed as int64, whatever the
dtype of their array.
"""

from __future__ import annotations

import numba
import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import string_parts
from nvt_torchrec.base.kernels import compiled

#: The constants of MurmurHash3_x86_32, named as in its source.
_C1 = np.uint32(0xCC9E2D51)
_C2 = np.uint32(0x1B873593)
_N = np.uint32(0xE6546B64)
#: The multipliers of its finalizer.
_M1 = np.uint32(0x85EBCA6B)
_M2 = np.uint32(0xC2B2AE35)


def murmur3_int(values: np.ndarray) -> np.ndarray:
    """Return the hashes, uint32 [n], of integers [n] that fit int64."""
    return _hash_ints(np.ascontiguousarray(values).astype(np.int64, copy=False))


def murmur3_string(values: pa.Array) -> np.ndarray:
    """Return the hashes, uint32 [n], of a string or binary array [n]; a null is hashed as ""."""
    offsets, data = string_parts(values)
    return _hash_strings(offsets, data)


@numba.njit(inline="always")
def mix(x):
    """Mix 64 bits by MurmurHash3's finalizer, in compiled code.

    Each bit of the input changes about half of the bits of the result.
    """
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


@numba.njit(inline="always")
def splitmix64(x):
    """Mix 64 bits by SplitMix64's output function (Steele, Lea, Flood 2014).

    ``py_func`` takes arrays.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@numba.njit(inline="always")
def join_hash(first, second):
    """Hash the pair of two hashes, in compiled code; int64."""
    return np.int64(mix(mix(np.uint64(first)) + np.uint64(second)))


@numba.njit(forceinline=True)
def _rotate(x, bits):
    return np.uint32((x << np.uint32(bits)) | (x >> np.uint32(32 - bits)))


@numba.njit(forceinline=True)
def _scramble(word):
    # Numba widens products of uint32 to uint64, so each is truncated
    return np.uint32(_rotate(np.uint32(word * _C1), 15) * _C2)


@numba.njit(forceinline=True)
def _mix(hashed, word):
    rotated = _rotate(np.uint32(hashed ^ _scramble(word)), 13)
    return np.uint32(np.uint32(rotated * np.uint32(5)) + _N)


@numba.njit(forceinline=True)
def finish_murmur3(hashed, length):
    """Mix 32 bits by MurmurHash3's finalizer; ``py_func`` takes arrays."""
    hashed = np.uint32(hashed ^ np.uint32(length))
    hashed = np.uint32((hashed ^ (hashed >> np.uint32(16))) * _M1)
    hashed = np.uint32((hashed ^ (hashed >> np.uint32(13))) * _M2)
    return np.uint32(hashed ^ (hashed >> np.uint32(16)))


@numba.njit(forceinline=True)
def hash_murmur3_int(value):
    """Hash one int64, in compiled code."""
    bits = np.uint64(value)
    hashed = _mix(np.uint32(0), np.uint32(bits & np.uint64(0xFFFFFFFF)))
    return finish_murmur3(_mix(hashed, np.uint32(bits >> np.uint64(32))), 8)


@numba.njit(forceinline=True)
def hash_murmur3_bytes(data, at, end):
    """Hash the bytes ``data[at:end]``, in compiled code."""
    length = end - at
    hashed = np.uint32(0)
    while at + 4 <= end:
        word = np.uint32(data[at])
        for k in range(1, 4):
            word = np.uint32(word | (np.uint32(data[at + k]) << np.uint32(8 * k)))
        hashed = _mix(hashed, word)
        at += 4
    if at < end:
        word = np.uint32(0)
        for k in range(end - at):
            word = np.uint32(word | (np.uint32(data[at + k]) << np.uint32(8 * k)))
        hashed = np.uint32(hashed ^ _scramble(word))
    return finish_murmur3(hashed, length)


@compiled()
def _hash_ints(values):
    """Return the hashes, uint32 [n], of int64 [n]."""
    hashes = np.empty(len(values), np.uint32)
    for i in range(len(values)):
        hashes[i] = hash_murmur3_int(values[i])
    return hashes


@compiled()
def _hash_strings(offsets, data):
    """Return the hashes, uint32 [n], of texts as :func:`base.arrays.string_parts` returns them."""
    hashes = np.empty(len(offsets) - 1, np.uint32)
    for i in range(len(hashes)):
        hashes[i] = hash_murmur3_bytes(data, offsets[i], offsets[i + 1])
    return hashes
