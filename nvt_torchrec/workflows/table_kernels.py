"""Compiled loops of tables: find keys, and take values at rows."""

from __future__ import annotations

import numpy as np

from nvt_torchrec.base.kernels import compiled


@compiled()
def find_rows(sorted_keys, keys):
    """Find keys by binary search; 0 stands for a missing key."""
    found = np.empty(len(keys), np.int64)
    for i in range(len(keys)):
        key = keys[i]
        low, high = 0, len(sorted_keys)
        while low < high:
            middle = (low + high) // 2
            if sorted_keys[middle] < key:
                low = middle + 1
            else:
                high = middle
        is_there = key != 0 and low < len(sorted_keys) and sorted_keys[low] == key
        found[i] = low if is_there else -1
    return found


@compiled()
def find_versions(sorted_keys, starts, keys, cuts):
    """Find the newest version of each key that was known before a time, by binary search."""
    found = np.empty(len(keys), np.int64)
    for i in range(len(keys)):
        key, cut = keys[i], cuts[i]
        low, high = 0, len(sorted_keys)  # after all versions of the key that began before the cut
        while low < high:
            middle = (low + high) // 2
            is_before = sorted_keys[middle] < key
            if is_before or (sorted_keys[middle] == key and starts[middle] < cut):
                low = middle + 1
            else:
                high = middle
        is_there = key != 0 and low > 0 and sorted_keys[low - 1] == key
        found[i] = low - 1 if is_there else -1
    return found


@compiled()
def take_missing(missing, rows):
    """Return whether each row is none, or has no value."""
    taken = np.empty(len(rows), np.bool_)
    for i in range(len(rows)):
        taken[i] = rows[i] < 0 or missing[rows[i]] != 0
    return taken


@compiled()
def take_numbers(values, rows, missing, taken):
    """Write the number at each row, unless it is missing; return whether all are there.

    The rows may be codes of a file, and thus anything.
    """
    for i in range(len(rows)):
        if missing[i]:
            continue
        if rows[i] < 0 or rows[i] >= len(values):
            return False
        taken[i] = values[rows[i]]
    return True


@compiled()
def measure_values(offsets, size, rows, missing, ends, lengths):
    """Write the end and the length of the values of each row; return whether all are there.

    Offsets and rows may be those of a file, and thus anything: no value may lie outside of
    ``size``.
    """
    for i in range(len(rows)):
        if missing[i]:
            ends[i] = lengths[i] = 0
            continue
        if rows[i] < 0 or rows[i] + 1 >= len(offsets):
            return False
        begin, end = offsets[rows[i]], offsets[rows[i] + 1]
        if begin < 0 or end < begin or end > size:
            return False
        ends[i], lengths[i] = end, end - begin
    return True


@compiled()
def copy_texts(data, begins, offsets, taken):
    """Copy the bytes of texts, which begin in ``data`` and are measured, one after the other."""
    for i in range(len(begins)):
        length = offsets[i + 1] - offsets[i]
        taken[offsets[i] : offsets[i + 1]] = data[begins[i] : begins[i] + length]
