"""Assign rows to batches, by pure functions of a few integers, without torch or files.

An epoch orders the row groups (:func:`order_row_groups`). Their rows, concatenated in that order,
are *the stream* of N rows. With the global batch G (``batch_size · world_size``) there are
``K = N // G`` full steps. K·G rows of the stream are assigned to V *virtual shards*
(:func:`assign_rows`), and shard s gives its next ``g = b[s + 1] - b[s]`` rows to every step, where
``b[s] = s · G // V``::

    row i of global batch k  =  row k · g + i - b[s] of virtual shard s        b[s] <= i < b[s + 1]

Rank r of W takes rows ``[r·B, (r+1)·B)`` of each global batch, where B = G // W. V is a function
of G (:func:`choose_virtual_shards`) or given by the caller. So the global batch does not depend on
the number of ranks, every row is assigned exactly once, and all ranks take the same number of
steps, whatever the sizes of files and row groups. The remaining ``N % G`` rows form one last,
smaller step and are split evenly; a rank may get an empty batch in it, which is a valid batch. With
``drop_last``, ``N % G`` rows are left out instead, different ones in each epoch.

If W divides V, each rank reads V/W virtual shards, which no other rank reads. Otherwise adjacent
ranks read the same virtual shard and skip each other's rows; with W > V every shard is read by
about W/V ranks. A virtual shard begins at a row group. If its row groups contain more rows than it
needs, the surplus is appended to shards that have too few. A range of surplus rows may begin inside
a row group, which must be decoded from its start. That costs at most V row groups per epoch, so V
should be far below the number of row groups.

Shuffling permutes the row groups and, if requested, the rows within windows of a virtual shard.
Both permutations depend only on the seed, the epoch and the plan, never on a global generator or
the rank.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator

import numpy as np

from nvt_torchrec.base.arrays import to_offsets
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.nvt_loader.parquet.parquet_kernels import fill_random_order
from nvt_torchrec.nvt_loader.parquet.row_chunks import Range, RowGroupSlice

#: The default number of virtual shards. With 1, 2, 4 or 8 ranks, no two ranks share one.
VIRTUAL_SHARDS = 8

#: Ways to shuffle: nothing, the row groups, or the row groups and the rows within windows.
SHUFFLES = ("none", "row_groups", "rows")

#: The default number of rows of a shuffling window, over all virtual shards.
WINDOW_ROWS = 65536
#: The spawn key of the random words that choose the remainder. It makes them independent of those
#: that order row groups (no key) and the rows of windows (two keys).
REMAINDER = 2**31


@dataclasses.dataclass(frozen=True)
class Span:
    """The part of every step that a rank takes from one virtual shard.

    Attributes:
        shard: The index of the virtual shard.
        width: g, the number of rows that the shard gives to a full step.
        begin, end: The rank takes rows [begin, end) of these.
    """

    shard: int
    width: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The number of steps of an epoch, and the rows of each step that a rank takes.

    Attributes:
        rows: N, the number of rows of the stream.
        global_batch: G, the number of rows of a full step over all ranks.
        virtual_shards: V, at most G.
        drop_last: Whether to leave out the last step if it has fewer than G rows.
        limit: The maximum number of steps of an epoch; None for no limit.
        window_rows: The number of rows of a shuffling window, over all virtual shards.
    """

    rows: int
    global_batch: int
    virtual_shards: int
    drop_last: bool = False
    limit: int | None = None
    window_rows: int = WINDOW_ROWS

    def __post_init__(self) -> None:
        if not 1 <= self.virtual_shards <= self.global_batch:
            raise SettingsError(
                f"virtual_shards = {self.virtual_shards} with a global batch of "
                f"{self.global_batch} rows, to which each shard gives at least one row",
                "choose from 1 to batch_size * world_size",
            )

    @functools.cached_property
    def bounds(self) -> tuple[int, ...]:
        """b: the position in a full step where each virtual shard's rows begin, followed by G."""
        shards = self.virtual_shards
        return tuple(shard * self.global_batch // shards for shard in range(shards + 1))

    @property
    def full_steps(self) -> int:
        """K, the number of steps with G rows."""
        return self.rows // self.global_batch

    @property
    def remainder_rows(self) -> int:
        """The number of rows left after the full steps, ``N % G``."""
        return self.rows % self.global_batch

    @property
    def last_rows(self) -> int:
        """The number of rows of the last, smaller step over all ranks; 0 without such a step."""
        return 0 if self.drop_last else self.remainder_rows

    @property
    def steps(self) -> int:
        """The number of steps of an epoch, the same on every rank."""
        steps = self.full_steps + (self.last_rows > 0)
        return steps if self.limit is None else min(steps, self.limit)

    @property
    def epoch_rows(self) -> int:
        """The number of rows of an epoch over all ranks."""
        rows = min(self.steps, self.full_steps) * self.global_batch
        if self.steps > self.full_steps:
            rows += self.last_rows
        return rows

    def count_rank_rows(self, rank: int, world_size: int, first_step: int, end_step: int) -> int:
        """Return the number of rows that a rank gets in steps [first_step, end_step)."""
        full = min(end_step, self.full_steps) - min(first_step, self.full_steps)
        rows = full * (self.global_batch // world_size)
        if first_step <= self.full_steps < end_step:
            begin, end = self.find_last_rows(rank, world_size)
            rows += end - begin
        return rows

    def list_spans(self, rank: int, world_size: int) -> list[Span]:
        """Return the parts of each full step that a rank takes, in the order of its batch."""
        size = self.global_batch // world_size
        begin = rank * size
        end = begin + size
        spans = []
        for shard, (start, stop) in enumerate(itertools.pairwise(self.bounds)):
            if start < end and begin < stop:
                own_begin = max(begin, start) - start
                own_end = min(end, stop) - start
                spans.append(Span(shard, stop - start, own_begin, own_end))
        return spans

    def find_last_rows(self, rank: int, world_size: int) -> Range:
        """Return the rows [begin, end) of the last, smaller step that a rank gets."""
        return (self.last_rows * rank // world_size, self.last_rows * (rank + 1) // world_size)

    @property
    def window_steps(self) -> int:
        """The number of full steps of a shuffling window."""
        return max(1, self.window_rows // self.global_batch)

    def list_windows(self, first_step: int = 0) -> Iterator[tuple[int, int, int]]:
        """Yield the shuffling windows, beginning with the one that contains ``first_step``.

        Yields:
            The index of the window, and its full steps [begin, end).
        """
        window = 0
        begin = 0
        # The first window is short, so that the first batch is ready soon.
        end = max(1, self.window_steps // 8)
        while begin < self.full_steps:
            end = min(end, self.full_steps)
            if end > first_step:
                yield window, begin, end
            window += 1
            begin = end
            end += self.window_steps


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The assignment of an epoch's stream to virtual shards.

    Attributes:
        shards: For each virtual shard, the ranges of the stream that make up its rows, in order.
        remainder: The range of the stream that forms the last, smaller step or, with ``drop_last``,
            is left out.
    """

    shards: tuple[tuple[Range, ...], ...]
    remainder: Range

    def list_shard_ranges(self, shard: int, begin: int) -> list[Range]:
        """Return the ranges of the stream that make up a shard from its row ``begin`` on."""
        ranges = []
        for first, last in self.shards[shard]:
            skipped = min(begin, last - first)
            begin -= skipped
            if first + skipped < last:
                ranges.append((first + skipped, last))
        return ranges


def assign_rows(plan: Plan, starts: np.ndarray, remainder: int | None = None) -> Assignment:
    """Assign each row of the stream to one virtual shard, K · g rows to each shard.

    Args:
        plan: The plan.
        starts: int64 [row_groups + 1], from :func:`find_stream_starts`.
        remainder: The first row of the ``N % G`` rows that belong to no full step, from
            :func:`find_remainder`; by default they are the last rows of the stream.
    """
    total = plan.full_steps * plan.global_batch
    size = plan.remainder_rows
    remainder = total if remainder is None else remainder
    # First assign the rows as if the stream did not contain the remainder, which moves the row
    # groups after it forward; `_insert_gap` puts the remainder back.
    group_begins = np.unique(
        np.concatenate([starts[starts < remainder], starts[starts >= remainder + size] - size])
    )
    # Each shard begins at the first row group that begins at or after the shard's begin by an even
    # division, so that no row group is decoded for two shards.
    even_begins = plan.full_steps * np.array(plan.bounds[:-1])
    sizes = (plan.full_steps * np.diff(plan.bounds)).tolist()
    following = np.searchsorted(group_begins, even_begins)
    begins = np.append(group_begins, total)[following].clip(max=total)
    begins[0] = 0
    ends = np.append(begins[1:], total)
    shards: list[list[Range]] = []
    surplus: collections.deque[Range] = collections.deque()
    for begin, end, needed in zip(begins.tolist(), ends.tolist(), sizes, strict=True):
        shards.append([(begin, min(end, begin + needed))])
        if begin + needed < end:
            surplus.append((begin + needed, end))
    for ranges, needed in zip(shards, sizes, strict=True):
        missing = needed - (ranges[0][1] - ranges[0][0])
        while missing:
            begin, end = surplus.popleft()
            taken = min(missing, end - begin)
            ranges.append((begin, begin + taken))
            missing -= taken
            if begin + taken < end:
                surplus.appendleft((begin + taken, end))
    assigned = [tuple(_insert_gap(ranges, remainder, size)) for ranges in shards]
    return Assignment(tuple(assigned), (remainder, remainder + size))


def _insert_gap(ranges: list[Range], gap: int, size: int) -> Iterator[Range]:
    """Yield ranges of a stream without a gap as ranges of the stream with it.

    Args:
        ranges: Ranges of the stream without the gap.
        gap: The first row of the gap.
        size: The number of rows of the gap.
    """
    for begin, end in ranges:
        if begin < min(end, gap):
            yield begin, min(end, gap)
        if max(begin, gap) < end:
            yield max(begin, gap) + size, end + size


def find_remainder(plan: Plan, *, shuffle: bool, seed: int, epoch: int) -> int:
    """Return the first row of the ``N % G`` rows of the stream that belong to no full step.

    If they form the last step, they are the last rows of the stream. If ``drop_last`` leaves them
    out, they differ in each epoch, so that no row is left out for ever: they are chosen at random
    if the epoch is shuffled, and otherwise directly precede the rows that the previous epoch left
    out.
    """
    last = plan.rows - plan.remainder_rows
    if not plan.drop_last or not plan.remainder_rows:
        return last
    if shuffle:
        return int(_draw_words(1, seed, epoch, (REMAINDER,))[0] % np.uint64(last + 1))
    return (last - epoch * plan.remainder_rows) % (last + 1)


def choose_virtual_shards(global_batch: int) -> int:
    """Return the number of virtual shards: 8, or the global batch if it is smaller.

    The number does not depend on the world size, which may change between runs while the batches
    must not.
    """
    return min(VIRTUAL_SHARDS, global_batch)


def order_row_groups(row_groups: int, *, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the row groups in an epoch: int64 [row_groups], a permutation."""
    if not shuffle:
        return np.arange(row_groups)
    return np.argsort(_draw_words(row_groups, seed, epoch, ()))


def order_window(rows: int, *, seed: int, epoch: int, shard: int, window: int) -> np.ndarray:
    """Return the order of the rows of a virtual shard's window: int64 [rows], a permutation."""
    order = np.empty(rows, np.int64)
    sequence = np.random.SeedSequence((seed, epoch), spawn_key=(shard, window))
    fill_random_order(order, sequence.generate_state(1, np.uint64)[0])
    return order


def _draw_words(length: int, seed: int, epoch: int, key: tuple[int, ...]) -> np.ndarray:
    """Return random words of an epoch, independent for each spawn ``key``: uint64 [length]."""
    # Raw words of Philox, because NumPy may change the streams of Generator's methods.
    sequence = np.random.SeedSequence((seed, epoch), spawn_key=key)
    return np.random.Philox(sequence).random_raw(length)


def slice_row_groups(
    starts: np.ndarray, order: np.ndarray, begin: int, end: int
) -> Iterator[RowGroupSlice]:
    """Yield the non-empty slices of row groups that rows [begin, end) of the stream consist of.

    Args:
        starts: int64 [row_groups + 1], from :func:`find_stream_starts`.
        order: int64 [row_groups], from :func:`order_row_groups`.
        begin: The first row of the stream.
        end: The end of the rows, at most N.
    """
    if begin >= end:
        return
    position = int(np.searchsorted(starts, begin, side="right")) - 1
    while begin < end:
        start = int(starts[position])
        stop = int(starts[position + 1])
        if stop > begin:
            yield RowGroupSlice(int(order[position]), begin - start, min(end, stop) - start)
            begin = min(end, stop)
        position += 1


def find_stream_starts(rows: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return the row of the stream where each row group begins.

    Args:
        rows: int64 [row_groups], the number of rows of each row group, in the order of the files.
        order: int64 [row_groups], from :func:`order_row_groups`.

    Returns:
        int64 [row_groups + 1], the first row of each row group in the order of the epoch, followed
        by N.
    """
    return to_offsets(rows[order])
