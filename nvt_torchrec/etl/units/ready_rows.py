"""The rows of a file that are written now, where others wait for their clicks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class ReadyRows:
    """The rows of a file that are written, where others wait for their clicks.

    Attributes:
        lines: How many rows the file has.
        rows: int64 [n], the numbers of these rows, from 0.
    """

    lines: int
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def find(self, rank: int) -> int:
        """Return the number of the row before which so many of these rows are."""
        if rank == 0:
            return 0
        if rank == len(self.rows):
            return self.lines
        return int(self.rows[rank])


def cuts_of_file(
    ready: ReadyRows, cuts: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    """Return which rows of a file each split takes, all of them together.

    Args:
        ready: The rows of the file that are written.
        cuts: By split, the range of such rows, counted from the first of this file.
    """
    if not len(ready):
        # All of its rows wait; they go to one split, so that a unit accounts for them.
        split = "test"
        for name, (begin, end) in cuts.items():
            if begin <= 0 < end:
                split = name
        return {split: (0, ready.lines)}
    ranges = {}
    for split, (begin, end) in cuts.items():
        first = ready.find(min(max(begin, 0), len(ready)))
        last = ready.find(min(max(end, 0), len(ready)))
        if first < last:
            ranges[split] = (first, last)
    return ranges
