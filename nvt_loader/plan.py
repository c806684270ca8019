"""Which rows make which batch: pure functions of a few integers, without torch or files.

An epoch puts the row groups into an order (:func:`epoch_order`); their rows, one after another,
are *the stream*, N rows. With the global batch G (``batch_size · world_size``) there are
``K = N // G`` full steps. K·G rows of the stream are dealt to V *virtual shards*
(:func:`deal`), and shard s gives its next ``g = b[s + 1] - b[s]`` rows to every step, where
``b[s] = s · G // V``::

    row i of global batch k  =  row k · g + i - b[s] of virtual shard s        b[s] <= i < b[s + 1]

Rank r of W takes rows ``[r·B, (r+1)·B)`` of each global batch, B = G // W. V is a function of G
(:func:`default_virtual_shards`), or given: so the global batch does not depend on how many ranks
share it, every row is dealt exactly once, and all ranks take the same number of steps, whatever the
sizes of files and row groups. The ``N % G`` rows that are left make one last, smaller step, split
evenly; ranks may get no row of it, and an empty batch is a batch. ``drop_last`` leaves them out, in
every epoch from another place of the stream.

While W divides V, each rank reads V/W long runs of consecutive rows, of no shard a part: rank r
begins at ``r · G // W = b[r · V / W]``. Otherwise neighbouring ranks both read some row groups, and
each passes over the other's rows. Shards begin at row groups; what one has too much goes to the
ends of those that have too little. Reading on from inside a row group decodes it from its start,
which costs V row groups an epoch at most, so V should be far below their number.

Shuffling permutes the row groups, and, if asked to, the rows inside windows of a virtual shard.
Both depend on (seed, epoch) and the plan only, never on a global generator or the rank.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator

import numpy as np

from clicklog.errors import SettingsError
from nvt_loader.kernels import random_order, random_words

#: Default number of virtual shards: none of them is shared by ranks if these are 1, 2, 4 or 8.
VIRTUAL_SHARDS = 8

#: Ways to shuffle: not at all, the row groups, or these and the rows within windows.
SHUFFLES = ("none", "row_groups", "rows")

#: Default number of rows, over all virtual shards, among which shuffling rows permutes.
WINDOW_ROWS = 65536

Range = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Span:
    """The part of every step that a rank takes from one virtual shard.

    Attributes:
        shard: which.
        width: g, the rows that the shard gives to a full step.
        begin, end: which of these are the rank's.
    """

    shard: int
    width: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows [begin, end) of a row group, given by its index in file order."""

    row_group: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the rows of an epoch are dealt; see the module's docstring.

    Attributes:
        rows: N, rows of the stream.
        global_batch: G, rows of a full step over all ranks.
        virtual_shards: V, at most G.
        drop_last: leave out the last step when it has fewer than G rows.
        limit: steps after which an epoch ends, or None.
        window_rows: rows of a shuffling window, over all virtual shards.
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
                f"{self.global_batch} rows, of which each gives at least one",
                "choose 1 … batch_size * world_size",
            )

    @functools.cached_property
    def bounds(self) -> tuple[int, ...]:
        """b, where the rows of each virtual shard begin in a full step; and G."""
        shards = self.virtual_shards
        return tuple(shard * self.global_batch // shards for shard in range(shards + 1))

    @property
    def full_steps(self) -> int:
        """K, the steps with G rows."""
        return self.rows // self.global_batch

    @property
    def left_rows(self) -> int:
        """The ``N % G`` rows that make no full step."""
        return self.rows % self.global_batch

    @property
    def last_rows(self) -> int:
        """Rows, over all ranks, of the last, smaller step; 0 when there is none."""
        return 0 if self.drop_last else self.left_rows

    @property
    def steps(self) -> int:
        """Steps of an epoch, the same on every rank."""
        steps = self.full_steps + (self.last_rows > 0)
        return steps if self.limit is None else min(steps, self.limit)

    @property
    def epoch_rows(self) -> int:
        """Rows that the ranks together get in an epoch."""
        full = min(self.steps, self.full_steps)
        return full * self.global_batch + (self.steps > full) * self.last_rows

    def rank_rows(self, rank: int, world_size: int, first_step: int, end_step: int) -> int:
        """Rows that a rank gets in steps [first, end)."""
        full = min(end_step, self.full_steps) - min(first_step, self.full_steps)
        rows = full * (self.global_batch // world_size)
        if first_step <= self.full_steps < end_step:
            begin, end = self.last_step(rank, world_size)
            rows += end - begin
        return rows

    def spans(self, rank: int, world_size: int) -> list[Span]:
        """What a rank takes of each full step, in the order of its batch."""
        size = self.global_batch // world_size
        begin, end = rank * size, (rank + 1) * size
        return [
            Span(shard, stop - start, max(begin - start, 0), min(end, stop) - start)
            for shard, (start, stop) in enumerate(itertools.pairwise(self.bounds))
            if start < end and begin < stop
        ]

    def last_step(self, rank: int, world_size: int) -> Range:
        """Which rows [begin, end) of the last, smaller step a rank gets."""
        return (
            self.last_rows * rank // world_size,
            self.last_rows * (rank + 1) // world_size,
        )

    def windows(self, first_step: int = 0) -> Iterator[tuple[int, int, int]]:
        """The shuffling windows from the one that ``first_step`` is in: (number, begin, end) in
        full steps. The first window is short, so that the first batch does not wait for a long one.
        """
        length = max(1, self.window_rows // self.global_batch)
        begin, end = 0, max(1, length // 8)
        for number in itertools.count():
            if begin >= self.full_steps:
                return
            end = min(end, self.full_steps)
            if end > first_step:
                yield number, begin, end
            begin, end = end, end + length


@dataclasses.dataclass(frozen=True)
class Deal:
    """Whose rows an epoch's stream rows are.

    Attributes:
        shards: per virtual shard the ranges of stream rows that are its rows, in order.
        left: the stream rows [begin, end) of the last, smaller step, or those left out.
    """

    shards: tuple[tuple[Range, ...], ...]
    left: Range

    def shard_ranges(self, shard: int, begin: int) -> list[Range]:
        """The stream rows of a virtual shard from its row ``begin`` on."""
        found = []
        for first, last in self.shards[shard]:
            skipped = min(begin, last - first)
            begin -= skipped
            if first + skipped < last:
                found.append((first + skipped, last))
        return found


def deal(plan: Plan, starts: np.ndarray, left_at: int | None = None) -> Deal:
    """Deal the stream rows to the virtual shards: K · g to each, every row once.

    Args:
        plan: the plan.
        starts: int64 [row_groups + 1], from :func:`stream_starts`.
        left_at: the first of the rows that make no full step; by default they are the last rows.
    """
    total, left = plan.full_steps * plan.global_batch, plan.left_rows
    left_at = total if left_at is None else left_at
    # Places in the stream without the rows that are left: those behind move forward.
    places = np.unique(
        np.concatenate([starts[starts < left_at], starts[starts >= left_at + left] - left])
    )
    nominal = plan.full_steps * np.array(plan.bounds[:-1])
    sizes = (plan.full_steps * np.diff(plan.bounds)).tolist()
    begins = np.append(places, total)[np.searchsorted(places, nominal)].clip(max=total)
    begins[0] = 0
    ends = np.append(begins[1:], total)
    own: list[list[Range]] = []
    surplus: collections.deque[Range] = collections.deque()
    for begin, end, size in zip(begins.tolist(), ends.tolist(), sizes, strict=True):
        own.append([(begin, min(end, begin + size))])
        if begin + size < end:
            surplus.append((begin + size, end))
    for ranges, size in zip(own, sizes, strict=True):
        missing = size - (ranges[0][1] - ranges[0][0])
        while missing:
            begin, end = surplus.popleft()
            taken = min(missing, end - begin)
            ranges.append((begin, begin + taken))
            missing -= taken
            if begin + taken < end:
                surplus.appendleft((begin + taken, end))
    shards = [
        tuple(part for one in ranges for part in _around(*one, left_at, left)) for ranges in own
    ]
    return Deal(tuple(shards), (left_at, left_at + left))


def _around(begin: int, end: int, hole: int, width: int) -> Iterator[Range]:
    """Rows [begin, end) of the stream without a hole, as rows of the whole stream."""
    if begin < min(end, hole):
        yield begin, min(end, hole)
    if max(begin, hole) < end:
        yield max(begin, hole) + width, end + width


def left_at(plan: Plan, *, shuffle: bool, seed: int, epoch: int) -> int:
    """Where in the stream the rows lie that make no full step.

    At its end, if they make the last step. With ``drop_last``, in another place in each epoch:
    shuffled anywhere, else one stretch after another from the end backwards.
    """
    end = plan.rows - plan.left_rows
    if not plan.drop_last or not plan.left_rows:
        return end
    if shuffle:
        return int(_words(1, seed, epoch, (LEFT_AT,))[0] % np.uint64(end + 1))
    return (end - epoch * plan.left_rows) % (end + 1)


def default_virtual_shards(global_batch: int) -> int:
    """V = 8, or as many as a global batch has rows. Not a function of the world size: that may
    change on the way, and the batches may not."""
    return min(VIRTUAL_SHARDS, global_batch)


def epoch_order(row_groups: int, *, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    """The order of the row groups in an epoch: int64 [row_groups], a permutation."""
    if not shuffle:
        return np.arange(row_groups)
    return np.argsort(_words(row_groups, seed, epoch, ()))


def window_order(rows: int, *, seed: int, epoch: int, shard: int, window: int) -> np.ndarray:
    """Which row comes to each place of a shuffled window of a virtual shard: int64 [rows]."""
    order = np.empty(rows, np.int64)
    random_order(order, _sequence(seed, epoch, (shard, window)).generate_state(1, np.uint64)[0])
    return order


def keep_rows(rows: int, rate: float, *, seed: int, row_group: int) -> np.ndarray:
    """Which rows of a row group a sample of share ``rate`` holds: bool [rows].

    A function of seed and row group, the same in every epoch.
    """
    words = np.empty(rows, np.uint64)
    random_words(words, _sequence(seed, KEEP, (row_group,)).generate_state(1, np.uint64)[0])
    return words < np.uint64(rate * 2**63) * np.uint64(2) if rate < 1 else np.ones(rows, bool)


#: Marks that keep the random words of different uses apart.
LEFT_AT, KEEP = 2**31, 2**32


def _sequence(seed: int, epoch: int, where: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence((seed, epoch), spawn_key=where)


def _words(length: int, seed: int, epoch: int, where: tuple[int, ...]) -> np.ndarray:
    # Raw Philox words instead of a Generator's methods, whose streams NumPy may change.
    return np.random.Philox(_sequence(seed, epoch, where)).random_raw(length)


def pieces(starts: np.ndarray, order: np.ndarray, begin: int, end: int) -> Iterator[Piece]:
    """Where the stream rows [begin, end) lie, in stream order; row groups without rows are skipped.

    Args:
        starts: int64 [row_groups + 1], the first stream row of each row group *in epoch order*,
            and N.
        order: int64 [row_groups], from :func:`epoch_order`.
        begin: first stream row.
        end: one after the last stream row, at most N.
    """
    if begin >= end:
        return
    place = int(np.searchsorted(starts, begin, side="right")) - 1
    while begin < end:
        start, stop = int(starts[place]), int(starts[place + 1])
        if stop > begin:
            yield Piece(int(order[place]), begin - start, min(end, stop) - start)
            begin = min(end, stop)
        place += 1


def stream_starts(rows: np.ndarray, order: np.ndarray) -> np.ndarray:
    """First stream row of each row group in epoch order, and N: int64 [row_groups + 1].

    Args:
        rows: int64 [row_groups], rows of each row group in file order.
        order: int64 [row_groups], from :func:`epoch_order`.
    """
    return np.concatenate([[0], np.cumsum(rows[order], dtype=np.int64)])
