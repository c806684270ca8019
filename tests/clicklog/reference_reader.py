"""What a reader must return, in plain Python: csv, re, int and float."""

from __future__ import annotations

import csv
import datetime
import math
import re
from collections.abc import Callable

import numpy as np

from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.derivations import Derivation
from nvt_torchrec.formats.feature_spec.raw_types.time import parse_iso
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.formats.rows import Jagged, RawRows, is_missing, make_empty_rows
from tests.clicklog.reference_fields import BAD, LARGEST, expected

__all__ = [
    "LARGEST",
    "BadFieldError",
    "as_lists",
    "check_rows",
    "derived",
    "key_of",
    "parse",
    "split",
]


class BadFieldError(Exception):
    """The field breaks the spec."""


def split(line: str, spec: FeatureSpec) -> list[str]:
    """The fields of a line without its end."""
    delimiter = spec.input.delimiter
    if spec.input.format == "csv" and len(delimiter) == 1:
        reader = csv.reader([line], delimiter=delimiter, strict=True)
        return next(reader, []) or [""]
    if spec.input.format == "csv":
        return _split_quoted(line, delimiter)
    return line.split(delimiter)


def _split_quoted(line: str, delimiter: str) -> list[str]:
    """The fields of a line of csv with a delimiter of several characters."""
    fields, left = [], line
    while True:
        if left.startswith('"'):
            quoted = re.match('"((?:[^"]|"")*)"', left)
            if not quoted:
                raise BadFieldError
            fields.append(quoted[1].replace('""', '"'))
            left = left[quoted.end() :]
            if left and not left.startswith(delimiter):
                raise BadFieldError
        else:
            field = left.split(delimiter, 1)[0]
            fields.append(field)
            left = left[len(field) :]
        if not left:
            return fields
        left = left[len(delimiter) :]


def parse(
    fields: list[str], spec: FeatureSpec, names: list[str] | None = None, *, label: bool = True
) -> list:
    """What a row's fields become: labels, weight and key, if any, dense and categorical columns.

    ``names`` are those of the fields, as the file's header has them; None: as the spec has them.
    Raises :class:`BadFieldError`.
    """
    names = spec.file_columns(label=label) if names is None else names
    if len(fields) != len(names):
        raise BadFieldError
    texts = dict(zip(names, fields, strict=True))
    separator = spec.input.list_separator
    return features({source: texts[source] for source in spec.sources(label=label)}, spec,
                    lambda text, read: _read(text, read, separator), label=label)  # fmt: skip


def features(sources: dict, spec: FeatureSpec, read_one: Callable, *, label: bool) -> list:
    """The columns of a row, of what ``read_one`` makes of its sources."""
    plan = spec.read_plan(label=label)
    values = [read_one(sources[read.source], read) for read in plan.reads]
    row = [values[index] for index in plan.labels]
    if plan.weight is not None:
        row.append(None if values[plan.weight] is None else float(np.float32(values[plan.weight])))
    if plan.key is not None:
        key = values[plan.key]
        row.append(key_of(key) if isinstance(key, str) else key)
    if None in row:
        raise BadFieldError
    for kind in ("dense", "categorical"):
        for column, places in zip(getattr(spec, kind), getattr(plan, kind), strict=True):
            given = [values[place] for place in places]
            row.append(derived(column.derive, given) if column.derive else given[0])
    return row


def _read(text: str, read: Read, separator: str):
    """The value of a field by the rules of a read."""
    if not read.multi_hot:
        actual = expected(text, read)
        if actual == BAD:
            raise BadFieldError
        return actual
    strip = (lambda each: each.strip(" \t")) if read.trim else (lambda each: each)
    text = strip(text)
    if not text or text in map(strip, read.nulls):
        return None
    if text[0] == "[" and text[-1] == "]" and read.raw != "string":
        text = text[1:-1]
    text = strip(text[:-1] if text[1:] and text[-1] == separator else text)
    if not text or text in map(strip, read.nulls):
        return None
    actual = [expected(item, read) for item in text.split(separator)]
    if None in actual or BAD in actual:
        raise BadFieldError
    return actual


