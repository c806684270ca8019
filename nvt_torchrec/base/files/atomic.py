"""Write files and directories atomically: to a temporary path next to them, fsync, rename.

Syncing waits for the disk. Files written within :func:`together` are synced together at the end.
Files written within :func:`deferred` are synced when any thread calls :func:`publish`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar

from nvt_torchrec.base.errors import BadInputError, OutputError
from nvt_torchrec.base.files.validation import parse_strict_json, read_regular

#: The ending of files and directories that are being written. They are never read, and may always
#: be deleted.
TEMPORARY = ".tmp"
#: The largest size of a JSON file of this project. A manifest has 200 bytes for each file.
_MAX_JSON_BYTES = 64 << 20
#: The largest number of files that are synced at the same time.
_MAX_SYNCS = 8

#: A temporary file, and the path that it will be renamed to.
Written: TypeAlias = tuple[Path, Path]
_Item = TypeVar("_Item")

#: The files that this thread has written but not published; None if it publishes them at once.
_deferred: ContextVar[list[Written] | None] = ContextVar("deferred", default=None)


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable: POSIX renames are, once their directory is synced."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def get_writer_id() -> int:
    """Return the id of this thread, which makes names of temporary files unique on a machine.

    A worker of a cluster may still write a file for a run that was interrupted, while another of
    its threads writes the same file for the run that continues.
    """
    return threading.get_native_id()


@contextlib.contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path next to ``path``; on success fsync it and rename it into place.

    On an exception the temporary file is removed, and ``path`` is unchanged. Within
    :func:`deferred` and :func:`together` of the same thread, fsync and rename come later.

    Raises:
        OutputError: The directory cannot be written, or the disk is full.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{get_writer_id()}{TEMPORARY}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
    except OSError as error:
        _delete(temporary)
        ours = {str(written) for written in (temporary, path, *path.parents)}
        if error.filename is not None and str(error.filename) not in ours:
            raise  # the error is about another file, for example an input
        with output_errors(path):
            raise
    except BaseException:
        _delete(temporary)
        raise
    waiting = _deferred.get()
    if waiting is None:
        publish([(temporary, path)])
    else:
        waiting.append((temporary, path))


def _delete(temporary: Path) -> None:
    """Delete a temporary file if it exists; ignore errors."""
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def output_errors(path: Path, remedy: str = "") -> Iterator[None]:
    """Turn an OSError into an :class:`OutputError` about ``path``.

    Args:
        path: The path that was written.
        remedy: What to do about it; by default, free space or write elsewhere.
    """
    try:
        yield
    except OSError as error:
        reason: object = error.strerror or error
        if isinstance(error, shutil.Error):  # copytree's list of (source, target, reason)
            reason = error.args[0][0][2]
        raise OutputError(
            f"{path}: cannot be written: {reason}",
            remedy or "free space or choose a writable place; finished files are kept",
        ) from error


@contextlib.contextmanager
def deferred() -> Iterator[list[Written]]:
    """Leave the files that this thread writes atomically under their temporary names.

    Yields the list of these files for :func:`publish`, which any thread may call. On an exception
    the files are removed.
    """
    with removed_on_error() as written:
        outer = _deferred.set(written)
        try:
            yield written
        finally:
            _deferred.reset(outer)


@contextlib.contextmanager
def removed_on_error() -> Iterator[list[Written]]:
    """Yield a list for deferred files of any thread; on an exception remove these files."""
    written: list[Written] = []
    try:
        yield written
    except BaseException:
        for temporary, _ in written:
            _delete(temporary)
        raise


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Sync the files that this thread writes atomically all together at the end.

    Until then, and after an exception, no file is in place. Raises :class:`OutputError`.
    """
    with deferred() as written:
        yield
    publish(written)


def publish(written: Sequence[Written]) -> None:
    """Make written files durable under their names: sync all, rename, sync their directories.

    Raises:
        OutputError: A file cannot be written; files that are not yet in place are removed.
    """
    try:
        # Sync before renaming: otherwise a name could lead to an empty file after a power failure.
        _sync_in_threads(_sync_file, written)
        for temporary, path in written:
            with output_errors(path):
                os.replace(temporary, path)
        # One file of each directory; errors name it if the directory cannot be synced.
        file_by_directory = {path.parent: path for _, path in written}
        _sync_in_threads(_sync_parent, file_by_directory.values())
    finally:
        for temporary, _ in written:
            _delete(temporary)


def _sync_file(written: Written) -> None:
    """Make the content of a temporary file durable."""
    temporary, path = written
    with output_errors(path), open(temporary, "rb+") as file:
        os.fsync(file.fileno())


