"""Random specs and rows of every raw type, and what must become of them, the slow way."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from nvt_torchrec.base.hashing import murmur3_int, murmur3_string
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.columns import DENSE_TRANSFORMS
from nvt_torchrec.formats.feature_spec.raw_types import (
    CATEGORICAL_RAW_TYPES,
    DENSE_RAW_TYPES,
    RAW_TYPES,
)
from nvt_torchrec.formats.rows import (
    Jagged,
    RawRows,
    add_missing,
    get_dense_dtype,
    is_missing,
    make_empty_mask,
)
from tests.clicklog.reference_fields import KINDS


def examples(number: int) -> settings:
    """So many examples of a slow test, each in a directory of its own."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=number, deadline=None, suppress_health_check=checks)


def raw_rows(
    label: np.ndarray,
    categorical: list,
    missing: np.ndarray | None = None,
    dense: np.ndarray | None = None,
    dense_missing: np.ndarray | None = None,
) -> RawRows:
    """Rows of which none is malformed; by default without dense columns and missing values."""
    rows = len(label)
    return RawRows(
        labels=label[np.newaxis],
        dense=np.empty((0, rows), np.int32) if dense is None else dense,
        dense_missing=make_empty_mask(0, rows) if dense_missing is None else dense_missing,
        categorical=categorical,
        categorical_missing=make_empty_mask(len(categorical), rows) if missing is None else missing,
        line=np.arange(rows),
        lines=rows,
    )


def as_columns(counts: dict, raw: str) -> tuple[np.ndarray | pa.Array, np.ndarray]:
    """Counted values of a raw type, and their counts, in the order of the dict."""
    values = pa.array([*counts], pa.string()) if raw == "string" else np.array([*counts], np.int64)
    return values, np.array([*counts.values()], np.int64)


def order_of(value: int | str) -> int | bytes:
    """Values of equal counts are sorted by it."""
    return value.encode() if isinstance(value, str) else value


def kept_values(counts: dict, column: CategoricalColumn) -> list:
    """The values that the policy of a column keeps, by their counts."""
    kept = sorted(counts, key=lambda value: (-counts[value], order_of(value)))
    kept = [value for value in kept if counts[value] >= column.freq_threshold]
    return kept[: column.max_table_size - column.reserved_ids] if column.max_table_size else kept


@st.composite
def feature_specs(draw: st.DrawFn) -> FeatureSpec:
    """Up to five categorical columns, some sharing a vocabulary, and up to three dense ones."""
    categorical = []
    while not categorical or (len(categorical) < 5 and draw(st.booleans())):
        policy = draw(
            st.sampled_from(
                [
                    {},
                    {},
                    {"freq_threshold": 2},
                    {"max_table_size": 6},
                    {"max_table_size": 9, "num_buckets": 3},
                    {"freq_threshold": 3, "num_buckets": 2},
                    {"hash_buckets": 5},
                ]
            )
        )
        raw = draw(st.sampled_from(CATEGORICAL_RAW_TYPES))
        sharing = 1 if "hash_buckets" in policy else draw(st.integers(1, 3))
        vocabulary = f"v{len(categorical)}" if sharing > 1 or draw(st.booleans()) else ""
        for _ in range(sharing):
            categorical.append(
                CategoricalColumn(
                    f"c{len(categorical)}",
                    raw=raw,
                    multi_hot=draw(st.booleans()),
                    vocabulary="" if "hash_buckets" in policy else vocabulary,
                    **policy,
                )
            )
    dense = []
    for i in range(draw(st.integers(0, 3))):
        raw = draw(st.sampled_from(DENSE_RAW_TYPES))
        fill = draw(st.sampled_from([0, -1, 7] if RAW_TYPES[raw].is_whole else [0, 0.25]))
        own = draw(st.sampled_from(["", *DENSE_TRANSFORMS]))
        dense.append(DenseColumn(f"d{i}", fill=fill, raw=raw, transform=own))
    transform = draw(st.sampled_from(DENSE_TRANSFORMS))
    order = draw(st.permutations(categorical))
    return FeatureSpec("label", tuple(dense), tuple(order), transform)


