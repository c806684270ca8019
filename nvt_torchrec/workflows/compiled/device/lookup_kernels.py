"""CUDA kernels of the compiled workflow: look up ids in hash tables, dense values in result tables.

They read the same arrays as the host's kernels (:mod:`workflows.compiled.tables`). ``lanes``
threads share a column. Each takes every ``lanes``-th row, so that neighbouring threads read
neighbouring rows, and adds to a tally only once. Importing this module imports numba.cuda.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from nvt_torchrec.base.device import kernel
from nvt_torchrec.base.hashing import hash_murmur3_int
from nvt_torchrec.formats.feature_spec.columns import FIRST_OOV_ID, NULL_ID
from nvt_torchrec.workflows.compiled.tables import (
    REGION_BEGIN,
    REGION_FIRST_ID,
    REGION_OOV_IDS,
    REGION_SLOTS,
    REGION_VALUES,
    find_home_narrow,
)

_ONE = np.uint64(1)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


@kernel
def encode_columns(lanes, values, missing, words, regions, out, tallies):
    """Look up the ids of all columns.

    Args:
        lanes: Number of threads that share a column.
        values: uint32 [columns, n].
        missing: uint64 [n]; bit j is set where column j is missing.
        words: uint64, all tables; every table is narrow.
        regions: int64 [columns, fields].
        out: int32 [columns, n], the result: 1 where missing, 2 or more where out of vocabulary.
        tallies: int64 [columns, 2], to which the numbers of missing and out-of-vocabulary values
            are added.
    """
    thread = cuda.grid(1)
    column = thread // lanes
    if column >= values.shape[0]:
        return
    bit = np.uint64(column)
    begin = np.uint64(regions[column, REGION_BEGIN])
    size = np.uint64(regions[column, REGION_SLOTS])
    oov_ids = regions[column, REGION_OOV_IDS]
    first_id = regions[column, REGION_FIRST_ID]
    ids = regions[column, REGION_VALUES]
    nulls = 0
    oov = 0
    for row in range(thread % lanes, values.shape[1], lanes):
        if (missing[row] >> bit) & _ONE != 0:
            out[column, row] = NULL_ID
            nulls += 1
            continue
        key = np.uint64(values[column, row])
        at = begin + np.uint64(find_home_narrow(key, size))
        word = words[at]
        left = size  # ends the search in a damaged table without empty slots
        while word >> _HALF != 0 and word & _LOW != key and left > _ONE:
            at += _ONE
            if at == begin + size:
                at = begin + _ONE
            left -= _ONE
            word = words[at]
        number = np.int64(word >> _HALF) if word & _LOW == key else np.int64(0)
        if number < first_id or number >= first_id + ids:
            number = np.int64(FIRST_OOV_ID)
            if oov_ids > 1:
                number += np.int64(hash_murmur3_int(np.int64(key))) % oov_ids
            oov += 1
        out[column, row] = number
    if nulls:
        cuda.atomic.add(tallies, (column, 0), nulls)
    if oov:
        cuda.atomic.add(tallies, (column, 1), oov)


@kernel
def look_up_dense(lanes, values, missing, fill, minimum, table, out, beyond):
    """Transform integers by looking up their results in a table.

    Args:
        lanes: Number of threads that share a column.
        values: int32 [columns, n].
        missing: uint64 [n]; bit j is set where column j is missing.
        fill: int64 [columns], the values that replace missing ones.
        minimum: The smallest integer in the table; smaller integers are raised to it.
        table: float32 [columns, integers], the results of ``minimum``, ``minimum`` + 1, …
        out: float32 [columns, n], the result; undefined for integers beyond the table.
        beyond: int64 [columns], to which the number of integers beyond the table is added.
    """
    thread = cuda.grid(1)
    column = thread // lanes
    if column >= values.shape[0]:
        return
    bit = np.uint64(column)
    above = 0
    for row in range(thread % lanes, values.shape[1], lanes):
        value = np.int64(values[column, row])
        if (missing[row] >> bit) & _ONE != 0:
            value = fill[column]
        index = max(value, minimum) - minimum
        if index < table.shape[1]:
            out[column, row] = table[column, index]
        else:
            above += 1
    if above:
        cuda.atomic.add(beyond, column, above)


@kernel
def count_bits(lanes, missing, counts):
    """Count the rows in which each of the lowest bits is set.

    Args:
        lanes: Number of threads that share a bit.
        missing: uint64 [n].
        counts: int64 [bits], to which the numbers of rows are added.
    """
    thread = cuda.grid(1)
    bit = thread // lanes
    if bit >= counts.shape[0]:
        return
    count = 0
    for row in range(thread % lanes, missing.shape[0], lanes):
        count += np.int64((missing[row] >> np.uint64(bit)) & _ONE)
    if count:
        cuda.atomic.add(counts, bit, count)
