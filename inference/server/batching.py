"""Dynamic batching: requests that wait at the same time go through the model together.

A thread takes what waits. While it computes, the next requests gather, so batches grow with the
load by themselves; ``delay`` lets the first request of a batch wait a little for company when the
model is idle. Only encoded rows get here: a bad row has been refused before and harms nobody else.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from clicklog.rows import Ragged
from workflows.compiled.workflow import EncodedRows, Ids

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Batch:
    """What went through the model at once.

    Attributes:
        requests: the rows of each request.
        probabilities: float32, of all rows.
        waited: seconds that each request waited.
        seconds: that the model took.
    """

    requests: Sequence[EncodedRows]
    probabilities: np.ndarray
    waited: Sequence[float]
    seconds: float


@dataclasses.dataclass(frozen=True)
class _Waiting:
    rows: EncodedRows
    future: asyncio.Future[np.ndarray]
    since: float


class Batcher:
    """The queue before a model, and the thread that empties it.

    Args:
        model: (dense, ids) of :class:`EncodedRows` → probabilities float32 [n].
        batch_rows: a batch takes no further request once it has so many rows.
        delay: seconds that a request may wait for others while the model is idle.
        observe: called with every batch, in the model's thread.
    """

    def __init__(
        self,
        model: Callable[[np.ndarray, np.ndarray | list[Ids]], np.ndarray],
        *,
        batch_rows: int,
        delay: float,
        observe: Callable[[Batch], None],
    ) -> None:
        self._model, self._observe = model, observe
        self._batch_rows, self._delay = batch_rows, delay
        self._changed = threading.Condition()
        self._queue: deque[_Waiting] = deque()
        self._rows = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def waiting_rows(self) -> int:
        """Rows in the queue."""
        return self._rows

    async def score(self, rows: EncodedRows) -> np.ndarray:
        """Probabilities float32 [n] of a request's rows; raises what the model raises."""
        if not len(rows):
            return np.empty(0, np.float32)
        future = asyncio.get_running_loop().create_future()
        with self._changed:
            self._queue.append(_Waiting(rows, future, time.perf_counter()))
            self._rows += len(rows)
            if len(self._queue) == 1 or self._rows >= self._batch_rows:
                self._changed.notify()
        return await future

    def hurry(self) -> None:
        """Wait for company no more: there will be none."""
        with self._changed:
            self._delay = 0.0
            self._changed.notify()

    def close(self) -> None:
        """Score what waits, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (batch := self._take()) is not None:
            # who asked has gone (a timeout): no work for nobody
            batch = [one for one in batch if not one.future.cancelled()]
            if batch:
                self._score(batch)

    def _take(self) -> list[_Waiting] | None:
        """The next batch; None at the end."""
        with self._changed:
            while not self._queue:
                if self._closed:
                    return None
                self._changed.wait()
            while self._rows < self._batch_rows and not self._closed:
                left = self._queue[0].since + self._delay - time.perf_counter()
                if left <= 0:
                    break
                self._changed.wait(left)
            batch = [self._queue.popleft()]
            rows = len(batch[0].rows)
            while self._queue and rows + len(self._queue[0].rows) <= self._batch_rows:
                batch.append(self._queue.popleft())
                rows += len(batch[-1].rows)
            self._rows -= rows
            return batch

    def _score(self, batch: list[_Waiting]) -> None:
        requests = [one.rows for one in batch]
        begin = time.perf_counter()
        answers: list[np.ndarray | Exception]
        try:
            probabilities = self._model(*join(requests))
            done = time.perf_counter()
            waited = [begin - one.since for one in batch]
            self._observe(Batch(requests, probabilities, waited, done - begin))
            answers = np.split(probabilities, np.cumsum([len(rows) for rows in requests])[:-1])
        except Exception as error:  # of this batch only, say memory: the next may do
            log.exception("a batch could not be scored")
            answers = [error] * len(batch)
        loop = batch[0].future.get_loop()
        loop.call_soon_threadsafe(_answer, batch, answers)  # once: waking the loop is not free


def _answer(batch: list[_Waiting], answers: list[np.ndarray | Exception]) -> None:
    for one, answer in zip(batch, answers, strict=True):
        if one.future.done():  # cancelled meanwhile
            continue
        if isinstance(answer, Exception):
            one.future.set_exception(answer)
        else:
            one.future.set_result(answer)


def join(requests: Sequence[EncodedRows]) -> tuple[np.ndarray, np.ndarray | list[Ids]]:
    """Dense float32 [columns, n] and ids of all requests' rows, one after the other."""
    if len(requests) == 1:
        return requests[0].dense, requests[0].ids
    dense = np.concatenate([rows.dense for rows in requests], axis=1)
    if isinstance(requests[0].ids, np.ndarray):
        return dense, np.concatenate([rows.ids for rows in requests], axis=1)
    columns = zip(*(rows.ids for rows in requests), strict=True)
    return dense, [_join_column(column) for column in columns]


def _join_column(parts: Sequence[Ids]) -> Ids:
    if not isinstance(parts[0], Ragged):
        return np.concatenate(parts)
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return Ragged(offsets, np.concatenate([part.values for part in parts]))