def _sync_parent(path: Path) -> None:
    """Make the names in the directory of a file durable."""
    with output_errors(path):
        fsync_directory(path.parent)


def _sync_in_threads(sync: Callable[[_Item], object], items: Iterable[_Item]) -> None:
    """Sync items in threads: a file system writes its journal once for several of them."""
    items = list(items)
    if len(items) == 1:
        sync(items[0])  # starting a thread would take longer than syncing the file
        return
    with ThreadPoolExecutor(min(_MAX_SYNCS, len(items)) or 1, "sync") as pool:
        list(pool.map(sync, items))


def remove(path: Path | str) -> None:
    """Delete a file durably, if it exists. Raises :class:`OutputError`."""
    path = Path(path)
    with output_errors(path, "choose a writable place"), contextlib.suppress(FileNotFoundError):
        path.unlink()
        fsync_directory(path.parent)


def start_reading(path: Path | str, begin: int, end: int) -> None:
    """Ask the system to read the bytes ``[begin, end)`` of a local file into memory in advance.

    This is only a hint. If it is not possible, for example for a remote file, nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):  # only Linux and BSD have such hints
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def lock(marker: IO, directory: Path) -> None:
    """Lock an open marker file, so that no other program writes to ``directory``.

    The lock ends when the file is closed or the process ends, even by SIGKILL.

    Raises:
        OutputError: Another process holds it.
    """
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(
            f"{directory}: another run is writing here", "wait for it, or choose another directory"
        ) from None


@contextlib.contextmanager
def locked(marker: Path, directory: Path) -> Iterator[IO[str]]:
    """Yield the marker file, open and locked, so that no other program writes to ``directory``.

    Args:
        marker: The marker file; it is created if necessary, and not deleted.
        directory: The directory, for errors.

    Raises:
        OutputError: Another process holds the lock.
        OSError: The marker cannot be opened.
    """
    while True:
        with open(marker, "a+", encoding="utf-8") as file:
            lock(file, directory)
            # The previous holder of the lock may have removed the marker after it was opened here,
            # and a third process may have created and locked a new one with the same name.
            if marker.exists() and os.path.samestat(os.fstat(file.fileno()), marker.stat()):
                yield file
                return


def remove_temporary(directory: Path) -> None:
    """Delete the temporary files and directories below ``directory`` that killed processes left.

    They come from :func:`atomic_path` and :func:`new_directory`.

    Raises:
        OutputError: One cannot be deleted.
    """
    # List all names first: deleting files while their directory is listed may confuse the listing.
    for path in [*directory.rglob(f".*{TEMPORARY}")]:
        if path.is_dir() and not path.is_symlink():
            with output_errors(path, "make its directory writable"):
                shutil.rmtree(path)
        else:
            delete(path)


def delete(path: Path) -> None:
    """Delete a file if it exists. Raises :class:`OutputError`."""
    with output_errors(path, "make its directory writable"):
        path.unlink(missing_ok=True)


def write_text(path: Path | str, text: str) -> None:
    """Write ``text`` (UTF-8) atomically. Raises :class:`OutputError`."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path | str, value: Any) -> None:
    """Write ``value`` as JSON, atomically. Raises :class:`OutputError`."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path | str, what: str, remedy: str = "") -> Any:
    """Return the value of a JSON file that this project wrote.

    Args:
        path: The path of the file.
        what: A description of the file, for errors.
        remedy: What to do about a damaged file; by default, copy it again or make it again.

    Raises:
        BadInputError: The file is missing, not a regular one, not JSON, has a duplicate key, or is
            larger than any file that this project writes.
    """
    try:
        return parse_strict_json(read_regular(path, _MAX_JSON_BYTES).decode())
    except FileNotFoundError:
        raise BadInputError(
            f"{path}: no such file", f"check the path; it should lead to {what}"
        ) from None
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"{path}: cannot be read as {what}: {error}",
            remedy or "copy it again, or make it again",
        ) from error


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory next to ``path``; on success sync its files and rename it.

    Raises:
        OutputError: ``path`` exists, or cannot be written; then nothing is left behind.
    """
    path = path.absolute()
    if path.exists():
        raise OutputError(f"{path} exists", "choose another path, or remove it first")
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    try:
        with output_errors(path, "free space, or choose a writable place"):
            shutil.rmtree(temporary, ignore_errors=True)  # left by a run that was killed
            temporary.mkdir(parents=True)
            yield temporary
            for path_inside in (temporary, *temporary.rglob("*")):
                if path_inside.is_dir():
                    fsync_directory(path_inside)
                else:
                    with open(path_inside, "rb") as opened:  # may be a link to a read-only file
                        os.fsync(opened.fileno())
            os.rename(temporary, path)
            fsync_directory(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
