"""Stores in parts: directories that are named after the number of their first entry.

A part is ``ROOT/FIRST``, where FIRST is decimal. The first part begins at 0, and each other part
begins where the previous one ends. Each added day adds parts; existing parts never change, so
outputs share them by hard links.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from nvt_torchrec.base.errors import BadInputError

Part = TypeVar("Part")
#: The largest number of names that an error lists.
_MAX_LISTED = 5


def open_parts(
    root: Path,
    what: str,
    remedy: str,
    open_part: Callable[[Path, int], tuple[Part, int]],
    entries: str,
) -> tuple[list[Part], int]:
    """Open all parts of a store, in order.

    Args:
        root: The directory of the parts.
        what: The name of the store in errors.
        remedy: What to do about a damaged store.
        open_part: Opens the directory of a part whose first entry has a given number; returns the
            part and its number of entries.
        entries: The name of the entries in errors, in the plural.

    Returns:
        The parts, and their total number of entries.

    Raises:
        BadInputError: There is no part, a part is missing, or the directory holds something else.
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
            f"{root}: expected directories of {entries} that are named after their first number, "
            f"from 0 on without a gap; found {listed} (complete up to {expected})",
            remedy,
        )
    return parts, expected


def link_parts(sources: Sequence[Path], target: Path, directory: str) -> None:
    """Hard-link the parts of stores into another directory, except for existing files.

    Args:
        sources: The directories to link from; those without ``directory`` are skipped.
        target: The directory to link into.
        directory: The directory of the stores, below each source and below the target.

    Raises:
        OSError: The target cannot be written, or its file system has no hard links.
    """
    for source in sources:
        for file in sorted((source / directory).rglob("*.npy")):
            link = target / file.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                os.link(file, link)
