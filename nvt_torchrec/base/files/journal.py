"""The journal of a job that can be resumed: its plan, and a record of each finished unit of work.

Layout of its directory::

    plan.json       what the units depend on: settings, inputs, versions
    units/*.json    by name, the records of units that were finished at the same time

A unit's own files are made durable first, and its record after them, each written beside, synced
and renamed. So, however the process ends, a unit with a record is finished, and one without is done
again. Several processes, also on several machines, may add records to one journal.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from nvt_torchrec.base.errors import BadInputError, OutputError
from nvt_torchrec.base.files.atomic import output_errors, read_json, write_json
from nvt_torchrec.base.files.validation import parse

PLAN_FILE, UNITS = "plan.json", "units"
#: Of the changes that an error lists; of a list or dict.
_SHOWN_CHANGES, _SHOWN_LETTERS = 8, 60
T = TypeVar("T")


class Journal:
    """The journal in a directory, which need not exist yet."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._units = directory / UNITS

    def begin(self, plan: Any) -> None:
        """Discard all records, and write a plan, JSON-ready. Raises :class:`OutputError`."""
        with output_errors(self.directory), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._units)
        self.update(plan)

    def update(self, plan: Any) -> None:
        """Write another plan, for which the same records hold. Raises :class:`OutputError`."""
        write_json(self.directory / PLAN_FILE, plan)

    def plan(self, kind: type[T], remedy: str) -> T | None:
        """The plan that the job was begun with; None if it was not begun.

        Args:
            kind: What the plan must be, see :func:`base.files.validation.parse`.
            remedy: What to do about a damaged plan.

        Raises:
            BadInputError: It is damaged.
        """
        file = self.directory / PLAN_FILE
        if not file.exists():
            return None
        return parse(kind, read_json(file, "the plan of an unfinished job", remedy), file, remedy)

    def add(self, records: dict[str, Any]) -> None:
        """Record finished units by name, durably; their files are in place. Raises OutputError."""
        # Of a unit that was done again, because its first record is damaged, the later one counts.
        write_json(self._units / f"{time.time_ns():020}.{secrets.token_hex(4)}.json", records)

    def finished(self, kind: type[T]) -> dict[str, T]:
        """The records of the finished units, by name.

        Args:
            kind: What a record must be; a unit whose record is damaged is left out.

        Raises:
            BadInputError: A record cannot be read now, which says nothing about its unit.
        """
        finished: dict[str, T] = {}
        for file in self._files():
            try:
                records = parse(dict[str, Any], read_json(file, "records of finished units"), file)
            except BadInputError as error:
                if isinstance(error.__cause__, OSError):
                    raise
                continue
            for name, record in records.items():
                with contextlib.suppress(BadInputError):
                    finished[name] = parse(kind, record, file)
        return finished

    def _files(self) -> list[Path]:
        """The files of records, oldest first."""
        try:  # unlike a glob, which passes over what it may not list
            names = os.listdir(self._units)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise BadInputError(
                f"{self._units}: cannot be listed: {error}", "repair the storage or its permissions"
            ) from error
        return [self._units / name for name in sorted(names) if name.endswith(".json")]


def refuse_changes(before: dict[str, Any], now: dict[str, Any], path: Path, remedy: str) -> None:
    """Raise :class:`OutputError`, which lists the changes, unless two plans are the same.

    Args:
        before, now: The plans; see :func:`changes`.
        path: What the job writes.
        remedy: What to do about changes.
    """
    changed = changes(before, now)
    if changed:
        more = len(changed) - _SHOWN_CHANGES
        listed = changed[:_SHOWN_CHANGES] + ([f"and {more} more"] if more > 0 else [])
        lines = "".join(f"\n  {line}" for line in listed)
        raise OutputError(f"{path}: begun with other settings or inputs:{lines}", remedy)


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return what is different between two plans, a line for each difference, inputs last.

    Plans are nested dicts and lists. A line names a value by the keys below the first: of
    ``{"settings": {"seed": 0}}`` it says ``seed: 0 before, 1 now``.
    """
    kinds = sorted(before.keys() | now.keys(), key=lambda kind: (kind == "inputs", kind))
    return [
        line
        for kind in kinds
        for line in _changes(before.get(kind, {}), now.get(kind, {}), (kind,))
    ]


def _changes(before: Any, now: Any, path: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines on the values below a path; nothing is the same as an empty dict or list."""
    old, new = _items(before), _items(now)
    if old is None or new is None:
        if before != now:
            yield f"{_name(path)}: {_short(before)} before, {_short(now)} now"
        return
    for key in sorted(old.keys() | new.keys()):
        below = (*path, key)
        if key in old and key in new:
            yield from _changes(old[key], new[key], below)
        else:
            yield f"{_name(below)}: {'new' if key in new else 'no longer there'}"


def _name(path: tuple[str, ...]) -> str:
    kind, *rest = path
    return " ".join(rest) if kind == "inputs" else ".".join(rest or path)


def _items(value: Any) -> dict[str, Any] | None:
    """Return the items of a dict or a list, columns by their names; None of other values."""
    if isinstance(value, list):
        named = all(isinstance(item, dict) and "name" in item for item in value)
        value = {item["name"] if named else i: item for i, item in enumerate(value)}
    if not isinstance(value, dict):
        return None
    return {str(key): item for key, item in value.items() if _items(item) != {}}


def _short(value: Any) -> str:
    text = repr(value)
    is_short = isinstance(value, str) or len(text) <= _SHOWN_LETTERS  # a path is shown as a whole
    return text if is_short else f"{text[: _SHOWN_LETTERS - 1]}…"
