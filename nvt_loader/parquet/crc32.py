"""CRC-32, the checksum of parquet's pages (and of gzip and PNG: RFC 1952), at memory's speed.

Where the processor multiplies polynomials (PCLMULQDQ), 64 bytes are folded into the next 64 at a
time (Gopal, Ozturk et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
Instruction", Intel 2009), several times as fast as by tables. What is left goes through tables, as
all of it does on other processors.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from clicklog.kernels import compiled
from nvt_loader.native import pointer

#: The generator polynomial x^32 + x^26 + …, its highest term left out; and with its bits reversed.
POLYNOMIAL, REVERSED = 0x04C11DB7, 0xEDB88320


def _folds() -> bool:
    """Whether numba compiles for this processor, and it has the instruction."""
    if numba.config.CPU_NAME or numba.config.CPU_FEATURES:
        return False
    try:
        return bool(binding.get_host_cpu_features().get("pclmul"))
    except RuntimeError:  # LLVM cannot tell
        return False


FOLDS = _folds()

#: Bytes that are folded at a time: four words of the processor.
BLOCK, WORD = 64, 16


def _tables() -> np.ndarray:
    """What a byte adds to the checksum if 0 … 7 bytes follow it: uint32 [8, 256]."""
    tables = np.empty((8, 256), np.uint32)
    rest = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        rest = (rest >> 1) ^ np.where(rest & 1, np.uint32(REVERSED), np.uint32(0))
    tables[0] = rest
    for i in range(1, 8):
        tables[i] = (tables[i - 1] >> 8) ^ tables[0][tables[i - 1] & 255]
    return tables


TABLES = _tables()


def _multiplier(bits: int) -> int:
    """x^bits modulo the polynomial, bits reversed, as the instruction wants it: 33 bits."""
    rest = 1
    for _ in range(bits):
        rest <<= 1
        if rest >> 32:
            rest ^= 1 << 32 | POLYNOMIAL
    return int(f"{rest:032b}"[::-1], 2) << 1


@intrinsic
def _fold(_context, address, blocks, start, folded):
    """Fold ``blocks`` (one or more) of 64 bytes at ``address`` into the 64 bytes at ``folded``,
    which have the checksum that all of it has, begun at ``start``."""

    def generate(context, builder, _signature, arguments):
        address, blocks, start, folded = arguments
        number, byte = ir.IntType(64), ir.IntType(8)
        word = ir.VectorType(number, 2)
        multiply = builder.module.declare_intrinsic(
            "llvm.x86.pclmulqdq", (), ir.FunctionType(word, [word, word, byte])
        )
        # a word's halves move over the 512 bits between a block and the next
        bits = 8 * BLOCK
        by = ir.Constant(word, [_multiplier(bits + 32), _multiplier(bits - 32)])

        def at(base, i):
            return builder.inttoptr(builder.add(base, number(WORD * i)), word.as_pointer())

        words = [builder.load(at(address, i), align=1) for i in range(BLOCK // WORD)]
        first = builder.insert_element(ir.Constant(word, [0, 0]), start, ir.IntType(32)(0))
        words[0] = builder.xor(words[0], first)
        before = builder.block
        loop, after = builder.append_basic_block("fold"), builder.append_basic_block("folded")
        builder.cbranch(builder.icmp_signed(">", blocks, number(1)), loop, after)

        builder.position_at_end(loop)
        count = builder.phi(number)
        state = [builder.phi(word) for _ in words]
        block = builder.add(address, builder.mul(count, number(BLOCK)))
        low, high = ([builder.call(multiply, [x, by, byte(i)]) for x in state] for i in (0, 0x11))
        found = [
            builder.xor(builder.xor(x, y), builder.load(at(block, i), align=1))
            for i, (x, y) in enumerate(zip(low, high, strict=True))
        ]
        following = builder.add(count, number(1))
        builder.cbranch(builder.icmp_signed("<", following, blocks), loop, after)

        builder.position_at_end(after)
        ends = [builder.phi(word) for _ in words]
        for merged, initial, value in (
            (count, number(1), following),
            *zip(state, words, found, strict=True),
        ):
            merged.add_incoming(initial, before)
            merged.add_incoming(value, loop)
        for i, (end, initial, value) in enumerate(zip(ends, words, found, strict=True)):
            end.add_incoming(initial, before)
            end.add_incoming(value, loop)
            builder.store(end, at(folded, i), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.uint64, types.int64), generate


@numba.njit(inline="always")
def _through_tables(address, size, rest):
    eight = numba.carray(pointer(address), (1,), np.uint64)
    for i in range(np.uint64(size) >> np.uint64(3)):
        x = eight[i] ^ np.uint64(rest)
        rest = np.uint32(0)
        for k in range(8):
            rest ^= TABLES[7 - k, (x >> np.uint64(8 * k)) & np.uint64(255)]
    single = numba.carray(pointer(address), (1,), np.uint8)
    for i in range(size & ~7, size):
        rest = TABLES[0, (rest ^ single[i]) & np.uint32(255)] ^ (rest >> np.uint32(8))
    return rest


if FOLDS:

    @numba.njit(inline="always")
    def _begin(address, size):
        """The checksum of the whole blocks, not yet inverted."""
        if size < BLOCK:
            return np.uint32(0xFFFFFFFF)
        folded = np.empty(BLOCK, np.uint8)
        _fold(address, size // BLOCK, np.uint64(0xFFFFFFFF), folded.ctypes.data)
        rest = _through_tables(folded.ctypes.data, BLOCK, np.uint32(0))
        folded[0] = 0  # an address does not keep an array: it is used until here
        return rest

    ALONE = BLOCK - 1
else:

    @numba.njit(inline="always")
    def _begin(_address, _size):
        return np.uint32(0xFFFFFFFF)

    ALONE = -1


@compiled("uint32(int64, int64)")
def crc32(address, size):
    """The CRC-32 of ``size`` bytes at ``address``."""
    begun = size & ~ALONE
    return ~_through_tables(address + begun, size - begun, _begin(address, size))
