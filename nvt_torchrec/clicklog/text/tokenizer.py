"""Lines of text → rows, by the parser that suits the spec; and that of Criteo's format.

One compiled pass without the interpreter lock, so that threads parse in parallel, takes the usual
rows of Criteo's format (:mod:`.fast_rows`) and checks every field. All others, malformed ones among
them, are parsed like any delimited text.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.clicklog.text.assemble import take
from nvt_torchrec.clicklog.text.delimited import parse_delimited
from nvt_torchrec.clicklog.text.fast_rows import count_newlines, longest_row, parse_row
from nvt_torchrec.clicklog.text.line_layout import LineLayout, plain_layout
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import RawRows

_NEWLINE = 10


def parse_rows(
    data: bytes | memoryview, spec: FeatureSpec, layout: LineLayout, *, max_bad_rows: int = 0
) -> RawRows:
    """Parse whole lines of text, without a header line.

    Args:
        data: Lines of UTF-8; the last one with or without its newline; ``\\r\\n`` ends a line too.
        spec: The columns; their raw types say what a field may hold.
        layout: Which columns the fields of a line are.
        max_bad_rows: If there are more bad rows, ``RawRows.bad`` has only the first ones.

    Raises:
        SettingsError: There are 2 GiB of text or more.
    """
    if spec.is_criteo_format:
        return parse_criteo(data, spec, label=layout.label, max_bad_rows=max_bad_rows)
    return parse_delimited(data, spec, layout, max_bad_rows=max_bad_rows)


def as_utf8(text: bytes | memoryview, encoding: str) -> bytes | memoryview:
    """Return text in one of the encodings of a spec as UTF-8, which is not checked."""
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
        data: Lines, the last one with or without its newline; ``\\r\\n`` ends a line too.
        spec: The columns, in order; its ``is_criteo_format`` is true. Categories are up to 8
            hexadecimal digits, dense values 32-bit integers, labels 0 or 1, also as 0.0 and 1.0. An
            empty field is a missing value, which a label may not be.
        label: Whether the rows begin with the label.
        max_bad_rows: See :func:`parse_rows`.
    """
    buffer = np.frombuffer(data, np.uint8)
    if len(buffer) and buffer[-1] != _NEWLINE:
        buffer = np.append(buffer, np.uint8(_NEWLINE))
    buffer.flags.writeable = False  # one type of array, so that loops are compiled once
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
    longest = longest_row(len(spec.dense), len(spec.categorical))
    # parse_row reads so many bytes of any row: the last rows are in a copy with room behind them
    tail = np.concatenate([buffer[-longest:], np.full(longest, _NEWLINE, np.uint8)])
    others, text = np.empty(lines, np.int64), np.empty(len(buffer), np.uint8)
    columns = (
        rows.labels.reshape(-1),
        rows.dense,
        rows.categorical,
        rows.dense_missing,
        rows.categorical_missing,
    )
    split = max(0, len(buffer) - longest)
    count, size = _parse(buffer, tail, split, label, *columns, others, text)
    if not count:
        return rows
    return _fill_in_others(
        rows, others[:count], memoryview(text)[:size], spec, max_bad_rows=max_bad_rows
    )  # type: ignore[arg-type]


def _fill_in_others(
    rows: RawRows, lines: np.ndarray, text: memoryview, spec: FeatureSpec, *, max_bad_rows: int
) -> RawRows:
    """Fill in the rows that are not usual, or leave them out if they are malformed.

    Args:
        rows: With arbitrary values in these rows.
        lines: int64 [k], the lines of these rows.
        text: Theirs.
        spec: The columns.
        max_bad_rows: See :func:`parse_rows`.
    """
    layout = plain_layout(spec, label=len(rows.labels) > 0)
    parsed = parse_delimited(text, spec, layout, max_bad_rows=max_bad_rows)
    good = lines[parsed.line]
    for name in ("labels", "dense", "dense_missing", "categorical", "categorical_missing"):
        getattr(rows, name)[..., good] = getattr(parsed, name)
    kept = np.ones(len(rows), bool)
    kept[lines] = False
    kept[good] = True
    bad = [row.move_to(int(lines[row.line])) for row in parsed.bad]
    return dataclasses.replace(
        rows if kept.all() else take(rows, kept), bad=bad, bad_count=parsed.bad_count
    )


@compiled()
def _parse(
    buffer, tail, split, has_label, labels, dense, categorical, missing, absent, others, text
):
    """Fill the columns with the usual rows; return how many others there are, and their bytes.

    Args:
        buffer: The text, which ends with a newline.
        tail: The text from ``split`` on, with room behind it.
        split: Rows that begin behind it are read from ``tail``.
        has_label: Whether rows begin with the label.
        labels: [lines], filled; so are the next four, as those of ``RawRows``.
        dense: See above.
        categorical: See above.
        missing: Of dense columns.
        absent: Of categorical columns.
        others: [lines], filled with the lines of rows that are not usual.
        text: [size of the buffer], filled with these rows.
    """
    begin, tail_begin = np.uint64(buffer.ctypes.data), np.uint64(tail.ctypes.data)
    dense_address, dense_step = np.uint64(dense.ctypes.data), np.uint64(4 * dense.shape[1])
    ids_address, ids_step = np.uint64(categorical.ctypes.data), np.uint64(4 * categorical.shape[1])
    line = 0
    count = 0
    size = 0
    at = 0
    while at < len(buffer):
        base = begin if at <= split else tail_begin - np.uint64(split)
        offset = np.uint64(4 * line)
        end, label, dense_missing, ids_missing = parse_row(
            base + np.uint64(at), has_label,
            dense_address + offset, dense_step, dense.shape[0],
            ids_address + offset, ids_step, categorical.shape[0],
        )  # fmt: skip
        if end:
            if has_label:
                labels[line] = label
            missing[0, line] = dense_missing
            absent[0, line] = ids_missing
            at = np.int64(end - base)
        else:
            others[count] = line
            count += 1
            byte = np.uint8(0)
            while byte != _NEWLINE:
                byte = buffer[at]
                text[size] = byte
                at += 1
                size += 1
        line += 1
    return count, size
