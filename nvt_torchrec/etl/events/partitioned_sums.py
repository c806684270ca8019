"""Divide the rows and events of each group into partitions, and sum these up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from nvt_torchrec.base.files.growing import create_array
from nvt_torchrec.base.files.mapping import map_array
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.etl.events.earlier_events import EarlierEvents
from nvt_torchrec.etl.events.extract import EventFiles
from nvt_torchrec.etl.events.partitions import (
    KeyRanges,
    PartitionFiles,
    count_keys,
    count_numbers,
    cut_keys,
    find_keys,
)
from nvt_torchrec.etl.events.sums import Partition, Summed, sum_partition
from nvt_torchrec.etl.events.timeline import EventLog
from nvt_torchrec.workflows.event_groups import EVENT, GroupSums, sums_of_groups
from nvt_torchrec.workflows.history_tail import HistoryTail


def sum_up(
    log: EventLog,
    earlier: Sequence[EarlierEvents],
    tails: Sequence[HistoryTail],
    newest: int,
    threads: int,
    report: Callable[[float], object] = lambda rows: None,
) -> Iterator[Summed]:
    """Write what the events before each row sum up to; yield the sums of each partition.

    They are yielded in the order of groups, then of keys.

    Args:
        log: The events.
        earlier: Of each group, the events of days before.
        tails: Of each history, the newest events of days before; none without such days.
        newest: The time of the newest row that is not late, also of earlier days.
        threads: How many partitions are summed up at once.
        report: Called with the number of rows done since the last call, counting a row once.
    """
    groups = sums_of_groups(log.spec)
    partitions = (
        partition
        for number, wanted in enumerate(groups)
        for partition in _divide(log, number, wanted, earlier[number], tails, newest)
    )
    results = map_in_order(sum_partition, partitions, threads, "events")
    for number, summed in itertools.groupby(results, key=lambda result: result.group):
        for result in summed:
            report(result.rows / len(groups))
            yield result
        PartitionFiles(log.files, number).delete()
    outputs = []
    for number, wanted in enumerate(groups):
        outputs += [path for path, _, _ in _list_outputs(log.files, number, wanted, np.int64)]
        outputs += [log.files.positions(name, number) for name in log.names]
    log.sync(outputs)


def _divide(
    log: EventLog,
    group: int,
    wanted: GroupSums,
    earlier: EarlierEvents,
    tails: Sequence[HistoryTail],
    newest: int,
) -> Iterator[Partition]:
    """Write the rows and events of a group by partition, and yield the partitions."""
    spec, files = log.spec, log.files
    keys, arrays = map_array(files.keys(group)), PartitionFiles(files, group)
    arrays.delete()  # of a process that was killed
    counts = arrays.create_counts(3, len(keys))
    of_rows, of_events, of_earlier = counts
    without_key = 0
    for name in log.names:
        without_key += count_numbers(log.map(files.numbers(name, group)), of_rows)
    for name in log.event_names(wanted.source):
        numbers = log.map(files.numbers(name, group))
        if spec.negatives:  # a row that was drawn is no event
            numbers = numbers[log.map(files.flags(name)) >> EVENT != 0]
        count_numbers(numbers, of_events)
    count_keys(earlier.key, keys, of_earlier)
    bounds = cut_keys(counts[1:])
    rows, events = KeyRanges(bounds, of_rows, without_key), KeyRanges(bounds, of_events)
    arrays.write_rows(log, rows)
    arrays.write_events(log.iterate_events(group), events)
    num_events = log.count_events(group) + earlier.counts[0].sum()
    kind = np.int32 if num_events < 2**31 else np.int64
    for path, shape, dtype in _list_outputs(files, group, wanted, kind):
        create_array(path, (*shape, int(rows.offsets[-1])), dtype)
    for i, (begin, end) in enumerate(itertools.pairwise(bounds.tolist())):
        of_keys = keys[begin:end]
        newest_events = {}
        for number in wanted.histories if tails else ():
            newest_events[number] = tails[number].take(find_keys(tails[number].keys, of_keys))
        yield Partition(
            spec=spec,
            files=files,
            group=group,
            keys=slice(begin, end),
            rows=slice(*rows.offsets[i : i + 2].tolist()),
            events=slice(*events.offsets[i : i + 2].tolist()),
            earlier=earlier.take(find_keys(earlier.key, of_keys)),
            tails=newest_events,
            newest=newest,
        )


def _list_outputs(
    files: EventFiles, group: int, wanted: GroupSums, kind: type
) -> list[tuple[Path, tuple[int, ...], type]]:
    """Return the files of a group's sums, the shapes of what they have of each row, and types."""
    outputs: list[tuple[Path, tuple[int, ...], type]] = []
    outputs.append((files.sums(group), (len(wanted.sums),), kind))
    if wanted.totals:
        outputs.append((files.totals(group), (len(wanted.totals), 2), np.float64))
    if wanted.picks:
        outputs.append((files.picks(group), (len(wanted.picks),), np.float64))
    if wanted.distinct:
        outputs.append((files.distinct(group), (len(wanted.distinct),), kind))
    if wanted.has_last:
        outputs.append((files.last(group), (), np.int64))
    return outputs
