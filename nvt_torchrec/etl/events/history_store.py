"""Write the events of histories, once their columns have ids, and the newest events of each key.

Each block writes its events of each history by the partitions of the group, with their ids. Then a
task for each history reads one partition after the other, so that events are stored by key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import null_mask, to_numpy
from nvt_torchrec.base.files.atomic import get_writer_id
from nvt_torchrec.base.files.growing import GrowingArray
from nvt_torchrec.base.files.mapping import map_array
from nvt_torchrec.base.threads import MapTasks, run_each
from nvt_torchrec.etl.events.earlier_events import EarlierFiles
from nvt_torchrec.etl.events.event_blocks import EventLog
from nvt_torchrec.etl.events.event_files import EventFiles
from nvt_torchrec.etl.events.event_records import gather_part, history_dtype, write_records
from nvt_torchrec.etl.events.extract import is_sorted
from nvt_torchrec.etl.events.partitions import (
    MAX_IN_MEMORY,
    divide_numbers,
    find_keys,
    sort_by_key,
)
from nvt_torchrec.formats.feature_spec.columns import NULL_ID
from nvt_torchrec.formats.feature_spec.events import HistoryRule
from nvt_torchrec.formats.histories import HISTORIES, StoredHistory, write_history
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.compiled import CompiledWorkflow
from nvt_torchrec.workflows.event_groups import get_history_bit
from nvt_torchrec.workflows.history_tail import HistoryTail

_TAIL_ARRAYS = [field.name for field in dataclasses.fields(HistoryTail)]
#: Held while a workflow is loaded, so that a process loads it once even if two threads need it.
_LOADING = threading.Lock()


def write_histories(
    log: EventLog,
    description: WorkflowDescription,
    earlier: EarlierFiles | None,
    first_keys: dict[str, int],
    map_tasks: MapTasks,
) -> None:
    """Write the histories of a run or an extension, and their newest events, below the events.

    Args:
        log: The events, which must have been divided into partitions.
        description: The description of the workflow that gives the ids.
        earlier: The files of earlier days; None for a run.
        first_keys: For each history, the number of its first key.
        map_tasks: Runs tasks.

    Raises:
        OutputError: The directory cannot be written.
    """
    files = log.files
    groups = _list_groups(log)
    shutil.rmtree(files.directory / HISTORIES, ignore_errors=True)  # from an interrupted process
    for group in set(groups):
        files.delete_scratch(group)
    divide = functools.partial(
        divide_histories, log=log, workflow=description.path, digest=description.digest
    )
    run_each(map_tasks, divide, log.names)
    store = functools.partial(store_history, log=log, earlier=earlier, first_keys=first_keys)
    run_each(map_tasks, store, range(len(groups)))
    for group in set(groups):
        files.delete_scratch(group)


def read_tail(files: EventFiles, rule: HistoryRule) -> HistoryTail:
    """Map the newest events of each key of a history."""
    return HistoryTail(*(map_array(files.tail(rule.name, name)) for name in _TAIL_ARRAYS))


def _list_groups(log: EventLog) -> list[int]:
    """Return the number of the group of each history."""
    return [log.spec.groups.index(rule.group) for rule in log.spec.histories]


def _make_path(log: EventLog, history: int, name: str) -> Path:
    """Return the file of a block's events of a history."""
    return log.files.scratch(_list_groups(log)[history], f"history.{history}.{name}")


def divide_histories(name: str, log: EventLog, workflow: Path, digest: str) -> None:
    """Write the events of all histories of a block, with their ids, by partition and time.

    Args:
        name: The name of the block.
        log: The events.
        workflow: The directory of the workflow that gives the ids.
        digest: Its digest.

    Raises:
        OutputError: The directory cannot be written.
    """
    spec = log.spec
    files = log.files
    with _LOADING:
        encoder = _load_encoder(workflow, digest)
    ids = _encode(files.values(name), encoder)[:, files.read_order(name)]
    flags = map_array(files.flags(name))
    known = map_array(files.times(name))[-1]
    for history, (rule, group) in enumerate(zip(spec.histories, _list_groups(log), strict=True)):
        numbers = map_array(files.numbers(name, group))
        is_event = flags >> get_history_bit(spec, history) & 1 == 1
        numbers = np.where(is_event, numbers, np.int32(-1))
        order, offsets, in_partition = divide_numbers(numbers, map_array(files.bounds(group)))
        chosen = [spec.history_columns.index(column) for column in rule.columns]
        columns = {"known": known, "numbers": in_partition, "ids": ids[chosen]}
        dtype = history_dtype(len(rule.columns))
        write_records(_make_path(log, history, name), dtype, offsets, order, columns)


def store_history(
    history: int, log: EventLog, earlier: EarlierFiles | None, first_keys: dict[str, int]
) -> None:
    """Write a history below the directory of the events, and the newest events of each key.

    Args:
        history: Its number.
        log: The events; each block must have written those of the history.
        earlier: The files of earlier days; None for a run.
        first_keys: For each history, the number of its first key.

    Raises:
        OutputError: The directory cannot be written.
    """
    rule = log.spec.histories[history]
    files = log.files
    stored = StoredHistory(rule.name, rule.columns)
    with (
        write_history(files.directory, stored, first_keys[rule.name]) as writer,
        HistoryTailWriter(files, rule) as newest,
    ):
        for events in HistoryReader(log, history, earlier).read():
            ids = events.ids
            counts = events.counts
            newest.add(HistoryTail.select_newest(events.keys, counts, events.known, ids, rule.kept))
            if not events.is_row_key.all():
                ids = ids[:, np.repeat(events.is_row_key, counts)]
                counts = counts[events.is_row_key]
            writer.add(counts, dict(zip(rule.columns, ids, strict=True)))


