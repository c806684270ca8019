"""The benchmarks of loader and training, small: processes of their own, and sums by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import regression, train
from benchmarks.process import run
from benchmarks.train_worker import BARE, OURS, PLAIN_FORMS, Stamps
from nvt_torchrec.nvt_loader import KJTLoader
from tests.warm import warm_python


@pytest.fixture(autouse=True)
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", warm_python())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "data"
    train.make_data(path, 700)
    return path


@pytest.mark.parametrize("system", [OURS, BARE])
def test_a_system_is_measured(system: str, data: Path) -> None:
    settings = train.BenchmarkSettings(warm_up=2, steps=5)
    flags = ["--no-boosted_trees"] if system == OURS else []
    systems = train._list_systems(settings, data, 64, ["--interaction_type=dcn", *flags])
    [command] = [one.command for one in systems if one.name == system]
    done = run(command, timeout=800)
    assert done.error == ""
    assert done.output["samples_per_s"] > 0
    assert done.output["samples_per_cpu_s"] > 0


def test_plain_forms_are_measured_beside_the_bare_loop(data: Path) -> None:
    settings = train.BenchmarkSettings(warm_up=0, steps=1, plain=PLAIN_FORMS)
    systems = train._list_systems(settings, data, 64, [])
    cases = ["B=64", "B=64, plain bins", "B=64, plain lookups", "B=64, plain join"]
    assert [(system.name, system.case) for system in systems] == [(BARE, case) for case in cases]
    for system in systems[1:]:
        assert run(system.command, timeout=800).error == ""


def test_speed_is_of_the_steps_after_the_warm_up() -> None:
    stamps = Stamps(1, 3)
    stamps.wall = [0.0, 100.0, 101.0, 103.0, 104.0, 900.0]
    stamps.cpu = [0.0, 10.0, 12.0, 14.0, 16.0, 90.0]
    assert stamps.summarize(batch_size=8) == {
        "samples_per_s": 24 / 4,
        "samples_per_cpu_s": 24 / 6,
        "step_ms": 1000.0,
    }
    stamps.wall = stamps.wall[:4]
    with pytest.raises(RuntimeError, match="4 steps began instead of 5"):
        stamps.summarize(batch_size=8)


def test_the_same_rows_for_both(data: Path) -> None:
    (batch,) = KJTLoader(data / "split" / "train", 700, device="cpu", virtual_shards=1)
    dense, sparse, labels = (
        np.load(data / "npy" / f"train_{kind}.npy") for kind in ("dense", "sparse", "labels")
    )
    np.testing.assert_array_equal(batch.sparse_features.values().view(26, 700).numpy(), sparse.T)
    np.testing.assert_array_equal(batch.dense_features.numpy(), dense)
    np.testing.assert_array_equal(batch.labels.numpy(), labels[:, 0])


def test_regression_beside_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(regression, "BUILD", tmp_path)
    monkeypatch.setattr("benchmarks.harness.BUILD", tmp_path)
    monkeypatch.setattr("benchmarks.harness.start_logging", lambda: None)  # it handles signals
    small = ["--logs=tiny", "--optimizers=sgd", "--seeds=2"]
    assert regression.main([*small, "--", "--limit_train_batches=5", "--epochs=1"]) == 0
    written = json.loads((tmp_path / "regression.json").read_text())["results"]
    found, other = (run["output"] for run in written)
    assert found["auroc"] != other["auroc"], "each seed"
    assert 0.6 < found["auroc"] < 0.9
    assert 0.6 < found["regression_auroc"] < found["oracle"] < 1
    assert 0.6 < found["trees"] < found["oracle"]
    assert 0.1 < found["regression_log_loss"] < 0.7
    assert "oracle's" in capsys.readouterr().out
