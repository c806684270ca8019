"""Compiled loops over tables: find the rows of keys, and read values at rows.

Arrays that come from files may be damaged. Loops that use their values as indices check them, and
return False if one is out of range.
"""

from __future__ import annotations

import numpy as np

from nvt_torchrec.base.kernels import compiled

#: Searches use unsigned indices. Numba compares signed ones with 0, as negative ones count from the
#: end, and that would double the time of a search.
_ONE = np.uint64(1)


def make_buckets(sorted_keys: np.ndarray, bucket_rows: int) -> tuple[np.ndarray, int]:
    """Divide sorted keys into buckets by their highest bits.

    Keys are hashes, and so spread evenly. A search in a bucket reads one or two cache lines; a
    search in all keys would read one in almost every step.

    Args:
        sorted_keys: int64 [rows], ascending.
        bucket_rows: About how many rows a bucket has.

    Returns:
        The row at which each bucket begins, and the end, int64 [buckets + 1]; and the shift for
        :func:`find_bucket`.
    """
    num_buckets, shift = choose_buckets(len(sorted_keys), bucket_rows)
    lowest = np.arange(-num_buckets // 2, num_buckets // 2, dtype=np.int64) << shift
    bounds = np.empty(num_buckets + 1, np.int64)
    bounds[:-1] = np.searchsorted(sorted_keys, lowest)
    bounds[-1] = len(sorted_keys)
    return bounds, shift


def choose_buckets(num_rows: int, bucket_rows: int) -> tuple[int, int]:
    """Return the number of buckets for a number of rows, and the shift for :func:`find_bucket`.

    Args:
        num_rows: Number of rows.
        bucket_rows: About how many rows a bucket has.
    """
    bits = max(1, (num_rows // bucket_rows).bit_length())
    return 1 << bits, 64 - bits


@compiled()
def find_bucket(key, shift):
    """Return the bucket of a key: its highest bits, shifted so that the lowest key has bucket 0."""
    return np.uint64((key >> shift) + (1 << (63 - shift)))


@compiled()
def find_rows(sorted_keys, bounds, shift, keys):
    """Find keys by binary search in their buckets; 0 stands for a missing key.

    Args:
        sorted_keys: int64 [rows], ascending.
        bounds, shift: See :func:`make_buckets`.
        keys: int64 [n].

    Returns:
        int64 [n], the row of each key; -1 if the key is missing or not found.
    """
    found = np.empty(len(keys), np.int64)
    for i in range(len(keys)):
        key = keys[i]
        bucket = find_bucket(key, shift)
        low = np.uint64(bounds[bucket])
        high = np.uint64(bounds[bucket + _ONE])
        while low < high:
            middle = (low + high) >> _ONE
            if sorted_keys[middle] < key:
                low = middle + _ONE
            else:
                high = middle
        is_there = key != 0 and low < np.uint64(len(sorted_keys)) and sorted_keys[low] == key
        found[i] = np.int64(low) if is_there else -1
    return found


@compiled()
def find_versions(sorted_keys, starts, bounds, shift, keys, cuts):
    """Find the newest version of each key that was known before a time.

    Args:
        sorted_keys, bounds, shift, keys: See :func:`find_rows`.
        starts: int64 [rows], the time from which each row counts, ascending within a key.
        cuts: int64 [n], the time for each key.

    Returns:
        int64 [n], the row of each key; -1 if the key is missing or has no such version.
    """
    found = np.empty(len(keys), np.int64)
    for i in range(len(keys)):
        key = keys[i]
        cut = cuts[i]
        bucket = find_bucket(key, shift)
        # Find the end of the versions of the key that began before the cut.
        low = np.uint64(bounds[bucket])
        high = np.uint64(bounds[bucket + _ONE])
        while low < high:
            middle = (low + high) >> _ONE
            is_before = sorted_keys[middle] < key
            if is_before or (sorted_keys[middle] == key and starts[middle] < cut):
                low = middle + _ONE
            else:
                high = middle
        is_there = key != 0 and low > np.uint64(0) and sorted_keys[low - _ONE] == key
        found[i] = np.int64(low) - 1 if is_there else -1
    return found


@compiled()
def take_missing(missing, rows):
    """Return the mask of rows that are -1 (no row) or have no value, bool [n]."""
    taken = np.empty(len(rows), np.bool_)
    for i in range(len(rows)):
        taken[i] = rows[i] < 0 or missing[rows[i]] != 0
    return taken


@compiled()
def mark_missing(missing, rows, words, bit):
    """Set a bit of the word of each row that is -1 (no row) or has no value.

    Args:
        missing: uint8 [rows of the table], 1 for no value.
        rows: int64 [n], rows of the table; -1 for no row.
        words: uint64 [n].
        bit: uint64, the position of the bit.
    """
    for i in range(len(rows)):
        if rows[i] < 0 or missing[rows[i]] != 0:
            words[i] |= _ONE << bit


@compiled()
def take_present(values, missing, rows, taken):
    """Write the value of each row, 0 for a row that is -1 (no row) or has no value.

    Args:
        values: [rows of the table].
        missing: uint8 [rows of the table], 1 for no value.
        rows: int64 [n], rows of the table; -1 for no row.
        taken: [n], the result.
    """
    for i in range(len(rows)):
        row = rows[i]
        taken[i] = 0 if row < 0 or missing[row] != 0 else values[row]


@compiled()
def count_codes(codes, missing, rows, counts):
    """Count the codes of rows; return False if a code is out of range.

    Args:
        codes: int32 [rows of the table], not trusted.
        missing: uint8 [rows of the table], 1 for no value.
        rows: int64 [n], rows of the table; -1 for no row.
        counts: int64 [codes], to which 1 is added for each row that has a value.
    """
    for i in range(len(rows)):
        row = rows[i]
        if row < 0 or missing[row] != 0:
            continue
        code = codes[row]
        if code < 0 or code >= len(counts):
            return False
        counts[code] += 1
    return True


@compiled()
def encode_codes(codes, missing, rows, ids_by_code, bounds, ids, tally):
    """Write the id of each row's value; return False if a code is out of range.

    Args:
        codes, missing, rows: See :func:`count_codes`.
        ids_by_code: int32 [codes], the ids of the distinct values.
        bounds: The id of a missing value, the first out-of-vocabulary id, and the first id of the
            vocabulary.
        ids: int32 [n], the result.
        tally: int64 [2], to which the numbers of missing and of out-of-vocabulary values are added.
    """
    null_id, first_oov, first_known = bounds
    num_null = 0
    num_oov = 0
    for i in range(len(rows)):
        row = rows[i]
        if row < 0 or missing[row] != 0:
            ids[i] = null_id
            num_null += 1
            continue
        code = codes[row]
        if code < 0 or code >= len(ids_by_code):
            return False
        ids[i] = ids_by_code[code]
        num_oov += first_oov <= ids[i] < first_known
    tally[0] += num_null
    tally[1] += num_oov
    return True


@compiled()
def take_numbers(values, rows, missing, taken):
    """Write the value at each row, unless it is missing; return False if a row is out of range.

    Args:
        values: The array that is read.
        rows: Integers [n], indices into ``values``, not trusted.
        missing: bool [n]; these rows are skipped.
        taken: [n], the result.
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
    """Write the end and the length of each row's list; return False if one is out of range.

    Args:
        offsets: int64, where each list begins, and the end of the last one; not trusted.
        size: The number of items that exist; no list may end beyond it.
        rows: Integers [n], indices of lists, not trusted.
        missing: bool [n]; these rows get an empty list.
        ends: int64 [n], the result.
        lengths: int64 [n], the result.
    """
    for i in range(len(rows)):
        if missing[i]:
            ends[i] = 0
            lengths[i] = 0
            continue
        if rows[i] < 0 or rows[i] + 1 >= len(offsets):
            return False
        begin, end = offsets[rows[i]], offsets[rows[i] + 1]
        if begin < 0 or end < begin or end > size:
            return False
        ends[i] = end
        lengths[i] = end - begin
    return True


@compiled()
def copy_texts(data, begins, offsets, taken):
    """Concatenate strings into ``taken``.

    Args:
        data: uint8, the bytes of all strings.
        begins: int64 [n], where each string begins in ``data``.
        offsets: int32 [n + 1], where each string begins in ``taken``, and the end.
        taken: uint8, the result.
    """
    for i in range(len(begins)):
        length = offsets[i + 1] - offsets[i]
        taken[offsets[i] : offsets[i + 1]] = data[begins[i] : begins[i] + length]
