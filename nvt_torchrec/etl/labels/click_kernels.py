"""Compiled loops of labels from other files: to which row a click belongs, and which rows have one.

Keys are hashes, and so evenly spread: what is sorted by them is searched from where the first bits
of a key say, which takes a few steps however many there are.
"""

from __future__ import annotations

import numpy as np

from nvt_torchrec.base.kernels import compiled

#: Bits of a key that are looked up, at most.
_MAX_BITS = 24
_SIGN = np.uint64(1 << 63)


def index_keys(keys: np.ndarray) -> np.ndarray:
    """Return where keys with each value of their first bits begin, int64 [2^bits + 1].

    Args:
        keys: int64 [n], rising.
    """
    bits = min(_MAX_BITS, max(1, len(keys).bit_length()))
    prefixes = (keys.view(np.uint64) ^ _SIGN) >> np.uint64(64 - bits)
    return np.searchsorted(prefixes, np.arange(2**bits + 1, dtype=np.uint64))


@compiled()
def _find_key(sorted_keys, begins, shift, key):
    """Return where a key begins among sorted ones, or would."""
    prefix = (np.uint64(key) ^ np.uint64(1 << 63)) >> shift
    low, high = begins[prefix], begins[prefix + np.uint64(1)]
    while low < high:
        middle = (low + high) // 2
        if sorted_keys[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low


@compiled()
def _find_time(sorted_keys, sorted_times, first, time):
    """Return the first entry of a key, which begin at ``first``, that is not before a time."""
    key = sorted_keys[first]
    low, high, step = first, first + 1, 1  # most keys have few entries
    while high < len(sorted_keys) and sorted_keys[high] == key and sorted_times[high] < time:
        low = high
        step *= 2
        high = low + step
    high = min(high, len(sorted_keys))
    while low < high:
        middle = (low + high) // 2
        if sorted_keys[middle] == key and sorted_times[middle] < time:
            low = middle + 1
        else:
            high = middle
    return low


def choose_shift(begins: np.ndarray) -> np.uint64:
    """Return by how much a key is shifted to be looked up in what :func:`index_keys` returned."""
    return np.uint64(64 - (len(begins) - 1).bit_length() + 1)


@compiled()
def match_rows(click_keys, click_times, begins, shift, newest, seen, keys, times, window):
    """Note for each click the time of the newest row that it may belong to.

    Rows may come in any order, and in pieces. A row that is older than the one noted for a click is
    so for all later clicks within its window, so each row ends at the first such click. The newest
    rows of a piece come last, as a rule, and are looked at first, so that few clicks are noted
    twice.

    Args:
        click_keys: int64 [clicks], rising.
        click_times: int64 [clicks], rising for each key.
        begins: See :func:`index_keys`.
        shift: See :func:`choose_shift`.
        newest: int64 [clicks], the time of the newest row so far; it is changed.
        seen: bool [clicks], of the first click of each key whether a row has the key; likewise.
        keys: int64 [n], the keys of rows, 0 without one.
        times: int64 [n], their times.
        window: How long after a row a click may come.
    """
    for i in range(len(keys) - 1, -1, -1):
        key, time = keys[i], times[i]
        if key == 0:
            continue
        first = _find_key(click_keys, begins, shift, key)
        if first == len(click_keys) or click_keys[first] != key:
            continue
        seen[first] = True
        at = _find_time(click_keys, click_times, first, time)
        while at < len(click_keys) and click_keys[at] == key:
            if click_times[at] - time > window or newest[at] >= time:
                break
            newest[at] = time
            at += 1


@compiled()
def find_clicked(clicked_keys, clicked_times, begins, shift, keys, times, found):
    """Write 1 for each row whose key and time are among those of clicked rows, else 0."""
    for i in range(len(keys)):
        found[i] = 0
        key = keys[i]
        if key == 0:
            continue
        first = _find_key(clicked_keys, begins, shift, key)
        if first == len(clicked_keys) or clicked_keys[first] != key:
            continue
        at = _find_time(clicked_keys, clicked_times, first, times[i])
        is_there = at < len(clicked_keys) and clicked_keys[at] == key
        if is_there and clicked_times[at] == times[i]:
            found[i] = 1
