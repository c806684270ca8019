"""Write the events of histories, once their columns have ids, and what is kept of them."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import null_mask, to_numpy
from nvt_torchrec.base.files.mapping import map_array, write_array
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.etl.events.extract import flag_type, history_bit, history_columns
from nvt_torchrec.etl.events.timeline import EventBlock, EventLog
from nvt_torchrec.formats.feature_spec.columns import NULL_ID
from nvt_torchrec.formats.histories import HISTORIES, StoredHistory, write_history
from nvt_torchrec.workflows.compiled import CompiledWorkflow
from nvt_torchrec.workflows.history_tail import HistoryTail

#: About how many events of a history are in memory at once.
PARTITION_EVENTS = 1 << 22


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
        is_row_key = np.isin(history.keys, map_array(files.row_keys(history.group)))
        stored, parts = StoredHistory(rule.name, rule.columns), []
        with write_history(files.directory, stored, first_keys[rule.name]) as writer:
            for begin, end in history.partitions():
                counts, known, ids = history.read(begin, end)
                there = is_row_key[begin:end]
                columns = ids if there.all() else ids[:, np.repeat(there, counts)]
                writer.add(counts[there], dict(zip(rule.columns, columns, strict=True)))
                keys = history.keys[begin:end]
                parts.append(HistoryTail.newest(keys, counts, known, ids, rule.kept))
        kept.append(HistoryTail.concatenate(parts))
    return kept


class HistoryReader:
    """Reads the events of a history, those that are kept of earlier days and new ones."""

    def __init__(self, log: EventLog, number: int, tail: HistoryTail) -> None:
        rule = log.spec.histories[number]
        self.group = log.spec.groups.index(rule.group)
        self.keys = map_array(log.files.keys(self.group))
        self._log, self._bit = log, history_bit(log.spec, number)
        columns = history_columns(log.spec)
        self._columns = np.array([columns.index(name) for name in rule.columns])
        key, known = tail.expand()
        ids = np.zeros((len(columns), len(key)), np.int32)
        ids[self._columns] = tail.ids
        flags = np.full(len(key), 1 << self._bit, flag_type(log.spec))
        numbers = np.searchsorted(self.keys, key).astype(np.int32)
        by_time = np.argsort(known, kind="stable")
        amounts = np.full((len(log.spec.amounts), len(key)), np.nan)
        pairs = np.full((len(log.pair_keys[self.group]), len(key)), -1, np.int32)
        self._tail = EventBlock(known, known, flags, numbers, amounts, pairs, ids).take(by_time)

    def _iterate(self) -> Iterator[EventBlock]:
        return self._log.iterate_events(self.group, [self._tail], with_ids=True)

    @functools.cached_property
    def _counts(self) -> np.ndarray:
        """How many events each key has, int64 [keys]."""
        counts = np.zeros(len(self.keys), np.int64)
        for events in self._iterate():
            chosen = (events.numbers >= 0) & (events.flags >> self._bit & 1 == 1)
            np.add.at(counts, events.numbers[chosen], 1)
        return counts

    def partitions(self) -> list[tuple[int, int]]:
        """Return ranges of keys, of each of which the events fit into memory."""
        ends = np.cumsum(self._counts)
        places = np.arange(PARTITION_EVENTS, self._counts.sum(), PARTITION_EVENTS)
        cuts = np.unique(np.searchsorted(ends, places)).tolist()
        return list(itertools.pairwise([0, *cuts, len(ends)]))

    def read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read the events of some keys.

        Returns:
            int64 [keys], how many each has; of all of them by key, then time, from when they are
            known, int64 [events], and their ids, int32 [columns, events].
        """
        counts = self._counts[begin:end]
        known = np.empty(counts.sum(), np.int64)
        ids = np.empty((len(self._columns), len(known)), np.int32)
        places = np.cumsum(counts) - counts
        for events in self._iterate():
            arrays = events.numbers, events.flags, events.known, events.ids
            _place_by_key(arrays, self._columns, self._bit, begin, places, known, ids)
        return counts, known, ids


@compiled()
def _place_by_key(
    events: tuple,
    columns: np.ndarray,
    bit: int,
    begin: int,
    places: np.ndarray,
    known: np.ndarray,
    ids: np.ndarray,
) -> None:
    """Put the events that have a bit, of keys from ``begin`` on, at the places of their keys."""
    numbers, flags, known_of_event, ids_of_event = events
    for event in range(len(numbers)):
        key = numbers[event] - begin
        if 0 <= key < len(places) and flags[event] >> bit & 1:
            known[places[key]] = known_of_event[event]
            for column in range(len(columns)):
                ids[column, places[key]] = ids_of_event[columns[column], event]
            places[key] += 1


def _encode(path: Path, workflow: CompiledWorkflow) -> np.ndarray:
    """Return the ids of the columns of histories of a block, int32 [columns, n]."""
    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
        encoded = []
        for name in history_columns(workflow.spec):
            column = table.column(name).combine_chunks()
            column = column if isinstance(column, pa.Array) else column.chunk(0)
            values = column.dictionary
            values = values if pa.types.is_string(values.type) else to_numpy(values)
            ids = np.append(workflow.encode_values(name, values), np.int32(NULL_ID))
            absent = null_mask(column.indices)
            encoded.append(ids[np.where(absent, -1, to_numpy(column.indices))])
        return np.array(encoded, np.int32).reshape(len(encoded), table.num_rows)
