"""Look up the ids of all columns by one kernel call, for requests of a few rows.

Each kernel call costs microseconds. For a single row of 26 columns, a call for each column would
double the time of the request.
"""

from __future__ import annotations

import numpy as np
from numba import types

from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.formats.flat_columns import FlatColumns
from nvt_torchrec.formats.ids import Ids, find_offsets
from nvt_torchrec.formats.rows import is_missing
from nvt_torchrec.workflows.compiled.tables import (
    IDS,
    READ_WORDS,
    encode_int,
    read_only_array,
)
from nvt_torchrec.workflows.compiled.text_tables import BYTES, encode_text


@compiled(
    types.void(types.Array(types.int64, 2, "C"), read_only_array(types.int64),
               read_only_array(types.int32), BYTES, read_only_array(types.uint64),
               READ_WORDS, types.Array(types.int64, 2, "C", readonly=True),
               read_only_array(types.int64), BYTES, IDS,
               types.Array(types.int64, 2, "C")),
)  # fmt: skip
def encode_flat(
    layout, numbers, begins, data, missing, words, regions, text_begins, text, out, tallies
):
    """Look up the ids of all values of :class:`formats.flat_columns.FlatColumns`.

    Args:
        layout, numbers, begins, data, missing: Its attributes.
        words, regions: See :func:`.tables.encode_hex`.
        text_begins, text: See :func:`.text_tables.encode_text`.
        out: int32 [values], the result: the concatenated ids of all columns.
        tallies: int64 [columns, 2], to which the numbers of missing and out-of-vocabulary values
            are added.
    """
    at = 0
    for j in range(len(layout)):
        begin = layout[j, 1]
        count = layout[j, 2]
        end = begin + count
        absent = missing[at : at + count]
        ids = out[at : at + count]
        if layout[j, 0]:
            encode_text(
                begins[begin : end + 1], data, absent, 0, words, regions[j], text_begins, text, ids,
                tallies[j],
            )  # fmt: skip
        else:
            encode_int(numbers[begin:end], absent, 0, words, regions[j], ids, tallies[j])
        at += count


def encode_columns(
    columns: FlatColumns,
    missing: np.ndarray,
    words: np.ndarray,
    regions: np.ndarray,
    text_begins: np.ndarray,
    text: np.ndarray,
    tallies: np.ndarray,
) -> Ids:
    """Return the ids of all columns; see :func:`encode_flat`.

    Args:
        columns: The values.
        missing: uint64 [words, n], the mask of missing values.
        words, regions, text_begins, text, tallies: See :func:`encode_flat`.
    """
    ids = np.empty(len(columns.missing), np.int32)
    values = columns.layout, columns.numbers, columns.begins, columns.data, columns.missing
    encode_flat(*values, words, regions, text_begins, text, ids, tallies)
    if not columns.lists:
        return Ids(ids.reshape(columns.lengths.shape))
    if missing.any():
        for j in columns.lists:  # a missing list stays empty, and does not get id 1
            tallies[j, 0] = np.count_nonzero(is_missing(missing, j))
    return Ids(ids, find_offsets(columns.lengths, np.int32))
