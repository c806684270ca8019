"""`make demo` in small, with programs that have imported already; .ci/run runs it whole."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import nvt_torchrec.nvt_compat  # noqa: F401

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from demo.__main__ import main
from tests.shell import warm_environment
from tests.warm import warm_python

ROOT = Path(__file__).resolve().parents[2]


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path, capsys) -> None:
    (tmp_path / "precious").write_text("x")
    assert main(["--output", str(tmp_path)]) == 2
    assert "not empty, and not made by the demo" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("demo") / "demo"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "executable", warm_python())
        for name, value in warm_environment().items():
            monkeypatch.setenv(name, value)
        assert main(["--output", str(output), "--rows_per_day", "100"]) == 0
    return output


def test_summary(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["rows_in"] == summary["rows_out"] == 24 * 100
    assert summary["rows_rejected"] == 0
    assert summary["predict_max_abs_diff"] < 1e-5
    assert summary["predict_log_loss_diff"] < 1e-5
    assert 0.7 < summary["oracle_auroc_test"] < 0.9
    for name in summary["paths"]:
        assert Path(summary["paths"][name]).exists(), name
    assert {"synthesize", "etl", "train", "predict", "check", "total"} == set(summary["seconds"])


def test_the_readme_scores_raw_rows_of_the_demo(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its example in Python gives the ids of the parquet and the scores of `inference predict`."""
    for name, target in (("OUT", "out"), ("CKPT", "checkpoint"), ("RAW", "raw")):
        (tmp_path / name).symlink_to(finished / target)
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text()
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
        if "Predictor" in block
    ]
    shown: dict = {}
    exec(code, shown)
    split = finished / "out" / "criteo_binary" / "split"
    parts = [pq.read_table(split / name / "part.0.parquet") for name in ("valid", "test")]
    expected = pa.concat_tables(parts).to_pandas()
    features = shown["features"]
    assert set(features) == set(expected) - {"label"}
    assert len(features) == len(expected) == 100
    for name in features:
        tolerance = 3e-7 if name.startswith("int") else 0  # NVTabular's logarithms are float64
        np.testing.assert_allclose(features[name], expected[name], rtol=tolerance, atol=tolerance)
    scores = pq.read_table(finished / "predictions.parquet")["probability"].to_numpy()
    np.testing.assert_allclose(shown["probabilities"], scores, atol=1e-6)
