"""What a reader must return, in plain Python: csv, re, int and float."""

from __future__ import annotations

import csv
import re

import numpy as np

from clicklog.missing import is_missing
from clicklog.rows import Jagged, RawRows
from clicklog.spec.feature_spec import FeatureSpec

#: Of float32.
LARGEST = (2 - 2**-23) * 2.0**127


class BadFieldError(Exception):
    """The field breaks the spec."""


def value(text: str, raw: str):
    """The value of a field; None: missing."""
    if raw == "label":
        if text not in ("0", "1"):
            raise BadFieldError
        return int(text)
    if text == "":
        return None
    if raw in ("int32", "int"):
        if not re.fullmatch("-?[0-9]+", text):
            raise BadFieldError
        number = int(text)
        low, high = (-(2**31), 2**31 - 1) if raw == "int32" else (-(2**53), 2**53)
        if not low <= number <= high:
            raise BadFieldError
        return number
    if raw == "hex32":
        if not re.fullmatch("[0-9a-fA-F]{1,8}", text):
            raise BadFieldError
        return int(text, 16)
    if raw == "float":
        if not re.fullmatch(r"-?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
            raise BadFieldError
        if not abs(float(text)) <= LARGEST:
            raise BadFieldError
        return float(text)
    return text


def items(text: str, raw: str, separator: str):
    """The list in a field; None: missing."""
    if text == "":
        return None
    values = [value(item, raw) for item in text.split(separator)]
    if None in values:
        raise BadFieldError
    return values


def split(line: str, spec: FeatureSpec) -> list[str]:
    """The fields of a line without its end."""
    if spec.input.format == "csv":
        reader = csv.reader([line], delimiter=spec.input.delimiter, strict=True)
        return next(reader, []) or [""]
    return line.split(spec.input.delimiter)


def raw_types(spec: FeatureSpec) -> list[tuple[str, bool]]:
    """Of the label, the dense and the categorical columns: raw type, and whether it is a list."""
    dense = [(column.raw, False) for column in spec.dense]
    return [("label", False), *dense, *((c.raw, c.multi_hot) for c in spec.categorical)]


def parse(fields: list[str], spec: FeatureSpec) -> list:
    """The values of a row's fields, in spec order. Raises :class:`BadFieldError`."""
    types = raw_types(spec)
    if len(fields) != len(types):
        raise BadFieldError
    return [
        items(text, raw, spec.input.list_separator) if multi_hot else value(text, raw)
        for text, (raw, multi_hot) in zip(fields, types, strict=True)
    ]


def as_lists(rows: RawRows, spec: FeatureSpec) -> list[list]:
    """What a reader returned, as :func:`parse` writes rows."""
    columns = [rows.label.tolist()]
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


def _with_none(values: list, mask: np.ndarray, column: int, default) -> list:
    missing = is_missing(mask, column).tolist()
    assert all(v == default for v, absent in zip(values, missing, strict=True) if absent)
    return [None if absent else v for v, absent in zip(values, missing, strict=True)]
