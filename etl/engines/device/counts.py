"""Count the values of categorical columns on a card, and merge such counts there.

The same counts as :mod:`etl.engines.counting`: sorting and adding integers has one result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from nvt_torchrec.base.device import Device, DeviceArray
from nvt_torchrec.etl.engines.counting import Counts


@dataclasses.dataclass(frozen=True)
class DeviceCounts:
    """Distinct values in ascending order, uint32 [n], and how often each occurred, int64 [n]."""

    values: DeviceArray
    counts: DeviceArray


def count_on_device(
    device: Device, columns: Sequence[DeviceArray], placeholders: int
) -> DeviceCounts:
    """Count the values of the columns that share a vocabulary.

    Args:
        device: the card.
        columns: uint32 [n] each; none, for a vocabulary whose values are not counted.
        placeholders: how many zeros stand for missing values and are not counted.
    """
    arrays = device.arrays
    if not columns:
        return DeviceCounts(arrays.empty(0, np.uint32), arrays.empty(0, np.int64))
    together = columns[0] if len(columns) == 1 else arrays.concatenate(columns)
    values, counts = arrays.unique(together, return_counts=True)
    counts = counts.astype(np.int64)
    if placeholders:  # then 0 is the first value
        counts[0] -= placeholders
        if not int(counts[0]):
            values, counts = values[1:], counts[1:]
    return DeviceCounts(values, counts)


def merge_on_device(device: Device, several: Sequence[DeviceCounts]) -> DeviceCounts:
    """Add up counts, at least one."""
    arrays = device.arrays
    some = [counts for counts in several if len(counts.values)]
    if len(some) < 2:
        return some[0] if some else several[0]
    values = arrays.concatenate([counts.values for counts in some])
    order = arrays.argsort(values)
    values = values[order]
    sums = arrays.cumsum(arrays.concatenate([counts.counts for counts in some])[order])
    last = arrays.concatenate([values[1:] != values[:-1], arrays.ones(1, np.bool_)])
    places = arrays.flatnonzero(last)
    until = sums[places]
    counts = until.copy()
    counts[1:] -= until[:-1]
    return DeviceCounts(values[places], counts)


def to_device(device: Device, counts: Counts) -> DeviceCounts:
    """Copy counts of numbers to the card."""
    return DeviceCounts(device.upload(counts.values), device.upload(counts.counts))


def to_host(device: Device, counts: DeviceCounts) -> Counts:
    """Copy counts to the host."""
    return Counts(device.download(counts.values), device.download(counts.counts))
