"""Read the footers of parquet files without pyarrow's accessors, which can crash the process.

pyarrow decodes the metadata of a column chunk on access, in C++ functions that must not throw: an
unknown codec or malformed statistics terminate the process (pyarrow 25 and 26). So the metadata of
column chunks is read here, from the footer's bytes, which are in Thrift's compact protocol
(apache/parquet-format: parquet.thrift).
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import IO

import numba
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.remote import RemoteFile, open_file
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.base.parquet.compact_protocol import (
    BINARY,
    BYTE,
    DOUBLE,
    FALSE,
    I16,
    LIST,
    SET,
    STRUCT,
    TRUE,
)

#: The metadata of a column chunk is a row of int64 with these indices: the codec, the number of
#: values, the sizes decompressed and in the file, and the offsets of the first data page and of the
#: dictionary.
CODEC = 0
VALUES = 1
DECOMPRESSED = 2
BYTES = 3
DATA_PAGE = 4
DICTIONARY = 5
#: Stands for a number that the footer lacks.
MISSING = -(1 << 63)

#: The largest depth of nested structs and lists.
_MAX_DEPTH = 12
#: The bits of a field's number in a path, which joins the numbers of the fields from the root on;
#: lists do not add a number.
_PATH_BITS = 5


def join_path(*fields: int) -> int:
    """Return the path of a field, by the numbers of the fields from the root on."""
    number = 0
    for field in fields:
        number = (number << _PATH_BITS) + field
    return number


#: The path of ColumnMetaData.
_CHUNK = join_path(4, 1, 3)
#: The paths of its fields, in the order of CODEC to DICTIONARY.
_CHUNK_NUMBERS = np.array([join_path(4, 1, 3, field) for field in (4, 5, 6, 7, 9, 11)])

#: The number of bytes that are read from the end of a file at first; few footers are longer.
_TAIL_BYTES = 64 << 10


@numba.njit(inline="always")
def read_varint(memory, at, end):
    """Read an unsigned integer with 7 bits per byte.

    Returns:
        The integer, and its end; -1 if it does not end before ``end``.
    """
    value = np.uint64(0)
    shift = np.uint64(0)
    while at < end and shift < np.uint64(64):
        byte = np.uint64(memory[at])
        at += 1
        value |= (byte & np.uint64(127)) << shift
        shift += np.uint64(7)
        if byte < np.uint64(128):
            return value, at
    return value, -1


@numba.njit
def read_structs(memory, at, end, struct, wanted, numbers):
    """Read integers of the structs at one path of a Thrift object.

    The object may be damaged: every read is checked against ``end``, and the depth is limited.

    Args:
        memory: The bytes, uint8.
        at: The offset of the object.
        end: The end of the bytes.
        struct: The path of the structs.
        wanted: int64 [fields], the paths of integers in them.
        numbers: The result, int64 [structs, fields], MISSING for absent integers. Structs that
            exceed its length are only counted.

    Returns:
        The end of the object, -1 if it cannot be read; and the number of structs.
    """
    # The stack of structs and lists: the path of each, the number of its last field, the number of
    # elements left in a list (-1 for a struct), and the type of a list's elements.
    paths, fields, lefts, kinds = np.zeros((4, _MAX_DEPTH), np.int64)
    lefts[0] = -1
    depth = 0
    count = 0
    if struct == 0 and len(numbers):
        numbers[0] = MISSING
    while True:
        if lefts[depth] == 0:
            depth -= 1
            continue
        if at >= end:
            return -1, count
        kind = kinds[depth]
        here = paths[depth]
        if lefts[depth] > 0:
            lefts[depth] -= 1
            if kind in (TRUE, FALSE):  # a byte each, in lists
                kind = BYTE
        else:
            byte = np.int64(memory[at])
            at += 1
            if byte == 0:  # the struct ends
                count += here == struct
                depth -= 1
                if depth < 0:
                    return at, count
                continue
            kind = byte & 15
            fields[depth] += byte >> 4
            if byte < 16:  # no difference to the last field's number: the number itself follows
                value, at = read_varint(memory, at, end)
                if at < 0:
                    return -1, count
                fields[depth] = _signed(value)
            known = here >= 0 and 0 < fields[depth] < 1 << _PATH_BITS
            here = (here << _PATH_BITS) + fields[depth] if known else np.int64(-1)
        if kind in (STRUCT, LIST, SET):
            depth += 1
            if depth == _MAX_DEPTH:
                return -1, count
            paths[depth] = here
            fields[depth] = 0
            lefts[depth] = -1
            if kind != STRUCT:
                if at >= end:
                    return -1, count
                byte = np.int64(memory[at])
                at += 1
                kinds[depth] = byte & 15
                lefts[depth] = byte >> 4
                if byte >> 4 == 15:
                    value, at = read_varint(memory, at, end)
                    if at < 0 or value > np.uint64(end - at):
                        return -1, count
                    lefts[depth] = value
            elif here == struct and count < len(numbers):
                numbers[count] = MISSING
        elif kind in (BYTE, DOUBLE):
            at += 1 if kind == BYTE else 8
        elif I16 <= kind <= BINARY:
            value, at = read_varint(memory, at, end)
            if at < 0:
                return -1, count
            if kind == BINARY:
                if value > np.uint64(end - at):
                    return -1, count
                at += np.int64(value)
            elif count < len(numbers):
                for i in range(len(wanted)):
                    if wanted[i] == here:
                        numbers[count, i] = _signed(value)
        elif kind != TRUE and kind != FALSE:
            return -1, count


@numba.njit(inline="always")
def _signed(value):
    return np.int64(value >> np.uint64(1)) ^ -np.int64(value & np.uint64(1))


@compiled("int64(uint8[::1], int64, int64[::1], int64[:, ::1])", nogil=False)
def _read_footer(memory, struct, wanted, numbers):
    """Call :func:`read_structs`; return the number of structs, -1 if they cannot be read."""
    at, count = read_structs(memory, 0, len(memory), struct, wanted, numbers)
    return -1 if at < 0 else count


@dataclasses.dataclass(frozen=True)
class Footer:
    """The footer of a parquet file.

    Attributes:
        metadata: The metadata for pyarrow's readers. Its column chunks must not be accessed.
        schema: The columns.
        rows: int64 [row groups], the number of rows.
        chunks: int64 [row groups, leaves, 6], the metadata of column chunks; see :data:`CODEC`.
    """

    metadata: pq.FileMetaData
    schema: pa.Schema
    rows: np.ndarray
    chunks: np.ndarray


def read_footer(path: Path | str | RemoteFile, remedy: str = "") -> Footer:
    """Read the footer of a parquet file.

    Raises:
        BadInputError: The footer cannot be read; the error has the ``remedy``.
    """
    try:
        with open_file(path) as file:
            return parse_footer(file)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadInputError(f"{path}: not a whole parquet file: {error}", remedy) from error


def parse_footer(file: IO[bytes]) -> Footer:
    """Read the footer of an open parquet file.

    Raises:
        pa.ArrowInvalid, OSError: It cannot be read.
    """
    content = _footer_bytes(file)
    try:
        metadata = pq.read_metadata(pa.BufferReader(content))
        schema = metadata.schema.to_arrow_schema()
        schema.names  # noqa: B018  # raises UnicodeDecodeError
    except UnicodeDecodeError as error:
        raise pa.ArrowInvalid(f"the name of a column is not UTF-8: {error}") from None
    groups = metadata.num_row_groups
    leaves = metadata.num_columns
    memory = np.frombuffer(bytearray(content), np.uint8)[:-8]
    rows = np.array([metadata.row_group(i).num_rows for i in range(groups)], np.int64)
    chunks = np.empty((groups * leaves, len(_CHUNK_NUMBERS)), np.int64)
    count = _read_footer(memory, _CHUNK, _CHUNK_NUMBERS, chunks)
    if count != len(chunks) or (rows < 0).any():
        raise pa.ArrowInvalid("its footer is damaged")
    return Footer(metadata, schema, rows, chunks.reshape(groups, leaves, -1))


def compute_footer_digest(path: Path) -> str:
    """Return the SHA-256 of the footer of a parquet file; page checksums cover the rest.

    Raises:
        pa.ArrowInvalid, OSError: It cannot be read.
    """
    with open_file(path) as file:
        return hashlib.sha256(_footer_bytes(file)).hexdigest()


def _footer_bytes(file: IO[bytes]) -> bytes:
    """Return the footer with the eight bytes that follow it: its length and ``PAR1``.

    Raises:
        pa.ArrowInvalid, OSError: It cannot be read.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL_BYTES))
    tail = file.read()
    if len(tail) < 8 or tail[-4:] != b"PAR1":
        raise pa.ArrowInvalid("it does not end with a parquet footer")
    wanted = int.from_bytes(tail[-8:-4], "little") + 8
    if wanted > size:
        raise pa.ArrowInvalid(f"its footer should have {wanted} bytes, but the file has {size}")
    if wanted > len(tail):
        file.seek(size - wanted)
        tail = file.read()
    return tail[-wanted:]


def list_leaf_columns(schema: pa.Schema) -> list[str]:
    """Return the name of the column that each leaf belongs to.

    The paths of leaves are ambiguous, because a column may be called ``a.b``.
    """
    names: list[str] = []
    for field in schema:
        names += [field.name] * _count_leaves(field.type)
    return names


def _count_leaves(kind: pa.DataType) -> int:
    """Count the leaves of a type: 1 unless it is nested."""
    if not kind.num_fields:
        return 1
    return sum(_count_leaves(kind.field(i).type) for i in range(kind.num_fields))