class HistoryTailWriter:
    """Writes the newest events of a history, a range of keys at a time.

    Args:
        files: The files of the run's events.
        rule: The history.
    """

    def __init__(self, files: EventFiles, rule: HistoryRule) -> None:
        keys, offsets, known, ids = (files.tail(rule.name, name) for name in _TAIL_ARRAYS)
        self._arrays = [
            GrowingArray(keys, np.int64),
            GrowingArray(offsets, np.int64),
            GrowingArray(known, np.int64),
            GrowingArray(ids, np.int32, len(rule.columns)),
        ]
        self._arrays[1].append(np.zeros(1, np.int64))  # offsets begin with 0

    def __enter__(self) -> HistoryTailWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        with contextlib.ExitStack() as stack:
            for array in self._arrays:
                stack.push(array)

    def add(self, tail: HistoryTail) -> None:
        """Add the events of the next keys."""
        keys, offsets, known, ids = self._arrays
        keys.append(tail.keys)
        offsets.append(known.length + tail.offsets[1:])
        known.append(tail.known)
        ids.append(tail.ids)


@dataclasses.dataclass(frozen=True)
class HistoryEvents:
    """A history's events of a range of keys, ordered by key, then time.

    Attributes:
        keys: int64 [keys].
        is_row_key: bool [keys], whether a row has the key.
        counts: int64 [keys], the number of events of each.
        known: int64 [events], the time from which each is known.
        ids: int32 [columns, events].
    """

    keys: np.ndarray
    is_row_key: np.ndarray
    counts: np.ndarray
    known: np.ndarray
    ids: np.ndarray


class HistoryReader:
    """Reads the events of a history: those kept from earlier days, and new ones."""

    def __init__(self, log: EventLog, history: int, earlier: EarlierFiles | None) -> None:
        rule = log.spec.histories[history]
        self._log = log
        self._history = history
        self._group = log.spec.groups.index(rule.group)
        self._columns = len(rule.columns)
        self._tail = earlier.open_tail(rule) if earlier else HistoryTail.make_empty(self._columns)

    def read(self) -> Iterator[HistoryEvents]:
        """Yield the events of ranges of keys, in the order of the keys."""
        files = self._log.files
        group = self._group
        all_keys = map_array(files.keys(group))
        row_indices = map_array(files.row_indices(group))
        num_row_keys = len(map_array(files.row_keys(group)))
        bounds = map_array(files.bounds(group)).tolist()
        for partition, (begin, end) in enumerate(itertools.pairwise(bounds)):
            keys = all_keys[begin:end]
            # row_indices grows after each key that rows have, and not after a key that only
            # earlier days or other sources have.
            following = row_indices[end] if end < len(all_keys) else num_row_keys
            is_row_key = np.diff(row_indices[begin:end], append=following) > 0
            yield self._sort(keys, is_row_key, self._gather(partition, len(bounds) - 1))

    def _gather(self, partition: int, partitions: int) -> np.ndarray:
        """Return the new events of a partition from all blocks, records [n]."""
        log = self._log
        history = self._history
        paths = [_make_path(log, history, name) for name in log.names]
        spilled = log.files.scratch(self._group, f"history.{history}.{get_writer_id()}.spilled")
        dtype = history_dtype(self._columns)
        records, _ = gather_part(paths, dtype, partitions, partition, spilled, MAX_IN_MEMORY)
        return records

    def _sort(self, keys: np.ndarray, is_row_key: np.ndarray, records: np.ndarray) -> HistoryEvents:
        """Return the old and new events of a range of keys.

        Args:
            keys: int64 [keys].
            is_row_key: bool [keys], whether a row has the key.
            records: Their new events [n], by block, then time.
        """
        tail = self._tail.take(find_keys(self._tail.keys, keys))
        old_keys, old_known = tail.expand()
        numbers = np.concatenate([np.searchsorted(keys, old_keys), records["numbers"]])
        known = np.concatenate([old_known, records["known"]])
        # Stable sorts: events known at the same time keep their order, earlier days first, then
        # the first block.
        order = np.arange(len(known))
        if not is_sorted(known):
            order = np.argsort(known, kind="stable")
        order = order[sort_by_key(numbers[order], len(keys))]
        counts = np.bincount(numbers, minlength=len(keys))
        ids = np.concatenate([tail.ids, records["ids"].T], axis=1)
        return HistoryEvents(keys, is_row_key, counts, known[order], ids[:, order])


@functools.lru_cache(1)
def _load_encoder(path: Path, digest: str) -> CompiledWorkflow:
    """Load a workflow without its event state; the last one loaded is cached.

    Args:
        path: The directory of the workflow.
        digest: Its digest. It is part of the cache key, because workers outlive a run, and another
            run may write another workflow to the same path.
    """
    return compiled.load(path, events=False)


def _encode(path: Path, workflow: CompiledWorkflow) -> np.ndarray:
    """Return the ids of a block's history columns, int32 [columns, n]."""
    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
        encoded = []
        for name in workflow.spec.history_columns:
            column = table.column(name).combine_chunks()
            if not isinstance(column, pa.Array):
                column = column.chunk(0)
            values = column.dictionary
            if not pa.types.is_string(values.type):
                values = to_numpy(values)
            ids = np.append(workflow.encode_values(name, values), np.int32(NULL_ID))
            absent = null_mask(column.indices)
            encoded.append(ids[np.where(absent, -1, to_numpy(column.indices))])
        return np.array(encoded, np.int32).reshape(len(encoded), table.num_rows)
