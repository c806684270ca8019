"""Number the keys of all events in the order of their hashes."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from nvt_torchrec.base.files.atomic import delete, get_writer_id
from nvt_torchrec.base.files.growing import GrowingArray, create_array
from nvt_torchrec.base.files.mapping import map_array, write_array
from nvt_torchrec.base.threads import MapTasks, run_each
from nvt_torchrec.etl.events.earlier_events import EarlierFiles
from nvt_torchrec.etl.events.event_blocks import EventLog, list_pair_keys
from nvt_torchrec.workflows.event_groups import plan_groups

#: About how many keys of all blocks are merged at once.
MERGED_KEYS = 1 << 20
#: Every so many keys, one is sampled to find where ranges end.
_SAMPLED = 1 << 8


def number_keys(log: EventLog, earlier: EarlierFiles | None, map_tasks: MapTasks) -> None:
    """Write all keys, and the number of each event's keys.

    First there is a task for each key, which merges its values from all blocks, then a task for
    each block, which looks up the numbers.

    Args:
        log: The events.
        earlier: The files of earlier days; None for a run.
        map_tasks: Runs tasks.
    """
    num_keys = len(log.spec.event_keys)
    merge = functools.partial(write_keys, log=log, earlier=earlier)
    run_each(map_tasks, merge, range(num_keys))
    keys_by_block: dict[str, list[int]] = {}
    for key in range(num_keys):
        for name in log.list_blocks(key):
            keys_by_block.setdefault(name, []).append(key)
    run_each(map_tasks, functools.partial(number_block, log=log), keys_by_block.items())


def number_block(block: tuple[str, list[int]], log: EventLog) -> None:
    """Write the numbers of the keys of a block's events.

    Args:
        block: The name of the block, and the keys that it has.
        log: The events.
    """
    name, keys_of_block = block
    for key in keys_of_block:
        all_keys = map_array(log.files.keys(key))
        block_keys = map_array(log.files.block_keys(name, key))
        numbers = np.searchsorted(all_keys, block_keys).astype(np.int32)
        numbers[block_keys == 0] = -1  # no key
        codes = map_array(log.files.codes(name, key))
        write_array(log.files.numbers(name, key), numbers[codes])


def write_keys(key: int, log: EventLog, earlier: EarlierFiles | None) -> None:
    """Write the distinct values of a key, and those that rows have; both ascending, without 0.

    Args:
        key: Its number in the spec.
        log: The events.
        earlier: The files of earlier days; None for a run.
    """
    files = log.files
    row_blocks = log.list_row_blocks(key)
    source_blocks = log.list_blocks(key)[len(row_blocks) :]
    kept_keys = _read_kept_keys(key, log, earlier) if earlier else []

    def iterate_row_keys() -> Iterator[np.ndarray]:
        for name in row_blocks:
            yield map_array(files.block_keys(name, key))

    def iterate_other_keys() -> Iterator[np.ndarray]:
        # Keys that no row of this run has are numbered, too: their events are kept for later days.
        for name in source_blocks:
            yield map_array(files.block_keys(name, key))
        yield from kept_keys

    num_row_keys = 0
    with contextlib.ExitStack() as stack:
        written = stack.enter_context(GrowingArray(files.keys(key), np.int64))
        written_row_keys = stack.enter_context(GrowingArray(files.row_keys(key), np.int64))
        indices = stack.enter_context(GrowingArray(files.row_indices(key), np.int32))
        for begin, end in _cut_hashes(itertools.chain(iterate_row_keys(), iterate_other_keys())):
            row_keys = _merge_keys(iterate_row_keys(), begin, end)
            keys = _merge_keys(itertools.chain([row_keys], iterate_other_keys()), begin, end)
            written.append(keys)
            written_row_keys.append(row_keys)
            indices.append(num_row_keys + np.searchsorted(row_keys, keys))
            num_row_keys += len(row_keys)
    delete(_pairs_file(log, key))


def _pairs_file(log: EventLog, key: int) -> Path:
    return log.files.scratch(key, f"{get_writer_id()}.pairs")


def _read_kept_keys(key: int, log: EventLog, earlier: EarlierFiles) -> list[np.ndarray]:
    """Return sorted arrays of the values of a key in events of earlier days."""
    groups = plan_groups(log.spec)
    kept_keys = []
    if key < len(groups):
        kept_keys.append(earlier.open_group(key, groups[key]).key)
    for number, pair_keys in enumerate(list_pair_keys(log.spec)):
        if key in pair_keys:
            pairs = earlier.open_group(number, groups[number]).pairs[pair_keys.index(key)]
            kept_keys += _sort_pieces(_pairs_file(log, key), pairs)
    return kept_keys


def _sort_pieces(path: Path, values: np.ndarray) -> list[np.ndarray]:
    """Sort values in pieces; return the pieces, which are mapped from a file."""
    target = create_array(path, values.shape, np.int64)
    pieces = []
    for begin in range(0, len(values), MERGED_KEYS):
        piece = target[begin : begin + MERGED_KEYS]
        piece[:] = np.sort(values[begin : begin + MERGED_KEYS])
        pieces.append(piece)
    return pieces


def _cut_hashes(arrays: Iterable[np.ndarray]) -> list[tuple[int | None, int | None]]:
    """Cut sorted arrays into ranges of hashes, each with about :data:`MERGED_KEYS` keys.

    Return begin and end of each range. The first has no begin, and the last has no end.
    """
    sampled = [np.empty(0, np.int64)]
    for keys in arrays:
        sampled.append(np.array(keys[::_SAMPLED]))  # a view would keep the file open
    sample = np.sort(np.concatenate(sampled))
    cuts = np.unique(sample[:: max(1, MERGED_KEYS // _SAMPLED)]).tolist()
    return list(itertools.pairwise([None, *cuts[1:], None]))


def _merge_keys(arrays: Iterable[np.ndarray], begin: int | None, end: int | None) -> np.ndarray:
    """Return the distinct keys of sorted arrays in a range of hashes, without 0."""
    pieces = [np.empty(0, np.int64)]
    for keys in arrays:
        first = 0 if begin is None else np.searchsorted(keys, begin)
        last = len(keys) if end is None else np.searchsorted(keys, end)
        pieces.append(np.array(keys[first:last]))  # a view would keep the file open
    merged = np.unique(np.concatenate(pieces))
    return merged[merged != 0]
