"""The benchmarks of loader and training, small: real processes, and sums checked by hand."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.process import run
from benchmarks.train import __main__ as train
from benchmarks.train import quality
from benchmarks.train.worker import BARE, OURS, Stamps
from nvt_torchrec.nvt_loader import KJTLoader
from tests.nvt_loader.data import write_split


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "data"
    train.make_data(path, 700)
    return path


@pytest.mark.parametrize("system", [OURS, BARE])
def test_a_system_is_measured(system: str, data: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.train.worker", system, "--data", str(data)]
    done = run([*command, "--batch_size", "64", "--warm_up", "2", "--steps", "5"], timeout=800)
    assert done.error == ""
    assert done.output["samples_per_s"] > 0
    assert done.output["samples_per_cpu_s"] > 0


def test_speed_is_of_the_steps_after_the_warm_up() -> None:
    stamps = Stamps()
    stamps.wall = [0.0, 100.0, 101.0, 103.0, 104.0, 900.0]
    stamps.cpu = [0.0, 10.0, 12.0, 14.0, 16.0, 90.0]
    assert stamps.result(1, 3, batch_size=8) == {
        "samples_per_s": 24 / 4,
        "samples_per_cpu_s": 24 / 6,
        "step_ms": 1000.0,
    }
    with pytest.raises(RuntimeError, match="6 steps began, not 7"):
        stamps.result(1, 5, batch_size=8)


def test_the_same_rows_for_both(data: Path) -> None:
    (batch,) = KJTLoader(data / "split" / "train", 700, device="cpu", virtual_shards=1)
    dense, sparse, labels = (
        np.load(data / "npy" / f"train_{kind}.npy") for kind in ("dense", "sparse", "labels")
    )
    np.testing.assert_array_equal(batch.sparse_features.values().view(26, 700).numpy(), sparse.T)
    np.testing.assert_array_equal(batch.dense_features.numpy(), dense)
    np.testing.assert_array_equal(batch.labels.numpy(), labels[:, 0])


@pytest.fixture
def split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(quality, "BUILD", tmp_path)
    monkeypatch.setattr("benchmarks.harness.BUILD", tmp_path)
    monkeypatch.setattr("benchmarks.harness.start_logging", lambda: None)  # it handles signals
    counts = {"train": [600], "valid": [200], "test": [300]}
    write_split(tmp_path / "split", counts, table_sizes=(10, 50, 200, 3), dense=3)
    return tmp_path / "split"


SMALL = ["quality", "--optimizers=sgd", "--global_batches=100", "--models=small"]


def test_spread_over_seeds(split: Path, capsys: pytest.CaptureFixture) -> None:
    assert train.main([*SMALL, "--seeds=2", "--", "--binary_path", str(split)]) == 0
    written = json.loads((split.parent / "quality.json").read_text())
    aurocs = [result["median"] for result in written["results"] if result["metric"] == "auroc"]
    assert len(set(aurocs)) == 2
    (summary,) = written["summary"].values()
    assert summary["mean"] == pytest.approx(statistics.mean(aurocs))
    assert summary["standard_deviation"] == pytest.approx(abs(aurocs[0] - aurocs[1]) / 2**0.5)
    assert (summary["worst"], summary["best"]) == (min(aurocs), max(aurocs))
    assert f"worst {min(aurocs):.5f}" in capsys.readouterr().out
