"""Compiled loops of tables: find keys, and take values at rows."""

from __future__ import annotations

import numpy as np

from nvt_torchrec.base.kernels import compiled

#: Indices have no sign where they are searched: Numba compares others with 0, to count negative
#: ones from the end, and that takes half of the time of a search.
_ONE = np.uint64(1)


def make_buckets(sorted_keys: np.ndarray, bucket_rows: int) -> tuple[np.ndarray, int]:
    """Divide sorted keys into buckets by their highest bits.

    Keys are hashes, and so spread evenly. A search in a bucket reads one or two lines of the cache,
    and one in all keys about as many as it has steps.

    Args:
        sorted_keys: int64 [rows], rising.
        bucket_rows: About how many rows a bucket has.

    Returns:
        The bounds of the buckets, int64 [buckets + 1], rows; and the shift, see
        :func:`find_bucket`.
    """
    num_buckets, shift = shift_to_buckets(len(sorted_keys), bucket_rows)
    lowest = np.arange(-num_buckets // 2, num_buckets // 2, dtype=np.int64) << shift
    bounds = np.empty(num_buckets + 1, np.int64)
    bounds[:-1] = np.searchsorted(sorted_keys, lowest)
    bounds[-1] = len(sorted_keys)
    return bounds, shift


def shift_to_buckets(num_rows: int, bucket_rows: int) -> tuple[int, int]:
    """Return how many buckets some rows are divided into, and the shift of :func:`find_bucket`.

    Args:
        num_rows: How many rows there are.
        bucket_rows: About how many rows a bucket has.
    """
    bits = max(1, (num_rows // bucket_rows).bit_length())
    return 1 << bits, 64 - bits


@compiled()
def find_bucket(key, shift):
    """Return the bucket of a key: its highest bits, of which the lowest number has bucket 0."""
    return np.uint64((key >> shift) + (1 << (63 - shift)))


@compiled()
def find_rows(sorted_keys, bounds, shift, keys):
    """Find keys by binary search in their buckets; 0 stands for a missing key.

    Args:
        sorted_keys: int64 [rows], rising.
        bounds: int64 [buckets + 1], see :func:`find_bucket`.
        shift: See :func:`find_bucket`.
        keys: int64 [n].

    Returns:
        int64 [n], the row of each key; -1 for none.
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
        starts: int64 [rows], the time from which each row counts; rising for each key.
        cuts: int64 [n], the time of each key.

    Returns:
        int64 [n], the row of each key; -1 for none.
    """
    found = np.empty(len(keys), np.int64)
    for i in range(len(keys)):
        key, cut = keys[i], cuts[i]
        bucket = find_bucket(key, shift)
        # Ends after all versions of the key that began before the cut.
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
    """Return whether each row is none, or has no value."""
    taken = np.empty(len(rows), np.bool_)
    for i in range(len(rows)):
        taken[i] = rows[i] < 0 or missing[rows[i]] != 0
    return taken


@compiled()
def mark_missing(missing, rows, words, bit):
    """Set a bit of the words of those rows that are none, or have no value.

    Args:
        missing: uint8 [rows of the table], 1 for no value.
        rows: int64 [n], rows of the table; -1 for none.
        words: uint64 [n].
        bit: uint64, the position of the bit.
    """
    for i in range(len(rows)):
        if rows[i] < 0 or missing[rows[i]] != 0:
            words[i] |= _ONE << bit


@compiled()
def take_present(values, missing, rows, taken):
    """Write the number of each row, 0 for a row that is none or has no value.

    Args:
        values: [rows of the table].
        missing: uint8 [rows of the table], 1 for no value.
        rows: int64 [n], rows of the table; -1 for none.
        taken: [n].
    """
    for i in range(len(rows)):
        row = rows[i]
        taken[i] = 0 if row < 0 or missing[row] != 0 else values[row]


@compiled()
def count_codes(codes, missing, rows, counts):
    """Count the codes of rows; return whether all codes are there.

    Args:
        codes: int32 [rows of the table]; they are those of a file, and thus anything.
        missing: uint8 [rows of the table], 1 for no value.
        rows: int64 [n], rows of the table; -1 for none.
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
    """Write the id of each row's value; return whether all codes are there.

    Args:
        codes, missing, rows: See :func:`count_codes`.
        ids_by_code: int32 [codes], the ids of the distinct values.
        bounds: The id of no value, the first one of values out of vocabulary, and the first one of
            the vocabulary.
        ids: int32 [n].
        tally: int64 [2], to which the rows without a value and those out of vocabulary are added.
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
