"""Rows to test an export with: known, unseen and missing values of every column."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.spec.reading import CROSS_SEPARATOR, Read
from nvt_torchrec.formats.spec.times import time_text
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.inference.inputs.columns import read_as_text
from nvt_torchrec.workflows.description import inspect

_LONGEST_LIST = 4
_KNOWN = 1000
#: Microseconds since 1970 of 2000 and 2035.
_FIRST_TIME, _LAST_TIME = 946_684_800_000_000, 2_051_222_400_000_000


def probe_rows(workflow: Path, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows as dicts, as in JSON, for the workflow saved at ``workflow``.

    A column of the log from which several features are read has values that suit all of them.
    """
    description = inspect(workflow)
    rng = np.random.default_rng(seed)
    spec = description.spec
    reads = spec.read_plan(label=False).reads
    text = read_as_text(reads)
    known, pairs = _known_values(workflow, description)
    columns = {}
    for name in spec.sources(label=False):
        own = [read for read in reads if read.source == name]
        crossed = any(name in both for both in pairs)
        edges = _edges(spec, name)
        columns[name] = _column(own, known.get(name, []), edges, count, rng, crossed=crossed)
        if name in text and not own[0].multi_hot:
            columns[name] = [one if one is None else str(one) for one in columns[name]]
    only_text = {
        name for name in columns if {r.raw for r in reads if r.source == name} == {"string"}
    }
    for (first, second), values in pairs.items():
        if values and {first, second} <= only_text:
            for row in np.flatnonzero(rng.random(count) < 0.5):
                pair = values[rng.integers(len(values))]
                columns[first][row], columns[second][row] = pair
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _known_values(
    workflow: Path, description: WorkflowDescription
) -> tuple[dict[str, list], dict[tuple[str, ...], list]]:
    """Return values in the vocabularies by column of the log, and pairs by the columns of a cross.

    Among the values are unknown ones for the sources of crosses: integers, which all exports take.
    """
    found: dict[str, list] = {}
    pairs: dict[tuple[str, ...], list] = {}
    for column in description.spec.categorical:
        if column.derive and column.derive.kind != "cross":
            continue
        file = workflow / description.vocabularies[column.name].file
        with pq.ParquetFile(file) as parquet:
            names = [parquet.schema_arrow.names[0]]
            batch = next(parquet.iter_batches(_KNOWN, columns=names), None)
        values = [] if batch is None else batch.column(0).to_pylist()
        if column.derive:
            pairs[column.reading.sources] = [
                tuple(value.split(CROSS_SEPARATOR)) for value in values
            ]
            for source in column.reading.sources:
                found.setdefault(source, []).extend(["-7", "123456789"])
        else:
            found.setdefault((column.reading.sources or (column.name,))[0], []).extend(values)
    return found, pairs


def _edges(spec: FeatureSpec, source: str) -> list[float]:
    """Return the boundaries of the buckets that are derived from a column of the log."""
    return [
        boundary
        for column in spec.categorical
        if column.derive and source in column.reading.sources
        for boundary in column.derive.boundaries
    ]


def _column(
    reads: Sequence[Read],
    known: list,
    edges: list[float],
    count: int,
    rng: np.random.Generator,
    *,
    crossed: bool,
) -> list:
    kinds = {read.raw for read in reads}
    times = [read for read in reads if read.raw == "time"]
    if times:
        moments = rng.integers(_FIRST_TIME, _LAST_TIME, count) // 10**6 * 10**6
        plain: list = [time_text(int(moment), times[0].time_format) for moment in moments]
    elif kinds <= {"int32", "float"} or len(kinds) > 1:
        plain = _numbers(kinds, edges, count, rng)
    else:
        return _categories(reads[0], known, count, rng, crossed=crossed)
    return [None if rng.random() < 0.2 else value for value in plain]


def _numbers(kinds: set[str], edges: list[float], count: int, rng: np.random.Generator) -> list:
    """Return numbers; what is read as an integer or as text, too, are integers."""
    unusual = [2_000_000_000, 2, 3, *edges] if kinds <= {"int32", "float"} else [7, 8, *edges]
    values = rng.integers(0 if "hex32" in kinds else -5, 100, count).astype(np.float64)
    picked = rng.choice(np.array(unusual, np.float64), count)
    values = np.where(rng.random(count) < 0.8, values, picked)
    if kinds == {"float"}:
        return np.where(rng.random(count) < 0.5, values, values + rng.random(count)).tolist()
    limit = 10**7 if "hex32" in kinds else 2**31 - 1
    return [int(value) for value in values.clip(0 if "hex32" in kinds else -limit, limit)]


def _categories(
    read: Read, known: list, count: int, rng: np.random.Generator, *, crossed: bool
) -> list:
    unseen = known if crossed else list(RAW_TYPES[read.raw].probes)

    def sample() -> Any:
        pool = known if known and rng.random() < 0.7 else unseen
        return pool[rng.integers(len(pool))]

    if read.multi_hot:
        return [[sample() for _ in range(rng.integers(0, _LONGEST_LIST + 1))] for _ in range(count)]
    return [None if rng.random() < 0.15 else sample() for _ in range(count)]
