"""Run one epoch of one rank: a background thread builds blocks, and batches are views of them."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from nvt_torchrec.base.device import device_errors, find_difference, use_device
from nvt_torchrec.nvt_loader import plan as planning
from nvt_torchrec.nvt_loader.cpu.block_builder import CpuBuilder
from nvt_torchrec.nvt_loader.cpu.blocks import BatchFactory, LoaderBatch, LoaderBlock, ShardRows
from nvt_torchrec.nvt_loader.cpu.history_lists import add_events
from nvt_torchrec.nvt_loader.cpu.vector_blocks import add_vectors
from nvt_torchrec.nvt_loader.memory import PREFETCH_BLOCKS, READ_AHEAD, Budget
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset
from nvt_torchrec.nvt_loader.parquet.row_chunks import Decoder, RowGroupSlice, ShardReader
from nvt_torchrec.nvt_loader.plan import Plan

#: The remedy for a device error while libcudf decodes, such as insufficient memory.
_DEVICE_REMEDY = (
    "decode on the CPU with cpu_decoding=True (--cpu_decoding of train_torchrec.py), or let "
    "libcudf take less memory with a smaller loader_memory (--loader_memory)"
)


@dataclasses.dataclass
class Position:
    """The progress of an iterator.

    Attributes:
        epoch: The epoch, counted from 0.
        step: The number of steps of the epoch drawn so far, including those before a resume.
        first: The step at which this iterator began.
        rows: The number of this rank's rows that this iterator has delivered.
    """

    epoch: int
    step: int = 0
    first: int = 0
    rows: int = 0


@dataclasses.dataclass(frozen=True)
class Order:
    """The settings that, together with the plan, determine the order of one rank's rows.

    Attributes:
        shuffle: One of :data:`nvt_loader.plan.SHUFFLES`.
        seed: The seed of the permutations.
        rank: The rank that gets the batches.
        world_size: The number of ranks.
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
    """Build the blocks of one rank from step ``position.first`` to the end of the epoch.

    Args:
        dataset: The data.
        plan: The plan of the epoch.
        builder: Builds the blocks.
        position: The epoch, and the step to begin with.
        order: The order of the rows.
        budget: The sizes of blocks and decoded chunks.
        fall_back: Called with the reason if the device's first block differs from the CPU's; it may
            raise an error.

    Yields:
        The steps of the block to draw (without those before ``position.first``), and the block.
    """
    if position.first >= plan.steps:
        return
    epoch = _RankEpoch(dataset, plan, position, order, budget)
    if builder.host is not None:
        yield from _compare_first_block(epoch, builder, builder.host, fall_back)
        return
    blocks = epoch.build_blocks(builder, epoch.open_readers(builder))
    if dataset.vectors is not None:
        blocks = add_vectors(dataset, blocks, builder.allocate_tensors)
    if dataset.stores:
        blocks = add_events(dataset, blocks, builder.allocate_tensors)
    yield from blocks


def _compare_first_block(
    epoch: _RankEpoch, builder: CpuBuilder, host: CpuBuilder, fall_back: Callable[[str], object]
) -> Iterator[tuple[slice, LoaderBlock]]:
    """Build the first block on both the host and the device, and compare the two.

    If they differ, call ``fall_back`` with the difference and build all other blocks on the host.
    """
    host_blocks = epoch.build_blocks(host, epoch.open_readers(host))
    readers = epoch.open_readers(builder)
    # The device decodes while the host builds the first block, which the caller gets without
    # waiting for the device.
    epoch.read_ahead(builder, readers)
    device_blocks = epoch.build_blocks(builder, readers)
    first = next(host_blocks)
    yield first
    read_next_on_device = functools.partial(_read_next_arrays, device_blocks)
    reason = find_difference(read_next_on_device, _read_next_arrays(iter([first])))
    if reason:
        fall_back(reason)
    rest = host_blocks if reason else device_blocks
    # Release the unused iterator and the row groups that it holds.
    del first, readers, host_blocks, device_blocks, read_next_on_device
    yield from rest


