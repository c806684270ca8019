"""A log with several labels and a weight: every step of the ETL hands them on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nvt_torchrec.etl.run import run
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.workflows.description import inspect
from tests.etl.extended import add
from tests.etl.findings import bad
from tests.etl.runs import cut, read_split, settings
from tests.weighted_logs import write_weighted_log


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp("log")
    spec, days = write_weighted_log(directory, [400, 300, 201, 101])
    return directory / "raw", spec, days


@pytest.fixture(scope="module", params=["cpu", "nvtabular"])
def output(log, request, engine_options, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each engine."""
    raw, spec, _ = log
    path = tmp_path_factory.mktemp("etl") / "out"
    run(settings(raw, path, spec, days=frozenset({0, 1, 2}), **engine_options(request.param)))
    return path


def expected(days: list[pd.DataFrame], split: str) -> np.ndarray:
    """Labels and weights of a split's rows, float32 [n, 3]."""
    rows = cut([frame.to_dict("records") for frame in days])[split]
    return np.array([[row["rating"] >= 4, row["bought"], row["w"]] for row in rows], np.float32)


@pytest.mark.parametrize("split", SPLITS)
def test_values(log, output: Path, split: str) -> None:
    _, spec, days = log
    found = read_split(output, split)
    assert found.columns.tolist() == spec.columns == ["liked", "bought", "w", "age", "site", "user"]
    assert {str(kind) for kind in found.dtypes[:4]} == {"float32"}
    wanted = expected(days[:3], split)
    np.testing.assert_array_equal(found[["liked", "bought", "w"]], wanted)
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["splits"][split]["positives"] == wanted[:, 0].sum()


def test_descriptions(log, output: Path) -> None:
    split = output / "criteo_binary" / "split"
    schema = TableSchema.read(split)
    assert schema == inspect(output / "workflow").table_schema
    assert (schema.label, schema.labels, schema.weight) == ("liked", ("liked", "bought"), "w")
    assert bad(output) == []


def test_a_day_more(log, tmp_path: Path) -> None:
    raw, spec, days = log
    output = tmp_path / "out"
    run(settings(raw, output, spec, days=frozenset({0, 1, 2})))
    add(output, raw / "day_3.csv")
    found = np.concatenate([read_split(output, s).iloc[:, :3] for s in ("valid", "test")])
    wanted = [[r >= 4, b, w] for r, b, w in days[3][["rating", "bought", "w"]].to_numpy()]
    np.testing.assert_array_equal(found, np.array(wanted, np.float32))
    assert bad(output) == []
