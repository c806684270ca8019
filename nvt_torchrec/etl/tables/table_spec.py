"""The spec by which the files of a table are read: its columns, and those of its key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from nvt_torchrec.formats.feature_spec import (
    CategoricalColumn,
    DenseColumn,
    FeatureSpec,
    InputFormat,
)
from nvt_torchrec.formats.feature_spec.columns import VectorValues
from nvt_torchrec.formats.feature_spec.file_formats import INPUT_FORMATS
from nvt_torchrec.formats.feature_spec.read_plan import Read, Reading
from nvt_torchrec.formats.feature_spec.table_rules import TableRule
from nvt_torchrec.formats.feature_spec.vector_columns import VectorColumn

#: A table has no label; the name that a spec must have is that of no column.
_NO_LABEL = "(a table has no label)"


def make_table_spec(
    rule: TableRule,
    spec: FeatureSpec,
    path: str,
    columns: Sequence[DenseColumn | CategoricalColumn] | None = None,
) -> FeatureSpec:
    """Return the spec of a file of a table.

    Its columns are those that are read, in their order, and behind them, as categories, those of
    the key, read as the log's are.

    Args:
        rule: The table.
        spec: The columns of the log and of its tables.
        path: The file, whose ending says its format where the rule does not.
        columns: The columns to read; None: those that the spec of the log takes from the table, and
            the values of its vectors.
    """
    if columns is None:
        columns = [
            *spec.table_columns(rule.name),
            *map(vector_values, spec.table_vectors(rule.name)),
        ]
    return make_keyed_spec(
        spec,
        path,
        columns=[dataclasses.replace(column, table="") for column in columns],
        key=dict(zip(rule.key, rule.file_key, strict=True)),
        time=_version_time(rule),
        given=rule.input,
    )


def vector_values(vector: VectorColumn) -> VectorValues:
    """Return the column by which the values of a vector are read."""
    return VectorValues(
        vector.name,
        reading=Reading((vector.column,)),
        width=vector.width,
        maximum=float(np.finfo(vector.dtype).max),
    )


def make_keyed_spec(
    spec: FeatureSpec,
    path: str,
    *,
    columns: Sequence[DenseColumn | CategoricalColumn],
    key: Mapping[str, str],
    time: Read | None,
    given: InputFormat | None,
) -> FeatureSpec:
    """Return the spec of a file of rows with a key, whose columns are behind all others.

    Args:
        spec: The columns of the log.
        path: The file, whose ending says its format where none is given.
        columns: The columns that are read.
        key: The columns of the key, by those of the log as which they are read.
        time: How the time of a row is read; None without.
        given: The format of the file.
    """
    keys = []
    for name, own_name in key.items():
        read = spec.make_key_read(name)
        reading = Reading((own_name,), nulls=read.nulls, trim=read.trim, lenient=read.lenient)
        keys.append(CategoricalColumn(f"key {own_name}", raw=read.raw, reading=reading))
    return FeatureSpec(
        label=_NO_LABEL,
        dense=tuple(column for column in columns if isinstance(column, DenseColumn)),
        categorical=(*(c for c in columns if isinstance(c, CategoricalColumn)), *keys),
        dense_transform=spec.dense_transform,
        input=given or guess_format(path, spec),
        version_time=time,
    )


def _version_time(rule: TableRule) -> Read | None:
    if not rule.valid_from:
        return None
    return Read(rule.valid_from, "time", trim=True, time_format=rule.time_format)


def guess_format(path: str, spec: FeatureSpec) -> InputFormat:
    """Return the format that the ending of a name says, else the log's; text has a header."""
    endings = path.split(".")[1:][::-1]
    for ending in endings[:2]:  # the last one may be that of a compression
        for name, kind in INPUT_FORMATS.items():
            if ending in (name, *kind.endings):
                return InputFormat(name, header=True if kind.delimiter else None)
    kind = INPUT_FORMATS[spec.input.format]
    return InputFormat(spec.input.format, header=True if kind.delimiter else None)
