"""Variants of a spec for one step of the ETL, or for a program that scores rows.

A step that needs only some of the columns reads only those, which is faster. Each function returns
a spec, which is checked like any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TypeVar

from nvt_torchrec.formats.feature_spec.columns import (
    CategoricalColumn,
    DenseColumn,
    InputFormat,
)
from nvt_torchrec.formats.feature_spec.events import Aggregate
from nvt_torchrec.formats.feature_spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.file_formats import INPUT_FORMATS
from nvt_torchrec.formats.feature_spec.read_plan import Reading
from nvt_torchrec.formats.feature_spec.split import BY_DAYS

_Column = TypeVar("_Column", DenseColumn, CategoricalColumn)


def keep_events_only(spec: FeatureSpec) -> FeatureSpec:
    """Return the spec that reads events only: keys, times, labels, histories and amounts."""
    names = [*spec.history_columns, *(column.name for column in spec.key_features)]
    columns = [column for column in spec.categorical if column.name in names]
    return dataclasses.replace(
        spec,
        dense=(*spec.aggregates, *spec.amount_features),
        categorical=tuple(columns or spec.categorical[:1]),  # a spec needs at least one
        input=_name_fields(spec),
    )


def drop_event_keys(spec: FeatureSpec) -> FeatureSpec:
    """Return the spec that reads rows whose events have been read before: no keys, no amounts.

    All aggregates become counts of all rows, and histories are dropped. A spec without aggregates
    keeps its histories, because events need one or the other.
    """
    if spec.split.by == "column":  # check_split requires the split's column in every key
        return spec
    dense = []
    for column in spec.dense:
        if column.aggregate:
            column = dataclasses.replace(column, aggregate=Aggregate((), "count"))
        dense.append(column)
    histories = () if spec.aggregates else spec.histories
    return dataclasses.replace(
        spec,
        dense=tuple(dense),
        histories=histories,
        event_sources=(),
        input=_name_fields(spec),
    )


def keep_label_keys_only(spec: FeatureSpec) -> FeatureSpec:
    """Return the spec that reads only what clicks are matched with: keys, times and labels."""
    time = spec.label_time
    assert time is not None
    files = []
    for file in spec.label_files:
        file = dataclasses.replace(file, log_time=time.source, log_time_format=time.time_format)
        files.append(file)
    columns = spec.key_features
    if not columns:  # a spec needs at least one
        name = files[0].key[0]
        reading = Reading((name,), trim=True)
        columns = [CategoricalColumn(f"key {name}", raw="string", reading=reading)]
    return dataclasses.replace(
        spec,
        dense=(),
        categorical=tuple(columns),
        input=_name_fields(spec),
        weight="",
        split=BY_DAYS,
        events=None,
        histories=(),
        event_sources=(),
        tables=(),
        vectors=(),
        label_files=tuple(files),
    )


def bound_times(spec: FeatureSpec, between: tuple[int, int]) -> FeatureSpec:
    """Return the spec for which rows outside a half-open range of times are malformed."""
    if spec.events is None:  # only labels from other files need times
        return dataclasses.replace(spec, label_times_between=between)
    return dataclasses.replace(spec, events=dataclasses.replace(spec.events, between=between))


def allow_scoring(spec: FeatureSpec) -> FeatureSpec:
    """Return the spec for scoring the rows of a file, with or without labels.

    As in a request, rows are not split, no negatives are drawn, and with events a time may be
    missing. A label that is constant in the log, or comes from another file, is read from a column
    of its name if the file has one.
    """
    if spec.label_files or spec.negatives:
        rules = tuple(dataclasses.replace(rule, value=None) for rule in spec.label_rules)
        spec = dataclasses.replace(spec, label_files=(), negatives=None, label_rules=rules)
    if not spec.events:
        return spec
    events = dataclasses.replace(spec.events, source="", optional=True)
    return dataclasses.replace(spec, events=events, split=BY_DAYS)


def drop_events(spec: FeatureSpec) -> FeatureSpec:
    """Return the spec that reads aggregates as columns, for a program without their state."""
    dense = tuple(dataclasses.replace(column, aggregate=None) for column in spec.dense)
    return dataclasses.replace(spec, dense=dense, events=None, histories=(), event_sources=())


def drop_tables(spec: FeatureSpec, names: Collection[str] | None = None) -> FeatureSpec:
    """Return the spec that reads columns of tables from the rows themselves, like other columns.

    Vectors are dropped from the spec, because rows hold none.

    Args:
        spec: The spec.
        names: The names of the columns and vectors to change; None for all of them.
    """

    def drop(column: _Column) -> _Column:
        if column.table and (names is None or column.name in names):
            return dataclasses.replace(column, table="")
        return column

    vectors = []
    for vector in spec.vectors:
        if names is not None and vector.name not in names:
            vectors.append(vector)
    return dataclasses.replace(
        spec,
        dense=tuple(map(drop, spec.dense)),
        categorical=tuple(map(drop, spec.categorical)),
        vectors=tuple(vectors),
    )


def replace_policy(spec: FeatureSpec, **policy: int) -> FeatureSpec:
    """Return the spec with vocabulary settings (``freq_threshold=…`` …) on every vocabulary.

    Hashed columns have no vocabulary and are left unchanged.
    """
    columns = []
    for column in spec.categorical:
        if not column.hash_buckets:
            column = dataclasses.replace(column, **policy)  # type: ignore[arg-type]
        columns.append(column)
    return dataclasses.replace(spec, categorical=tuple(columns))


def _name_fields(spec: FeatureSpec) -> InputFormat:
    """Return the input format with the names of all fields of text without a header.

    A variant reads only some of them, so its own columns do not describe a line.
    """
    if not INPUT_FORMATS[spec.input.format].delimiter or spec.input.header:
        return spec.input
    return dataclasses.replace(spec.input, columns=tuple(spec.file_columns(label=True)))
