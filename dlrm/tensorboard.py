"""TensorBoard's event files, written here: a few scalars need none of the packages that read them.

A file is a sequence of TFRecords, each an ``Event`` in protocol buffers' wire format (fields of
tensorflow's event.proto and summary.proto): 1 wall_time, 2 step, 3 file_version, 5 summary; a
summary's 1 value; a value's 1 tag, 2 simple_value.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from clicklog.errors import OutputError

_POLYNOMIAL = 0x82F63B78  # CRC-32C, reversed


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _table()


class EventFile:
    """An event file in a directory; TensorBoard shows it under the directory's name.

    Raises:
        OutputError: it cannot be written.
    """

    def __init__(self, directory: Path | str) -> None:
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self.path = Path(directory) / name
        self._append(_event(0, _bytes(3, b"brain.Event:2")))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add the value of each tag at ``step``."""
        summary = b"".join(
            _bytes(1, _bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
            for tag, value in values.items()
        )
        self._append(_event(step, _bytes(5, summary)))

    def _append(self, record: bytes) -> None:
        head = struct.pack("<Q", len(record))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab") as file:
                file.write(head + _masked_crc(head) + record + _masked_crc(record))
        except OSError as error:
            raise OutputError(
                f"{self.path}: cannot be written: {error.strerror or error}",
                "choose a writable --log_path",
            ) from error


def _event(step: int, what: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + what


def _bytes(field: int, value: bytes) -> bytes:
    """A field of length-delimited bytes."""
    return bytes([field << 3 | 2]) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _masked_crc(data: bytes) -> bytes:
    """CRC-32C as TFRecords store it: rotated and shifted, so that a record may hold such sums."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
