"""Tables of strings: insertion and lookup.

They are wide tables (:mod:`workflows.compiled.tables`) of the strings' hashes. The strings of all
vocabularies lie one after the other in an array of bytes; strings with equal hashes are
distinguished by their bytes.
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
def _last_bytes(data, at, end):
    """The fewer than eight bytes ``data[at:end]`` as one word."""
    if at + 8 <= len(data):
        kept = (np.uint64(1) << np.uint64(8 * (end - at))) - np.uint64(1)
        return tables.eight_bytes(data, at) & kept
    word = np.uint64(0)
    for k in range(end - at):
        word |= np.uint64(data[at + k]) << np.uint64(8 * k)
    return word


@numba.njit(forceinline=True)
def _hash_text(data, begin, end):
    hashed = np.uint64(end - begin)
    at = begin
    while at + 8 <= end:
        hashed = tables.mix64(hashed ^ tables.eight_bytes(data, at))
        at += 8
    return tables.mix64(hashed ^ _last_bytes(data, at, end))


@compiled(types.void(tables.WORDS, types.int64, tables.read_only(types.int64), BYTES, types.int64))
def insert_text(words, slots, begins, data, first_id):
    """As :func:`insert_narrow`, for strings ``data[begins[i]:begins[i + 1]]``.

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
def _same_text(data, begin, end, text_begins, text, which):
    """Whether ``data[begin:end]`` is string ``which``; safe if the offsets are damaged."""
    if which < 0 or which + 1 >= len(text_begins):
        return False
    at, text_end = text_begins[which], text_begins[which + 1]
    # in this order, because a difference of damaged offsets may overflow
    if at < 0 or text_end < at or text_end > len(text) or text_end - at != end - begin:
        return False
    while begin + 8 <= end:
        if tables.eight_bytes(data, begin) != tables.eight_bytes(text, at):
            return False
        begin += 8
        at += 8
    return _last_bytes(data, begin, end) == _last_bytes(text, at, text_end)


@compiled(
    types.void(tables.read_only(types.int32), BYTES, tables.read_only(types.uint64), types.int64,
               tables.READ_WORDS, tables.PLACE, tables.read_only(types.int64), BYTES,
               tables.IDS, tables.TALLY),
)  # fmt: skip
def encode_text(begins, data, missing, bit, words, place, text_begins, text, out, tally):
    """As :func:`encode_hex`, of one column of strings ``data[begins[i]:begins[i + 1]]``.

    ``text[text_begins[k]:text_begins[k + 1]]`` is string k of all vocabularies.
    """
    begin, size = np.uint64(place[tables.PLACE_BEGIN]), np.uint64(place[tables.PLACE_SLOTS])
    end = begin + np.uint64(2) * size
    oov_ids = np.uint32(place[tables.PLACE_OOV_IDS])
    first_id, ids = np.int32(place[tables.PLACE_FIRST_ID]), np.uint32(place[tables.PLACE_VALUES])
    first_text = place[tables.PLACE_TEXT] - place[tables.PLACE_FIRST_ID]
    shift, masked = np.uint64(bit), len(missing) > 0
    rows = len(begins) - 1
    hashes = np.empty(min(rows, tables.AHEAD), np.uint64)  # of the following rows, in a ring buffer
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
                and _same_text(
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
