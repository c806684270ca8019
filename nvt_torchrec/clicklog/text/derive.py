"""The values of derived columns, whatever derives them; and keys of splits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import blanked, string_parts
from nvt_torchrec.base.hashing import mix
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.formats.feature_spec.derivations import DERIVATIONS, Derivation
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES


def derive(
    how: Derivation, sources: Sequence[np.ndarray | pa.StringArray], missing: np.ndarray
) -> np.ndarray | pa.StringArray:
    """Compute a column; where it is missing, its values are 0 or "".

    Args:
        how: The rule.
        sources: The values [n] of its sources, of the raw type that the rule reads.
        missing: bool [n], where any source is missing.
    """
    values = DERIVATIONS[how.kind].compute(sources, how)
    if isinstance(values, pa.Array):
        return blanked(values, missing)
    values[missing] = 0
    return values.astype(RAW_TYPES[how.gives].dtype, copy=False)


#: Of FNV-1a (Fowler, Noll and Vo), whose low bits are mixed once more, by MurmurHash3's finalizer.
_BASIS, _PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)


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
        hashes[i] = mix(hashed)
    return hashes
