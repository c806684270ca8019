"""Hash tables of strings: insertion and lookup.

They are wide tables (:mod:`workflows.compiled.tables`) of the strings' hashes. One array of bytes
holds the strings of all vocabularies, which are compared to tell strings with equal hashes apart.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types

from nvt_torchrec.base.hashing import hash_murmur3_bytes
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.workflows.compiled import tables

BYTES = types.Array(types.uint8, 1, "C", readonly=True)


@numba.njit(forceinline=True)
def _load_last_bytes(data, at, end):
    """Return ``data[at:end]``, fewer than eight bytes, as one word."""
    if at + 8 <= len(data):
        kept = (np.uint64(1) << np.uint64(8 * (end - at))) - np.uint64(1)
        return tables.load_eight_bytes(data, at) & kept
    word = np.uint64(0)
    for k in range(end - at):
        word |= np.uint64(data[at + k]) << np.uint64(8 * k)
    return word


@numba.njit(forceinline=True)
def _hash_text(data, begin, end):
    hashed = np.uint64(end - begin)
    at = begin
    while at + 8 <= end:
        hashed = tables.mix64(hashed ^ tables.load_eight_bytes(data, at))
        at += 8
    return tables.mix64(hashed ^ _load_last_bytes(data, at, end))


@compiled(
    types.void(tables.WORDS, types.int64, tables.read_only_array(types.int64), BYTES, types.int64)
)
def insert_text(words, slots, begins, data, first_id):
    """Insert strings ``data[begins[i]:begins[i + 1]]``, like :func:`.tables.insert_narrow`.

    Strings with equal hashes both get a slot; a string that occurs twice is not detected.
    """
    size = np.uint64(slots)
    for i in range(len(begins) - 1):
        hashed = _hash_text(data, begins[i], begins[i + 1])
        at = tables.find_slot(hashed, size)
        while words[np.uint64(2) * at + np.uint64(1)] != 0:
            at = at + np.uint64(1) if at + np.uint64(1) < size else np.uint64(0)
        words[np.uint64(2) * at] = hashed
        words[np.uint64(2) * at + np.uint64(1)] = np.uint64(first_id + i)


@numba.njit(forceinline=True)
def _equals_text(data, begin, end, text_begins, text, index):
    """Return whether ``data[begin:end]`` is string ``index``; safe if the offsets are damaged."""
    if index < 0 or index + 1 >= len(text_begins):
        return False
    at, text_end = text_begins[index], text_begins[index + 1]
    # The difference comes last, because that of damaged offsets may overflow.
    if at < 0 or text_end < at or text_end > len(text) or text_end - at != end - begin:
        return False
    while begin + 8 <= end:
        if tables.load_eight_bytes(data, begin) != tables.load_eight_bytes(text, at):
            return False
        begin += 8
        at += 8
    return _load_last_bytes(data, begin, end) == _load_last_bytes(text, at, text_end)


@compiled(
    types.void(
        tables.read_only_array(types.int32),
        BYTES,
        tables.read_only_array(types.uint64),
        types.int64,
        tables.READ_WORDS,
        tables.REGION,
        tables.read_only_array(types.int64),
        BYTES,
        tables.IDS,
        tables.TALLY,
    )
)
def encode_text(begins, data, missing, bit, words, region, text_begins, text, out, tally):
    """Look up the ids of one column of strings, like :func:`.tables.encode_hex`.

    Args:
        begins, data: ``data[begins[i]:begins[i + 1]]`` is the string of row i.
        missing, bit, words: See :func:`.tables.encode_hex`.
        region: int64 [``REGION_FIELDS``], the region of the column's table.
        text_begins, text: ``text[text_begins[k]:text_begins[k + 1]]`` is string k of all
            vocabularies.
        out: int32 [n], the result.
        tally: int64 [2], to which the numbers of missing and out-of-vocabulary values are added.
    """
    begin = np.uint64(region[tables.REGION_BEGIN])
    size = np.uint64(region[tables.REGION_SLOTS])
    end = begin + np.uint64(2) * size
    oov_ids = np.uint32(region[tables.REGION_OOV_IDS])
    first_id = np.int32(region[tables.REGION_FIRST_ID])
    ids = np.uint32(region[tables.REGION_VALUES])
    first_text = region[tables.REGION_TEXT] - region[tables.REGION_FIRST_ID]
    shift = np.uint64(bit)
    masked = len(missing) > 0
    rows = len(begins) - 1
    # A ring buffer with the hashes of the next AHEAD rows, whose slots are being prefetched.
    hashes = np.empty(min(rows, tables.AHEAD), np.uint64)
    for i in range(min(rows, tables.AHEAD)):
        hashes[i] = _hash_text(data, begins[i], begins[i + 1])
    nulls = 0
    oov = 0
    for i in range(rows):
        hashed = hashes[i % tables.AHEAD]
        if i + tables.AHEAD < rows:
            later = _hash_text(data, begins[i + tables.AHEAD], begins[i + tables.AHEAD + 1])
            hashes[i % tables.AHEAD] = later
            tables.prefetch(words, begin + np.uint64(2) * tables.find_slot(later, size))
        if masked and (missing[i] >> shift) & np.uint64(1):
            out[i] = tables.NULL_ID32
            nulls += 1
            continue
        home = begin + np.uint64(2) * tables.find_slot(hashed, size)
        at = home
        id_ = np.int32(0)
        while words[at + np.uint64(1)] != 0:
            candidate = np.int32(words[at + np.uint64(1)])
            if (
                words[at] == hashed
                and np.uint32(candidate - first_id) < ids
                and _equals_text(
                    data, begins[i], begins[i + 1], text_begins, text, first_text + candidate
                )
            ):
                id_ = candidate
                break
            at += np.uint64(2)
            if at == end:
                at = begin
            if at == home:
                break
        if id_ == 0:
            id_ = tables.OOV_ID32
            if oov_ids > 1:
                hashed32 = hash_murmur3_bytes(data, begins[i], begins[i + 1])
                id_ += np.int32(hashed32 % oov_ids)
            oov += 1
        out[i] = id_
    tally[0] += nulls
    tally[1] += oov
