"""The division of a log's rows into training, validation and test."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np

SPLITS = ("train", "valid", "test")


def cut_last_day(rows: int, *, only_day: bool = False) -> dict[str, tuple[int, int]]:
    """Return the ranges of rows ``[begin, end)`` of the last day's splits.

    All earlier days are for training. The first half of the last day (with the odd row) is for
    validation, the second for test, as TorchRec's and NVIDIA's scripts cut day 23. A log of one day
    has no earlier day to train on, so the first 80 % of its rows are for training, and the rest is
    halved.

    Args:
        rows: The number of rows of the last day.
        only_day: Whether the log has no other day.
    """
    train = rows - rows // 5 if only_day else 0
    valid = train + (rows - train + 1) // 2
    return {"train": (0, train), "valid": (train, valid), "test": (valid, rows)}


@dataclasses.dataclass(frozen=True)
class RowRule:
    """Assigns each row to a split by a value of the row.

    Attributes:
        by: The value. ``share``: a hash of the row's file and row number; ``column``: a hash of its
            key; ``time``: its time, in microseconds since 1970 UTC; ``values``: 0, 1 or 2, the
            index of the split of its key's text.
        cuts: Ascending. Rows with a value below the first cut are train, below the second valid,
            all others test. With one cut there are no test rows.
        seed: The seed of the hash.
        valid_cut: For a split by values in which valid is a share of the training rows: a training
            row is valid if the hash of its file and row number is at least this. None if the
            values name valid.
    """

    by: str
    cuts: tuple[int, ...]
    seed: int = 0
    valid_cut: int | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that rows can be in."""
        return SPLITS[: len(self.cuts) + 1]

    def choose(self, values: np.ndarray) -> np.ndarray:
        """Return the index in :attr:`splits` for each value: int64 or uint64 [n] → uint8 [n]."""
        chosen = np.zeros(len(values), np.uint8)
        for cut in self.cuts:
            chosen += values >= values.dtype.type(cut)
        return chosen


def compute_hash_cuts(valid: float, test: float) -> tuple[int, ...]:
    """Return the cuts of a 64-bit hash for shares of the rows; one cut if ``test`` is 0."""
    # exact fractions, because a cut has 64 bits, but a float64 has 53
    before_test = 1 - Fraction(test)
    before_valid = before_test - Fraction(valid)
    shares = (before_valid, before_test) if test else (before_valid,)
    return tuple(int(share * 2**64) for share in shares)