def random_raw_rows(spec: FeatureSpec, rows: int, seed: int) -> RawRows:
    """Rows in which some columns are missing throughout, some lists all empty, some values rare."""
    rng = np.random.default_rng(seed)
    columns, missing = [], make_empty_mask(len(spec.categorical), rows)
    for j, column in enumerate(spec.categorical):
        absent = rng.random(rows) < rng.choice([0.0, 0.2, 1.0], p=[0.3, 0.6, 0.1])
        if column.multi_hot:
            lengths = np.where(absent, 0, rng.integers(0, 4, rows))
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            columns.append(Jagged(offsets, _values(column.raw, int(offsets[-1]), rng)))
            absent = lengths == 0
        else:
            columns.append(_values(column.raw, rows, rng))
        add_missing(missing, j, absent)
    dense = rng.integers(-6, 50, (len(spec.dense), rows)).astype(get_dense_dtype(spec))
    for values, column in zip(dense, spec.dense, strict=True):
        if not RAW_TYPES[column.raw].is_whole:
            values += rng.random(rows)
    dense_missing = make_empty_mask(len(spec.dense), rows)
    for j in range(len(spec.dense)):
        add_missing(dense_missing, j, rng.random(rows) < 0.5)
    label = rng.integers(0, 2, rows).astype(np.uint8)
    return raw_rows(label, columns, missing, dense, dense_missing)


def _values(raw: str, count: int, rng: np.random.Generator):
    return KINDS[raw].held((rng.zipf(1.5, count) % 11).astype(np.int64))


class Oracle:
    """What must be fitted to rows, and what other rows then become; plain Python."""

    def __init__(self, spec: FeatureSpec, parts: list[RawRows]) -> None:
        self.spec = spec
        self.counts = {name: Counter() for name in spec.vocabularies}
        self.nulls = Counter()
        for rows in parts:
            for column, cells in zip(spec.categorical, self.cells(rows), strict=True):
                for cell in cells:
                    values = cell if column.multi_hot else [cell]
                    for value in values:
                        if value is None:
                            self.nulls[column.vocabulary_name] += 1
                        else:
                            self.counts[column.vocabulary_name][value] += 1
        self.ids = {name: self._ids(columns[0]) for name, columns in spec.vocabularies.items()}
        columns = zip(*(self.dense(rows) for rows in parts), strict=True)
        dense = [np.concatenate(column) for column in columns]  # none without parts
        self.mean = [math.fsum(x) / len(x) for x in dense]
        self.std = [
            math.sqrt(math.fsum((x - mean) ** 2) / (len(x) - 1)) if len(x) > 1 else 0.0
            for x, mean in zip(dense, self.mean, strict=True)
        ]

    def _ids(self, column: CategoricalColumn) -> dict:
        if column.hash_buckets:
            return {}
        kept = kept_values(self.counts[column.vocabulary_name], column)
        return {value: column.reserved_ids + i for i, value in enumerate(kept)}

    def cells(self, rows: RawRows) -> list[list]:
        """By column, the value of each row: None where missing, a list for multi-hot columns."""
        result = []
        for j, (column, values) in enumerate(
            zip(self.spec.categorical, rows.categorical, strict=True)
        ):
            if column.multi_hot:
                flat, at = values.values.tolist(), values.offsets.tolist()
                result.append([flat[at[i] : at[i + 1]] for i in range(len(values))])
            else:
                absent = is_missing(rows.categorical_missing, j)
                result.append(
                    [None if a else v for v, a in zip(values.tolist(), absent, strict=True)]
                )
        return result

    def dense(self, rows: RawRows) -> list[np.ndarray]:
        """By column, the values before normalization."""
        result = []
        for j, column in enumerate(self.spec.dense):
            absent = is_missing(rows.dense_missing, j)
            x = np.where(absent, column.fill, rows.dense[j].astype(np.float64))
            formula = self.spec.get_transform(column).y_formula
            if formula == "log(max(x, -1) + 2)":
                x = np.log(np.maximum(x, -1) + 2)
            elif formula == "log(max(x, 0) + 1)":
                x = np.log(np.maximum(x, 0) + 1)
            elif formula != "x":
                x = np.log(np.maximum(x, -2) + 3)
            result.append(x)
        return result

    def transform(self, rows: RawRows) -> dict[str, list]:
        """By column: ids, lists of ids, floats."""
        result = {self.spec.label: rows.labels[0].tolist()}
        for j, (column, x) in enumerate(zip(self.spec.dense, self.dense(rows), strict=True)):
            if self.spec.get_transform(column).normalized:
                x = (x - self.mean[j]) / (self.std[j] or 1.0)
            result[column.name] = x.tolist()
        for column, cells in zip(self.spec.categorical, self.cells(rows), strict=True):
            result[column.name] = [
                [self.id(column, value) for value in cell]
                if column.multi_hot
                else self.id(column, cell)
                for cell in cells
            ]
        return result

    def id(self, column: CategoricalColumn, value) -> int:
        """The id of one value."""
        if value is None:
            return 1
        known = self.ids[column.vocabulary_name].get(value)
        if known is not None or column.oov_ids == 1:
            return known or 2
        hashed = (
            murmur3_string(pa.array([value]))
            if isinstance(value, str)
            else murmur3_int(np.array([value]))
        )
        return 2 + int(hashed[0]) % column.oov_ids
