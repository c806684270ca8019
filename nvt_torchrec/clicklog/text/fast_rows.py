"""Parse the usual row of a log in Criteo's format, eight bytes at a time.

Nearly all rows have integers of up to eight digits and categories of exactly eight hexadecimal
digits, or empty fields. :func:`parse_row` parses such a row without branches that depend on digits;
it gives up on any other row, which the tokenizer then parses byte by byte. It works on addresses,
because indexing a Numba array would check for a negative index at every byte.

Eight bytes in a 64-bit word (little-endian: the first byte is the lowest) are processed together
("SIMD within a register"): every multiplication merges pairs of adjacent numbers into numbers with
twice as many digits.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from nvt_torchrec.base.kernels import compiled

_TAB = 9
_NEWLINE = 10
_RETURN = 13
_MINUS = 45
#: The first byte of a word.
_BYTE = np.uint64(0xFF)
#: 1 in each byte of a word. Multiplied by a number, it puts the number into each byte.
_ONE_IN_EACH_BYTE = np.uint64(0x0101010101010101)
#: The lower half of each byte, which is the value of a decimal digit: "0" is 0x30, "9" is 0x39.
_LOW_HALVES = np.uint64(0x0F0F0F0F0F0F0F0F)
#: Every second byte, which has the numbers of two digits after the first step.
_EVERY_SECOND_BYTE = np.uint64(0x00FF00FF00FF00FF)
#: Every second pair of bytes, which has the numbers of four digits after the second step.
_EVERY_SECOND_PAIR = np.uint64(0x0000FFFF0000FFFF)


@compiled()
def count_newlines(buffer):
    """Count the newlines in a uint8 array, without allocating a mask as NumPy would."""
    lines = 0
    for i in range(len(buffer)):
        lines += buffer[i] == _NEWLINE
    return lines


def find_row_offsets(text: bytes | memoryview) -> np.ndarray:
    """Return the offset of each of ``n`` rows and the end of the last one, int32 [n + 1].

    Args:
        text: Whole rows, the last one with or without its newline.
    """
    buffer = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(buffer == _NEWLINE) + 1
    if len(buffer) and buffer[-1] != _NEWLINE:
        ends = np.append(ends, len(buffer))
    return np.concatenate([[0], ends]).astype(np.int32)


def find_max_row_bytes(dense_count: int, categorical_count: int) -> int:
    """Return the largest number of bytes that :func:`parse_row` reads from a row's beginning.

    These are a label and its tab; a sign, eight digits and a tab for each dense column; eight
    digits and a separator for each categorical column; ``\\r\\n``; and the rest of the last word.
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
    """Load the byte at an address."""

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
    """Count the zero bits below the lowest bit that is set; 64 if none is."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


@compiled()
def _count_digit_bits(word):
    """Return the number of bits, 8 per digit, of the decimal digits at the beginning of a word."""
    # A digit becomes its value, 0 to 9; every other byte becomes something above 9.
    values = word ^ np.uint64(0x3030303030303030)
    # Adding 0x76 to a byte above 9 sets its bit 7, which bytes of at least 0x80 have already. A
    # byte can only get a carry from an earlier byte above 9, after which bytes do not matter.
    above = ((values + np.uint64(0x7676767676767676)) | values) & np.uint64(0x8080808080808080)
    return trailing_zeros(above) & np.uint64(0x78)  # from bit 7 down to bit 0 of that byte


@compiled()
def _parse_decimal(word, bits):
    """Return the number in the first ``bits`` / 8 digits of the word; 0 without digits."""
    # Move the digits to the end of the word, with zeros before them, so that there are always
    # eight. The shift has two steps, because a shift by 64 (without digits) would be undefined.
    if bits < np.uint64(64):
        word = (word << np.uint64(8)) << (np.uint64(56) - bits)
    # Each multiplication adds the previous number times 10, 100 or 10,000 to a number.
    word &= _LOW_HALVES
    word = (word * np.uint64(10 << 8 | 1)) >> np.uint64(8)
    word = ((word & _EVERY_SECOND_BYTE) * np.uint64(100 << 16 | 1)) >> np.uint64(16)
    return ((word & _EVERY_SECOND_PAIR) * np.uint64(10_000 << 32 | 1)) >> np.uint64(32)


@compiled()
def _find_not_hexadecimal(word):
    """Return 0 if each byte of the word is a hexadecimal digit, and anything else if not."""
    # "0" to "9" are 0x30 to 0x39, "A" to "F" 0x41 to 0x46, "a" to "f" 0x61 to 0x66.
    low = word & _LOW_HALVES
    high = (word >> np.uint64(4)) & _LOW_HALVES
    letter = (high >> np.uint64(2)) & _ONE_IN_EACH_BYTE
    # The upper half must be 3 for digits, and 4 for letters or 6 for lower-case letters.
    three = np.uint64(3) * _ONE_IN_EACH_BYTE
    wrong = (high & ~(letter << np.uint64(1))) ^ (three + letter)
    # The lower half must be at most 9 for digits and 6 for letters; larger ones carry into bit 4.
    sixteen = np.uint64(16) * _ONE_IN_EACH_BYTE
    wrong |= (low + np.uint64(6) * _ONE_IN_EACH_BYTE + np.uint64(3) * letter) & sixteen
    # The lower half of a letter must be at least 1: 16 - 0 is the only difference with bit 4.
    return wrong | ((sixteen - low) & (letter << np.uint64(4)))


@compiled()
def _parse_hexadecimal(word):
    """Return the number in eight hexadecimal digits."""
    letter = (word >> np.uint64(6)) & _ONE_IN_EACH_BYTE
    # the lower half of "a" is 1, and its value is 10
    word = (word & _LOW_HALVES) + np.uint64(9) * letter
    # Join adjacent digits, then pairs, then groups of four; the first digit is the highest.
    word = ((word << np.uint64(4)) | (word >> np.uint64(8))) & _EVERY_SECOND_BYTE
    word = ((word << np.uint64(8)) | (word >> np.uint64(16))) & _EVERY_SECOND_PAIR
    return (word << np.uint64(16)) | (word >> np.uint64(32))


@compiled()
def parse_row(address, has_label, dense, dense_step, dense_count, ids, ids_step, ids_count):
    """Parse the row at an address, if it is a usual one.

    Args:
        address: Of the row's first byte; :func:`find_max_row_bytes` bytes from there can be read.
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
        word = load_word(address)
        label = (word & _BYTE) - np.uint64(48)
        if label > one or (word >> np.uint64(8)) & _BYTE != np.uint64(_TAB):
            return none, none, none, none
        address += np.uint64(2)
    for j in range(dense_count):
        word = load_word(address)
        # Signs and missing values are unpredictable for branches. So they are computed as numbers,
        # and the only branch is taken by unusual rows.
        negative = np.uint64((word & _BYTE) == np.uint64(_MINUS))
        word >>= negative << np.uint64(3)
        address += negative
        bits = _count_digit_bits(word)
        value = _parse_decimal(word, bits)
        address += bits >> np.uint64(3)
        missing = np.uint64(bits == none)
        if negative & missing or _load_byte(address) != np.uint8(_TAB):
            return none, none, none, none
        # two's complement: inverting all bits and adding 1 negates a number
        _store_word32(dense, (value ^ (none - negative)) + negative)
        dense_missing |= missing << np.uint64(j)
        dense += dense_step
        address += one
    last = ids_count - 1
    for j in range(ids_count):
        word = load_word(address)
        value = _parse_hexadecimal(word)
        if _find_not_hexadecimal(word) == none:
            address += np.uint64(8)
        else:
            value = none
            ids_missing |= one << np.uint64(j)
        _store_word32(ids, value)
        ids += ids_step
        byte = _load_byte(address)
        address += one
        if j < last:
            if byte != np.uint8(_TAB):
                return none, none, none, none
        elif byte == np.uint8(_RETURN) and _load_byte(address) == np.uint8(_NEWLINE):
            address += one
        elif byte != np.uint8(_NEWLINE):
            return none, none, none, none
    return address, label, dense_missing, ids_missing
