"""Extending a workflow day by day, against plain Python."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvt_torchrec.etl.units.counting import (
    compute_moments,
    compute_statistics,
    has_moments,
    merge_moments,
)
from nvt_torchrec.formats.feature_spec import CategoricalColumn, FeatureSpec
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.workflows import vocabulary
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.extend_workflow import (
    DayCounts,
    extend_workflow,
    write_base_state,
)
from nvt_torchrec.workflows.extension_state import read_state
from nvt_torchrec.workflows.vocabulary import PendingValues, apply_policy
from nvt_torchrec.workflows.writer import Fitted, write_workflow
from tests.workflows.random_specs import (
    Oracle,
    as_columns,
    examples,
    feature_specs,
    kept_values,
    order_of,
    random_raw_rows,
)
from tests.workflows.test_compiled import check


def _values(counter: Counter, raw: str):
    """Distinct values in an order that is none, and their counts."""
    listed = sorted(counter, key=lambda value: str(value)[::-1])
    return as_columns({value: counter[value] for value in listed}, raw)


def count_day(spec: FeatureSpec, day: int, rows: RawRows) -> DayCounts:
    """What an engine counts on a day, by :class:`Oracle`."""
    found = Oracle(spec, [rows])
    return DayCounts(
        day,
        {
            name: _values(found.counts[name], columns[0].raw)
            for name, columns in spec.vocabularies.items()
            if found.counts[name] and not columns[0].hash_buckets
        },
        dict(found.nulls),
    )


def fit(spec: FeatureSpec, rows: list[RawRows]) -> Fitted:
    """Generation 0."""
    found = Oracle(spec, rows)
    vocabularies, pending = {}, {}
    for name, columns in spec.vocabularies.items():
        values, counts = _values(found.counts[name], columns[0].raw)
        vocabularies[name], pending[name] = apply_policy(
            values, counts, columns[0], found.nulls[name]
        )
    merged = merge_moments([compute_moments(some, spec) for some in rows])
    return Fitted(
        compute_statistics(merged, spec) if has_moments(spec) else {},
        vocabularies,
        pending,
    )


def write_base(directory: Path, spec: FeatureSpec, fitted: Fitted, days: list[int]) -> Path:
    description = write_workflow(directory / "workflow", spec, fitted, days=tuple(days))
    write_base_state(directory / "extension", description, fitted, days)
    return directory


def extend(before: Path, after: Path, counts: DayCounts, **options):
    options = {"threads": 1, **options}
    return extend_workflow(
        before / "workflow",
        before / "extension",
        counts,
        after / "workflow",
        after / "extension",
        **options,
    )


class Days:
    """What a vocabulary must become, the slow way."""

    def __init__(self, column: CategoricalColumn, fitted: Counter, limit: int) -> None:
        self.column, self.nulls = column, 0
        self.values = kept_values(fitted, column)
        self.counts = {value: fitted[value] for value in self.values}
        self.pending = {value: n for value, n in fitted.items() if value not in self.counts}
        self._forget(limit)
        self.total = sum(fitted.values())

    def extend(self, counted: Counter, limit: int) -> None:
        self.total += sum(counted.values())
        for value, number in counted.items():
            where = self.counts if value in self.counts else self.pending
            where[value] = where.get(value, 0) + number
        for value in sorted(self.pending, key=self._place):
            full = len(self.values) + self.column.reserved_ids == self.column.max_table_size
            if self.pending[value] >= self.column.freq_threshold and not full:
                self.values.append(value)
                self.counts[value] = self.pending.pop(value)
        self._forget(limit)

    def check(self, values: list, counts: list, pending: PendingValues) -> None:
        """Compare all that is stored of the vocabulary."""
        assert values == self.values
        assert counts == [self.counts[value] for value in values]
        waiting = sorted(self.pending, key=order_of)
        assert pending.values.tolist() == waiting
        assert pending.counts.tolist() == [self.pending[value] for value in waiting]

    def _forget(self, limit: int) -> None:
        kept = sorted(self.pending, key=self._place)[:limit]
        self.pending = {value: self.pending[value] for value in kept}

    def _place(self, value) -> tuple:
        return -self.pending[value], order_of(value)


def _stored(path: Path, description, column: CategoricalColumn) -> tuple[list, list]:
    table = pq.read_table(path / "workflow" / description.vocabularies[column.name].file)
    return table[0].to_pylist(), table[1].to_pylist()


def _files(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


@examples(15)
@given(
    spec=feature_specs(),
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=5),
    gaps=st.lists(st.integers(1, 3), min_size=5, max_size=5),
    fitted_days=st.integers(1, 2),
    limit=st.sampled_from([1, 3, 10**6]),
)
def test_any_days_of_any_spec(
    tmp_path_factory, spec, seed, sizes, gaps, fitted_days, limit
) -> None:
    directory = tmp_path_factory.mktemp("days")
    numbers = np.cumsum(gaps).tolist()
    rows = [random_raw_rows(spec, size, seed + i) for i, size in enumerate(sizes)]
    fitted_days = min(fitted_days, len(rows) - 1)
    base = numbers[:fitted_days]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "PENDING_LIMIT", limit)
        whole = Oracle(spec, rows[:fitted_days])
        columns = {
            name: own[0] for name, own in spec.vocabularies.items() if not own[0].hash_buckets
        }
        expected = {
            name: Days(column, whole.counts[name], limit) for name, column in columns.items()
        }
        nulls = Counter(whole.nulls)
        before = write_base(directory / "0", spec, fit(spec, rows[:fitted_days]), base)
        description = inspect(before / "workflow")
        assert description.generation == 0
        assert description.parent is None
        digests = [description.digest]
        for g, (day, own) in enumerate(
            zip(numbers[fitted_days:], rows[fitted_days:], strict=False), 1
        ):
            counts, counted = count_day(spec, day, own), Oracle(spec, [own])
            nulls += counted.nulls
            after = directory / str(g)
            files = _files(before)
            description = extend(before, after, counts)
            extend(before, directory / "again", counts, threads=3)
            assert _files(after) == _files(directory / "again")
            assert _files(before) == files
            shutil.rmtree(directory / "again")
            assert description == inspect(after / "workflow")
            assert description.generation == g
            assert description.parent == digests[-1]
            digests.append(description.digest)
            assert [one.digest for one in description.lineage] == digests
            assert description.lineage[-1].days == (day,)
            state = read_state(after / "extension", description)
            for name, column in columns.items():
                oracle = expected[name]
                oracle.extend(counted.counts[name], limit)
                values, times = _stored(after, description, column)
                oracle.check(values, times, state.pending[name])
                observed = description.vocabularies[column.name].observed
                unique = sum(times)
                assert observed == {
                    "null": nulls[name], "oov": oracle.total - unique, "unique": unique,
                }  # fmt: skip
            before = after
    merged = Oracle(spec, rows[:fitted_days])
    assert description.statistics.keys() == set(spec.normalized_names)
    for j, name in enumerate(spec.dense_names):
        if name in description.statistics:
            assert description.statistics[name] == pytest.approx(
                {"mean": merged.mean[j], "std": merged.std[j]}, rel=1e-10, abs=1e-12
            )
    check(before / "workflow", random_raw_rows(spec, 40, seed + 99))  # as NVTabular encodes them
