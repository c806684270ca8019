"""Write the events of histories, once their columns have ids, and what is kept of them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import null_mask, to_numpy
from nvt_torchrec.base.files.growing import GrowingArray
from nvt_torchrec.base.files.mapping import map_array, write_array
from nvt_torchrec.etl.events.extract import EventFiles, history_bit
from nvt_torchrec.etl.events.partitions import (
    KeyRanges,
    PartitionFiles,
    count_numbers,
    cut_keys,
    find_keys,
    iterate_slices,
    sort_by_key,
)
from nvt_torchrec.etl.events.timeline import EventBlock, EventLog
from nvt_torchrec.formats.feature_spec.columns import NULL_ID
from nvt_torchrec.formats.feature_spec.events import HistoryRule
from nvt_torchrec.formats.histories import HISTORIES, StoredHistory, write_history
from nvt_torchrec.workflows.compiled import CompiledWorkflow
from nvt_torchrec.workflows.history_tail import HistoryTail

_TAIL_ARRAYS = [field.name for field in dataclasses.fields(HistoryTail)]


def write_histories(
    log: EventLog,
    workflow: CompiledWorkflow,
    tails: Sequence[HistoryTail] | None,
    first_keys: dict[str, int],
) -> list[HistoryTail]:
    """Write the histories of a run or an extension below the directory of its events.

    Args:
        log: The events.
        workflow: Gives the ids.
        tails: Of each history, the newest events of the days before; None without such days.
        first_keys: Of each history, the number of its first key.

    Returns:
        Of each history, the newest events of each key.

    Raises:
        OutputError: The directory cannot be written.
    """
    spec = workflow.spec
    files, names = log.files, log.names
    shutil.rmtree(files.directory / HISTORIES, ignore_errors=True)  # of an earlier process
    for name in names if spec.histories else ():
        ids = _encode(files.values(name), workflow)[:, files.read_order(name)]
        write_array(files.ids(name), ids)
    kept = []
    for number, rule in enumerate(spec.histories):
        tail = tails[number] if tails else HistoryTail.none(len(rule.columns))
        history = HistoryReader(log, number, tail)
        stored = StoredHistory(rule.name, rule.columns)
        with (
            write_history(files.directory, stored, first_keys[rule.name]) as writer,
            HistoryTailWriter(files, rule) as newest,
        ):
            for keys, is_row_key, counts, known, ids in history.read():
                columns = ids if is_row_key.all() else ids[:, np.repeat(is_row_key, counts)]
                writer.add(counts[is_row_key], dict(zip(rule.columns, columns, strict=True)))
                newest.add(HistoryTail.newest(keys, counts, known, ids, rule.kept))
        kept.append(newest.read())
    return kept


class HistoryTailWriter:
    """Writes the newest events of a history, those of some keys at a time.

    Args:
        files: Those of a run's events, beside which they are.
        rule: The history.
    """

    def __init__(self, files: EventFiles, rule: HistoryRule) -> None:
        self._paths = [files.tail(rule.name, name) for name in _TAIL_ARRAYS]
        kinds = (np.int64, None), (np.int64, None), (np.int64, None), (np.int32, len(rule.columns))
        self._arrays = [
            GrowingArray(path, *kind) for path, kind in zip(self._paths, kinds, strict=True)
        ]
        self._arrays[1].append(np.zeros(1, np.int64))  # the first offset

    def __enter__(self) -> HistoryTailWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        with contextlib.ExitStack() as stack:
            for array in self._arrays:
                stack.push(array)

    def add(self, tail: HistoryTail) -> None:
        """Add the events of further keys."""
        keys, offsets, known, ids = self._arrays
        keys.append(tail.keys)
        offsets.append(known.length + tail.offsets[1:])
        known.append(tail.known)
        ids.append(tail.ids)

    def read(self) -> HistoryTail:
        """Map what was written."""
        return HistoryTail(*map(map_array, self._paths))


class HistoryReader:
    """Reads the events of a history, those that are kept of earlier days and new ones."""

    def __init__(self, log: EventLog, number: int, tail: HistoryTail) -> None:
        rule = log.spec.histories[number]
        self._log, self._bit, self._tail = log, history_bit(log.spec, number), tail
        self._group = log.spec.groups.index(rule.group)
        columns = log.spec.history_columns
        self._columns = np.array([columns.index(name) for name in rule.columns])

    def _iterate(self) -> Iterator[EventBlock]:
        """Yield the new events of the history in the order of time, with the ids of its columns."""
        for events in self._log.iterate_events(self._group, with_ids=True):
            chosen = np.flatnonzero((events.numbers >= 0) & (events.flags >> self._bit & 1 == 1))
            of_history = events.take(chosen)
            assert of_history.ids is not None
            yield dataclasses.replace(of_history, ids=of_history.ids[self._columns])

    def read(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """Yield the events of ranges of keys, which follow each other.

        Yields:
            int64 [keys], the keys; bool [keys], whether rows have them; int64 [keys], how many
            events each has; of all of them by key, then time, from when they are known, int64
            [events], and their ids, int32 [columns, events].
        """
        files, group, tail = self._log.files, self._group, self._tail
        all_keys, row_indices = map_array(files.keys(group)), map_array(files.row_indices(group))
        num_row_keys = len(map_array(files.row_keys(group)))
        arrays = PartitionFiles(files, group)
        arrays.delete()  # of a process that was killed
        counts = arrays.create_counts(2, len(all_keys))
        for name in self._log.names:
            flags = self._log.map(files.flags(name))
            numbers = self._log.map(files.numbers(name, group))
            count_numbers(numbers[flags >> self._bit & 1 == 1], counts[0])
        for piece in iterate_slices(0, len(tail.keys)):
            num_events = np.diff(tail.offsets[piece.start : piece.stop + 1])
            counts[1, np.searchsorted(all_keys, tail.keys[piece])] = num_events
        bounds = cut_keys(counts)
        ranges = KeyRanges(bounds, counts[0])
        arrays.write_events(self._iterate(), ranges)
        for i, (begin, end) in enumerate(itertools.pairwise(bounds.tolist())):
            keys = all_keys[begin:end]
            # a key of earlier days alone has the same index as the next key that rows have
            following = row_indices[end] if end < len(all_keys) else num_row_keys
            is_row_key = np.diff(row_indices[begin:end], append=following) > 0
            events = arrays.read_events(slice(*ranges.offsets[i : i + 2].tolist()))
            yield keys, is_row_key, *self._sort(keys, events)
        arrays.delete()

    def _sort(
        self, keys: np.ndarray, events: list[EventBlock]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the events of some keys by key, then time.

        Args:
            keys: int64 [keys].
            events: Their new events, by time, as one block; none without events.

        Returns:
            How many each key has; from when they are known; their ids; see :meth:`read`.
        """
        tail = self._tail.take(find_keys(self._tail.keys, keys))
        old_keys, old_known = tail.expand()
        numbers, known, ids = [np.searchsorted(keys, old_keys)], [old_known], [tail.ids]
        for block in events:
            assert block.ids is not None
            numbers.append(block.numbers)
            known.append(block.known)
            ids.append(block.ids)
        number_of_event, known_of_event = np.concatenate(numbers), np.concatenate(known)
        order = np.arange(len(known_of_event))
        if len(old_keys):  # of events known at once, those of earlier days come first
            order = np.argsort(known_of_event, kind="stable")
        order = order[sort_by_key(number_of_event[order], len(keys))]
        counts = np.bincount(number_of_event, minlength=len(keys))
        return counts, known_of_event[order], np.concatenate(ids, axis=1)[:, order]


def _encode(path: Path, workflow: CompiledWorkflow) -> np.ndarray:
    """Return the ids of the columns of histories of a block, int32 [columns, n]."""
    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
        encoded = []
        for name in workflow.spec.history_columns:
            column = table.column(name).combine_chunks()
            column = column if isinstance(column, pa.Array) else column.chunk(0)
            values = column.dictionary
            values = values if pa.types.is_string(values.type) else to_numpy(values)
            ids = np.append(workflow.encode_values(name, values), np.int32(NULL_ID))
            absent = null_mask(column.indices)
            encoded.append(ids[np.where(absent, -1, to_numpy(column.indices))])
        return np.array(encoded, np.int32).reshape(len(encoded), table.num_rows)
