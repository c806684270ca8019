"""One epoch of one rank: a background thread builds blocks, and batches are views of them."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from nvt_torchrec.base.device import device_errors, difference, use_device
from nvt_torchrec.nvt_loader import plan as planning
from nvt_torchrec.nvt_loader.cpu.block_builder import CpuBuilder
from nvt_torchrec.nvt_loader.cpu.blocks import BatchFactory, LoaderBatch, LoaderBlock, ShardRows
from nvt_torchrec.nvt_loader.cpu.history_lists import add_events
from nvt_torchrec.nvt_loader.memory import PREFETCH_BLOCKS, READ_AHEAD, Budget
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset
from nvt_torchrec.nvt_loader.parquet.row_chunks import Decoder, ShardReader
from nvt_torchrec.nvt_loader.plan import Plan

_REMEDY = (
    "let the CPU decode: cpu_decoding=True, --cpu_decoding of train_torchrec.py; or give libcudf "
    "less memory by loader_memory, --loader_memory"
)


@dataclasses.dataclass
class Position:
    """How far an epoch has got.

    Attributes:
        epoch: The epoch, counted from 0.
        step: Steps of the epoch drawn so far, those before a resume included.
        first: The step at which this iterator began.
        rows: Rows of this rank that this iterator has delivered.
    """

    epoch: int
    step: int = 0
    first: int = 0
    rows: int = 0


@dataclasses.dataclass(frozen=True)
class Order:
    """What determines the order of the rows besides the plan.

    Attributes:
        shuffle: One of :data:`nvt_loader.plan.SHUFFLES`.
        seed: The seed of the permutations.
        rank, world_size: The rank that gets the batches, and the number of ranks.
    """

    shuffle: str
    seed: int
    rank: int
    world_size: int


def produce_blocks(
    dataset: Dataset,
    plan: Plan,
    builder: CpuBuilder,
    position: Position,
    order: Order,
    budget: Budget,
    fall_back: Callable[[str], object],
) -> Iterator[tuple[slice, LoaderBlock]]:
    """Build the blocks of one rank from step ``position.first`` to the epoch's end.

    Yields:
        The steps of the block to draw (not those before ``position.first``), and the block.
    """
    if position.first >= plan.steps:
        return
    epoch = _RankEpoch(dataset, plan, position, order, budget)
    if builder.host is None:
        blocks = epoch.blocks(builder, epoch.readers(builder))
        yield from add_events(dataset, blocks, builder.tensors) if dataset.stores else blocks
    else:
        yield from _compared(epoch, builder, builder.host, fall_back)


def _compared(
    epoch: _RankEpoch, builder: CpuBuilder, host: CpuBuilder, fall_back: Callable[[str], object]
) -> Iterator[tuple[slice, LoaderBlock]]:
    """Let the host make the first block, and the device make it once more, to compare them.

    If they differ, ``fall_back`` is called with how, and the host makes the other blocks, too.
    """
    on_host = epoch.blocks(host, epoch.readers(host))
    readers = epoch.readers(builder)
    epoch.read_ahead(builder, readers)
    on_device = epoch.blocks(builder, readers)
    first = next(on_host)
    yield first
    why = difference(functools.partial(_next_arrays, on_device), _next_arrays(iter([first])))
    if why:
        fall_back(why)
    rest = on_host if why else on_device
    del first, readers, on_host, on_device  # the other one's row groups are freed
    yield from rest


def _next_arrays(blocks: Iterator[tuple[slice, LoaderBlock]]) -> dict[str, np.ndarray]:
    """Return the arrays of the next block."""
    _, block = next(blocks)
    return {name: tensor.cpu().numpy() for name, tensor in block.tensors.items()}


class _RankEpoch:
    """The rows of an epoch that one rank gets: where they are read, in which order, in blocks."""

    def __init__(
        self, dataset: Dataset, plan: Plan, position: Position, order: Order, budget: Budget
    ) -> None:
        self._dataset, self._plan, self._order, self._budget = dataset, plan, order, budget
        self._epoch, self._first = position.epoch, position.first
        self._batch = plan.global_batch // order.world_size
        where = {"shuffle": order.shuffle != "none", "seed": order.seed, "epoch": position.epoch}
        rows = dataset.rows
        self._groups = planning.epoch_order(len(rows), **where)  # type: ignore[arg-type]
        self._starts = planning.stream_starts(rows, self._groups)
        remainder = planning.find_remainder(plan, **where)  # type: ignore[arg-type]
        self._assigned = planning.assign_rows(plan, self._starts, remainder)
        self._spans = plan.spans(order.rank, order.world_size)
        self._extents = list(_extents(plan, order.shuffle, self._first, self._batch, budget))

    def readers(self, builder: CpuBuilder) -> list[ShardReader]:
        """Return readers of this rank's virtual shards, from the first block on."""
        begin = self._extents[0][1] if self._extents else self._plan.full_steps
        return [
            self._read(self._assigned.shard_ranges(span.shard, begin * span.width), builder.decode)
            for span in self._spans
        ]

    def read_ahead(self, builder: CpuBuilder, readers: list[ShardReader]) -> None:
        """Begin to read the rows of the first blocks."""
        builder.read_ahead(self._sources(readers), self._sizes(0, 1 + READ_AHEAD))

    def blocks(
        self, builder: CpuBuilder, readers: list[ShardReader]
    ) -> Iterator[tuple[slice, LoaderBlock]]:
        """Build the blocks of the rows from :meth:`readers` on, and the last, smaller step."""
        plan, order = self._plan, self._order
        for number, (window, begin, end) in enumerate(self._extents):
            following = self._sizes(number + 1, READ_AHEAD)
            sources = self._sources(readers, window, end - begin)
            drawn = slice(max(self._first - begin, 0), plan.steps - begin)
            yield drawn, builder.build(end - begin, self._batch, sources, following)
        if plan.steps > plan.full_steps:
            ends = plan.last_step(order.rank, order.world_size)
            first, last = (self._assigned.remainder[0] + row for row in ends)
            rows, reader = last - first, self._read([(first, last)], builder.decode)
            sources = [ShardRows(reader, rows, 0, rows, 0)] if rows else []
            yield slice(0, 1), builder.build(1, rows, sources)

    def _sizes(self, first: int, count: int) -> list[int]:
        """Return the steps of some blocks."""
        return [end - begin for _, begin, end in self._extents[first : first + count]]

    def _read(self, ranges: list[planning.Range], decode: Decoder) -> ShardReader:
        slices = itertools.chain.from_iterable(
            planning.row_group_slices(self._starts, self._groups, *ends) for ends in ranges
        )
        rows = self._budget.decode_rows
        return ShardReader(decode, slices, min(self._budget.first_rows, rows), rows)

    def _sources(
        self, readers: list[ShardReader], window: int = 0, steps: int = 0
    ) -> list[ShardRows]:
        """Return what the virtual shards give to a block of ``steps`` steps."""
        sources, place = [], 0
        for span, reader in zip(self._spans, readers, strict=True):
            permutation = None
            if self._order.shuffle == "rows" and steps:
                permutation = functools.partial(
                    planning.window_order,
                    steps * span.width,
                    seed=self._order.seed,
                    epoch=self._epoch,
                    shard=span.shard,
                    window=window,
                )
            sources.append(ShardRows(reader, span.width, span.begin, span.end, place, permutation))
            place += span.end - span.begin
        return sources


