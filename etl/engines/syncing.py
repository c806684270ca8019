"""A thread that waits for the disk, so that those which compute need not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, Self, TypeVar

from clicklog.files.atomic import Written, publish

_Unit = TypeVar("_Unit")


class Syncer(Generic[_Unit]):
    """Makes written units of work durable in a thread of its own, while others are worked on.

    Units that are added while it waits for the disk are synced together. Use it as a context: at
    its end all that was added is durable, or the error is raised.

    Args:
        note: called with units whose files are durable and in place, to note that they are done;
            in the syncing thread, in the order in which they were added.
        ahead: how many units may wait beside those that are being synced; who adds another one
            waits too.
    """

    def __init__(self, note: Callable[[list[_Unit]], object], ahead: int) -> None:
        self._note = note
        self._room = threading.Semaphore(ahead)
        self._waiting: SimpleQueue[tuple[Sequence[Written], _Unit]] = SimpleQueue()
        self._thread = ThreadPoolExecutor(1, "sync")
        self._error: BaseException | None = None

    def add(self, written: Sequence[Written], unit: _Unit) -> None:
        """Sync a unit's files (see :func:`clicklog.files.atomic.deferred`), then note the unit.

        Raises:
            OutputError: these files, or those of a unit before, cannot be written.
        """
        self._room.acquire()
        self._waiting.put((written, unit))
        self._thread.submit(self._sync)
        self._raise()

    def wait(self) -> None:
        """Wait until all that was added is durable. Raises as :meth:`add`."""
        self._thread.submit(self._sync).result()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _sync(self) -> None:
        """Sync and note whatever waits; later calls for the same units find nothing."""
        files: list[Written] = []
        units: list[_Unit] = []
        for _ in range(self._waiting.qsize()):  # not those that come as soon as there is room
            written, unit = self._waiting.get()
            self._room.release()
            files += written
            units.append(unit)
        try:
            if units:
                publish(files)
                self._note(units)
        except BaseException as error:
            self._error = self._error or error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType
    ) -> None:
        self._thread.shutdown()
        if error is None:
            self._raise()
