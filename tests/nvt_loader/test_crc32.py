"""CRC-32 against zlib's."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib

import numpy as np
import pytest

from nvt_loader.parquet.crc32 import crc32

LENGTHS = [0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 1000, 100_003]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("begin", [0, 1])
def test_as_zlib(length, begin):
    memory = np.random.default_rng(length).integers(0, 256, length + 1, dtype=np.uint8)
    data = memory[begin : begin + length]
    assert crc32(data.ctypes.data, length) == zlib.crc32(data)


def test_every_bit_counts():
    memory = np.zeros(200, np.uint8)
    found = set()
    for bit in range(8 * len(memory)):
        memory[bit // 8] = 1 << bit % 8
        found.add(int(crc32(memory.ctypes.data, len(memory))))
        memory[bit // 8] = 0
    assert len(found) == 8 * len(memory)


@pytest.mark.parametrize(
    ("before", "setting"),
    [
        ("llvmlite.binding.get_host_cpu_features = llvmlite.binding.FeatureMap", {}),
        ("", {"NUMBA_CPU_NAME": "generic"}),
    ],
)
def test_on_a_processor_without_carry_less_products(tmp_path, before, setting):
    program = f"""
import llvmlite.binding, numpy, zlib
{before}
from nvt_loader.parquet import crc32
assert not crc32.FOLDS
for length in {LENGTHS}:
    data = numpy.random.default_rng(length).integers(0, 256, length, dtype=numpy.uint8)
    assert crc32.crc32(data.ctypes.data, length) == zlib.crc32(data), length
assert "pclmulqdq" not in str(crc32.crc32.inspect_llvm())
"""
    own = {
        "NUMBA_CACHE_DIR": str(tmp_path)
    } | setting  # or other processes would find what it compiles
    subprocess.run([sys.executable, "-c", program], env=os.environ | own, check=True)
