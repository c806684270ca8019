"""Write the events of histories, once their columns have ids, and what is kept of them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import null_mask, to_numpy
from nvt_torchrec.base.files.mapping import write_array
from nvt_torchrec.etl.events.extract import (
    KEY,
    KNOWN,
    ROW,
    ROW_SHIFT,
    EventFiles,
    history_columns,
)
from nvt_torchrec.etl.events.partitions import (
    choose_events,
    order_events,
    partitions,
    place_keys,
    read_partition,
)
from nvt_torchrec.formats.feature_spec.columns import NULL_ID
from nvt_torchrec.formats.histories import HISTORIES, HistoryWriter, StoredHistory, write_history
from nvt_torchrec.workflows.compiled import CompiledWorkflow
from nvt_torchrec.workflows.event_state import HistoryTail


def write_histories(
    files: EventFiles,
    names: Sequence[str],
    workflow: CompiledWorkflow,
    tails: Sequence[HistoryTail] | None,
    first_keys: dict[str, int],
) -> list[HistoryTail]:
    """Write the histories of a run or an extension below the directory of its events.

    Args:
        files: The events.
        names: The names of the blocks, in the order of the log.
        workflow: Gives the ids.
        tails: Of each history, the newest events of the days before; None without such days.
        first_keys: Of each history, the number of its first key.

    Returns:
        Of each history, the newest events of each key.

    Raises:
        OutputError: The directory cannot be written.
    """
    spec = workflow.spec
    shutil.rmtree(files.directory / HISTORIES, ignore_errors=True)  # of an earlier process
    for name in names if spec.histories else ():
        write_array(files.ids(name), _encode(files.values(name), workflow))
    kept = []
    for number, rule in enumerate(spec.histories):
        group = spec.groups.index(rule.key)
        events = [np.load(files.events(name, group), mmap_mode="r") for name in names]
        columns = [history_columns(spec).index(name) for name in rule.columns]
        ids = [np.load(files.ids(name), mmap_mode="r") for name in names]
        tail = tails[number] if tails else HistoryTail.none(len(columns))
        parts = []
        stored = StoredHistory(rule.name, rule.columns)
        with write_history(files.directory, stored, first_keys[rule.name]) as writer:
            for bounds in partitions(sum(array.shape[1] for array in events)):
                ranges, data = read_partition(events, bounds)
                rows = np.split(data[ROW] >> ROW_SHIFT, np.cumsum([e - b for b, e in ranges])[:-1])
                of_rows = [block[columns][:, row] for block, row in zip(ids, rows, strict=True)]
                chosen = choose_events(spec, number, data)
                new = np.concatenate(of_rows, axis=1)[:, chosen]
                old = tail.take(slice(*place_keys(tail.keys, bounds)))
                key, known = np.concatenate([old.expand(), data[[KEY, KNOWN]][:, chosen]], axis=1)
                every = np.concatenate([old.ids, new], axis=1)
                order = order_events(key, known)
                key, known, every = key[order], known[order], every[:, order]
                _write_keys(writer, stored, np.unique(data[KEY][data[KEY] != 0]), key, every)
                parts.append(HistoryTail.newest(key, known, every, rule.kept))
        kept.append(HistoryTail.concatenate(parts))
    return kept


def _write_keys(
    writer: HistoryWriter,
    stored: StoredHistory,
    row_keys: np.ndarray,
    key: np.ndarray,
    ids: np.ndarray,
) -> None:
    """Write the events, sorted by key, of the keys that rows have."""
    begin, end = (np.searchsorted(key, row_keys, side) for side in ("left", "right"))
    there = np.isin(key, row_keys)
    columns = (column[there] for column in ids)
    writer.add(end - begin, dict(zip(stored.columns, columns, strict=True)))


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
            code = np.where(absent, -1, to_numpy(column.indices.fill_null(0)))
            encoded.append(ids[code])
        return np.array(encoded, np.int32).reshape(len(encoded), table.num_rows)
