"""Which rows make which batch: pure functions of a few integers, without torch or files.

An epoch puts the row groups into an order (:func:`order_row_groups`). Their rows, one after another,
are *the stream*, N rows. With the global batch G (``batch_size · world_size``) there are
``K = N // G`` full steps. K·G rows of the stream are assigned to V *virtual shards*
(:func:`assign_rows`), and shard s gives its next ``g = b[s + 1] - b[s]`` rows to every step, where
``b[s] = s · G // V``::

    row i of global batch k  =  row k · g + i - b[s] of virtual shard s        b[s] <= i < b[s + 1]

Rank r of W takes rows ``[r·B, (r+1)·B)`` of each global batch, B = G // W. V is a function of G
(:func:`choose_virtual_shards`) or given by the caller. So the global batch does not depend on how
many ranks share it, every row is assigned exactly once, and all ranks take the same number of
steps, whatever the sizes of files and row groups. The remaining ``N % G`` rows make one last,
smaller step, split evenly; a rank may get an empty batch in it, which is a valid batch.
``drop_last`` leaves ``N % G`` rows out, in every epoch others.

If W divides V, each rank reads V/W virtual shards and no other rank reads them. Otherwise
neighbouring ranks read the same virtual shard, and each skips the rows of the others; with W > V
every shard is read by about W/V ranks. A virtual shard begins at a row group. If the row groups of
one hold more rows than it needs, the surplus goes to the end of those that have too few. A shard
that begins inside a row group decodes it from its start, which costs V row groups an epoch at most,
so V should be far below their number.

Shuffling permutes the row groups and, if requested, the rows inside windows of a virtual shard.
Both depend on (seed, epoch) and the plan only, never on a global generator or the rank.
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

#: Default number of virtual shards: 1, 2, 4 or 8 ranks read none of them together.
VIRTUAL_SHARDS = 8

#: Ways to shuffle: not at all, the row groups, or the row groups and the rows within windows.
SHUFFLES = ("none", "row_groups", "rows")

#: Default number of rows in a shuffling window, over all virtual shards.
WINDOW_ROWS = 65536
#: A spawn key of the seed, so that the random words which choose the remainder are independent of
#: those that order the row groups (no key) and the rows of windows (two keys).
REMAINDER = 2**31


@dataclasses.dataclass(frozen=True)
class Span:
    """The part of every step that a rank takes from one virtual shard.

    Attributes:
        shard: Number of the virtual shard.
        width: g, the rows that the shard gives to a full step.
        begin, end: The first of these rows that the rank takes, and the one after its last.
    """

    shard: int
    width: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """How many steps an epoch has, and which rows of a step a rank takes.

    Attributes:
        rows: N, rows of the stream.
        global_batch: G, rows of a full step over all ranks.
        virtual_shards: V, at most G.
        drop_last: Leave out the last step when it has fewer than G rows.
        limit: Steps after which an epoch ends, or None.
        window_rows: Rows of a shuffling window, over all virtual shards.
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
                "choose 1 … batch_size * world_size",
            )

    @functools.cached_property
    def bounds(self) -> tuple[int, ...]:
        """b, where the rows of each virtual shard begin in a full step, followed by G."""
        shards = self.virtual_shards
        return tuple(shard * self.global_batch // shards for shard in range(shards + 1))

    @property
    def full_steps(self) -> int:
        """K, the steps with G rows."""
        return self.rows // self.global_batch

    @property
    def remainder_rows(self) -> int:
        """The ``N % G`` rows behind the full steps."""
        return self.rows % self.global_batch

    @property
    def last_rows(self) -> int:
        """Rows, over all ranks, of the last, smaller step; 0 when there is none."""
        return 0 if self.drop_last else self.remainder_rows

    @property
    def steps(self) -> int:
        """Steps of an epoch, the same on every rank."""
        steps = self.full_steps + (self.last_rows > 0)
        return steps if self.limit is None else min(steps, self.limit)

    @property
    def epoch_rows(self) -> int:
        """Rows of an epoch over all ranks."""
        rows = min(self.steps, self.full_steps) * self.global_batch
        if self.steps > self.full_steps:
            rows += self.last_rows
        return rows

    def count_rank_rows(self, rank: int, world_size: int, first_step: int, end_step: int) -> int:
        """Return how many rows a rank gets in steps [first_step, end_step)."""
        full = min(end_step, self.full_steps) - min(first_step, self.full_steps)
        rows = full * (self.global_batch // world_size)
        if first_step <= self.full_steps < end_step:
            begin, end = self.find_last_rows(rank, world_size)
            rows += end - begin
        return rows

    def list_spans(self, rank: int, world_size: int) -> list[Span]:
        """Return the parts of each full step that a rank takes, in the order of its batch."""
        size = self.global_batch // world_size
        begin, end = rank * size, (rank + 1) * size
        spans = []
        for shard, (start, stop) in enumerate(itertools.pairwise(self.bounds)):
            if start < end and begin < stop:
                own_begin, own_end = max(begin, start), min(end, stop)
                spans.append(Span(shard, stop - start, own_begin - start, own_end - start))
        return spans

    def find_last_rows(self, rank: int, world_size: int) -> Range:
        """Return the rows [begin, end) of the last, smaller step that a rank gets."""
        return (self.last_rows * rank // world_size, self.last_rows * (rank + 1) // world_size)

    @property
    def window_steps(self) -> int:
        """Full steps of a shuffling window."""
        return max(1, self.window_rows // self.global_batch)

    def list_windows(self, first_step: int = 0) -> Iterator[tuple[int, int, int]]:
        """Yield the shuffling windows from the one of ``first_step`` on.

        Yields:
            The number of the window, and its full steps [begin, end).
        """
        # The first window is short, so that the first batch does not wait for a long one.
        number, begin, end = 0, 0, max(1, self.window_steps // 8)
        while begin < self.full_steps:
            end = min(end, self.full_steps)
            if end > first_step:
                yield number, begin, end
            number, begin, end = number + 1, end, end + self.window_steps


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Which rows of an epoch's stream belong to which virtual shard.

    Attributes:
        shards: For each virtual shard the ranges of the stream that make up its rows, in order.
        remainder: The range of the last, smaller step, or of the rows that ``drop_last`` leaves
            out.
    """

    shards: tuple[tuple[Range, ...], ...]
    remainder: Range

    def list_shard_ranges(self, shard: int, begin: int) -> list[Range]:
        """Return the ranges that make up a virtual shard from its row ``begin`` on."""
        ranges = []
        for first, last in self.shards[shard]:
            skipped = min(begin, last - first)
            begin -= skipped
            if first + skipped < last:
                ranges.append((first + skipped, last))
        return ranges


def assign_rows(plan: Plan, starts: np.ndarray, remainder: int | None = None) -> Assignment:
    """Assign the rows of the stream to the virtual shards: K · g to each, every row once.

    Args:
        plan: The plan.
        starts: int64 [row_groups + 1], from :func:`find_stream_starts`.
        remainder: The first of the ``N % G`` rows behind the full steps, from
            :func:`find_remainder`; by default they are the last rows of the stream.
    """
    total, size = plan.full_steps * plan.global_batch, plan.remainder_rows
    remainder = total if remainder is None else remainder
    # The rows are first assigned as if the remainder were not in the stream: rows behind it move
    # forward, and so do the row groups that begin there.
    group_begins = np.unique(
        np.concatenate([starts[starts < remainder], starts[starts >= remainder + size] - size])
    )
    # Each shard begins at the first row group at or behind the row where an even division would
    # let it begin, so that no row group is decoded for two shards.
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
    """Yield ranges that are counted without ``size`` rows from ``gap`` on, counted with them."""
    for begin, end in ranges:
        if begin < min(end, gap):
            yield begin, min(end, gap)
        if max(begin, gap) < end:
            yield max(begin, gap) + size, end + size


def find_remainder(plan: Plan, *, shuffle: bool, seed: int, epoch: int) -> int:
    """Return where in the stream the ``N % G`` rows behind the full steps begin.

    If they make the last step, they are the last rows. ``drop_last`` leaves them out, so they must
    be others in each epoch: random ones if the epoch is shuffled, else those directly before the
    ones that the previous epoch left out.
    """
    last = plan.rows - plan.remainder_rows
    if not plan.drop_last or not plan.remainder_rows:
        return last
    if shuffle:
        return int(_random_words(1, seed, epoch, (REMAINDER,))[0] % np.uint64(last + 1))
    return (last - epoch * plan.remainder_rows) % (last + 1)


def choose_virtual_shards(global_batch: int) -> int:
    """Return V = 8, or the rows of a global batch if these are fewer.

    It does not depend on the world size: that may change between runs, the batches may not.
    """
    return min(VIRTUAL_SHARDS, global_batch)


def order_row_groups(row_groups: int, *, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the row groups in an epoch: int64 [row_groups], a permutation."""
    if not shuffle:
        return np.arange(row_groups)
    return np.argsort(_random_words(row_groups, seed, epoch, ()))


def order_window(rows: int, *, seed: int, epoch: int, shard: int, window: int) -> np.ndarray:
    """Return the order of a shuffled window of a virtual shard: int64 [rows], a permutation."""
    order = np.empty(rows, np.int64)
    sequence = np.random.SeedSequence((seed, epoch), spawn_key=(shard, window))
    fill_random_order(order, sequence.generate_state(1, np.uint64)[0])
    return order


def _random_words(length: int, seed: int, epoch: int, key: tuple[int, ...]) -> np.ndarray:
    """Return random words for a purpose (``key``) of an epoch: uint64 [length]."""
    # Raw Philox words instead of a Generator's methods, whose streams NumPy may change.
    sequence = np.random.SeedSequence((seed, epoch), spawn_key=key)
    return np.random.Philox(sequence).random_raw(length)


def slice_row_groups(
    starts: np.ndarray, order: np.ndarray, begin: int, end: int
) -> Iterator[RowGroupSlice]:
    """Yield where the rows [begin, end) of the stream lie, in their order, without empty slices.

    Args:
        starts: int64 [row_groups + 1], from :func:`find_stream_starts`.
        order: int64 [row_groups], from :func:`order_row_groups`.
        begin: The first row.
        end: One after the last row, at most N.
    """
    if begin >= end:
        return
    position = int(np.searchsorted(starts, begin, side="right")) - 1
    while begin < end:
        start, stop = int(starts[position]), int(starts[position + 1])
        if stop > begin:
            yield RowGroupSlice(int(order[position]), begin - start, min(end, stop) - start)
            begin = min(end, stop)
        position += 1


def find_stream_starts(rows: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return where row groups begin in the stream.

    Args:
        rows: int64 [row_groups], the rows of each row group in file order.
        order: int64 [row_groups], from :func:`order_row_groups`.

    Returns:
        int64 [row_groups + 1], the first row of each row group in epoch order, followed by N.
    """
    return to_offsets(rows[order])
