"""The history of a directory of published bundles, and what it says is to be rolled back to.

An entry is written before the link is switched. If the command was ended between the two, the last
entry is of a switch that never happened: it is recognized by the link, and left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nvt_torchrec.base.files.artifact import Format
from nvt_torchrec.inference.model.bundle import bundle_name

HISTORY_FILE = "history.json"
_FORMAT = Format(
    "nvt-torchrec published bundles", 1, "the history of `python -m inference publish`"
)
_REMEDY = "copy the file again from a backup, or publish to a new directory"
#: By publish; by publish --rollback; a link that was switched by hand.
PUBLISH, ROLLBACK, _FOUND = "publish", "rollback", "found"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A switch.

    Attributes:
        action: What made it.
        bundle: The digest of the bundle that was served from then on.
        time: When, in UTC.
        generation: The generation of its workflow, if it has one.
        metrics: The metrics of the bundle on the sample, if there was one.
    """

    action: str
    bundle: str
    time: str
    generation: int | None = None
    metrics: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.action not in (PUBLISH, ROLLBACK, _FOUND):
            raise ValueError(f"action {self.action!r:.60}")
        if not (self.bundle.isalnum() and self.bundle.isascii()):  # it names a directory
            raise ValueError(f"bundle {self.bundle!r:.60}")

    @classmethod
    def now(cls, action: str, bundle: str, **details: Any) -> Entry:
        """Return an entry with the time of this call."""
        return cls(action, bundle, datetime.now(UTC).isoformat(timespec="seconds"), **details)

    @property
    def name(self) -> str:
        """The name of the bundle."""
        return bundle_name(self.bundle)


@dataclasses.dataclass(frozen=True)
class _History:
    entries: tuple[Entry, ...]


def read_history(root: Path) -> list[Entry]:
    """Read the history of a directory.

    Raises:
        BadInputError: It is missing or damaged.
        SchemaError: It has another version.
    """
    return list(_FORMAT.read(_History, root / HISTORY_FILE, _REMEDY).entries)


def write_history(root: Path, entries: Sequence[Entry]) -> None:
    """Write the history of a directory, durably. Raises OutputError."""
    content = {"entries": [dataclasses.asdict(entry) for entry in entries]}
    _FORMAT.write(root / HISTORY_FILE, content)


def served_in_turn(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries of the bundle that is served, last, and of those to roll back to."""
    turn: list[Entry] = []
    for entry in entries:
        if entry.action == ROLLBACK:
            del turn[-1:]
        else:
            turn.append(entry)
    return turn


def reconcile(entries: Sequence[Entry], current: str | None) -> list[Entry]:
    """Return the entries as far as they happened, given the name of the bundle that is served.

    Args:
        entries: The history.
        current: Where the link leads to; None if there is none.
    """

    def served(some: Sequence[Entry]) -> str | None:
        turn = served_in_turn(some)
        return turn[-1].name if turn else None

    if served(entries) == current:
        return list(entries)
    if entries and served(entries[:-1]) == current:  # ended before the link was switched
        return list(entries[:-1])
    if current is None:  # somebody removed the link
        return list(entries)
    known = {entry.name: entry for entry in entries}.get(current)
    bundle, generation = (known.bundle, known.generation) if known else (current, None)
    return [*entries, Entry.now(_FOUND, bundle, generation=generation)]
