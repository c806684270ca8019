"""Further labels and a weight pass through every form of a workflow unchanged."""

from __future__ import annotations

import dataclasses

import nvt_torchrec.nvt_compat  # noqa: F401

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvt_torchrec import workflows
from nvt_torchrec.etl.engines.nvtabular import transform_frame
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.spec.reading import LabelRule
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.compiled.workflow import to_table
from nvt_torchrec.workflows.store import load, save
from tests.workflows.random_specs import feature_specs, random_raw_rows
from tests.workflows.test_any_spec import fit

MORE = ("liked", "bought")


def labelled(spec: FeatureSpec, more: int, weight: bool) -> FeatureSpec:
    rules = tuple(LabelRule(name) for name in (spec.label, *MORE[:more]))
    return dataclasses.replace(
        spec, label_rules=rules if more else (), weight="weight" if weight else ""
    )


def filled(rows: RawRows, spec: FeatureSpec, seed: int) -> RawRows:
    """The rows with random further labels and weights, as the readers return them."""
    rng, more = np.random.default_rng(seed), len(spec.labels) - 1
    return dataclasses.replace(
        rows,
        more_labels=rng.integers(0, 2, (more, len(rows))).astype(np.uint8) if more else None,
        weight=rng.exponential(2, len(rows)).astype(np.float32) if spec.weight else None,
    )


@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    spec=feature_specs(),
    more=st.integers(0, 2),
    weight=st.booleans(),
    rows=st.integers(1, 30),
    seed=st.integers(0, 10**6),
)
def test_they_pass_through(
    tmp_path_factory: pytest.TempPathFactory,
    spec: FeatureSpec,
    more: int,
    weight: bool,
    rows: int,
    seed: int,
) -> None:
    """NVTabular's workflow and the compiled one write the same columns in the spec's order."""
    directory = tmp_path_factory.mktemp("labels")
    plain, spec = spec, labelled(spec, more, weight)
    read = filled(random_raw_rows(plain, rows, seed), spec, seed)
    save(fit(spec, [read], directory / "fit"), spec, directory / "workflow")
    schema = workflows.inspect(directory / "workflow").table_schema
    assert schema.columns == spec.columns == schema.arrow.names
    workflow = load(directory / "workflow")
    frame = workflows.to_frame(read, spec)
    by_nvtabular = transform_frame(frame, workflow, schema, gpu=False)
    compiled.build(directory / "workflow")
    encoded = compiled.load(directory / "workflow").transform(read)
    table = to_table(encoded, schema)
    assert table.schema == by_nvtabular.schema == schema.arrow
    given = [read.label, *([] if read.more_labels is None else read.more_labels)]
    given += [] if read.weight is None else [read.weight]
    for name, values in zip(spec.columns[: len(given)], given, strict=True):
        assert table.schema.field(name).type == pa.float32()
        for found in (table, by_nvtabular):
            assert found[name].to_numpy().tobytes() == values.astype(np.float32).tobytes()
    for name in spec.categorical_names:
        assert table[name].to_pylist() == by_nvtabular[name].to_pylist()
    # without labels, as at inference
    bare = dataclasses.replace(read, label=None, more_labels=None, weight=None)
    without = load(directory / "workflow", label=False).transform(workflows.to_frame(bare, spec))
    assert set(without.columns) == {*spec.dense_names, *spec.categorical_names}
    assert compiled.load(directory / "workflow").transform(bare).weight is None
