"""`make demo` in small, but for the training's launcher; .ci/run runs it whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from demo.__main__ import main
from demo.summary import make_summary

ROOT = Path(__file__).resolve().parents[2]


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path, capsys) -> None:
    (tmp_path / "precious").write_text("x")
    assert main(["--output", str(tmp_path)]) == 2
    assert "not empty, and not made by the demo" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("demo") / "demo"
    flags = ["--output", str(output), "--rows_per_day", "300"]
    done = subprocess.run(
        [sys.executable, "-m", "demo", *flags], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "AUROC" in done.stdout
    return output


def test_summary(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["rows_in"] == summary["rows_out"] == 24 * 300
    assert summary["rows_rejected"] == 0
    assert summary["predict_max_abs_diff"] < 1e-5
    assert summary["predict_log_loss_diff"] < 1e-5
    assert 0.7 < summary["oracle_auroc_test"] < 0.9
    for name in summary["paths"]:
        assert Path(summary["paths"][name]).exists(), name
    assert {"synthesize", "etl", "train", "predict", "check", "total"} == set(summary["seconds"])


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 2), (1, 1), (8, 2)])
def test_each_rank_has_a_gpu(monkeypatch, tmp_path: Path, gpus: int, ranks: int) -> None:
    seen = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("demo.__main__._run", lambda settings: seen.append(settings.ranks))
    assert main(["--output", str(tmp_path)]) == 0
    assert main(["--output", str(tmp_path), "--ranks", "4"]) == 0
    assert seen == [ranks, 4]


def test_wrong_scores_are_seen(finished: Path) -> None:
    paths = {
        name: Path(path)
        for name, path in json.loads((finished / "summary.json").read_text())["paths"].items()
    }
    table = pq.read_table(paths["predictions"])
    wrong = table["probability"].to_numpy().copy()
    wrong[5] += 0.01
    paths["predictions"] = finished / "wrong.parquet"
    pq.write_table(table.set_column(1, "probability", pa.array(wrong)), paths["predictions"])
    assert make_summary(paths)["predict_max_abs_diff"] == pytest.approx(0.01, rel=1e-3)
