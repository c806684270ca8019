"""Number the keys of all events: by rising hash, so that a range of numbers is one of hashes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from nvt_torchrec.base.files.atomic import delete
from nvt_torchrec.base.files.growing import GrowingArray, create_array
from nvt_torchrec.base.files.mapping import map_array, write_array
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.etl.events.earlier_events import EarlierEvents
from nvt_torchrec.etl.events.timeline import EventLog

#: About how many keys of all blocks are merged at once.
MERGED_KEYS = 1 << 20
#: One key of so many is looked at to find where ranges end.
_SAMPLED = 1 << 8


def number_keys(log: EventLog, earlier: Sequence[EarlierEvents], threads: int) -> None:
    """Write all keys, and the number of each key of each event.

    Args:
        log: The events.
        earlier: Of each group, the events of days before.
        threads: How many blocks are in work at once.
    """
    groups_by_block: dict[str, list[int]] = {}
    for group, key in enumerate(log.spec.event_keys):
        of_source = log.event_names(key.source) if key.source else []
        for name in (*_row_blocks(log, group), *of_source):
            groups_by_block.setdefault(name, []).append(group)
        _write_keys(log, group, earlier)

    def number_block(name: str) -> None:
        for group in groups_by_block[name]:
            keys = map_array(log.files.keys(group))
            block_keys = map_array(log.files.block_keys(name, group))
            numbers = np.searchsorted(keys, block_keys).astype(np.int32)
            numbers[block_keys == 0] = -1  # no key
            # an event has the index of its key among those of its block
            codes = map_array(log.files.codes(name, group))
            write_array(log.files.numbers(name, group), numbers[codes])

    for _ in map_in_order(number_block, groups_by_block, threads, "events"):
        pass


def _row_blocks(log: EventLog, group: int) -> Sequence[str]:
    """Return the blocks whose rows have keys of a group; none if only events have such keys."""
    return log.names if group < len(log.spec.row_keys) else []


def _write_keys(log: EventLog, group: int, earlier: Sequence[EarlierEvents]) -> None:
    """Write the different keys of a group, and those of its rows, rising, but for 0."""
    files = log.files
    source = log.spec.event_keys[group].source
    of_source = log.event_names(source) if source else []
    before = [earlier[group].key] if group < len(earlier) else []
    for other, pair_keys in enumerate(log.pair_keys):
        if group in pair_keys:
            pairs = earlier[other].pairs[pair_keys.index(group)]
            before += _sort_pieces(files.scratch(group, "pairs"), pairs)

    def row_keys() -> Iterator[np.ndarray]:
        for name in _row_blocks(log, group):
            yield log.map(files.block_keys(name, group))

    def other_keys() -> Iterator[np.ndarray]:
        # a row looks up what events of its key sum up to, wherever these are
        for name in of_source:
            yield log.map(files.block_keys(name, group))
        yield from before

    num_rows = 0
    with contextlib.ExitStack() as stack:
        written = stack.enter_context(GrowingArray(files.keys(group), np.int64))
        written_rows = stack.enter_context(GrowingArray(files.row_keys(group), np.int64))
        indices = stack.enter_context(GrowingArray(files.row_indices(group), np.int32))
        for begin, end in _cut_hashes(itertools.chain(row_keys(), other_keys())):
            of_rows = _merge_keys(row_keys(), begin, end)
            keys = _merge_keys(itertools.chain([of_rows], other_keys()), begin, end)
            written.append(keys)
            written_rows.append(of_rows)
            indices.append(num_rows + np.searchsorted(of_rows, keys))
            num_rows += len(of_rows)
    delete(files.scratch(group, "pairs"))


def _sort_pieces(path: Path, values: np.ndarray) -> list[np.ndarray]:
    """Return pieces of some values, each sorted, in a file."""
    target = create_array(path, values.shape, np.int64)
    pieces = []
    for begin in range(0, len(values), MERGED_KEYS):
        piece = target[begin : begin + MERGED_KEYS]
        piece[:] = np.sort(values[begin : begin + MERGED_KEYS])
        pieces.append(piece)
    return pieces


def _cut_hashes(arrays: Iterable[np.ndarray]) -> list[tuple[int | None, int | None]]:
    """Return ranges of hashes, each with about :data:`MERGED_KEYS` of some sorted arrays.

    A range ends where the next one begins; the first one has no begin, and the last one no end.
    """
    sampled = [np.empty(0, np.int64), *(keys[::_SAMPLED] for keys in arrays)]
    sample = np.sort(np.concatenate(sampled))
    cuts: list[int | None] = [*np.unique(sample[:: max(1, MERGED_KEYS // _SAMPLED)]).tolist()]
    return [*itertools.pairwise([None, *cuts[1:], None])]


def _merge_keys(arrays: Iterable[np.ndarray], begin: int | None, end: int | None) -> np.ndarray:
    """Return the different keys of sorted arrays in a range of hashes, but for 0."""
    pieces = [np.empty(0, np.int64)]
    for keys in arrays:
        first = 0 if begin is None else np.searchsorted(keys, begin)
        last = len(keys) if end is None else np.searchsorted(keys, end)
        pieces.append(keys[first:last])
    merged = np.unique(np.concatenate(pieces))
    return merged[merged != 0]
