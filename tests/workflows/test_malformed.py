"""Saved workflows with any JSON in them: errors of this project, or a workflow that works."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from nvt_torchrec import workflows
from nvt_torchrec.formats.rows import RawRows, empty_rows
from nvt_torchrec.formats.spec.columns import DenseColumn
from nvt_torchrec.formats.spec.feature_spec import CategoricalColumn, FeatureSpec
from nvt_torchrec.workflows import compiled
from tests.mutations import expect_own_errors

SPEC = FeatureSpec(
    "label",
    (DenseColumn("int_0"), DenseColumn("price", raw="float")),
    (
        CategoricalColumn("cat_0"),
        CategoricalColumn("cat_1", raw="string", vocabulary="words"),
        CategoricalColumn("cat_2", raw="string", vocabulary="words", multi_hot=True),
        CategoricalColumn("cat_3", raw="int", max_table_size=100, num_buckets=3),
        CategoricalColumn("cat_4", raw="int", hash_buckets=7),
    ),
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    values = {
        "cat_0": np.array([7, 8]),
        "words": pa.array(["a", "b"]),
        "cat_3": np.array([5]),
        "cat_4": np.empty(0, np.int64),
    }
    vocabularies = {
        name: workflows.FittedVocabulary(
            some, np.ones(len(some), np.int64), dict.fromkeys(("null", "oov", "unique"), 0)
        )
        for name, some in values.items()
    }
    statistics = {name: {"mean": 1.0, "std": 2.0} for name in SPEC.dense_names}
    path = tmp_path / "workflow"
    workflows.write_workflow(path, SPEC, workflows.Fitted(statistics, vocabularies))
    return path


def _use(path: Path) -> None:
    workflow = compiled.load(path, verify=True)
    workflow.transform(_row(workflow.spec))
    workflows.inspect(path).verify()


def _row(spec: FeatureSpec) -> RawRows:
    return empty_rows(spec)


def test_metadata(saved: Path) -> None:
    expect_own_errors(saved / "metadata.json", lambda: _use(saved), rounds=400)


def test_graph(saved: Path) -> None:
    metadata = saved / "metadata.json"
    value = json.loads(metadata.read_text())

    def fit() -> None:
        content = (saved / "graph.json").read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        value["files"]["graph.json"] = {"bytes": len(content), "sha256": digest}
        metadata.write_text(json.dumps(value))

    expect_own_errors(saved / "graph.json", lambda: _use(saved), rounds=150, after=fit)


def test_compiled(saved: Path) -> None:
    expect_own_errors(saved / "compiled" / "compiled.json", lambda: _use(saved), rounds=300)


def test_a_copy_is_mapped_from_nothing(saved: Path) -> None:
    copy = pickle.loads(pickle.dumps(compiled.load(saved)))
    (saved / "compiled" / "tables.npy").write_bytes(b"")
    assert len(copy.transform(_row(SPEC))) == 0
