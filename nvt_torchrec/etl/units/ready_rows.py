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
        if not rank:
            return 0
        return int(self.rows[rank]) if rank < len(self.rows) else self.lines


def cuts_of_file(
    ready: ReadyRows, cuts: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    """Return which rows of a file each split takes, all of them together.

    Args:
        ready: The rows of the file that are written.
        cuts: By split, the range of such rows, counted from the first of this file.
    """
    if not len(ready):  # its rows wait: one unit accounts for them
        split = next((split for split, (begin, end) in cuts.items() if begin <= 0 < end), "test")
        return {split: (0, ready.lines)}
    ranges = {}
    for split, (begin, end) in cuts.items():
        first, last = (ready.find(min(max(rank, 0), len(ready))) for rank in (begin, end))
        if first < last:
            ranges[split] = (first, last)
    return ranges
