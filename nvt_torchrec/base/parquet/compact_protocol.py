"""Encode values in Thrift's compact protocol, which parquet's metadata uses.

:mod:`.footer` decodes them. A value is a pair of the number of its type and its bytes. See
apache/thrift: doc/specs/thrift-compact-protocol.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

#: The number of a type, and the bytes of a value.
Value: TypeAlias = tuple[int, bytes]

# The numbers of the types.
TRUE = 1
FALSE = 2
BYTE = 3
I16 = 4
I32 = 5
I64 = 6
DOUBLE = 7
BINARY = 8
LIST = 9
SET = 10
MAP = 11
STRUCT = 12
#: The length from which on a list stores its length in separate bytes after the header.
_LONG_LIST = 15

#: All single bytes: most numbers are small, and a lookup is faster than making a bytes object.
_BYTES = [bytes([number]) for number in range(256)]


def encode_varint(number: int) -> bytes:
    """Encode an unsigned integer in groups of 7 bits, the lowest first."""
    if number < 128:
        return _BYTES[number]
    groups = bytearray()
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def _zigzag(number: int) -> bytes:
    """Encode a signed integer: 0, -1, 1, -2 … as 0, 1, 2, 3 …, so that small ones are short."""
    return encode_varint(number << 1 if number >= 0 else ~(number << 1))


def i32(number: int) -> Value:
    """Encode a 32-bit integer."""
    return I32, _zigzag(number)


def i64(number: int) -> Value:
    """Encode a 64-bit integer."""
    return I64, _zigzag(number)


def boolean(flag: bool) -> Value:
    """Encode a boolean as the field of a struct."""
    return (TRUE if flag else FALSE), b""


def binary(content: bytes) -> Value:
    """Encode bytes, or a string in UTF-8."""
    return BINARY, encode_varint(len(content)) + content


def list_value(values: Sequence[Value]) -> Value:
    """Encode a list of values of one type; an empty list is encoded as one of structs."""
    kind = values[0][0] if values else STRUCT
    if len(values) < _LONG_LIST:
        header = bytes([len(values) << 4 | kind])
    else:
        header = bytes([_LONG_LIST << 4 | kind]) + encode_varint(len(values))
    return LIST, header + b"".join(content for _, content in values)


def struct(fields: Mapping[int, Value]) -> Value:
    """Encode a struct of fields by their numbers, which increase and are at most 15 apart."""
    parts = []
    previous = 0
    for number, (kind, content) in fields.items():
        parts.append(_BYTES[(number - previous) << 4 | kind])
        parts.append(content)
        previous = number
    return STRUCT, b"".join(parts) + b"\0"