def _read_next_arrays(blocks: Iterator[tuple[slice, LoaderBlock]]) -> dict[str, np.ndarray]:
    """Return the tensors of the next block as arrays, by name."""
    _, block = next(blocks)
    return {name: tensor.cpu().numpy() for name, tensor in block.tensors.items()}


class _RankEpoch:
    """The rows of an epoch that one rank gets: their location, order and division into blocks."""

    def __init__(
        self, dataset: Dataset, plan: Plan, position: Position, order: Order, budget: Budget
    ) -> None:
        self._dataset = dataset
        self._plan = plan
        self._order = order
        self._budget = budget
        self._epoch = position.epoch
        self._first = position.first
        self._batch = plan.global_batch // order.world_size
        shuffle = order.shuffle != "none"
        seed = order.seed
        epoch = position.epoch
        rows = dataset.rows
        self._groups = planning.order_row_groups(len(rows), shuffle=shuffle, seed=seed, epoch=epoch)
        self._starts = planning.find_stream_starts(rows, self._groups)
        remainder = planning.find_remainder(plan, shuffle=shuffle, seed=seed, epoch=epoch)
        self._assigned = planning.assign_rows(plan, self._starts, remainder)
        self._spans = plan.list_spans(order.rank, order.world_size)
        self._extents = list(_divide_steps(plan, order.shuffle, self._first, self._batch, budget))

    def open_readers(self, builder: CpuBuilder) -> list[ShardReader]:
        """Return a reader of each of this rank's virtual shards, positioned at the first block."""
        begin = self._extents[0][1] if self._extents else self._plan.full_steps
        readers = []
        for span in self._spans:
            ranges = self._assigned.list_shard_ranges(span.shard, begin * span.width)
            readers.append(self._open_reader(ranges, builder.decode))
        return readers

    def read_ahead(self, builder: CpuBuilder, readers: list[ShardReader]) -> None:
        """Start to read the rows of the first blocks."""
        builder.read_ahead(self._list_sources(readers), self._count_steps(0, 1 + READ_AHEAD))

    def build_blocks(
        self, builder: CpuBuilder, readers: list[ShardReader]
    ) -> Iterator[tuple[slice, LoaderBlock]]:
        """Build the blocks of the full steps from the rows of readers, then the last, smaller step.

        Yields:
            The steps of the block to draw, and the block.
        """
        plan = self._plan
        order = self._order
        for number, (window, begin, end) in enumerate(self._extents):
            following = self._count_steps(number + 1, READ_AHEAD)
            sources = self._list_sources(readers, window, end - begin)
            drawn = slice(max(self._first - begin, 0), plan.steps - begin)
            yield drawn, builder.build(end - begin, self._batch, sources, following)
        if plan.steps > plan.full_steps:
            begin, end = plan.find_last_rows(order.rank, order.world_size)
            rows = end - begin
            first = self._assigned.remainder[0]
            sources = []
            if rows:
                reader = self._open_reader([(first + begin, first + end)], builder.decode)
                sources = [ShardRows(reader, rows, 0, rows, 0)]
            yield slice(0, 1), builder.build(1, rows, sources)

    def _count_steps(self, first: int, count: int) -> list[int]:
        """Return the number of steps of each of ``count`` blocks, starting with block ``first``."""
        return [end - begin for _, begin, end in self._extents[first : first + count]]

    def _open_reader(self, ranges: list[planning.Range], decode: Decoder) -> ShardReader:
        """Return a reader of ranges of the stream."""
        rows = self._budget.decode_rows
        first_rows = min(self._budget.first_rows, rows)
        return ShardReader(decode, self._slice_row_groups(ranges), first_rows, rows)

    def _slice_row_groups(self, ranges: list[planning.Range]) -> Iterator[RowGroupSlice]:
        """Yield the slices of row groups that ranges of the stream consist of."""
        for begin, end in ranges:
            yield from planning.slice_row_groups(self._starts, self._groups, begin, end)

    def _list_sources(
        self, readers: list[ShardReader], window: int = 0, steps: int = 0
    ) -> list[ShardRows]:
        """Return the rows that each virtual shard gives to a block of ``steps`` steps."""
        sources = []
        first = 0
        for span, reader in zip(self._spans, readers, strict=True):
            order = None
            if self._order.shuffle == "rows" and steps:
                # A function, so that the thread that takes the rows also computes their order.
                order = functools.partial(
                    planning.order_window,
                    steps * span.width,
                    seed=self._order.seed,
                    epoch=self._epoch,
                    shard=span.shard,
                    window=window,
                )
            sources.append(ShardRows(reader, span.width, span.begin, span.end, first, order))
            first += span.end - span.begin
        return sources


