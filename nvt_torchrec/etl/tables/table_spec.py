"""Make the spec by which the files of a table are read, with its columns and its key."""

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

#: A spec must name a label, and a table has none; no column has this name.
_NO_LABEL = "(a table has no label)"


def make_table_spec(
    rule: TableRule,
    spec: FeatureSpec,
    path: str,
    columns: Sequence[DenseColumn | CategoricalColumn] | None = None,
) -> FeatureSpec:
    """Return the spec of a file of a table.

    It has the columns that are read, followed by the columns of the key, which are categorical and
    are read like those of the log.

    Args:
        rule: The table.
        spec: The columns of the log and of its tables.
        path: The file; its suffix gives the format unless the rule does.
        columns: The columns to read; None for those that the spec joins from the table, and the
            values of its vectors.
    """
    if columns is None:
        columns = list(spec.table_columns(rule.name))
        columns += map(make_vector_column, spec.table_vectors(rule.name))
    return make_keyed_spec(
        spec,
        path,
        columns=[dataclasses.replace(column, table="") for column in columns],
        key=dict(zip(rule.key, rule.file_key, strict=True)),
        time=_get_version_time(rule),
        given=rule.input,
    )


def make_vector_column(vector: VectorColumn) -> VectorValues:
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
    """Return the spec of a file of rows with a key; the columns of the key are the last ones.

    Args:
        spec: The columns of the log.
        path: The file; its suffix gives the format unless ``given`` does.
        columns: The columns that are read.
        key: For each column of the log's key, the column of the file that is read like it.
        time: How the time of a row is read; None if rows have no time.
        given: The format of the file; None to guess it.
    """
    keys = []
    for name, own_name in key.items():
        read = spec.make_key_read(name)
        reading = Reading((own_name,), nulls=read.nulls, trim=read.trim, lenient=read.lenient)
        keys.append(CategoricalColumn(f"key {own_name}", raw=read.raw, reading=reading))
    categorical = [column for column in columns if isinstance(column, CategoricalColumn)]
    return FeatureSpec(
        label=_NO_LABEL,
        dense=tuple(column for column in columns if isinstance(column, DenseColumn)),
        categorical=(*categorical, *keys),
        dense_transform=spec.dense_transform,
        input=given or guess_format(path, spec),
        version_time=time,
    )


def _get_version_time(rule: TableRule) -> Read | None:
    if not rule.valid_from:
        return None
    return Read(rule.valid_from, "time", trim=True, time_format=rule.time_format)


def guess_format(path: str, spec: FeatureSpec) -> InputFormat:
    """Guess the format from the suffix of a file, else take the log's; text has a header."""
    endings = path.split(".")[1:][::-1]
    for ending in endings[:2]:  # the last suffix may be that of a compression
        for name, kind in INPUT_FORMATS.items():
            if ending in (name, *kind.endings):
                return InputFormat(name, header=True if kind.delimiter else None)
    kind = INPUT_FORMATS[spec.input.format]
    return InputFormat(spec.input.format, header=True if kind.delimiter else None)
