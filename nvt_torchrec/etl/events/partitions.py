"""Divide the rows and events of a group by ranges of its keys, so that each range fits into memory.

Keys are numbered in the order of their hashes, so a range of numbers is a partition by hash, and
the concatenated results of all partitions are in the order of the keys. Each block writes its rows
and events, by partition and then time; :mod:`.merged_partitions` merges those of all blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nvt_torchrec.base.arrays import to_offsets
from nvt_torchrec.base.files.atomic import get_writer_id
from nvt_torchrec.base.files.mapping import map_array
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.etl.events.event_blocks import EventLog, list_pair_keys
from nvt_torchrec.etl.events.event_records import (
    event_dtype,
    row_dtype,
    save_array,
    sums_dtype,
    write_records,
)
from nvt_torchrec.workflows.event_groups import EVENT, GroupSums, plan_groups

#: About how many keys, rows and events a partition has in all, unless a single key has more.
PARTITION_EVENTS = 1 << 19
#: A partition with more rows or events is kept in mapped files while it is summed.
MAX_IN_MEMORY = 1 << 20
#: Rows and events are counted by buckets of keys, about this many for a partition, to find where
#: partitions end.
_BUCKETS_OF_PARTITION = 16


@dataclasses.dataclass(frozen=True)
class DividedGroup:
    """A group whose keys are divided into partitions. It is passed to workers with each task.

    Attributes:
        log: The events.
        number: The number of the group.
        partitions: Number of partitions.
        large: Whether there may be too many events for 32 bits.
    """

    log: EventLog
    number: int
    partitions: int
    large: bool

    @functools.cached_property
    def group_sums(self) -> GroupSums:
        """The sums that the group needs."""
        return plan_groups(self.log.spec)[self.number]

    @property
    def pair_keys(self) -> list[int]:
        """The numbers of the keys that are pairs of the group's key and a counted value."""
        return list_pair_keys(self.log.spec)[self.number]

    @property
    def sums_dtype(self) -> np.dtype:
        """The type of a row's sums."""
        return sums_dtype(self.group_sums, large=self.large)

    def rows_file(self, name: str) -> Path:
        """Return the file with the rows of a block, by partition and time."""
        return self.log.files.scratch(self.number, f"{name}.rows")

    def row_order_file(self, name: str) -> Path:
        """Return the file with the index in the block of each row in :meth:`rows_file`, int32."""
        return self.log.files.scratch(self.number, f"{name}.row_order")

    def events_file(self, name: str) -> Path:
        """Return the file with the events of a block that have a key, by partition and time."""
        return self.log.files.scratch(self.number, f"{name}.events")

    def sums_file(self, partition: int) -> Path:
        """Return the file with the sums before the rows of a partition, by block."""
        return self.log.files.scratch(self.number, f"{partition}.sums")

    def kept_file(self, partition: int) -> Path:
        """Return the file with the events that a partition keeps for later days."""
        return self.log.files.scratch(self.number, f"{partition}.kept")

    def trained_file(self, partition: int) -> Path:
        """Return the file with the numbers of training rows of a partition's keys."""
        return self.log.files.scratch(self.number, f"{partition}.trained")

    def spilled_file(self, partition: int, name: str) -> Path:
        """Return the file of an array that is too large for memory, private to this thread."""
        return self.log.files.scratch(self.number, f"{partition}.{get_writer_id()}.spilled.{name}")

    def list_spilled(self, partition: int) -> list[Path]:
        """Return the existing files of :meth:`spilled_file`."""
        pattern = self.spilled_file(partition, "*")
        return [*pattern.parent.glob(pattern.name)]


