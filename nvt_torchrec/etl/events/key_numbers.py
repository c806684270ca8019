"""Number the keys of all events."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from nvt_torchrec.base.files.mapping import map_array, write_array
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.etl.events.earlier_events import EarlierEvents
from nvt_torchrec.etl.events.timeline import EventLog


def number_keys(log: EventLog, earlier: Sequence[EarlierEvents], threads: int) -> None:
    """Write all keys, and the number of each key of each event.

    Args:
        log: The events.
        earlier: Of each group, the events of days before.
        threads: How many blocks are in work at once.
    """
    keys_before: list[list[np.ndarray]] = [[] for _ in log.spec.event_keys]
    for group, before in enumerate(earlier):
        keys_before[group].append(before.key)
        for key, pairs in zip(log.pair_keys[group], before.pairs, strict=True):
            keys_before[key].append(pairs)
    keys_by_group = []
    groups_by_block: dict[str, list[int]] = {}
    num_row_keys = len(log.spec.row_keys)
    for group, known_before in enumerate(keys_before):
        names = log.names if group < num_row_keys else []
        row_keys = _merge_keys(map_array(log.files.block_keys(name, group)) for name in names)
        # a row looks up what events of its key sum up to, wherever these are
        source = log.spec.event_keys[group].source
        of_source = log.event_names(source) if source else []
        others = (map_array(log.files.block_keys(name, group)) for name in of_source)
        keys = _merge_keys(itertools.chain([row_keys], others, known_before))
        keys_by_group.append(keys)
        for name in (*names, *of_source):
            groups_by_block.setdefault(name, []).append(group)
        write_array(log.files.row_keys(group), row_keys)
        write_array(log.files.keys(group), keys)

    def number_block(name: str) -> None:
        for group in groups_by_block[name]:
            keys = keys_by_group[group]
            block_keys = map_array(log.files.block_keys(name, group))
            numbers = np.searchsorted(keys, block_keys).astype(np.int32)
            numbers[block_keys == 0] = -1  # no key
            # an event has the index of its key among those of its block
            codes = map_array(log.files.codes(name, group))
            write_array(log.files.numbers(name, group), numbers[codes])

    for _ in map_in_order(number_block, groups_by_block, threads, "events"):
        pass


def _merge_keys(several: Iterable[np.ndarray]) -> np.ndarray:
    """Return the different keys, rising, but for 0."""
    merged, waiting, size = np.empty(0, np.int64), list[np.ndarray](), 0
    for keys in several:
        waiting.append(keys)
        size += len(keys)
        # Merged when as many wait as there are: so a key is sorted a few times only, and what waits
        # takes no more memory than what is kept.
        if size > max(len(merged), 1 << 20):
            merged, waiting, size = np.unique(np.concatenate([merged, *waiting])), [], 0
    merged = np.unique(np.concatenate([merged, *waiting]))
    return merged[merged != 0]


def sort_by_key(numbers: np.ndarray, keys: int) -> np.ndarray:
    """Return the indices of events that have a key, by rising key; ties keep their order.

    Args:
        numbers: int32 [n], those of their keys; negative without one.
        keys: How many keys there are.
    """
    counts = np.bincount(numbers[numbers >= 0], minlength=keys)
    order = np.empty(counts.sum(), np.int64)
    _write_order(numbers, np.cumsum(counts) - counts, order)
    return order


@compiled()
def _write_order(numbers: np.ndarray, begins: np.ndarray, order: np.ndarray) -> None:
    # a counting sort: begins[key] is where the next event of a key goes
    for event in range(len(numbers)):
        if numbers[event] >= 0:
            order[begins[numbers[event]]] = event
            begins[numbers[event]] += 1
