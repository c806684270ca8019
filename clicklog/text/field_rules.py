"""What a column's rules change about its fields before they are parsed: spaces, null tokens."""

from __future__ import annotations

import functools

import numpy as np

from nvt_torchrec.base.kernels import compiled

_SPACE, _TAB = 32, 9


@compiled()
def trim(data, begin, end):
    """Return where the fields begin and end without the spaces and tabs around them."""
    first = begin.copy()
    last = end.copy()
    for i in range(len(begin)):
        at, stop = begin[i], end[i]
        while at < stop and (data[at] == _SPACE or data[at] == _TAB):
            at += 1
        while stop > at and (data[stop - 1] == _SPACE or data[stop - 1] == _TAB):
            stop -= 1
        first[i] = at
        last[i] = stop
    return first, last


def find_texts(
    data: np.ndarray, begin: np.ndarray, end: np.ndarray, texts: tuple[str, ...], *, trimmed: bool
) -> np.ndarray:
    """Return which fields are one of some texts, bool [n].

    Args:
        data: of the fields; UTF-8.
        begin: likewise.
        end: likewise.
        texts: the texts.
        trimmed: whether the fields are without the spaces around them; then the texts are taken
            without them too.
    """
    found = np.zeros(len(begin), np.bool_)
    _find(data, begin, end, *_encoded(texts, trimmed), found)
    return found


@functools.lru_cache(maxsize=256)
def _encoded(texts: tuple[str, ...], trimmed: bool) -> tuple[np.ndarray, np.ndarray]:
    encoded = [(text.strip(" \t") if trimmed else text).encode() for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return np.frombuffer(b"".join(encoded), np.uint8), offsets


@compiled()
def _find(data, begin, end, texts, offsets, found):
    for i in range(len(begin)):
        size = end[i] - begin[i]
        for k in range(len(offsets) - 1):
            if offsets[k + 1] - offsets[k] != size:
                continue
            same = 0
            while same < size and data[begin[i] + same] == texts[offsets[k] + same]:
                same += 1
            if same == size:
                found[i] = True
                break


def as_utf8(text: bytes | memoryview, encoding: str) -> bytes | memoryview:
    """Return text in one of the encodings of a spec as UTF-8, which is not checked."""
    if encoding == "utf-8":
        return text
    array = np.frombuffer(text, np.uint8)
    more = int(np.count_nonzero(array & 128))
    if not more:
        return text
    wide = np.empty(len(array) + more, np.uint8)
    _widen(array, wide)
    return wide.data


@compiled()
def _widen(array, wide):
    to = 0
    for byte in array:
        if byte < 128:
            wide[to] = byte
            to += 1
        else:
            wide[to] = 192 | (byte >> 6)
            wide[to + 1] = 128 | (byte & 63)
            to += 2