def _divide_steps(
    plan: Plan, shuffle: str, first_step: int, batch: int, budget: Budget
) -> Iterator[tuple[int, int, int]]:
    """Divide the full steps of an epoch from ``first_step`` on into blocks.

    If rows are shuffled, a block is a whole window, even if the epoch resumes inside of it.
    Otherwise a block may begin at any step.

    Yields:
        The index of the shuffling window (0 if rows are not shuffled), and the steps [begin, end).
    """
    full_steps = min(plan.full_steps, plan.steps)
    if shuffle == "rows":
        for window, begin, end in plan.list_windows(first_step):
            if begin >= full_steps:
                return
            yield window, begin, end
        return
    begin = first_step
    length = max(1, budget.first_rows // batch)
    while begin < full_steps:
        end = min(begin + length, full_steps)
        yield 0, begin, end
        begin = end
        length = max(1, budget.block_rows // batch)


class EpochIterator(Iterator[LoaderBatch]):
    """Yields batches from blocks, which a background thread builds ahead.

    The thread runs one task per block and never waits for the caller, so it can always end: at the
    end of the epoch, after an error, or when the iterator and with it the executor are deleted. An
    error ends the epoch, and every later ``next()`` raises it again.
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
        """Yield the batches of the blocks in ``produced``.

        Args:
            produced: Yields the steps of a block to draw, and the block.
            builder: The builder of the blocks.
            make_batch: Makes the batches.
            position: Updated with the number of steps and rows drawn.
            begin: Called with ``position`` before the first batch.
            finish: Called with ``position`` after the last batch; it may raise an error.
        """
        self._produced = produced
        self._builder = builder
        self._make_batch = make_batch
        self._begin = begin
        self._finish = finish
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
            # Release the previous block before waiting for the next one.
            self._batches = iter(())
            self._batches = self._receive_next_block()
            batch = next(self._batches, None)
        self._position.step += 1
        self._position.rows += batch.labels.shape[0]
        return batch

    def _submit(self) -> None:
        self._ahead.append(self._executor.submit(self._builder.produce, self._produced))

    def _receive_next_block(self) -> Iterator[LoaderBatch]:
        if self._error is not None:
            raise self._error
        if not self._ahead:
            raise StopIteration
        context: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self._builder.on_device:
            context = device_errors(_DEVICE_REMEDY)
        try:
            with context:
                # The block is removed from the queue below, so that it is not lost if Ctrl-C
                # interrupts the wait.
                produced = self._ahead[0].result()
            if produced is None:
                self._finish(self._position)
        except Exception as error:
            self._error = error
            self._stop()
            raise
        if produced is None:
            self._stop()
            raise StopIteration
        self._ahead.popleft()
        self._submit()
        steps, block = self._builder.receive(*produced)
        return block.iterate_batches(steps, self._make_batch)

    def _stop(self) -> None:
        self._ahead.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._builder.close()
