"""A 64-bit hash of texts, by which rows with the same text go to the same split."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import string_parts
from nvt_torchrec.base.kernels import compiled

#: Of FNV-1a (Fowler, Noll and Vo), whose low bits are mixed once more, by MurmurHash3's finalizer.
_BASIS, _PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)
_M1, _M2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_SHIFT = np.uint64(33)


def hash_texts(values: pa.StringArray) -> np.ndarray:
    """Hash strings [n]; int64 [n]. The hash of a text never changes between versions."""
    offsets, data = string_parts(values)
    return _hash_texts(offsets, data).view(np.int64)


@compiled()
def _hash_texts(offsets, data):
    hashes = np.empty(len(offsets) - 1, np.uint64)
    for i in range(len(hashes)):
        hashed = _BASIS
        for at in range(offsets[i], offsets[i + 1]):
            hashed = (hashed ^ np.uint64(data[at])) * _PRIME
        hashed = (hashed ^ (hashed >> _SHIFT)) * _M1
        hashed = (hashed ^ (hashed >> _SHIFT)) * _M2
        hashes[i] = hashed ^ (hashed >> _SHIFT)
    return hashes
