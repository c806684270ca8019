"""Find the days of a log: files ``day_0``, ``day_1`` … of a directory, local or remote."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection

from clicklog.errors import BadInputError, SettingsError
from clicklog.readers.lines import filesystem_of

_DAY_NAME = re.compile(r"day_(\d+)(\.tsv|\.txt|\.csv|\.parquet)?(\.(?:gz|bz2|xz|zst))?")
_COMPRESSED = re.compile(r".*\.(?:gz|bz2|xz|zst)")


@dataclasses.dataclass(frozen=True)
class DayFile:
    """One day of a log.

    Attributes:
        day: its number, from the name ``day_<number>``.
        path: where its bytes are.
        size: bytes of the file as it is stored.
        source: the file as the user knows it; ``path`` may be a decompressed copy.
        modified: seconds since 1970, or None if the file system does not report it.
        compressed: whether the file must be decompressed before it can be cut into blocks.
    """

    day: int
    path: str
    size: int
    source: str
    modified: float | None = None
    compressed: bool = False


def parse_days(text: str) -> set[int]:
    """``"0-3,7"`` → {0, 1, 2, 3, 7}. Raises :class:`SettingsError`."""
    days: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match:
            raise SettingsError(f"days {text!r}: cannot read {part!r}", "write for example 0-3,7")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise SettingsError(f"days {text!r}: {part!r} ends before it begins", "write 0-3")
        days.update(range(first, last + 1))
    return days


def find_days(
    input_path: str, days: Collection[int] | None = None, *, after: int | None = None
) -> list[DayFile]:
    """Return the days of a log in a directory, by number; one file is a log of one day.

    Args:
        input_path: a directory with ``day_0``, ``day_1.tsv``, ``day_2.csv.gz``, ``day_3.parquet``
            …; or a file of any name, which is day 0 unless its name says otherwise.
        days: the days to take; None: all, between which no day may be missing.
        after: of a directory, take only later days than this one, of which there may be none; the
            next day must be the first of them. None: any days.

    Raises:
        BadInputError: there is no such directory, it has no days, or a day is missing, empty or
            there twice.
    """
    filesystem, root = filesystem_of(str(input_path))
    if not filesystem.exists(root):
        raise BadInputError(f"{input_path}: no such directory", "pass the directory of day_0 …")
    one_file = filesystem.isfile(root)
    listed = [filesystem.info(root)] if one_file else filesystem.ls(root, detail=True)
    found: dict[int, DayFile] = {}
    for info in listed:
        name = info["name"].rstrip("/").rsplit("/", 1)[-1]
        match = _DAY_NAME.fullmatch(name)
        if info["type"] == "directory" or not (match or one_file):  # links are files too
            continue
        day = int(match[1]) if match else 0
        if days is not None and day not in days:
            continue
        if after is not None and day <= after and not one_file:
            continue
        path = filesystem.unstrip_protocol(info["name"]).removeprefix("file://")
        if day in found:
            raise BadInputError(
                f"day {day} is there twice: {found[day].path}, {path}", "remove one"
            )
        info = filesystem.info(info["name"])  # of the target, if it is a link
        if not info["size"]:
            raise BadInputError(f"{path}: empty file", f"fetch day {day} again, or leave it out")
        packed = _COMPRESSED.fullmatch(name) is not None
        found[day] = DayFile(day, path, info["size"], path, info.get("mtime"), packed)
    if not found and not days and after is not None:
        return []
    if not found and not days:
        raise BadInputError(
            f"{input_path}: no files day_0, day_1 … in it",
            "make a log with `python -m etl synthesize`, or see README.md for the real one",
        )
    first = min(found, default=0) if after is None else after + 1
    wanted = set(range(first, max(found) + 1)) if days is None else set(days)
    missing = sorted(wanted - found.keys())
    if missing:
        present = ",".join(map(str, sorted(found)))
        choose = f", or choose what is there with --days {present}" if found else ""
        raise BadInputError(
            f"{input_path}: missing {', '.join(f'day_{day}' for day in missing)}",
            f"add the files{choose}",
        )
    return [found[day] for day in sorted(found)]
