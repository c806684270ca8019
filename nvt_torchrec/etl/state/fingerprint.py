"""What identifies the content of an input file: its time of change, or a digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.readers.lines import read_bytes

_MIB, _SAMPLES = 1 << 20, 16


def fingerprint(day: DayFile) -> dict[str, Any]:
    """What identifies the content of a file: its size and time of change.

    Where a file system knows no time, it is a checksum of the first and last bytes.

    Raises:
        BadInputError: it cannot be read.
    """
    if day.modified is not None:
        return {"size": day.size, "modified": str(day.modified)}
    ends = {(0, min(day.size, _MIB)), (max(0, day.size - _MIB), day.size)}
    return {"size": day.size, "sha256 of its ends": _digest(day, sorted(ends))}


def content_digest(day: DayFile) -> str:
    """Return a digest by which copies of a file are known: of its size, and of 16 MiB in 16 places.

    All of a small file is read. To read all of a large one would take as long as a tenth of a run.

    Raises:
        BadInputError: It cannot be read.
    """
    if day.digest:
        return day.digest
    step = max(_MIB, -(-day.size // _SAMPLES))
    places = [(begin, min(begin + _MIB, day.size)) for begin in range(0, day.size, step)]
    return f"{day.size}-{_digest(day, places)}"


def _digest(day: DayFile, ranges: Iterable[tuple[int, int]]) -> str:
    digest = hashlib.sha256()
    for begin, end in ranges:
        digest.update(read_bytes(day.path, begin, end))
    return digest.hexdigest()
