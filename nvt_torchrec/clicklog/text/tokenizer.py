"""Parse lines of text: the choice of the parser, and the parser of Criteo's format.

One compiled pass, without the interpreter lock so that threads parse in parallel, parses and checks
the usual rows of Criteo's format (:mod:`.fast_rows`). All other rows, including malformed ones, are
then parsed like any delimited text.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.clicklog.text.assemble import take
from nvt_torchrec.clicklog.text.delimited import parse_delimited
from nvt_torchrec.clicklog.text.fast_rows import count_newlines, find_max_row_bytes, parse_row
from nvt_torchrec.clicklog.text.line_layout import LineLayout, make_plain_layout
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import RawRows

_NEWLINE = 10


def parse_rows(
    data: bytes | memoryview, spec: FeatureSpec, layout: LineLayout, *, max_bad_rows: int = 0
) -> RawRows:
    """Parse whole lines of text without a header line, by the parser that suits the spec.

    Args:
        data: Lines of UTF-8; the last one with or without its newline; ``\\r\\n`` ends a line, too.
        spec: The columns.
        layout: The fields of a line.
        max_bad_rows: If there are more bad rows, ``RawRows.bad`` has only the first ones.

    Raises:
        SettingsError: There are 2 GiB of text or more.
    """
    if spec.is_criteo_format:
        return parse_criteo(data, spec, label=layout.label, max_bad_rows=max_bad_rows)
    return parse_delimited(data, spec, layout, max_bad_rows=max_bad_rows)


def to_utf8(text: bytes | memoryview, encoding: str) -> bytes | memoryview:
    """Convert text in one of the encodings of a spec to UTF-8; UTF-8 itself is not checked."""
    return text if encoding == "utf-8" else bytes(text).decode(encoding, "replace").encode()


def parse_criteo(
    data: bytes | memoryview | np.ndarray,
    spec: FeatureSpec,
    *,
    label: bool,
    max_bad_rows: int = 0,
) -> RawRows:
    """Parse whole lines of a log in Criteo's format.

    Args:
        data: Lines, the last one with or without its newline; ``\\r\\n`` ends a line, too.
        spec: The columns, in order; its ``is_criteo_format`` is true. Categories are up to 8
            hexadecimal digits, dense values 32-bit integers, labels 0 or 1, also as 0.0 and 1.0. An
            empty field is a missing value; labels must not be missing.
        label: Whether the rows begin with the label.
        max_bad_rows: See :func:`parse_rows`.
    """
    buffer = np.frombuffer(data, np.uint8)
    if len(buffer) and buffer[-1] != _NEWLINE:
        buffer = np.append(buffer, np.uint8(_NEWLINE))
    # Numba would compile the loops for read-only arrays (of bytes objects) and for writable ones
    # (of np.append), so all are made read-only.
    buffer.flags.writeable = False
    lines = count_newlines(buffer)
    rows = RawRows(
        labels=np.empty((int(label), lines), np.uint8),
        dense=np.empty((len(spec.dense), lines), np.int32),
        dense_missing=np.empty((1, lines), np.uint64),
        categorical=np.empty((len(spec.categorical), lines), np.uint32),
        categorical_missing=np.empty((1, lines), np.uint64),
        line=np.arange(lines),
        lines=lines,
    )
    max_row_bytes = find_max_row_bytes(len(spec.dense), len(spec.categorical))
    # parse_row may read max_row_bytes from the beginning of any row, for the last rows beyond the
    # end of the buffer. So these are read from a copy that is padded with newlines.
    tail = np.concatenate([buffer[-max_row_bytes:], np.full(max_row_bytes, _NEWLINE, np.uint8)])
    tail_offset = max(0, len(buffer) - max_row_bytes)
    unusual_lines = np.empty(lines, np.int64)
    unusual_text = np.empty(len(buffer), np.uint8)
    columns = (
        rows.labels.reshape(-1),
        rows.dense,
        rows.categorical,
        rows.dense_missing,
        rows.categorical_missing,
    )
    count, size = _parse(buffer, tail, tail_offset, label, *columns, unusual_lines, unusual_text)
    if not count:
        return rows
    text: Any = memoryview(unusual_text)  # type: ignore[arg-type]
    return _fill_in_unusual(
        rows, unusual_lines[:count], text[:size], spec, max_bad_rows=max_bad_rows
    )


def _fill_in_unusual(
    rows: RawRows, lines: np.ndarray, text: memoryview, spec: FeatureSpec, *, max_bad_rows: int
) -> RawRows:
    """Parse the unusual rows, and remove those that are malformed.

    Args:
        rows: All rows, with arbitrary values in the unusual ones.
        lines: int64 [k], the lines of the unusual rows.
        text: The text of these lines.
        spec: The columns.
        max_bad_rows: See :func:`parse_rows`.
    """
    layout = make_plain_layout(spec, label=len(rows.labels) > 0)
    parsed = parse_delimited(text, spec, layout, max_bad_rows=max_bad_rows)
    good = lines[parsed.line]
    for name in ("labels", "dense", "dense_missing", "categorical", "categorical_missing"):
        getattr(rows, name)[..., good] = getattr(parsed, name)
    kept = np.ones(len(rows), bool)
    kept[lines] = False
    kept[good] = True
    bad = [row.move_to(int(lines[row.line])) for row in parsed.bad]
    if not kept.all():
        rows = take(rows, kept)
    return dataclasses.replace(rows, bad=bad, bad_count=parsed.bad_count)


@compiled()
def _parse(
    buffer,
    tail,
    tail_offset,
    has_label,
    labels,
    dense,
    categorical,
    dense_missing,
    categorical_missing,
    unusual_lines,
    unusual_text,
):
    """Fill the columns with the usual rows, and copy the text of the others.

    Args:
        buffer: uint8 [bytes], the text, which ends with a newline.
        tail: uint8, the text from ``tail_offset`` on, with padding after it.
        tail_offset: Rows that begin after this offset are read from ``tail``.
        has_label: Whether rows begin with the label.
        labels: The result, uint8 [lines].
        dense: The result, int32 [dense columns, lines].
        categorical: The result, uint32 [categorical columns, lines].
        dense_missing: The result, uint64 [1, lines].
        categorical_missing: The result, uint64 [1, lines].
        unusual_lines: The result, int64 [lines], the lines of unusual rows.
        unusual_text: The result, uint8 [bytes], the text of unusual rows.

    Returns:
        The number of unusual rows, and the number of their bytes.
    """
    # Addresses instead of indices: see fast_rows. A step leads from one column to the next.
    buffer_address = np.uint64(buffer.ctypes.data)
    tail_address = np.uint64(tail.ctypes.data)
    dense_address = np.uint64(dense.ctypes.data)
    dense_step = np.uint64(4 * dense.shape[1])
    ids_address = np.uint64(categorical.ctypes.data)
    ids_step = np.uint64(4 * categorical.shape[1])
    line = 0
    unusual = 0
    unusual_bytes = 0
    offset = 0
    while offset < len(buffer):
        # the address of byte 0 of the text, as if the buffer or the tail began there
        base = buffer_address if offset <= tail_offset else tail_address - np.uint64(tail_offset)
        column_offset = np.uint64(4 * line)
        end, label, dense_bits, ids_bits = parse_row(
            base + np.uint64(offset), has_label,
            dense_address + column_offset, dense_step, dense.shape[0],
            ids_address + column_offset, ids_step, categorical.shape[0],
        )  # fmt: skip
        if end:
            if has_label:
                labels[line] = label
            dense_missing[0, line] = dense_bits
            categorical_missing[0, line] = ids_bits
            offset = np.int64(end - base)
        else:
            unusual_lines[unusual] = line
            unusual += 1
            byte = np.uint8(0)
            while byte != _NEWLINE:
                byte = buffer[offset]
                unusual_text[unusual_bytes] = byte
                offset += 1
                unusual_bytes += 1
        line += 1
    return unusual, unusual_bytes
