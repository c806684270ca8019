"""Compiled loops that match clicks with rows: find the row of each click, and the clicked rows.

Keys are hashes, and so spread evenly. A table of the begins of all prefixes of keys narrows a
search in sorted keys to a few steps, regardless of their number.
"""

from __future__ import annotations

import numpy as np

from nvt_torchrec.base.kernels import compiled

#: The maximum number of bits of a prefix.
_MAX_BITS = 24
_SIGN = np.uint64(1 << 63)


def index_keys(keys: np.ndarray) -> np.ndarray:
    """Return where the keys of each prefix begin, and the end of the last, int64 [2^bits + 1].

    Args:
        keys: int64 [n], ascending.
    """
    bits = min(_MAX_BITS, max(1, len(keys).bit_length()))
    prefixes = (keys.view(np.uint64) ^ _SIGN) >> np.uint64(64 - bits)
    return np.searchsorted(prefixes, np.arange(2**bits + 1, dtype=np.uint64))


@compiled()
def _find_key(sorted_keys, begins, shift, key):
    """Return the first index of a key in sorted keys, or the index where it would be inserted."""
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
    """Return the first entry of a key that is not before a time; its entries begin at ``first``."""
    key = sorted_keys[first]
    # An exponential search, because most keys have few entries.
    low = first
    high = first + 1
    step = 1
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
    """Return the shift that gives the prefix of a key, for the result of :func:`index_keys`."""
    return np.uint64(64 - (len(begins) - 1).bit_length() + 1)


@compiled()
def match_rows(click_keys, click_times, begins, shift, newest, seen, keys, times, window):
    """Update, for each click, the time of the newest row that it may belong to.

    Rows may come in any order, and in pieces. If a click already has a newer row, so have all later
    clicks within the window, and the loop over clicks can stop. Rows are processed from the end,
    because the newest rows of a piece usually come last, so that few clicks are updated twice.

    Args:
        click_keys: int64 [clicks], ascending.
        click_times: int64 [clicks], ascending within a key.
        begins: See :func:`index_keys`.
        shift: See :func:`choose_shift`.
        newest: int64 [clicks], the time of the newest row so far; changed in place.
        seen: bool [clicks], set at the first click of each key that a row has.
        keys: int64 [n], the keys of rows; 0 for a missing key.
        times: int64 [n], the times of rows.
        window: The longest time from a row to its click, in microseconds.
    """
    for i in range(len(keys) - 1, -1, -1):
        key = keys[i]
        time = times[i]
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
    """Write 1 to ``found`` for each row whose key and time are those of a clicked row, else 0."""
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
