"""Which rows make which batch: pure functions of a few integers, without torch or files.

An epoch puts the row groups into an order (:func:`epoch_order`); their rows, one after another,
are *the stream*, N rows. With the global batch G (``batch_size · world_size``) there are
``K = N // G`` full steps. The stream's first K·G rows are cut into V *virtual shards* of
consecutive rows, and each shard gives ``g = G // V`` rows to every step::

    row i of global batch k  =  stream row  (i // g) · K · g  +  k · g  +  i % g        0 <= i < G

Rank r of W takes rows ``[r·B, (r+1)·B)`` of each global batch, B = G // W. So the global batch
does not depend on how many ranks share it, every row is dealt exactly once, and all ranks take
the same number of steps, whatever the sizes of files and row groups. The ``N % G`` rows that are
left make one last, smaller step, split evenly; ranks may get no row of it, and an empty batch is
a batch.

While W divides V, each rank reads V/W long runs of consecutive rows; otherwise neighbouring ranks
both decode some row groups. A run that begins inside a row group decodes it from its start, so V
should be far below the number of row groups.

Shuffling permutes the row groups, and the rows inside windows of a virtual shard. Both depend on
(seed, epoch) and the plan only, never on a global generator or the rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from clicklog.errors import SettingsError

#: Default number of virtual shards: divisible by the world sizes 1, 2, 4 and 8.
VIRTUAL_SHARDS = 8

#: Rows of a virtual shard among which shuffling permutes. Every step takes rows from one window
#: of each of the V shards, so neighbours come from V places of an already permuted stream.
WINDOW_ROWS = 16384


@dataclasses.dataclass(frozen=True)
class Span:
    """The part of every step that a rank takes from one virtual shard: rows [begin, end) of g."""

    shard: int
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
        virtual_shards: V, a divisor of G.
        drop_last: leave out the last step when it has fewer than G rows.
    """

    rows: int
    global_batch: int
    virtual_shards: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.virtual_shards < 1 or self.global_batch % self.virtual_shards:
            raise SettingsError(
                f"virtual_shards = {self.virtual_shards} does not divide the global batch of "
                f"{self.global_batch} rows",
                "choose a divisor of batch_size * world_size",
            )

    @property
    def share(self) -> int:
        """g, the rows that each virtual shard gives to a full step."""
        return self.global_batch // self.virtual_shards

    @property
    def full_steps(self) -> int:
        """K, the steps with G rows."""
        return self.rows // self.global_batch

    @property
    def last_rows(self) -> int:
        """Rows, over all ranks, of the last, smaller step; 0 when there is none."""
        return 0 if self.drop_last else self.rows % self.global_batch

    @property
    def steps(self) -> int:
        """Steps of an epoch, the same on every rank."""
        return self.full_steps + (self.last_rows > 0)

    def spans(self, rank: int, world_size: int) -> list[Span]:
        """What a rank takes of each full step, in the order of its batch."""
        size = self.global_batch // world_size
        begin, end = rank * size, (rank + 1) * size
        return [
            Span(
                shard,
                max(begin - shard * self.share, 0),
                min(end - shard * self.share, self.share),
            )
            for shard in range(begin // self.share, -(-end // self.share))
        ]

    def shard_rows(self, shard: int, first_step: int, end_step: int) -> tuple[int, int]:
        """The stream rows [begin, end) that a virtual shard gives to full steps [first, end)."""
        start = shard * self.full_steps * self.share
        return start + first_step * self.share, start + end_step * self.share

    def last_step(self, rank: int, world_size: int) -> tuple[int, int]:
        """The stream rows [begin, end) of a rank's batch in the last, smaller step."""
        start = self.full_steps * self.global_batch
        return (
            start + self.last_rows * rank // world_size,
            start + self.last_rows * (rank + 1) // world_size,
        )

    @property
    def window_steps(self) -> int:
        """Full steps among which shuffling permutes the rows of each virtual shard."""
        return max(1, WINDOW_ROWS // self.share)


def default_virtual_shards(global_batch: int, world_size: int) -> int:
    """V = 8 where that suits, so that 1, 2, 4 and 8 ranks see the same global batches; else W."""
    if VIRTUAL_SHARDS % world_size == 0 and global_batch % VIRTUAL_SHARDS == 0:
        return VIRTUAL_SHARDS
    return world_size


def epoch_order(row_groups: int, *, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    """The order of the row groups in an epoch: int64 [row_groups], a permutation."""
    if not shuffle:
        return np.arange(row_groups)
    return _permutation(row_groups, seed, epoch, ())


def window_order(rows: int, *, seed: int, epoch: int, shard: int, window: int) -> np.ndarray:
    """The order of the rows of one shuffled window of a virtual shard: int64 [rows]."""
    return _permutation(rows, seed, epoch, (shard, window))


def _permutation(length: int, seed: int, epoch: int, where: tuple[int, ...]) -> np.ndarray:
    # Sorting raw Philox words instead of Generator.permutation, whose stream NumPy may change.
    sequence = np.random.SeedSequence((seed, epoch), spawn_key=where)
    return np.argsort(np.random.Philox(sequence).random_raw(length))


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
