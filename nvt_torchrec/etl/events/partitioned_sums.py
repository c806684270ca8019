"""Divide the rows and events of a group into partitions, sum each, and collect the sums by row.

Each step consists of tasks, one for each block or partition. A task writes its own files and
returns only counts, so that tasks may run in threads or on the machines of a cluster:

1. count the rows and events of each block by ranges of keys, and cut the keys into partitions;
2. write the rows and events of each block by partition (:mod:`.partitions`);
3. sum the events of each partition (:mod:`.sums`);
4. collect the sums before the rows of each block;
5. join the events that the partitions keep for later days.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from nvt_torchrec.base.files.artifact import FileEntry
from nvt_torchrec.base.files.atomic import atomic_path, get_writer_id
from nvt_torchrec.base.files.growing import GrowingArray, create_array
from nvt_torchrec.base.files.mapping import map_array, write_array
from nvt_torchrec.base.threads import MapTasks, run_each
from nvt_torchrec.etl.events.earlier_events import EarlierEvents, EarlierFiles, kept_file_name
from nvt_torchrec.etl.events.event_blocks import EventLog
from nvt_torchrec.etl.events.event_files import EventFiles
from nvt_torchrec.etl.events.event_records import put_records, read_part
from nvt_torchrec.etl.events.label_rates import KeyMoments
from nvt_torchrec.etl.events.partitions import (
    DividedGroup,
    choose_bucket_size,
    count_buckets,
    cut_keys,
    divide_block,
)
from nvt_torchrec.etl.events.sums import sum_partition
from nvt_torchrec.workflows.event_groups import EVENT, GroupSums, plan_groups

#: The maximum number of events whose sums fit into 32 bits.
_MAX_SMALL_SUM = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class SummedGroup:
    """The result for a group whose events have been summed.

    Attributes:
        moments: The moments for the smoothing of rates, see :meth:`.KeyMoments.sum`.
        kept: The file with the events that are kept for later days.
    """

    moments: np.ndarray
    kept: FileEntry


def sum_group(
    log: EventLog,
    number: int,
    earlier: EarlierFiles | None,
    newest: int,
    map_tasks: MapTasks,
    report: Callable[[float], object] = lambda rows: None,
) -> SummedGroup:
    """Write the sums of a group before each row, and the events that are kept for later days.

    Args:
        log: The events; their keys must have been numbered.
        number: The number of the group.
        earlier: The files of earlier days; None for a run.
        newest: The time of the newest row that is not late, including earlier days.
        map_tasks: Runs tasks.
        report: Called with the number of rows done since the last call.
    """
    log.files.delete_scratch(number)  # from a process that was killed
    group = _divide_keys(log, number, earlier, map_tasks)
    run_each(map_tasks, functools.partial(divide_block, group=group), log.list_blocks(number))
    sum_events = functools.partial(sum_partition, group=group, earlier=earlier, newest=newest)
    for rows in map_tasks(sum_events, range(group.partitions)):
        report(rows)
    run_each(map_tasks, functools.partial(collect_sums, group=group), range(len(log.names)))
    (summed,) = map_tasks(join_partitions, [group])
    log.files.delete_scratch(number)
    return summed


def _divide_keys(
    log: EventLog, number: int, earlier: EarlierFiles | None, map_tasks: MapTasks
) -> DividedGroup:
    """Cut the keys of a group into partitions of similar size, and write their bounds."""
    group = plan_groups(log.spec)[number]
    files = log.files
    num_keys = len(map_array(files.keys(number)))
    blocks = log.list_blocks(number)
    rows = sum(len(map_array(files.flags(name))) for name in blocks)
    bucket_size = choose_bucket_size(num_keys, 2 * rows)
    count = functools.partial(
        _count_block, log=log, number=number, num_keys=num_keys, bucket_size=bucket_size
    )
    counts = sum(map_tasks(count, blocks), np.zeros((2, 1), np.int64))
    num_events = int(counts[1].sum())
    sizes = counts.sum(axis=0)
    if earlier:
        count_kept = functools.partial(
            _count_kept, files=files, number=number, group=group, bucket_size=bucket_size
        )
        ((kept, kept_events),) = map_tasks(count_kept, [earlier])
        sizes = sizes + kept
        num_events += kept_events
    bounds = cut_keys(sizes, num_keys, bucket_size)
    write_array(files.bounds(number), bounds)
    return DividedGroup(log, number, len(bounds) - 1, large=num_events > _MAX_SMALL_SUM)


def _count_block(
    name: str, log: EventLog, number: int, num_keys: int, bucket_size: int
) -> np.ndarray:
    """Count the rows and events of a block by ranges of keys, int64 [2, ranges]."""
    numbers = map_array(log.files.numbers(name, number))
    every = count_buckets(numbers, num_keys, bucket_size)
    counts = np.zeros((2, len(every)), np.int64)
    if name in log.names:
        counts[0] = every
    if name in log.list_event_blocks(log.spec.groups[number].source):
        counts[1] = every
        if log.spec.negatives:  # a negative is a row, but no event
            happened = map_array(log.files.flags(name)) >> EVENT != 0
            counts[1] = count_buckets(numbers[happened], num_keys, bucket_size)
    return counts


def _count_kept(
    earlier: EarlierFiles, files: EventFiles, number: int, group: GroupSums, bucket_size: int
) -> tuple[np.ndarray, int]:
    """Count the kept events of earlier days by ranges of keys; also return the original number.

    A kept event may stand for many that were merged.
    """
    kept = earlier.open_group(number, group)
    keys = map_array(files.keys(number))
    counts = count_buckets(np.searchsorted(keys, kept.key), len(keys), bucket_size)
    return counts, int(kept.counts[0].sum())


def collect_sums(block: int, group: DividedGroup) -> None:
    """Write the sums before each row of a block, in the order of the rows.

    Args:
        block: The number of the block in the log.
        group: The group; its partitions must have been summed.

    Raises:
        OutputError: The directory cannot be written.
    """
    names = group.log.names
    files = group.log.files
    rows = map_array(group.row_order_file(names[block]))
    with atomic_path(files.sums(names[block], group.number)) as temporary:
        sums = create_array(temporary, rows.shape, group.sums_dtype)
        begin = 0
        for partition in range(group.partitions):
            path = group.sums_file(partition)
            records = read_part(path, group.sums_dtype, len(names), block)
            put_records(sums, rows[begin : begin + len(records)], records)
            begin += len(records)


def join_partitions(group: DividedGroup) -> SummedGroup:
    """Join the events that the partitions of a group keep, in the order of its keys.

    Raises:
        OutputError: The directory cannot be written.
    """
    group_sums = group.group_sums
    files = group.log.files
    file = files.directory / kept_file_name(group.number)
    key_moments = KeyMoments(
        files.scratch(group.number, f"{get_writer_id()}.moments"), group_sums.num_labels
    )
    with GrowingArray(file, np.int64, EarlierEvents.count_rows(group_sums)) as written:
        for partition in range(group.partitions):
            written.append(np.load(group.kept_file(partition)))
            key_moments.add(np.load(group.trained_file(partition)))
    return SummedGroup(key_moments.sum(), FileEntry.from_file(file))
