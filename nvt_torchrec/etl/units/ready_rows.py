"""The rows of a file that are written now, while the others wait for their clicks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class ReadyRows:
    """The rows of a file that are written now, while the others wait for their clicks.

    Attributes:
        lines: The number of rows of the file.
        rows: int64 [n], the row numbers of the ready rows, from 0, ascending.
    """

    lines: int
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def find(self, rank: int) -> int:
        """Return the row number at which to cut the file so that ``rank`` ready rows are before."""
        if rank == 0:
            return 0
        if rank == len(self.rows):
            return self.lines
        return int(self.rows[rank])


def locate_cuts(
    ready: ReadyRows, cuts: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    """Convert ranges of ready rows into ranges of all rows of their file.

    Args:
        ready: The ready rows of the file.
        cuts: By split, its range of ready rows, counted from the first ready row of this file;
            ranges may begin before this file and end after it.

    Returns:
        By split that has rows of the file, the range of row numbers. Together the ranges cover the
        file.
    """
    if not len(ready):
        # All rows wait. They go to one split, so that some unit accounts for them.
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
