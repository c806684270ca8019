"""Files that are whole or absent: write beside, fsync, rename."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from clicklog.errors import BadInputError, OutputError

#: Ending of files that are being written. Such a file is never read, and may always be deleted.
TEMPORARY = ".tmp"
#: Objects and lists in one another that JSON of this project may have; it has fewer than 20.
_MAX_DEPTH = 100


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable (POSIX: a rename is, once its directory is synced)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success fsync it and rename it into place.

    On an exception the temporary file is removed and whatever ``path`` held stays as it was.

    Raises:
        OutputError: the directory cannot be written, or the disk is full.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_directory(path.parent)
    except OSError as error:
        ours = {str(one) for one in (temporary, path, *path.parents)}
        if error.filename is not None and str(error.filename) not in ours:
            raise  # of another file, one that is read meanwhile for example
        raise OutputError(
            f"{path}: cannot be written: {error.strerror or error}",
            "free space or choose a writable place; finished files are kept",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def remove(path: Path | str) -> None:
    """Delete a file, durably, if it is there. Raises :class:`OutputError`."""
    path = Path(path)
    try:
        path.unlink()
        fsync_directory(path.parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be replaced: {error.strerror or error}", "choose a writable place"
        ) from error


def lock(marker: IO, directory: Path) -> None:
    """Lock an open marker file, so that two running programs keep apart in ``directory``.

    The lock ends when the file is closed or the process ends, however it ends.

    Raises:
        OutputError: another process holds it.
    """
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(
            f"{directory}: another run is writing here", "wait for it, or choose another directory"
        ) from None


def write_text(path: Path | str, text: str) -> None:
    """Write ``text`` (UTF-8) atomically. Raises :class:`OutputError`."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path | str, value: Any) -> None:
    """Write ``value`` as JSON, atomically. Raises :class:`OutputError`."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path | str, what: str) -> Any:
    """Read a JSON file that this project wrote; ``what`` names it in errors.

    Raises:
        BadInputError: it is missing or no JSON, an object has a key twice, or values are nested
            deeper than any that this project writes.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_object)
        _check_depth(value)
        return value
    except FileNotFoundError:
        raise BadInputError(f"{path}: no such file", f"is this the path of {what}?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadInputError(
            f"{path}: cannot be read as {what}: {error}", "copy it again, or make it again"
        ) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, of whose keys programs would otherwise take one value or another."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r:.60} is there twice")
        found[key] = value
    return found


def _check_depth(value: Any) -> None:
    """What reads the value later may call itself for each level."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            item
            for outer in level
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError(f"more than {_MAX_DEPTH} values in one another")
