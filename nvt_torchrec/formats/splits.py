"""The rows of a log that are for training, validation and test."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np

SPLITS = ("train", "valid", "test")


def cut_last_day(rows: int, *, only_day: bool = False) -> dict[str, tuple[int, int]]:
    """Return row ranges ``[begin, end)`` of the last day's splits.

    All earlier days are for training. The first half is for validation (the odd row too), the
    second for test, as TorchRec's and NVIDIA's scripts cut day 23. A log of one day has no earlier
    day to train on: there the first 80 % of the rows are for training, and the rest is halved.

    Args:
        rows: Rows of the last day.
        only_day: Whether the log has no other day.
    """
    train = rows - rows // 5 if only_day else 0
    valid = train + (rows - train + 1) // 2
    return {"train": (0, train), "valid": (train, valid), "test": (valid, rows)}


@dataclasses.dataclass(frozen=True)
class RowRule:
    """Decides by a value of each row which split the row is in.

    Attributes:
        by: ``share``: the value is a hash of the row's place; ``column``: a hash of its key;
            ``time``: its time, in microseconds since 1970 UTC; ``values``: 0, 1 or 2, as the text
            of its key says.
        cuts: Ascending: rows whose value is below the first are train, below the second valid, all
            others test. With one cut there are no test rows.
        seed: The seed of the hash.
        valid_cut: For a split by values in which valid is a share of the rows for training: such a
            row is valid if the hash of its place is at least this. None if the values name valid.
    """

    by: str
    cuts: tuple[int, ...]
    seed: int = 0
    valid_cut: int | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that there are."""
        return SPLITS[: len(self.cuts) + 1]

    def choose(self, values: np.ndarray) -> np.ndarray:
        """Return the index in :attr:`splits` for each value: int64 or uint64 [n] → uint8 [n]."""
        chosen = np.zeros(len(values), np.uint8)
        for cut in self.cuts:
            chosen += values >= values.dtype.type(cut)
        return chosen


def compute_hash_cuts(valid: float, test: float) -> tuple[int, ...]:
    """Return the cuts of a 64-bit hash for shares of the rows; without ``test``, one cut."""
    # fractions, because float64 has 53 bits where a cut has 64
    before_test = 1 - Fraction(test)
    before_valid = before_test - Fraction(valid)
    shares = (before_valid, before_test) if test else (before_valid,)
    return tuple(int(share * 2**64) for share in shares)
