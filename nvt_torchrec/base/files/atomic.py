"""Files and directories that are whole or absent: write beside, fsync, rename.

Syncing waits for the disk. Files written within :func:`together` are synced at once. Files written
within :func:`deferred` are synced when another thread calls :func:`publish`.
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

#: Ending of files and directories that are being written. They are never read, and may always be
#: deleted.
TEMPORARY = ".tmp"
#: The most bytes of a JSON file of this project. A manifest takes 200 for each file.
_MAX_JSON_BYTES = 64 << 20
#: How many files are synced at the same time, at most.
_MAX_SYNCS = 8

#: A temporary file, and the path it is for.
Written: TypeAlias = tuple[Path, Path]
_Item = TypeVar("_Item")

#: Files that this thread has written and not published yet; None: it publishes them at once.
_deferred: ContextVar[list[Written] | None] = ContextVar("deferred", default=None)


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

    On an exception the temporary file is removed, and ``path`` stays as it was. Within
    :func:`deferred` and :func:`together` of the same thread, fsync and renaming come later.

    Raises:
        OutputError: The directory cannot be written, or the disk is full.
    """
    path = Path(path)
    # A worker of a cluster may still write a file for a run that was interrupted, while another of
    # its threads writes it for the run that goes on: the thread is what makes the names differ.
    temporary = path.with_name(f".{path.name}.{threading.get_native_id()}{TEMPORARY}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
    except OSError as error:
        _delete(temporary)
        ours = {str(written) for written in (temporary, path, *path.parents)}
        if error.filename is not None and str(error.filename) not in ours:
            raise  # it is about another file, for example an input
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
    """Delete a temporary file if it is there; what cannot be deleted is left."""
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def output_errors(path: Path, remedy: str = "") -> Iterator[None]:
    """Turn an OSError into an :class:`OutputError` about ``path``.

    Args:
        path: What was written.
        remedy: What to do about it; by default, to free space or to write elsewhere.
    """
    try:
        yield
    except OSError as error:
        reason: object = error.strerror or error
        if isinstance(error, shutil.Error):  # of copytree: a list of (source, target, reason)
            reason = error.args[0][0][2]
        raise OutputError(
            f"{path}: cannot be written: {reason}",
            remedy or "free space or choose a writable place; finished files are kept",
        ) from error


@contextlib.contextmanager
def deferred() -> Iterator[list[Written]]:
    """Leave files that this thread writes atomically meanwhile under their temporary names.

    Yields the list of these files, for :func:`publish`, which any thread may call. On an exception
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
    """Sync files that this thread writes atomically meanwhile, all of them together at the end.

    Before the end no file is in place; after an exception none is. Raises :class:`OutputError`.
    """
    with deferred() as written:
        yield
    publish(written)


def publish(written: Sequence[Written]) -> None:
    """Make written files durable under their names: sync all, rename, sync their directories.

    Raises:
        OutputError: A file cannot be written; those that are not in place are removed.
    """
    try:
        # Before renaming: after a power failure a name may otherwise lead to an empty file.
        _sync_in_threads(_sync_file, written)
        for temporary, path in written:
            with output_errors(path):
                os.replace(temporary, path)
        # One file for each directory, which the error names if the directory cannot be synced.
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
        sync(items[0])  # a thread for it would take longer than the file
        return
    with ThreadPoolExecutor(min(_MAX_SYNCS, len(items)) or 1, "sync") as pool:
        list(pool.map(sync, items))


def remove(path: Path | str) -> None:
    """Delete a file, durably, if it is there. Raises :class:`OutputError`."""
    path = Path(path)
    with output_errors(path, "choose a writable place"), contextlib.suppress(FileNotFoundError):
        path.unlink()
        fsync_directory(path.parent)


def start_reading(path: Path | str, begin: int, end: int) -> None:
    """Have the system read bytes ``[begin, end)`` of a local file into memory, without waiting.

    This is a hint. Where it is not possible, for a remote file for example, nothing happens.
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
        marker: Is created if need be, and stays.
        directory: Is named in errors.

    Raises:
        OutputError: Another process holds the lock.
        OSError: The marker cannot be opened.
    """
    while True:
        with open(marker, "a+", encoding="utf-8") as file:
            lock(file, directory)
            # The process that held the lock before may have removed the marker since it was opened
            # here, and a third may have created and locked another one of that name.
            if marker.exists() and os.path.samestat(os.fstat(file.fileno()), marker.stat()):
                yield file
                return


def remove_temporary(directory: Path) -> None:
    """Delete what processes that were ended left half written below ``directory``.

    They are files of :func:`atomic_path` and directories of :func:`new_directory`.

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
        path: Of the file.
        what: Describes it in errors.
        remedy: What to do about a damaged file; by default, copying it or making it again.

    Raises:
        BadInputError: The file is missing, not a regular one, or not JSON; an object has a key
            twice; or it is larger than what this project writes.
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
    """Yield a temporary directory beside ``path``; on success sync its files and rename it.

    Raises:
        OutputError: ``path`` exists, or cannot be written; nothing is left of it.
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
            for resolve_inside in (temporary, *temporary.rglob("*")):
                if resolve_inside.is_dir():
                    fsync_directory(resolve_inside)
                else:
                    with open(resolve_inside, "rb") as opened:  # may be a link to a read-only file
                        os.fsync(opened.fileno())
            os.rename(temporary, path)
            fsync_directory(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
