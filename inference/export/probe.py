"""Rows to test an export with: known, unseen and missing values of every column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from clicklog.spec.columns import CategoricalColumn, DenseColumn
from clicklog.spec.raw_types import RAW_TYPES
from workflows.description import inspect

_LONGEST_LIST = 4
_KNOWN = 1000


def probe_rows(workflow: Path, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows as dicts, as in JSON, for the workflow saved at ``workflow``.

    Its columns must not be derived, nor several of them be read from one.
    """
    description = inspect(workflow)
    rng = np.random.default_rng(seed)
    columns = {_source(column): _dense(column, count, rng) for column in description.spec.dense}
    for column in description.spec.categorical:
        vocabulary = description.vocabularies[column.name]
        with pq.ParquetFile(workflow / vocabulary.file) as file:
            batch = next(file.iter_batches(_KNOWN, columns=[file.schema_arrow.names[0]]), None)
        known = [] if batch is None else batch.column(0).to_pylist()
        columns[_source(column)] = _categories(column, known, count, rng)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _source(column: DenseColumn | CategoricalColumn) -> str:
    return (column.reading.sources or (column.name,))[0]


def _dense(column: DenseColumn, count: int, rng: np.random.Generator) -> list:
    values = np.where(rng.random(count) < 0.9, rng.integers(-5, 100, count), 2_000_000_000)
    plain = values.tolist() if column.raw == "int32" else (values + rng.random(count)).tolist()
    return [None if rng.random() < 0.2 else value for value in plain]


def _categories(
    column: CategoricalColumn, known: list, count: int, rng: np.random.Generator
) -> list:
    kind = RAW_TYPES[column.raw]
    unseen: list = {
        "hex32": [kind.least, kind.most, 0x9E3779B9],
        "int": [kind.least, kind.most, -1, 0],
        "string": ["never seen", "é"],
    }[column.raw]

    def sample() -> Any:
        pool = known if known and rng.random() < 0.7 else unseen
        return pool[rng.integers(len(pool))]

    if column.multi_hot:
        return [[sample() for _ in range(rng.integers(0, _LONGEST_LIST + 1))] for _ in range(count)]
    return [None if rng.random() < 0.15 else sample() for _ in range(count)]
