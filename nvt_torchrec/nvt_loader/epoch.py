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
from nvt_torchrec.nvt_loader.cpu.blocks import BatchBlock, BatchFactory, LoaderBatch, ShardRows
from nvt_torchrec.nvt_loader.cpu.builder import CpuBuilder
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
) -> Iterator[tuple[slice, Any]]:
    """Build the blocks of one rank from step ``position.first`` to the epoch's end.

    If row groups are decoded on a device, the host makes the first block, and the device makes it
    once more, to compare them. If they differ, ``fall_back`` is called with how, and the host makes
    the other blocks, too.

    Yields:
        The steps of the block to draw (not those before ``position.first``), and the block.
    """
    epoch, first_step = position.epoch, position.first
    rank, world_size = order.rank, order.world_size
    if first_step >= plan.steps:
        return
    where = {"shuffle": order.shuffle != "none", "seed": order.seed, "epoch": epoch}
    rows = dataset.rows
    groups = planning.epoch_order(len(rows), **where)
    starts = planning.stream_starts(rows, groups)
    assigned = planning.assign_rows(plan, starts, planning.find_remainder(plan, **where))

    def read(ranges: list[planning.Range], decode: Decoder) -> ShardReader:
        slices = (
            dataset.locate(part)
            for ends in ranges
            for part in planning.row_group_slices(starts, groups, *ends)
        )
        first = min(budget.first_rows, budget.decode_rows)
        return ShardReader(decode, slices, first, budget.decode_rows)

    batch = plan.global_batch // world_size
    spans = plan.spans(rank, world_size)

    def readers_from(step: int, decode: Decoder) -> list[ShardReader]:
        return [
            read(assigned.shard_ranges(span.shard, step * span.width), decode) for span in spans
        ]

    def sources_of(
        readers: list[ShardReader], window: int = 0, begin: int = 0, end: int = 0
    ) -> list[ShardRows]:
        sources, place = [], 0
        for span, reader in zip(spans, readers, strict=True):
            permutation = None
            if order.shuffle == "rows" and end > begin:
                permutation = functools.partial(
                    planning.window_order,
                    (end - begin) * span.width,
                    seed=order.seed,
                    epoch=epoch,
                    shard=span.shard,
                    window=window,
                )
            sources.append(ShardRows(reader, span.width, span.begin, span.end, place, permutation))
            place += span.end - span.begin
        return sources

    extents = list(_extents(plan, order.shuffle, first_step, batch, budget))
    now = builder.host or builder
    readers: list[ShardReader] = []
    on_device: list[ShardReader] = []
    for number, (window, begin, end) in enumerate(extents):
        following = [later[2] - later[1] for later in extents[number + 1 : number + 1 + READ_AHEAD]]
        if number == 0:
            readers = readers_from(begin, now.decode)
            if now is not builder:
                on_device = readers_from(begin, builder.decode)
                builder.read_ahead(sources_of(on_device), [end - begin, *following])
        size = end - begin, batch
        block = now.build(*size, sources_of(readers, window, begin, end), following)
        yield slice(max(first_step - begin, 0), plan.steps - begin), block
        if on_device and number == 0:
            sources = sources_of(on_device, window, begin, end)
            why = _difference(functools.partial(builder.build, *size, sources, following), block)
            if why:
                fall_back(why)
            else:
                now, readers = builder, on_device
        del block  # it is not needed here while the next one is made
    if plan.steps > plan.full_steps:
        first, last = (assigned.remainder[0] + row for row in plan.last_step(rank, world_size))
        rows_left = last - first
        reader = read([(first, last)], now.decode)
        sources = [ShardRows(reader, rows_left, 0, rows_left, 0)] if rows_left else []
        yield slice(0, 1), now.build(1, rows_left, sources)


def _difference(build: Callable[[], BatchBlock], host: BatchBlock) -> str:
    """Return how a block that is built on a device differs from the host's; "" if it does not."""

    def arrays(block: BatchBlock) -> dict[str, np.ndarray]:
        return {name: tensor.cpu().numpy() for name, tensor in block.tensors.items()}

    return difference(lambda: arrays(build()), arrays(host))


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
        finish: Callable[[Position], None],
    ) -> None:
        """Yield the batches of the blocks in ``produced``; at the end call ``finish``, which may
        raise."""
        self._produced, self._builder = produced, builder
        self._make_batch, self._finish = make_batch, finish
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
