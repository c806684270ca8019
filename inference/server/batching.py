"""Dynamic batching: requests that wait at the same time are scored in one batch.

A thread takes the waiting requests. While it computes, new ones arrive, so batches grow with the
load. ``delay`` lets the first request of a batch wait for others while the model is idle. Clients
take turns by rows, so a request that needs several batches is scored in parts. Rows are encoded
before they get here: one that is not valid has been refused, and cannot fail a batch.

Each request names the model that scores it, that of the bundle which encoded it. A batch is of one
model: when another bundle is put in place, requests that were encoded before are scored by the old.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from nvt_torchrec.formats.rows import Jagged
from nvt_torchrec.inference.predictor import cut_ids
from nvt_torchrec.inference.server.fairness import FairQueue
from nvt_torchrec.workflows.compiled.workflow import EncodedRows, Ids

log = logging.getLogger(__name__)

#: Takes dense and ids of :class:`EncodedRows`, returns probabilities float32 [n].
Model: TypeAlias = Callable[[np.ndarray, np.ndarray | list[Ids]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Batch:
    """A scored batch.

    Attributes:
        model: What scored it.
        requests: The rows of each request, or of a part of one.
        probabilities: Float32, for all rows.
        waited: Seconds that each request waited.
        seconds: Seconds that the model took.
    """

    model: Model
    requests: Sequence[EncodedRows]
    probabilities: np.ndarray
    waited: Sequence[float]
    seconds: float


@dataclasses.dataclass(frozen=True)
class _Waiting:
    model: Model
    rows: EncodedRows
    future: asyncio.Future[np.ndarray]
    since: float


class Batcher:
    """The queue in front of the models, and the thread that runs them.

    Args:
        batch_rows: The largest number of rows in a batch.
        delay: Seconds that a request may wait for others while the model is idle.
        observe: Called with every batch, in the model's thread.
    """

    def __init__(self, *, batch_rows: int, delay: float, observe: Callable[[Batch], None]) -> None:
        self._observe = observe
        self._batch_rows, self._delay = batch_rows, delay
        self._changed = threading.Condition()
        self._queue: FairQueue[_Waiting] = FairQueue()
        self._rows = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def waiting_rows(self) -> int:
        """The number of rows in the queue."""
        return self._rows

    async def score(self, model: Model, rows: EncodedRows, client: str = "") -> np.ndarray:
        """Return the probabilities float32 [n] of a client's rows; raise what the model raises."""
        if not len(rows):
            return np.empty(0, np.float32)
        loop, now = asyncio.get_running_loop(), time.perf_counter()
        parts = [
            _Waiting(model, part, loop.create_future(), now)
            for part in split(rows, self._batch_rows)
        ]
        with self._changed:
            idle = not self._queue
            for part in parts:
                self._queue.put(part, client, len(part.rows))
            self._rows += len(rows)
            if idle or self._rows >= self._batch_rows:
                self._changed.notify()
        if len(parts) == 1:
            return await parts[0].future
        return np.concatenate(await asyncio.gather(*(part.future for part in parts)))

    def stop_delaying(self) -> None:
        """Score every request at once from now on: no others will come."""
        with self._changed:
            self._delay = 0.0
            self._changed.notify()

    def close(self) -> None:
        """Score the waiting requests, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (batch := self._take()) is not None:
            batch = [part for part in batch if not part.future.cancelled()]  # timed out
            if batch:
                self._score(batch)
            del batch  # while waiting for the next one, keep no model that is not served any more

    def _take(self) -> list[_Waiting] | None:
        """Wait for the next batch; None after :meth:`close`."""
        with self._changed:
            while not self._queue:
                if self._closed:
                    return None
                self._changed.wait()
            while self._rows < self._batch_rows and not self._closed:
                oldest = min(part.since for part in self._queue.items()) if self._delay else 0.0
                left = oldest + self._delay - time.perf_counter()
                if left <= 0:
                    break
                self._changed.wait(left)
            batch = [self._queue.pop()]
            rows = len(batch[0].rows)
            while self._queue and self._may_join(batch[0], rows, self._queue.first()):
                batch.append(self._queue.pop())
                rows += len(batch[-1].rows)
            self._rows -= rows
            return batch

    def _may_join(self, first: _Waiting, rows: int, part: _Waiting) -> bool:
        return rows + len(part.rows) <= self._batch_rows and part.model == first.model

    def _score(self, batch: list[_Waiting]) -> None:
        model = batch[0].model
        requests = [part.rows for part in batch]
        begin = time.perf_counter()
        answers: list[np.ndarray | Exception]
        try:
            probabilities = model(*join(requests))
            done = time.perf_counter()
            waited = [begin - part.since for part in batch]
            self._observe(Batch(model, requests, probabilities, waited, done - begin))
            answers = np.split(probabilities, np.cumsum([len(rows) for rows in requests])[:-1])
        except Exception as error:  # for example memory: the next batch may succeed
            log.exception("a batch could not be scored")
            answers = [error] * len(batch)
        loop = batch[0].future.get_loop()
        loop.call_soon_threadsafe(_answer, batch, answers)  # once: waking the loop takes time


def _answer(batch: list[_Waiting], answers: list[np.ndarray | Exception]) -> None:
    for part, answer in zip(batch, answers, strict=True):
        if part.future.done():  # cancelled meanwhile
            continue
        if isinstance(answer, Exception):
            part.future.set_exception(answer)
        else:
            part.future.set_result(answer)


def split(rows: EncodedRows, size: int) -> list[EncodedRows]:
    """Split rows into parts of up to ``size`` rows; the first keeps the counts of all."""
    if len(rows) <= size:
        return [rows]
    zeros = np.zeros_like(rows.null)
    return [
        EncodedRows(
            None,
            rows.dense[:, at : at + size],
            cut_ids(rows.ids, at, at + size),
            zeros if at else rows.null,
            zeros if at else rows.oov,
        )
        for at in range(0, len(rows), size)
    ]


def join(requests: Sequence[EncodedRows]) -> tuple[np.ndarray, np.ndarray | list[Ids]]:
    """Concatenate the rows of requests: dense float32 [columns, n] and ids."""
    if len(requests) == 1:
        return requests[0].dense, requests[0].ids
    dense = np.concatenate([rows.dense for rows in requests], axis=1)
    if isinstance(requests[0].ids, np.ndarray):
        return dense, np.concatenate([rows.ids for rows in requests], axis=1)
    columns = zip(*(rows.ids for rows in requests), strict=True)
    return dense, [_join_column(column) for column in columns]


def _join_column(parts: Sequence[Ids]) -> Ids:
    if not isinstance(parts[0], Jagged):
        return np.concatenate(parts)
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return Jagged(offsets, np.concatenate([part.values for part in parts]))
