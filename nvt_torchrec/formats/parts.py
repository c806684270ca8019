"""Stores in parts: directories by the number of their first entry, to which days add others.

``ROOT/FIRST``, where FIRST is decimal: the first begins at 0, each other one where the one before
ends. No part ever changes, so that outputs share them by hard links.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from nvt_torchrec.base.errors import BadInputError

Part = TypeVar("Part")
#: How many names an error lists.
_MAX_LISTED = 5


def open_parts(
    root: Path,
    what: str,
    remedy: str,
    open_part: Callable[[Path, int], tuple[Part, int]],
    entries: str,
) -> tuple[list[Part], int]:
    """Open all parts of a store, in their order.

    Args:
        root: The directory of the parts.
        what: What it is, in errors.
        remedy: What to do about a damaged one.
        open_part: Opens a directory, whose first entry has a number; returns the part, and how many
            entries it has.
        entries: What the entries are called in errors.

    Returns:
        The parts, and how many entries they have together.

    Raises:
        BadInputError: There is none, there is a gap, or something else lies there.
    """
    try:
        names = [path.name for path in root.iterdir() if path.name[0] != "."]
    except OSError as error:
        raise BadInputError(f"{root}: {what}: {error.strerror}", remedy) from error
    parts = []
    expected = 0  # the first entry of the next directory
    for first in sorted(int(name) for name in names if name.isdecimal() and name.isascii()):
        if first != expected:
            break
        part, count = open_part(root / str(first), first)
        parts.append(part)
        expected += count
    if len(parts) != len(names) or not names:
        listed = ", ".join(sorted(names)[:_MAX_LISTED]) or "nothing"
        raise BadInputError(
            f"{root}: it holds {listed}, where directories of {entries} begin at 0 and follow each "
            f"other without a gap (here at {expected})",
            remedy,
        )
    return parts, expected


def link_parts(sources: Sequence[Path], target: Path, directory: str) -> None:
    """Link the parts of stores into another directory; those that are there stay.

    Args:
        sources: Directories that have ``directory``, or not.
        target: The directory that gets it.
        directory: Of the stores, below each of them.

    Raises:
        OSError: It cannot be written, or its file system has no hard links.
    """
    for source in sources:
        for file in sorted((source / directory).rglob("*.npy")):
            link = target / file.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                os.link(file, link)
