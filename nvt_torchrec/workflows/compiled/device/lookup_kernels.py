"""Kernels of the compiled workflow: ids by hash tables, dense values by tables of results.

They read the arrays that the host's kernels read (:mod:`workflows.compiled.tables`). Of each
column, ``lanes`` threads each take every ``lanes``-th row, so that neighbouring threads have
neighbouring rows, and a thread adds to a tally once. Importing this module imports numba.cuda.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from nvt_torchrec.base.device import kernel
from nvt_torchrec.base.hashing import hash_murmur3_int
from nvt_torchrec.formats.feature_spec.columns import FIRST_OOV_ID, NULL_ID
from nvt_torchrec.workflows.compiled.tables import (
    PLACE_BEGIN,
    PLACE_FIRST_ID,
    PLACE_OOV_IDS,
    PLACE_SLOTS,
    PLACE_VALUES,
    home_narrow,
)

_ONE, _HALF, _LOW = np.uint64(1), np.uint64(32), np.uint64(0xFFFFFFFF)


@kernel
def encode_columns(lanes, values, missing, words, places, out, tallies):
    """Look up the ids of all columns; column j is bit j of the missing values.

    Args:
        lanes: How many threads share a column.
        values: uint32 [columns, n].
        missing: uint64 [n].
        words: uint64, all tables, which are narrow.
        places: int64 [columns, fields].
        out: The result, int32 [columns, n]: 1 where missing, 2 … where out of vocabulary.
        tallies: int64 [columns, 2], to which missing and out-of-vocabulary values are added.
    """
    thread = cuda.grid(1)
    column = thread // lanes
    if column >= values.shape[0]:
        return
    bit = np.uint64(column)
    begin = np.uint64(places[column, PLACE_BEGIN])
    size = np.uint64(places[column, PLACE_SLOTS])
    oov_ids = places[column, PLACE_OOV_IDS]
    first_id = places[column, PLACE_FIRST_ID]
    ids = places[column, PLACE_VALUES]
    nulls = 0
    oov = 0
    for row in range(thread % lanes, values.shape[1], lanes):
        if (missing[row] >> bit) & _ONE != 0:
            out[column, row] = NULL_ID
            nulls += 1
            continue
        key = np.uint64(values[column, row])
        at = begin + np.uint64(home_narrow(key, size))
        word = words[at]
        left = size  # so that the search ends in damaged tables, too
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
    """Transform integers by the table of results.

    Args:
        lanes: How many threads share a column.
        values: int32 [columns, n].
        missing: uint64 [n], with bit j set where column j is missing.
        fill: int64 [columns], the values of missing ones.
        minimum: The smallest integer in the table; smaller ones count as it.
        table: float32 [columns, integers], the results from there on.
        out: The result, float32 [columns, n]; undefined for integers beyond the table.
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
        place = max(value, minimum) - minimum
        if place < table.shape[1]:
            out[column, row] = table[column, place]
        else:
            above += 1
    if above:
        cuda.atomic.add(beyond, column, above)


@kernel
def count_bits(lanes, missing, counts):
    """Count in how many rows each of the lowest bits is set.

    Args:
        lanes: How many threads share a bit.
        missing: uint64 [n].
        counts: int64 [bits], to which the numbers are added.
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
