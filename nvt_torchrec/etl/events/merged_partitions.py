"""Merge the rows and events of a partition from all blocks, in the order of time."""

from __future__ import annotations

import dataclasses

import numpy as np

from nvt_torchrec.etl.events.event_records import allocate, event_dtype, gather_part, row_dtype
from nvt_torchrec.etl.events.partitions import MAX_IN_MEMORY, DividedGroup
from nvt_torchrec.etl.events.timeline import EventBlock, iterate_in_order
from nvt_torchrec.workflows.event_groups import find_cuts


@dataclasses.dataclass(frozen=True)
class PartitionRows:
    """The rows of a partition in the order of their times.

    Attributes:
        cuts: int64 [n], the time before which events count for each row.
        numbers: int32 [n], the number of each row's key in the partition; -1 without a key.
        flags: Unsigned [n], see :data:`workflows.event_groups.TRAIN`.
        indices: int64 [n], the index of each row in the order by block.
        offsets: int64 [blocks + 1], where the rows of each block begin in the order by block, and
            the end.
    """

    cuts: np.ndarray
    numbers: np.ndarray
    flags: np.ndarray
    indices: np.ndarray
    offsets: np.ndarray


def read_rows(group: DividedGroup, partition: int) -> PartitionRows:
    """Merge the rows of a partition from all blocks."""
    spec = group.log.spec
    files = [group.rows_file(name) for name in group.log.names]
    spilled = group.spilled_file(partition, "rows")
    dtype = row_dtype(spec)
    records, offsets = gather_part(
        files, dtype, group.partitions, partition, spilled, MAX_IN_MEMORY
    )

    def make_column(name: str, dtype: np.dtype | type) -> np.ndarray:
        return allocate(group.spilled_file(partition, name), (len(records),), dtype, MAX_IN_MEMORY)

    rows = PartitionRows(
        cuts=make_column("cuts", np.int64),
        numbers=make_column("row_numbers", np.int32),
        flags=make_column("row_flags", dtype["flags"]),
        indices=make_column("row_indices", np.int64),
        offsets=offsets,
    )
    begin = 0
    for indices in iterate_in_order(records["times"], offsets):
        piece = slice(begin, begin + len(indices))
        rows.cuts[piece] = find_cuts(spec, records["times"][indices])
        rows.numbers[piece] = records["numbers"][indices]
        rows.flags[piece] = records["flags"][indices]
        rows.indices[piece] = indices
        begin = piece.stop
    return rows


def allocate_sums(group: DividedGroup, partition: int, rows: int) -> np.ndarray:
    """Return uninitialized records for the sums before the rows of a partition."""
    path = group.spilled_file(partition, "sums")
    return allocate(path, (rows,), group.sums_dtype, MAX_IN_MEMORY)


def read_events(group: DividedGroup, partition: int) -> EventBlock:
    """Merge the events of a partition from all blocks, in the order in which they become known."""
    group_sums = group.group_sums
    names = group.log.list_event_blocks(group_sums.source)
    files = [group.events_file(name) for name in names]
    spilled = group.spilled_file(partition, "events")
    dtype = event_dtype(group.log.spec, group_sums)
    records, offsets = gather_part(
        files, dtype, group.partitions, partition, spilled, MAX_IN_MEMORY
    )
    columns: dict[str, np.ndarray] = {}
    for name in dtype.names or ():
        shape = (*dtype[name].shape, len(records))
        path = group.spilled_file(partition, f"event_{name}")
        columns[name] = allocate(path, shape, dtype[name].base, MAX_IN_MEMORY)
    begin = 0
    for indices in iterate_in_order(records["known"], offsets):
        piece = slice(begin, begin + len(indices))
        for name, column in columns.items():
            column[..., piece] = records[name][indices].T
        begin = piece.stop
    return EventBlock(**columns)
