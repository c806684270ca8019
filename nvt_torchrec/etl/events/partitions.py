"""Partitions of events: ranges of hashes of their keys, small enough for memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nvt_torchrec.etl.events.extract import FIRST_LABEL, KEY, ROW
from nvt_torchrec.formats.feature_spec import FeatureSpec

#: About how many rows a partition has: what it is computed of stays in a processor's cache.
PARTITION_ROWS = 1 << 18


def partitions(rows: int) -> list[tuple[int, int | None]]:
    """Return the ranges of hashes of the partitions of so many rows; the last one is open."""
    count = 1
    while count * PARTITION_ROWS < rows:
        count *= 2
    lows = [-(2**63) + i * (2**64 // count) for i in range(count)]
    return list(zip(lows, [*lows[1:], None], strict=True))


def place_keys(keys: np.ndarray, bounds: tuple[int, int | None]) -> tuple[int, int]:
    """Return where the keys of a partition begin and end among rising keys."""
    low, high = bounds
    end = len(keys) if high is None else int(np.searchsorted(keys, high))
    return int(np.searchsorted(keys, low)), end


def read_partition(
    events: Sequence[np.ndarray], bounds: tuple[int, int | None]
) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Read the events of a partition.

    Args:
        events: The events of each block, int64 [4, n].
        bounds: The partition, see :func:`partitions`.

    Returns:
        Where they begin and end in each block; all of them, int64 [4, m].
    """
    ranges = [place_keys(array[KEY], bounds) for array in events]
    pieces = [array[:, begin:end] for array, (begin, end) in zip(events, ranges, strict=True)]
    return ranges, np.concatenate(pieces, axis=1)


def order_events(key: np.ndarray, time: np.ndarray) -> slice | np.ndarray:
    """Return the order by key, then time, of int64 [n] each; equal ones keep their order.

    Blocks are sorted by key, and most logs by time: merging is faster than sorting, and one block
    is in order as it is.
    """
    order: slice | np.ndarray = slice(None)
    if (key[1:] < key[:-1]).any():
        order = np.argsort(key, kind="stable")
    late, same = time[order], key[order]
    if ((late[1:] < late[:-1]) & (same[1:] == same[:-1])).any():
        return np.lexsort((time, key))
    return order


def choose_events(spec: FeatureSpec, number: int, data: np.ndarray) -> np.ndarray:
    """Return the places of the events of a history in int64 [4, n]."""
    rule, chosen = spec.histories[number], data[KEY] != 0
    if rule.where:
        chosen &= (data[ROW] >> (FIRST_LABEL + spec.labels.index(rule.where)) & 1).astype(bool)
    return np.flatnonzero(chosen)
