"""Dynamic batching: requests that wait at the same time are scored in one batch.

A thread takes the waiting requests. While it computes, new ones arrive, so batches grow with the
load. Batches begin alternately with small requests and with parts of larger ones, so that one row
need not wait for thousands. Rows are encoded before they are queued: invalid rows have been refused
by then and cannot fail a batch.

Waking a thread, and then the event loop, takes longer than a quick model takes for a row. So the
event loop itself scores the rows of small requests that arrived in the same turn, if they are at
most ``SMALL_ROWS``; otherwise the thread scores them.

Each request is scored by the model of the bundle that encoded it, and a batch has one model. When
another bundle is put in place, the old one still scores the requests that it has encoded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.workflows.compiled.encoded_rows import EncodedRows, split_rows

log = logging.getLogger(__name__)

#: The most rows that go through the model at once. Larger batches are not faster.
BATCH_ROWS = 1024
#: Requests of up to this many rows are small: 16 of them still fit into one batch.
SMALL_ROWS = 64

#: A function from the rows of several requests to their probabilities, float32 [rows, labels].
Model: TypeAlias = Callable[[Sequence[EncodedRows]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class RequestBatch:
    """A scored batch.

    Attributes:
        requests: The rows of each request, or of a part of a large request.
        probabilities: Float32 [rows, labels], of all rows.
        waited: The seconds that each request waited.
        seconds: The seconds that the model took.
    """

    requests: Sequence[EncodedRows]
    probabilities: np.ndarray
    waited: Sequence[float]
    seconds: float


@dataclasses.dataclass(frozen=True)
class _Waiting:
    """A waiting request, or a part of a large one, and the future of its probabilities."""

    model: Model
    rows: EncodedRows
    future: asyncio.Future[np.ndarray]
    since: float


class Batcher:
    """The queue in front of the models, and the thread that runs them.

    Args:
        observe: Called with every batch, in the model's thread or by the event loop.
        batch_rows: The most rows in a batch.
    """

    def __init__(
        self, observe: Callable[[RequestBatch], None], batch_rows: int = BATCH_ROWS
    ) -> None:
        self._observe = observe
        self._batch_rows = batch_rows
        self._changed = threading.Condition()
        self._small: deque[_Waiting] = deque()
        self._large: deque[_Waiting] = deque()
        self._large_first = False
        #: The small requests of this turn of the event loop. Only the loop uses it, so it needs no
        #: lock.
        self._this_turn: list[_Waiting] = []
        self._rows = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def waiting_rows(self) -> int:
        """The number of rows in the queue."""
        return self._rows

    async def score(self, model: Model, rows: EncodedRows, *, at_once: bool = False) -> np.ndarray:
        """Return the probabilities of rows, float32 [rows, labels]; raise any error of the model.

        Args:
            model: The model.
            rows: The rows of one request.
            at_once: True if the event loop may score small requests itself.
        """
        if not len(rows):
            return model([rows])
        loop = asyncio.get_running_loop()
        now = time.perf_counter()
        parts = []
        for part in split_rows(rows, self._batch_rows):
            parts.append(_Waiting(model, part, loop.create_future(), now))
        is_small = len(rows) <= SMALL_ROWS
        if is_small and at_once:
            if not self._this_turn:
                loop.call_soon(self._end_turn)
            self._this_turn += parts
        else:
            self._put(self._small if is_small else self._large, parts)
        if len(parts) == 1:
            return await parts[0].future
        return np.concatenate(await asyncio.gather(*(part.future for part in parts)))

    def _put(self, queue: deque[_Waiting], parts: Sequence[_Waiting]) -> None:
        """Append parts to one of the queues, and wake the model's thread."""
        with self._changed:
            queue.extend(parts)
            self._rows += sum(len(part.rows) for part in parts)
            self._changed.notify()

    def _end_turn(self) -> None:
        """Score the small requests of this turn of the event loop, or pass them to the thread."""
        parts = self._this_turn
        self._this_turn = []
        if sum(len(part.rows) for part in parts) > SMALL_ROWS:
            self._put(self._small, parts)
            return
        for _, batch in itertools.groupby(parts, key=lambda part: part.model):
            waiting = [part for part in batch if not part.future.cancelled()]
            if waiting:
                _set_results(waiting, self._score(waiting))

    def close(self) -> None:
        """Score the waiting requests, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        """Score batches until :meth:`close`, in the model's thread."""
        while (batch := self._take()) is not None:
            # A request that exceeded its time limit was cancelled.
            batch = [part for part in batch if not part.future.cancelled()]
            if batch:
                results = self._score(batch)
                loop = batch[0].future.get_loop()
                # Waking the loop takes time, so the whole batch is one call.
                loop.call_soon_threadsafe(_set_results, batch, results)
                del results
            # Drop this batch before waiting for the next one: it refers to its model, which would
            # keep a replaced bundle in memory.
            del batch

    def _take(self) -> list[_Waiting] | None:
        """Wait for the next batch and return it; return None after :meth:`close`."""
        with self._changed:
            while not (self._small or self._large):
                if self._closed:
                    return None
                self._changed.wait()
            queues = [self._small, self._large]
            # Batches begin with the two queues alternately, so that neither starves the other.
            if self._large_first:
                queues.reverse()
            self._large_first = not self._large_first
            batch: list[_Waiting] = []
            rows = 0
            for queue in queues:
                while queue and (not batch or queue[0].model == batch[0].model):
                    if rows + len(queue[0].rows) > self._batch_rows:
                        break
                    batch.append(queue.popleft())
                    rows += len(batch[-1].rows)
            self._rows -= rows
            return batch

    def _score(self, batch: list[_Waiting]) -> list[np.ndarray | Exception]:
        """Return the probabilities of each part of a batch, or the error for each of them."""
        model = batch[0].model
        requests = [part.rows for part in batch]
        begin = time.perf_counter()
        results: list[np.ndarray | Exception]
        try:
            probabilities = model(requests)
            done = time.perf_counter()
            waited = [begin - part.since for part in batch]
            self._observe(RequestBatch(requests, probabilities, waited, done - begin))
            results = []
            first_row = 0
            for rows in requests:
                results.append(probabilities[first_row : first_row + len(rows)])
                first_row += len(rows)
        except Exception as error:  # such as MemoryError: the next batch may succeed
            is_unexpected = not isinstance(error, ClickLogError)
            log.error("a batch could not be scored: %s", error, exc_info=is_unexpected)
            results = [error] * len(batch)
        return results


def _set_results(batch: list[_Waiting], results: list[np.ndarray | Exception]) -> None:
    """Set the results of the futures, in the event loop."""
    for part, result in zip(batch, results, strict=True):
        if part.future.done():  # the request was cancelled while it was scored
            continue
        if isinstance(result, Exception):
            part.future.set_exception(result)
        else:
            part.future.set_result(result)