def _extents(
    plan: Plan, shuffle: str, first_step: int, batch: int, budget: Budget
) -> Iterator[tuple[int, int, int]]:
    """Yield the blocks of full steps: (window, begin, end).

    Shuffling rows needs whole windows, also when an epoch resumes inside one. Without it a block
    may begin at any step.
    """
    full_steps = min(plan.full_steps, plan.steps)
    if shuffle == "rows":
        windows = plan.windows(first_step)
        yield from itertools.takewhile(lambda window: window[1] < full_steps, windows)
        return
    begin, length = first_step, max(1, budget.first_rows // batch)
    while begin < full_steps:
        end = min(begin + length, full_steps)
        yield 0, begin, end
        begin, length = end, max(1, budget.block_rows // batch)


class EpochIterator(Iterator[LoaderBatch]):
    """Yields batches from blocks, which a thread of its own builds ahead.

    The thread runs one task per block and waits for nothing in between, so it can always end: at
    the end of the epoch, after an error, or when the iterator and with it the executor is dropped.
    An error ends the epoch and is raised again by every later ``next()``.
    """

    def __init__(
        self,
        produced: Iterator[tuple[slice, Any]],
        builder: CpuBuilder,
        make_batch: BatchFactory,
        position: Position,
        begin: Callable[[Position], None],
        finish: Callable[[Position], None],
    ) -> None:
        """Yield the batches of the blocks in ``produced``; before the first call ``begin``, and at
        the end ``finish``, which may raise."""
        self._produced, self._builder = produced, builder
        self._make_batch, self._begin, self._finish = make_batch, begin, finish
        self._position = position
        self._batches: Iterator[LoaderBatch] = iter(())
        self._error: Exception | None = None
        self._executor = concurrent.futures.ThreadPoolExecutor(
            1, "nvt_loader", use_device, (builder.device,)
        )
        self._ahead: collections.deque[concurrent.futures.Future] = collections.deque()
        for _ in range(PREFETCH_BLOCKS):
            self._submit()

    def __next__(self) -> LoaderBatch:
        if self._position.step == self._position.first:
            self._begin(self._position)
        batch = next(self._batches, None)
        while batch is None:
            self._batches = iter(())  # releases the last block
            self._batches = self._next_block()
            batch = next(self._batches, None)
        self._position.step += 1
        self._position.rows += batch.labels.shape[0]
        return batch

    def _submit(self) -> None:
        self._ahead.append(self._executor.submit(self._builder.produce, self._produced))

    def _next_block(self) -> Iterator[LoaderBatch]:
        if self._error is not None:
            raise self._error
        if not self._ahead:
            raise StopIteration
        try:
            with device_errors(_REMEDY) if self._builder.on_device else contextlib.nullcontext():
                made = self._ahead[0].result()  # stays in the queue if interrupted here
            if made is None:
                self._finish(self._position)
        except Exception as error:
            self._error = error
            self._stop()
            raise
        if made is None:
            self._stop()
            raise StopIteration
        self._ahead.popleft()
        self._submit()
        steps, block = self._builder.receive(*made)
        return block.batches(steps, self._make_batch)

    def _stop(self) -> None:
        self._ahead.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._builder.close()
