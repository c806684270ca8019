"""Parse the usual row of a log in Criteo's format, eight bytes at a time.

Nearly all rows have integers of up to eight digits and categories of exactly eight hexadecimal
digits, or empty fields. :func:`parse_row` parses such a row without branches that depend on digits;
it gives up on any other row, which the tokenizer then parses byte by byte. It works on addresses,
because indexing a Numba array checks for a negative index at every byte.

Eight bytes in a 64-bit word (little-endian: the first byte is the lowest) are processed together
("SIMD within a register"): every multiplication merges neighbouring numbers into one of twice as
many digits.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from nvt_torchrec.base.kernels import compiled

_TAB, _NEWLINE, _RETURN, _MINUS = 9, 10, 13, 45
_BYTE = np.uint64(0xFF)
_EACH = np.uint64(0x0101010101010101)
_LOW_DIGITS = np.uint64(0x0F0F0F0F0F0F0F0F)
_PAIRS = np.uint64(0x00FF00FF00FF00FF)
_FOURS = np.uint64(0x0000FFFF0000FFFF)


@compiled()
def count_newlines(buffer):
    """Count the newlines in a uint8 array, without the array of booleans that NumPy would make."""
    lines = 0
    for i in range(len(buffer)):
        lines += buffer[i] == _NEWLINE
    return lines


def row_begins(text: bytes | memoryview) -> np.ndarray:
    """Return int32 [n + 1], where each of the rows begins and the last one ends.

    Args:
        text: Whole rows, the last one with or without its newline.
    """
    buffer = np.frombuffer(text, np.uint8)
    begins = np.flatnonzero(buffer == _NEWLINE) + 1
    end = [len(buffer)] if len(buffer) and buffer[-1] != _NEWLINE else []
    return np.concatenate([[0], begins, end]).astype(np.int32)


def longest_row(dense_count: int, categorical_count: int) -> int:
    """Return how many bytes of the buffer, from the begin of a row, :func:`parse_row` may read.

    A label and its tab, a sign, eight digits and a tab, eight digits and a separator; at the end
    ``\\r\\n``, and the rest of the last word.
    """
    return 2 + 10 * dense_count + 9 * categorical_count + 2 + 8


@intrinsic
def load_word(typing, address):
    """Load the eight bytes at an address, which need not be aligned."""

    def generate(context, builder, signature, arguments):
        word = builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()))
        word.align = 1
        return word

    return types.uint64(types.uint64), generate


@intrinsic
def _load_byte(typing, address):
    def generate(context, builder, signature, arguments):
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(8).as_pointer()))

    return types.uint8(types.uint64), generate


@intrinsic
def _store_word32(typing, address, value):
    """Write the lower 32 bits of ``value`` at an address."""

    def generate(context, builder, signature, arguments):
        low = builder.trunc(arguments[1], ir.IntType(32))
        builder.store(low, builder.inttoptr(arguments[0], ir.IntType(32).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


@intrinsic
def trailing_zeros(typing, word):
    """64 for 0."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


@compiled()
def _digit_bits(word):
    """Return 8 × the number of decimal digits at the beginning of the word."""
    other = word ^ np.uint64(0x3030303030303030)
    # bit 7 of each byte above 9; a byte receives a carry only from a byte that is above 9 itself
    above = ((other + np.uint64(0x7676767676767676)) | other) & np.uint64(0x8080808080808080)
    return trailing_zeros(above) & np.uint64(0x78)


@compiled()
def _decimal(word, bits):
    """Return the number in the first ``bits`` / 8 digits; 0 without digits."""
    if bits < np.uint64(64):  # move the digits to the end of the word, with zeros before them
        word = (word << np.uint64(8)) << (np.uint64(56) - bits)
    word &= _LOW_DIGITS
    word = (word * np.uint64(10 << 8 | 1)) >> np.uint64(8)
    word = ((word & _PAIRS) * np.uint64(100 << 16 | 1)) >> np.uint64(16)
    return ((word & _FOURS) * np.uint64(10_000 << 32 | 1)) >> np.uint64(32)


@compiled()
def _not_hexadecimal(word):
    """Return 0 if each byte is a hexadecimal digit."""
    low = word & _LOW_DIGITS
    high = (word >> np.uint64(4)) & _LOW_DIGITS
    letter = (high >> np.uint64(2)) & _EACH
    # digits have 3 in front, letters 4 or 6
    wrong = (high & ~(letter << np.uint64(1))) ^ (np.uint64(3) * _EACH + letter)
    # digits go up to 9, letters from 1 to 6: bit 4 of each byte where they do not
    wrong |= (low + np.uint64(6) * _EACH + np.uint64(3) * letter) & (np.uint64(16) * _EACH)
    return wrong | ((np.uint64(16) * _EACH - low) & (letter << np.uint64(4)))


@compiled()
def _hexadecimal(word):
    """Return the number in eight hexadecimal digits."""
    letter = (word >> np.uint64(6)) & _EACH
    word = (word & _LOW_DIGITS) + np.uint64(9) * letter
    word = ((word << np.uint64(4)) | (word >> np.uint64(8))) & _PAIRS
    word = ((word << np.uint64(8)) | (word >> np.uint64(16))) & _FOURS
    return (word << np.uint64(16)) | (word >> np.uint64(32))


@compiled()
def parse_row(at, has_label, dense, dense_step, dense_count, ids, ids_step, ids_count):
    """Parse the row at an address, if it is a usual one.

    Args:
        at: Address of the row's first byte; :func:`longest_row` bytes from there can be read.
        has_label: Whether it begins with the label.
        dense: Address of the row's first dense value, int32.
        dense_step: Bytes from one dense column to the next.
        dense_count: Number of dense columns.
        ids: Address of the row's first categorical value, uint32.
        ids_step: Bytes from one categorical column to the next.
        ids_count: Number of categorical columns, at least 1.

    Returns:
        Address of the next row, the label, and bits of the missing values, dense and categorical;
        all uint64. The address is 0 if this is not a usual row; then what was written is invalid.
    """
    none = np.uint64(0)
    one = np.uint64(1)
    label = none
    dense_missing = none
    ids_missing = none
    if has_label:
        word = load_word(at)
        label = (word & _BYTE) - np.uint64(48)
        if label > one or (word >> np.uint64(8)) & _BYTE != np.uint64(_TAB):
            return none, none, none, none
        at += np.uint64(2)
    for j in range(dense_count):
        word = load_word(at)
        negative = np.uint64((word & _BYTE) == np.uint64(_MINUS))
        word >>= negative << np.uint64(3)
        at += negative
        bits = _digit_bits(word)
        value = _decimal(word, bits)
        at += bits >> np.uint64(3)
        absent = np.uint64(bits == none)
        if negative & absent or _load_byte(at) != np.uint8(_TAB):
            return none, none, none, none
        _store_word32(dense, (value ^ (none - negative)) + negative)
        dense_missing |= absent << np.uint64(j)
        dense += dense_step
        at += one
    last = ids_count - 1
    for j in range(ids_count):
        word = load_word(at)
        value = _hexadecimal(word)
        if _not_hexadecimal(word) == none:
            at += np.uint64(8)
        else:
            value = none
            ids_missing |= one << np.uint64(j)
        _store_word32(ids, value)
        ids += ids_step
        byte = _load_byte(at)
        at += one
        if j < last:
            if byte != np.uint8(_TAB):
                return none, none, none, none
        elif byte == np.uint8(_RETURN) and _load_byte(at) == np.uint8(_NEWLINE):
            at += one
        elif byte != np.uint8(_NEWLINE):
            return none, none, none, none
    return at, label, dense_missing, ids_missing
