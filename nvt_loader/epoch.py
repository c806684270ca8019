"""One epoch of one rank: blocks made in a background thread, batches handed out from them."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
from collections.abc import Iterator

import torch
from torchrec.datasets.utils import Batch

from nvt_loader import plan as planning
from nvt_loader.blocks import BatchFactory, Block, CpuBlocks
from nvt_loader.decode import RowReader
from nvt_loader.layout import Layout
from nvt_loader.plan import Plan

#: Rows of a block when rows are not shuffled: about 10 MB of Criteo.
BLOCK_ROWS = 65536

#: Rows decoded at a time, over all virtual shards of a rank, and the least for one of them.
DECODE_ROWS, LEAST_DECODE_ROWS = 65536, 32768

#: Blocks that are made ahead of the one in use.
PREFETCH_BLOCKS = 2


@dataclasses.dataclass
class Position:
    """Where an epoch is.

    Attributes:
        epoch: counted from 0.
        step: steps of the epoch drawn so far, those before a resume included.
        first: the step at which this iterator began.
    """

    epoch: int
    step: int = 0
    first: int = 0


def produce_blocks(
    layout: Layout,
    plan: Plan,
    blocks: CpuBlocks,
    position: Position,
    *,
    rank: int,
    world_size: int,
    shuffle: bool,
    seed: int,
) -> Iterator[Block]:
    """The blocks of one rank's batches from ``position.first`` to the epoch's end."""
    epoch, first_step = position.epoch, position.first
    rows = layout.rows
    order = planning.epoch_order(len(rows), shuffle=shuffle, seed=seed, epoch=epoch)
    starts = planning.stream_starts(rows, order)

    spans = plan.spans(rank, world_size)
    decode_rows = max(DECODE_ROWS // len(spans), LEAST_DECODE_ROWS)

    def read(begin: int, end: int) -> RowReader:
        pieces = planning.pieces(starts, order, begin, end)
        return RowReader(blocks.decode, pieces, decode_rows)

    batch = plan.global_batch // world_size
    # Shuffling needs whole windows, also when an epoch resumes inside one.
    block_steps = plan.window_steps if shuffle else max(1, BLOCK_ROWS // batch)
    begin = first_step // block_steps * block_steps
    readers = [read(*plan.shard_rows(span.shard, begin, plan.full_steps)) for span in spans]
    while begin < plan.full_steps:
        steps = min(block_steps, plan.full_steps - begin)
        block = blocks.empty(steps, batch)
        place = 0
        for span, reader in zip(spans, readers, strict=True):
            parts = reader.take(steps * plan.share)
            permutation = None
            if shuffle:
                permutation = planning.window_order(
                    steps * plan.share,
                    seed=seed,
                    epoch=epoch,
                    shard=span.shard,
                    window=begin // block_steps,
                )
            blocks.fill(block, place, parts, slice(span.begin, span.end), permutation)
            place += span.end - span.begin
        yield block.skip(first_step - begin)
        begin += steps
    if first_step < plan.steps and plan.last_rows:
        begin, end = plan.last_step(rank, world_size)
        block = blocks.empty(1, end - begin)
        if begin < end:
            blocks.fill(block, 0, read(begin, end).take(end - begin), slice(0, end - begin), None)
        yield block


class EpochIterator(Iterator[Batch]):
    """Batches from blocks; a thread of its own makes blocks ahead.

    The thread runs one task per block and waits for nothing in between, so it can always end: at
    the end of the epoch, after an error, or when the iterator is dropped (the executor goes with
    it). An error ends the epoch and is raised again by every later ``next()``.
    """

    def __init__(
        self,
        produced: Iterator[Block],
        blocks: CpuBlocks,
        make_batch: BatchFactory,
        position: Position,
    ) -> None:
        self._produced, self._blocks = produced, blocks
        self._make_batch = make_batch
        self._position = position
        self._batches: Iterator[tuple[torch.Tensor, ...]] = iter(())
        self._error: Exception | None = None
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "nvt_loader")
        self._ahead: collections.deque[concurrent.futures.Future] = collections.deque()
        for _ in range(PREFETCH_BLOCKS):
            self._submit()

    def __next__(self) -> Batch:
        views = next(self._batches, None)
        while views is None:
            block = self._next_block()
            self._batches = zip(block.labels, block.dense, block.ids, strict=True)
            views = next(self._batches, None)
        self._position.step += 1
        return self._make_batch(*views)

    def _submit(self) -> None:
        self._ahead.append(self._executor.submit(self._blocks.produce, self._produced))

    def _next_block(self) -> Block:
        if self._error is not None:
            raise self._error
        if not self._ahead:
            raise StopIteration
        try:
            made = self._ahead[0].result()  # stays in line if interrupted here
        except Exception as error:
            self._error = error
            self._stop()
            raise
        if made is None:
            self._stop()
            raise StopIteration
        self._ahead.popleft()
        self._submit()
        return self._blocks.receive(*made)

    def _stop(self) -> None:
        self._ahead.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)