def derived(how: Derivation, values: list):
    """A derived value, by Python's own calendar and logarithm."""
    if None in values:
        return None
    value = values[0]
    if how.kind == "cross":
        return f"{value}\x1f{values[1]}"
    if how.kind == "bucket":
        return sum(boundary <= value for boundary in how.boundaries)
    if how.kind == "log_square":
        return math.floor(math.log(value) ** 2) if value > 2 else max(int(value), -(2**53))
    if how.kind == "age":
        end = parse_iso(how.reference, "reference") if len(values) == 1 else value
        return float(end - values[-1]) / 86_400_000_000.0
    time = datetime.datetime(1970, 1, 1) + datetime.timedelta(microseconds=value)
    return {"hour": time.hour, "weekday": time.weekday()}[how.kind]


def key_of(text: str) -> int:
    """The hash by which rows with a text are split: FNV-1a, then MurmurHash3's finalizer."""
    bits = 2**64 - 1
    hashed = 0xCBF29CE484222325
    for byte in text.encode():
        hashed = (hashed ^ byte) * 0x100000001B3 & bits
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        hashed = (hashed ^ hashed >> 33) * factor & bits
    hashed ^= hashed >> 33
    return hashed - 2**64 if hashed >= 2**63 else hashed


def as_lists(rows: RawRows, spec: FeatureSpec) -> list[list]:
    """What a reader returned, as :func:`parse` writes rows."""
    columns = rows.labels.tolist()
    for each, dtype in ((rows.weight, np.float32), (rows.key, np.int64)):
        if each is not None:
            assert each.dtype == dtype
            columns.append(each.tolist())
    for j in range(len(spec.dense)):
        columns.append(_with_none(rows.dense[j].tolist(), rows.dense_missing, j, 0))
    for j, column in enumerate(rows.categorical):
        if isinstance(column, Jagged):
            flat = column.values.tolist()
            assert column.offsets[0] == 0
            assert column.offsets[-1] == len(flat)
            pairs = zip(column.offsets[:-1], column.offsets[1:], strict=True)
            values, default = [flat[begin:end] for begin, end in pairs], []
        else:
            values = column.tolist()
            default = 0 if isinstance(column, np.ndarray) else ""
        columns.append(_with_none(values, rows.categorical_missing, j, default))
    return [list(row) for row in zip(*columns, strict=True)]


def check_rows(
    rows: RawRows,
    lines: list[str],
    spec: FeatureSpec,
    names: list[str] | None = None,
    *,
    label: bool = True,
) -> None:
    """Rows are those of :func:`parse`, their arrays of the usual types; other lines are told."""
    good, kept, bad = [], [], []
    for number, line in enumerate(lines):
        try:
            good.append(parse(split(line, spec), spec, names, label=label))
            kept.append(number)
        except (BadFieldError, csv.Error):
            bad.append(number)
    assert as_lists(rows, spec) == good
    assert rows.line.tolist() == kept
    assert [item.line for item in rows.bad] == bad
    assert [item.text for item in rows.bad] == [lines[number].encode() for number in bad]
    assert all(item.column in ("", *spec.sources(label=label)) for item in rows.bad)
    assert (rows.bad_count, rows.lines) == (len(bad), len(lines))
    like = make_empty_rows(spec, label=label)
    assert list(map(type, rows.categorical)) == list(map(type, like.categorical))
    for name in ("labels", "weight", "key", "dense"):
        item, other = getattr(rows, name), getattr(like, name)
        assert (item is None) == (other is None)
        assert item is None or (item.dtype, item.shape[:-1]) == (other.dtype, other.shape[:-1])


def _with_none(values: list, mask: np.ndarray, column: int, default) -> list:
    missing = is_missing(mask, column).tolist()
    assert all(v == default for v, absent in zip(values, missing, strict=True) if absent)
    return [None if absent else v for v, absent in zip(values, missing, strict=True)]
