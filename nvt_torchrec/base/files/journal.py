"""The journal of a resumable job: its plan, and a record of each finished unit of work.

Layout of its directory::

    plan.json       the settings, inputs and versions that the units depend on
    units/*.json    the records, by name, of units that were finished at the same time

The files of a unit are made durable before its record is written, atomically. So, however the
process ends, a unit with a record is finished, and a unit without one is done again. Several
processes, also on several machines, may add records to one journal.
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

PLAN_FILE = "plan.json"
UNITS = "units"
#: The largest number of changes that an error lists.
_MAX_SHOWN_CHANGES = 8
#: The largest number of characters of a value that an error shows.
_MAX_SHOWN_CHARACTERS = 60
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
        """Replace the plan, keeping the records. Raises :class:`OutputError`."""
        write_json(self.directory / PLAN_FILE, plan)

    def read_plan(self, kind: type[T], remedy: str) -> T | None:
        """Read the plan of the job; None if the job has not begun.

        Args:
            kind: The type of the plan, see :func:`base.files.validation.parse`.
            remedy: What to do about a damaged plan.

        Raises:
            BadInputError: The plan is damaged.
        """
        file = self.directory / PLAN_FILE
        if not file.exists():
            return None
        return parse(kind, read_json(file, "the plan of an unfinished job", remedy), file, remedy)

    def add(self, records: dict[str, Any]) -> None:
        """Record finished units, by name, whose files are durable. Raises OutputError."""
        # File names begin with the time: if a unit was done again because its record was damaged,
        # the later record counts. Random letters avoid collisions between processes.
        write_json(self._units / f"{time.time_ns():020}.{secrets.token_hex(4)}.json", records)

    def read_finished(self, kind: type[T]) -> dict[str, T]:
        """Read the records of the finished units, by name.

        Args:
            kind: The type of a record; a unit whose record is damaged is left out.

        Raises:
            BadInputError: A record could not be read because of an error of the file system, so it
                is unknown whether its unit is finished.
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
        """Return the files of records, oldest first."""
        try:  # not a glob, which ignores directories that cannot be listed
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
        before: The recorded plan; see :func:`list_changes`.
        now: The current plan.
        path: The output of the job.
        remedy: What to do about changes.
    """
    changed = list_changes(before, now)
    if changed:
        listed = changed[:_MAX_SHOWN_CHANGES]
        if len(changed) > len(listed):
            listed.append(f"and {len(changed) - len(listed)} more")
        lines = "".join(f"\n  {line}" for line in listed)
        raise OutputError(f"{path}: was begun with other settings or inputs:{lines}", remedy)


def list_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the differences between two plans, one line each; those of inputs come last.

    Plans are nested dicts and lists. A line names a value by its keys without the first: for
    ``{"settings": {"seed": 0}}`` it is ``seed: 0 before, 1 now``.
    """
    kinds = sorted((before.keys() | now.keys()) - {"inputs"})
    lines: list[str] = []
    for kind in (*kinds, "inputs"):
        lines += _compare(before.get(kind, {}), now.get(kind, {}), (kind,))
    return lines


def _compare(before: Any, now: Any, path: tuple[str, ...]) -> Iterator[str]:
    """Yield a line for each change below a path; a missing value equals an empty dict or list."""
    old = _to_items(before)
    new = _to_items(now)
    if old is None or new is None:
        if before != now:
            yield f"{_name_path(path)}: {_shorten(before)} before, {_shorten(now)} now"
        return
    for key in sorted(old.keys() | new.keys()):
        below = (*path, key)
        if key not in new:
            yield f"{_name_path(below)}: no longer there"
        elif key not in old:
            yield f"{_name_path(below)}: new"
        else:
            yield from _compare(old[key], new[key], below)


def _name_path(path: tuple[str, ...]) -> str:
    """Format the path of a value for an error, without the first key."""
    kind, *rest = path
    return " ".join(rest) if kind == "inputs" else ".".join(rest or path)


def _to_items(value: Any) -> dict[str, Any] | None:
    """Return the items of a dict or a list, without empty ones; None for other values.

    The keys of a list are the names of its items, if all have names, as columns do; else indices.
    """
    if isinstance(value, list):
        have_names = all(isinstance(item, dict) and "name" in item for item in value)
        value = {item["name"] if have_names else i: item for i, item in enumerate(value)}
    if not isinstance(value, dict):
        return None
    return {str(key): item for key, item in value.items() if _to_items(item) != {}}


def _shorten(value: Any) -> str:
    """Format a value for an error; long values are shortened, except strings such as paths."""
    text = repr(value)
    if isinstance(value, str) or len(text) <= _MAX_SHOWN_CHARACTERS:
        return text
    return f"{text[: _MAX_SHOWN_CHARACTERS - 1]}…"
