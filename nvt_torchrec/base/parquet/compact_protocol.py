"""Thrift's compact protocol, in which parquet files describe themselves.

Its types, and how values are written; :mod:`.footer` reads them. A value is a pair: the number of
its type, and its bytes. See apache/thrift: doc/specs/thrift-compact-protocol.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

#: The number of a type, and the bytes of a value.
Value: TypeAlias = tuple[int, bytes]

#: The numbers of the types.
TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
#: Lists of this length on have it in bytes of its own, behind the header.
_LONG_LIST = 15

#: All single bytes, because most numbers are small, and to make a bytes object takes longer.
_BYTES = [bytes([number]) for number in range(256)]


def encode_varint(number: int) -> bytes:
    """Return an unsigned integer in groups of 7 bits, the lowest first."""
    if number < 128:
        return _BYTES[number]
    groups = bytearray()
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def _zigzag(number: int) -> bytes:
    """Return a signed integer: 0, -1, 1, -2 … as 0, 1, 2, 3 …, so that small ones are short."""
    return encode_varint(number << 1 if number >= 0 else ~(number << 1))


def i32(number: int) -> Value:
    """Return an integer of 32 bits."""
    return I32, _zigzag(number)


def i64(number: int) -> Value:
    """Return an integer of 64 bits."""
    return I64, _zigzag(number)


def boolean(flag: bool) -> Value:
    """Return a truth value as the field of a struct."""
    return (TRUE if flag else FALSE), b""


def binary(content: bytes) -> Value:
    """Return bytes, or a text in UTF-8."""
    return BINARY, encode_varint(len(content)) + content


def list_value(values: Sequence[Value]) -> Value:
    """Return a list of values of one type; an empty list is one of structs."""
    kind = values[0][0] if values else STRUCT
    if len(values) < _LONG_LIST:
        header = bytes([len(values) << 4 | kind])
    else:
        header = bytes([_LONG_LIST << 4 | kind]) + encode_varint(len(values))
    return LIST, header + b"".join(content for _, content in values)


def struct(fields: Mapping[int, Value]) -> Value:
    """Return a struct of fields by their numbers, which increase and are at most 15 apart."""
    parts = []
    previous = 0
    for number, (kind, content) in fields.items():
        parts.append(_BYTES[(number - previous) << 4 | kind])
        parts.append(content)
        previous = number
    return STRUCT, b"".join(parts) + b"\0"
