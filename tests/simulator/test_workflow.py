"""The workflow on a card gives the ids and the float32 of the compiled workflow, bit by bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.compiled import tables
from nvt_torchrec.workflows.compiled.dense import DensePlan
from nvt_torchrec.workflows.compiled.device import (
    DeviceWorkflow,
    count_missing,
    count_vocabulary_bytes,
)
from nvt_torchrec.workflows.vocabulary import fit_vocabulary
from nvt_torchrec.workflows.writer import Fitted, write_workflow
from tests.simulator.device import SimulatedDevice

#: Values at the ends of the type, beside each other, and such that only the upper half differs.
VALUES = [0, 1, 2, 3, 2**31 - 1, 2**31, 2**32 - 1, 0xDEADBEEF, 1 << 16, 1 << 24]
#: Around the minimum of the logarithm and around the end of the table of results.
INTEGERS = [0, 1, -1, -2, -3, -4, 5, 65532, 65533, 65534, 65535, 10**6, 2**31 - 1, -(2**31)]
POLICIES = [
    {},
    {"freq_threshold": 2},
    {"max_table_size": 6},
    {"max_table_size": 9, "num_buckets": 3},
    {"hash_buckets": 5},
    {"vocabulary": "shared"},
    {"vocabulary": "shared"},
]
STATISTICS = st.fixed_dictionaries(
    {
        "mean": st.sampled_from([0.0, 1.0, float(np.log(8)), -3.5, 1e6]),
        "std": st.sampled_from([0.0, 1.0, 0.1, 1e-9, 123.456]),
    }
)


def spec_of(transform: str, fills: list[int]) -> FeatureSpec:
    dense = tuple(DenseColumn(f"d{j}", fill=fill) for j, fill in enumerate(fills))
    columns = tuple(CategoricalColumn(f"c{j}", **policy) for j, policy in enumerate(POLICIES))
    return FeatureSpec("label", dense, columns, transform)


def save(path: Path, spec: FeatureSpec, statistics: dict, rng: np.random.Generator) -> None:
    """Write a workflow whose vocabularies hold some of the values, none, or all."""
    vocabularies = {}
    for name, columns in spec.vocabularies.items():
        kept = np.array(VALUES)[rng.random(len(VALUES)) < rng.choice([0.0, 0.5, 1.0])]
        kept = kept[: 0 if columns[0].hash_buckets else None]
        counts = rng.integers(1, 9, len(kept))
        vocabularies[name] = fit_vocabulary(kept, counts, columns[0], 0)
    write_workflow(path, spec, Fitted(statistics, vocabularies))


def rows_of(spec: FeatureSpec, rows: int, rng: np.random.Generator) -> RawRows:
    categorical = rng.choice(np.array(VALUES, np.uint32), (len(spec.categorical), rows))
    dense = rng.choice(np.array(INTEGERS, np.int32), (len(spec.dense), rows))
    missing = np.zeros((2, rows), np.uint64)
    for kind, columns in enumerate((dense, categorical)):
        for j, column in enumerate(columns):
            absent = rng.random(rows) < rng.choice([0.0, 0.3, 1.0])
            column[absent] = 0
            missing[kind] |= absent.astype(np.uint64) << np.uint64(j)
    line = np.arange(rows)
    labels = np.zeros((1, rows), np.uint8)
    return RawRows(labels, dense, missing[:1], categorical, missing[1:], line, [], 0, rows)


def check(workflow: compiled.CompiledWorkflow, rows: RawRows) -> None:
    device = SimulatedDevice()
    there = DeviceWorkflow(device, workflow)
    missing = np.concatenate([rows.dense_missing, rows.categorical_missing])
    encoded = there.transform(rows.dense, rows.categorical, missing)
    expected = workflow.transform(rows)
    np.testing.assert_array_equal(encoded.ids, expected.ids.values)
    np.testing.assert_array_equal(encoded.null, expected.null)
    np.testing.assert_array_equal(encoded.oov, expected.oov)
    assert encoded.ids.dtype == np.int32
    assert encoded.dense.dtype == np.float32
    np.testing.assert_array_equal(encoded.dense.view(np.int32), expected.dense.view(np.int32))


@settings(
    max_examples=35,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_as_the_host(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    transform = data.draw(st.sampled_from(["log_normalize", "log", "normalize"]))
    fills = data.draw(st.lists(st.sampled_from([0, -5, 70_000, 2**31 - 1]), max_size=3))
    spec = spec_of(transform, fills)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    statistics = {name: data.draw(STATISTICS) for name in spec.dense_names}
    path = tmp_path_factory.mktemp("workflow")
    save(path, spec, statistics if transform != "log" else {}, rng)
    check(compiled.load(path), rows_of(spec, data.draw(st.sampled_from([0, 1, 2, 3, 9])), rng))


def test_collisions_and_the_end_of_a_table(tmp_path: Path) -> None:
    """Values whose slots collide, some in the last slot, after which the search goes on in 1."""
    slots = tables.count_slots(300)
    draws = np.random.default_rng(5).integers(0, 2**32, 400_000, dtype=np.uint64)
    draws = np.unique(draws)
    product = draws * np.uint64(0x9E3779B97F4A7C15)
    homes = ((product >> np.uint64(32)) * np.uint64(slots - 1)) >> np.uint64(32)
    last = draws[homes + 1 == slots - 1].astype(np.int64)
    first = draws[homes + 1 == 1].astype(np.int64)
    assert min(len(last), len(first)) > 100
    known = np.concatenate([last[:120], first[:60]])  # without 0, so that its slot is empty
    spec = FeatureSpec("label", (), (CategoricalColumn("c0"),), "log")
    fitted = fit_vocabulary(known, np.arange(len(known), 0, -1), spec.categorical[0], 0)
    write_workflow(tmp_path, spec, Fitted({}, {"c0": fitted}))
    values = np.concatenate([known, last[120:130], first[60:70]])[None].astype(np.uint32)
    none = np.zeros((1, values.shape[1]), np.uint64)
    size = values.shape[1]
    dense = np.zeros((0, size), np.int32)
    labels = np.empty((0, size), np.uint8)
    rows = RawRows(labels, dense, none, values, none, np.arange(size), [], 0, size)
    check(compiled.load(tmp_path), rows)


def test_the_search_ends_in_a_full_table(tmp_path: Path) -> None:
    """A damaged table without an empty slot: no value is found, and nothing hangs."""
    spec = FeatureSpec("label", (), (CategoricalColumn("c0"),), "log")
    fitted = fit_vocabulary(np.array([5]), np.array([1]), spec.categorical[0], 0)
    write_workflow(tmp_path, spec, Fitted({}, {"c0": fitted}))
    there = DeviceWorkflow(SimulatedDevice(), compiled.load(tmp_path))
    there._words[:] = np.uint64(3 << 32 | 5)
    values = np.array([[5, 6]], np.uint32)
    none = np.zeros((2, 2), np.uint64)
    encoded = there.transform(np.zeros((0, 2), np.int32), values, none)
    assert encoded.ids.tolist() == [[3, 2]]
    there._words[:] = np.uint64(4 << 32 | 5)  # an id that the vocabulary does not have
    assert there.transform(np.zeros((0, 2), np.int32), values, none).ids.tolist() == [[2, 2]]


@given(st.lists(st.integers(0, 2**20 - 1), max_size=20), st.integers(1, 20))
@settings(max_examples=12, deadline=None)
def test_missing_values_are_counted(masks: list[int], columns: int) -> None:
    found = count_missing(SimulatedDevice(), np.array(masks, np.uint64), columns)
    assert found.tolist() == [sum(mask >> j & 1 for mask in masks) for j in range(columns)]


def test_what_a_card_has_to_hold(tmp_path: Path) -> None:
    spec = FeatureSpec("label", (), (CategoricalColumn("c0"),), "log")
    fitted = fit_vocabulary(np.arange(5000), np.ones(5000, np.int64), spec.categorical[0], 0)
    write_workflow(tmp_path, spec, Fitted({}, {"c0": fitted}))
    assert count_vocabulary_bytes(compiled.load(tmp_path)) == 8 * 2 * 5000


def test_integers_beyond_the_table_begin_where_it_ends() -> None:
    plan = DensePlan(spec_of("log", [0]), {})
    at = plan.find_first_beyond(0)
    assert plan.table[0, -1] == plan.calculate(0, np.array([at - 1]))[0]
