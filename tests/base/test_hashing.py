from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from nvt_torchrec.base.hashing import murmur3_int, murmur3_string


def reference(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, from Appleby's description, in plain Python."""

    def rotate(x: int, bits: int) -> int:
        return (x << bits | x >> 32 - bits) & 0xFFFFFFFF

    def scramble(word: int) -> int:
        return rotate(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF

    hashed, whole = 0, len(data) // 4 * 4
    for at in range(0, whole, 4):
        hashed ^= scramble(int.from_bytes(data[at : at + 4], "little"))
        hashed = (rotate(hashed, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    hashed ^= scramble(int.from_bytes(data[whole:], "little"))
    hashed ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hashed = (hashed ^ hashed >> shift) * factor & 0xFFFFFFFF
    return hashed


def test_values_that_cudf_documents() -> None:
    """``cudf.Series([10, 120, 30]).hash_values(method="murmur3")``, from its docstring."""
    expected = [4004982076, 2063150778, 699010651]
    assert murmur3_int(np.array([10, 120, 30])).tolist() == expected
    assert murmur3_int(np.array([10, 120, 30], np.uint32)).tolist() == expected


def test_published_vectors() -> None:
    texts = ["", "test", "Hello, world!", "The quick brown fox jumps over the lazy dog"]
    expected = [0, 0xBA6BD213, 0xC0363E43, 0x2E4FF723]
    assert murmur3_string(pa.array(texts)).tolist() == expected


@settings(deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_integers(values: list[int]) -> None:
    expected = [reference(value.to_bytes(8, "little", signed=True)) for value in values]
    assert murmur3_int(np.array(values, np.int64)).tolist() == expected


@settings(deadline=None)
@given(st.lists(st.text()), st.integers(0, 3), st.sampled_from([pa.string(), pa.large_string()]))
def test_strings(values: list[str], skipped: int, kind: pa.DataType) -> None:
    expected = [reference(value.encode()) for value in values[skipped:]]
    assert murmur3_string(pa.array(values, kind)[skipped:]).tolist() == expected
