"""Dynamic batching: requests that wait at the same time are scored in one batch.

A thread takes the waiting requests. While it computes, new ones arrive, so batches grow with the
load. Small requests and parts of larger ones begin batches in turn, so that one row need not wait
for thousands. Rows are encoded before they get here: one that is not valid has been refused, and
cannot fail a batch.

Waking a thread and the event loop again takes longer than a quick model takes for a row. So the
rows of small requests, which arrived in the same turn of the event loop, are scored by it, up to
``SMALL_ROWS`` of them; the thread scores what is more.

Each request names the model that scores it: that of the bundle which encoded it. A batch is of one
model. When another bundle is put in place, the old one scores the requests that it has encoded.
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

#: The largest number of rows that go through the model at once. Larger batches are not faster.
BATCH_ROWS = 1024
#: Requests of up to this many rows are small: even 16 of them make one batch.
SMALL_ROWS = 64

#: Takes the rows of requests, returns the probabilities of all of them, float32 [n, labels].
Model: TypeAlias = Callable[[Sequence[EncodedRows]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class RequestBatch:
    """A scored batch.

    Attributes:
        requests: The rows of each request, or of a part of one.
        probabilities: Float32 [rows, labels], for all rows.
        waited: Seconds that each request waited.
        seconds: Seconds that the model took.
    """

    requests: Sequence[EncodedRows]
    probabilities: np.ndarray
    waited: Sequence[float]
    seconds: float


@dataclasses.dataclass(frozen=True)
class _Waiting:
    """A request that waits, or a part of a large one, and the future of its probabilities."""

    model: Model
    rows: EncodedRows
    future: asyncio.Future[np.ndarray]
    since: float


class Batcher:
    """The queue in front of the models, and the thread that runs them.

    Args:
        observe: Called with every batch, in the model's thread or by the event loop.
        batch_rows: The largest number of rows in a batch.
    """

    def __init__(
        self, observe: Callable[[RequestBatch], None], batch_rows: int = BATCH_ROWS
    ) -> None:
        self._observe, self._batch_rows = observe, batch_rows
        self._changed = threading.Condition()
        self._small: deque[_Waiting] = deque()
        self._large: deque[_Waiting] = deque()
        self._large_first = False
        #: What arrived in this turn of the event loop. The loop alone uses it, without the lock.
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
        """Return the probabilities of rows, float32 [n, labels]; raise what the model raises.

        Args:
            model: The model.
            rows: The rows.
            at_once: Whether the event loop may score small requests.
        """
        if not len(rows):
            return model([rows])
        loop, now = asyncio.get_running_loop(), time.perf_counter()
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
        with self._changed:
            queue.extend(parts)
            self._rows += sum(len(part.rows) for part in parts)
            self._changed.notify()

    def _end_turn(self) -> None:
        """Score what arrived in this turn of the event loop, or let the thread do it."""
        parts, self._this_turn = self._this_turn, []
        if sum(len(part.rows) for part in parts) > SMALL_ROWS:
            self._put(self._small, parts)
            return
        for _, batch in itertools.groupby(parts, key=lambda part: part.model):
            waiting = [part for part in batch if not part.future.cancelled()]
            if waiting:
                _answer(waiting, self._score(waiting))

    def close(self) -> None:
        """Score the waiting requests, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        """Score batches until :meth:`close`, in the model's thread."""
        while (batch := self._take()) is not None:
            batch = [part for part in batch if not part.future.cancelled()]  # by a time limit
            if batch:
                answers = self._score(batch)
                loop = batch[0].future.get_loop()
                # One call for the whole batch: waking the loop takes time.
                loop.call_soon_threadsafe(_answer, batch, answers)
                del answers
            # While this thread waits for the next batch, it must not keep the model of this one: a
            # bundle that was replaced could not be let go.
            del batch

    def _take(self) -> list[_Waiting] | None:
        """Wait for the next batch; None after :meth:`close`."""
        with self._changed:
            while not (self._small or self._large):
                if self._closed:
                    return None
                self._changed.wait()
            queues = [self._small, self._large]
            # Both kinds begin batches in turn: neither waits for the other one's queue to end.
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
        """Return the probabilities of each part of a batch, or why there are none."""
        model = batch[0].model
        requests = [part.rows for part in batch]
        begin = time.perf_counter()
        answers: list[np.ndarray | Exception]
        try:
            probabilities = model(requests)
            done = time.perf_counter()
            waited = [begin - part.since for part in batch]
            self._observe(RequestBatch(requests, probabilities, waited, done - begin))
            answers = []
            first_row = 0
            for rows in requests:
                answers.append(probabilities[first_row : first_row + len(rows)])
                first_row += len(rows)
        except Exception as error:  # for example memory: the next batch may succeed
            traceback = not isinstance(error, ClickLogError)
            log.error("a batch could not be scored: %s", error, exc_info=traceback)
            answers = [error] * len(batch)
        return answers


def _answer(batch: list[_Waiting], answers: list[np.ndarray | Exception]) -> None:
    """Set the results of the futures, in the event loop."""
    for part, answer in zip(batch, answers, strict=True):
        if part.future.done():  # cancelled meanwhile
            continue
        if isinstance(answer, Exception):
            part.future.set_exception(answer)
        else:
            part.future.set_result(answer)
