"""Make written files durable in a separate thread, while the next ones are written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, Self, TypeVar

from nvt_torchrec.base.files.atomic import Written, publish

_Item = TypeVar("_Item")


class Syncer(Generic[_Item]):
    """A context manager that makes written units of work durable in a separate thread.

    Units that are added during a sync are synced together afterwards. When the context ends, all
    units are durable, or the error is raised.

    Args:
        note: A function that records units as finished. It is called in the syncing thread, with
            units whose files are durable and in place, in the order in which they were added.
        ahead: The number of units that may wait for the next sync; :meth:`add` blocks when there
            are more.
    """

    def __init__(self, note: Callable[[list[_Item]], object], ahead: int) -> None:
        self._note = note
        self._room = threading.Semaphore(ahead)
        self._waiting: SimpleQueue[tuple[Sequence[Written], _Item]] = SimpleQueue()
        self._thread = ThreadPoolExecutor(1, "sync")
        self._error: BaseException | None = None

    def add(self, written: Sequence[Written], unit: _Item) -> None:
        """Sync a unit's files (see :func:`base.files.atomic.deferred`), then record the unit.

        Raises:
            OutputError: The files of this unit, or of an earlier one, cannot be written.
        """
        self._room.acquire()
        self._waiting.put((written, unit))
        self._thread.submit(self._sync)
        self._raise()

    def wait(self) -> None:
        """Wait until all added units are durable; raises what :meth:`add` raises."""
        self._thread.submit(self._sync).result()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _sync(self) -> None:
        """Sync and record all units that wait; later calls for the same units find none."""
        files: list[Written] = []
        units: list[_Item] = []
        for _ in range(self._waiting.qsize()):  # later units wait for the next call
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