def choose_bucket_size(keys: int, rows: int) -> int:
    """Return the number of keys of a bucket.

    Args:
        keys: Number of keys of the group.
        rows: Number of its rows and events.
    """
    buckets = _BUCKETS_OF_PARTITION * (keys + rows) // PARTITION_EVENTS
    return max(1, keys // max(1, buckets))


def count_buckets(numbers: np.ndarray, keys: int, bucket_size: int) -> np.ndarray:
    """Count rows or events by buckets of keys.

    Args:
        numbers: Integers [n], the numbers of their keys. Those without a key have a negative
            number, and count for the first bucket.
        keys: Number of keys.
        bucket_size: Number of keys of a bucket.

    Returns:
        int64 [buckets], at least one.
    """
    buckets = np.maximum(numbers, 0) // bucket_size
    return np.bincount(buckets, minlength=max(1, -(-keys // bucket_size)))


def cut_keys(counts: np.ndarray, keys: int, bucket_size: int) -> np.ndarray:
    """Cut keys into partitions of about :data:`PARTITION_EVENTS` keys, rows and events each.

    Args:
        counts: int64 [buckets], the number of rows and events of each bucket.
        keys: Number of keys.
        bucket_size: Number of keys of a bucket.

    Returns:
        int64 [partitions + 1], the number of the key at which each partition begins, and the end;
        there is at least one partition.
    """
    bounds = [0]
    size = 0
    for bucket, count in enumerate(counts.tolist()):
        begin = bucket * bucket_size
        size += bucket_size + count
        if size > PARTITION_EVENTS and begin > bounds[-1]:
            bounds.append(begin)
            size = bucket_size + count
    return np.array([*bounds, keys], np.int64)


def find_keys(sorted_keys: np.ndarray, keys: np.ndarray) -> slice:
    """Return the slice of a sorted array that has the keys of a range.

    Args:
        sorted_keys: int64 [n], ascending, with duplicates.
        keys: int64 [keys], all keys of the range, ascending; may be empty.
    """
    if not len(keys):
        return slice(0, 0)
    first = np.searchsorted(sorted_keys, keys[0])
    return slice(int(first), int(np.searchsorted(sorted_keys, keys[-1], side="right")))


def cut_by_key(keys: np.ndarray) -> Iterator[slice]:
    """Yield slices of events that are sorted by key; a slice has all events of its keys.

    Args:
        keys: int64 [n], ascending, the key of each event.
    """
    begin = 0
    while begin < len(keys):
        end = min(begin + PARTITION_EVENTS // 2, len(keys) - 1)
        end = int(np.searchsorted(keys, keys[end], side="right"))
        yield slice(begin, end)
        begin = end


def divide_numbers(
    numbers: np.ndarray, bounds: np.ndarray, *, keep_missing: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort rows or events by partition; within a partition they keep their order.

    Args:
        numbers: int32 [n], the numbers of their keys; negative without a key.
        bounds: int64 [partitions + 1], see :func:`cut_keys`.
        keep_missing: Whether those without a key belong to the first partition, or are left out.

    Returns:
        Their indices in the new order, int32 [kept]; the offset of each partition, and the end,
        int64 [partitions + 1]; for each of ``numbers`` the number of the key within its partition,
        -1 without a key, int32 [n].
    """
    counts = np.zeros(len(bounds) - 1, np.int64)
    partitions = np.empty(len(numbers), np.int32)
    in_partition = np.empty(len(numbers), np.int32)
    _find_partitions(numbers, bounds, keep_missing, partitions, in_partition, counts)
    offsets = to_offsets(counts)
    order = np.empty(offsets[-1], np.int32)
    _order_by_partition(partitions, offsets[:-1].copy(), order)
    return order, offsets, in_partition


def divide_block(name: str, group: DividedGroup) -> None:
    """Write the rows and events of a block by the partitions of a group.

    Raises:
        OutputError: The directory cannot be written.
    """
    log = group.log
    files = log.files
    bounds = map_array(files.bounds(group.number))
    times = map_array(files.times(name))
    flags = map_array(files.flags(name))
    numbers = map_array(files.numbers(name, group.number))
    if name in log.names:
        _divide_rows(name, group, bounds, times[0], flags, numbers)
    if name not in log.list_event_blocks(group.group_sums.source):
        return
    if log.spec.negatives:  # a negative is a row, but no event
        numbers = np.where(flags >> EVENT != 0, numbers, np.int32(-1))
    order, offsets, in_partition = divide_numbers(numbers, bounds)
    columns = {"known": times[-1], "happened": times[0], "flags": flags, "numbers": in_partition}
    columns["amounts"] = np.empty((0, len(numbers)))
    if group.group_sums.amounts:
        columns["amounts"] = map_array(files.amounts(name))
    columns["pairs"] = np.empty((0, len(numbers)), np.int32)
    pair_keys = group.pair_keys
    if pair_keys:
        columns["pairs"] = np.stack([map_array(files.numbers(name, key)) for key in pair_keys])
    dtype = event_dtype(log.spec, group.group_sums)
    write_records(group.events_file(name), dtype, offsets, order, columns)


def _divide_rows(
    name: str,
    group: DividedGroup,
    bounds: np.ndarray,
    times: np.ndarray,
    flags: np.ndarray,
    numbers: np.ndarray,
) -> None:
    """Write the rows of a block by partition and time, and their indices in the block.

    Args:
        name: The name of the block.
        group: The group.
        bounds: The bounds of its partitions.
        times: int64 [n], the times of the rows, in the order of the block's files.
        flags: Unsigned [n].
        numbers: int32 [n], the numbers of their keys.
    """
    files = group.log.files
    by_time = files.read_time_order(name)
    block_order = files.read_order(name)
    order, offsets, numbers_by_time = divide_numbers(numbers[by_time], bounds, keep_missing=True)
    in_partition = numbers_by_time
    if not isinstance(by_time, slice):
        in_partition = np.empty_like(numbers_by_time)
        in_partition[by_time] = numbers_by_time
        order = by_time[order]
    columns = {"times": times, "flags": flags, "numbers": in_partition}
    write_records(group.rows_file(name), row_dtype(group.log.spec), offsets, order, columns)
    if not isinstance(block_order, slice):
        order = block_order[order]
    save_array(group.row_order_file(name), order.astype(np.int32, copy=False))


@compiled()
def _find_partitions(
    numbers: np.ndarray,
    bounds: np.ndarray,
    keep_missing: bool,
    partitions: np.ndarray,
    in_partition: np.ndarray,
    counts: np.ndarray,
) -> None:
    """Find the partition of each row, -1 for rows that are left out; count the rows of each."""
    for i in range(len(numbers)):
        if numbers[i] < 0:
            in_partition[i] = -1
            partitions[i] = 0 if keep_missing else -1
            counts[0] += keep_missing
            continue
        # Binary search for the last partition that begins at or before the number.
        first, last = 0, len(counts) - 1
        while first < last:
            middle = (first + last + 1) // 2
            if bounds[middle] <= numbers[i]:
                first = middle
            else:
                last = middle - 1
        partitions[i] = first
        in_partition[i] = numbers[i] - bounds[first]
        counts[first] += 1


@compiled()
def _order_by_partition(partitions: np.ndarray, begins: np.ndarray, order: np.ndarray) -> None:
    # Counting sort: begins[partition] is the index in ``order`` for its next row.
    for i in range(len(partitions)):
        partition = partitions[i]
        if partition >= 0:
            order[begins[partition]] = i
            begins[partition] += 1


def sort_by_key(numbers: np.ndarray, keys: int) -> np.ndarray:
    """Return the indices that sort events by key, int64 [n]; ties keep their order.

    Args:
        numbers: Integers [n], the numbers of their keys.
        keys: Number of keys.
    """
    counts = np.bincount(numbers, minlength=keys)
    order = np.empty(len(numbers), np.int64)
    _write_order(numbers, np.cumsum(counts) - counts, order)
    return order


@compiled()
def _write_order(numbers: np.ndarray, begins: np.ndarray, order: np.ndarray) -> None:
    # Counting sort: begins[key] is the index in ``order`` for its next event.
    for event in range(len(numbers)):
        order[begins[numbers[event]]] = event
        begins[numbers[event]] += 1
