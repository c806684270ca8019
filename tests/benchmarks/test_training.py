"""The training benchmarks, small: real processes, and sums checked by hand."""

from __future__ import annotations

import json
import statistics
import sys

import numpy as np
import pytest

from benchmarks import venvs
from benchmarks.convergence import __main__ as convergence
from benchmarks.process import run
from benchmarks.stability import __main__ as stability
from benchmarks.train.data import ensure
from benchmarks.train.worker import BARE, OURS, Stamps
from nvt_torchrec.nvt_loader import KJTLoader
from tests.nvt_loader.data import write_split


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "data"
    ensure(path, 700)
    return path


@pytest.mark.parametrize("system", [OURS, BARE])
def test_a_system_is_measured(system, rows):
    command = [sys.executable, "-m", "benchmarks.train.worker", system, "--data", str(rows)]
    done = run([*command, "--batch_size", "64", "--warm_up", "2", "--steps", "5"], timeout=800)
    assert done.error == ""
    assert done.output["samples_per_s"] > 0
    assert done.output["samples_per_cpu_s"] > 0


def test_speed_is_of_the_steps_after_the_warm_up():
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


def test_the_same_rows_for_both(rows):
    (batch,) = KJTLoader(rows / "split" / "train", 700, device="cpu", virtual_shards=1)
    sparse = np.load(rows / "npy" / "train_sparse.npy")
    np.testing.assert_array_equal(batch.sparse_features.values().view(26, 700).numpy(), sparse.T)
    np.testing.assert_array_equal(
        batch.dense_features.numpy(), np.load(rows / "npy" / "train_dense.npy")
    )
    labels = np.load(rows / "npy" / "train_labels.npy")
    np.testing.assert_array_equal(batch.labels.numpy(), labels[:, 0])


def test_stability(tmp_path, monkeypatch, capsys):
    split = tmp_path / "split"
    counts = {"train": [600], "valid": [200], "test": [300]}
    write_split(split, counts, table_sizes=(10, 50, 200, 3), dense=3)
    for module in (venvs, stability):
        monkeypatch.setattr(module, "BUILD", tmp_path / "build")
    monkeypatch.setattr("benchmarks.harness.BUILD", tmp_path / "build")
    monkeypatch.setattr("benchmarks.harness.start_logging", lambda: None)  # it handles signals
    flags = ["--binary_path", str(split), "--learning_rate=0.1", "--embedding_dim=8"]
    flags += ["--dense_arch_layer_sizes=16,8", "--over_arch_layer_sizes=16,1"]
    assert stability.main(["--seeds", "2", "--", *flags]) == 0
    found = json.loads((tmp_path / "build" / "stability.json").read_text())
    aurocs = [one["median"] for one in found["results"] if one["metric"] == "auroc"]
    assert len(set(aurocs)) == 2
    summary = found["summary"]
    assert summary["mean"] == pytest.approx(statistics.mean(aurocs))
    assert summary["standard_deviation"] == pytest.approx(abs(aurocs[0] - aurocs[1]) / 2**0.5)
    assert (summary["worst"], summary["best"]) == (min(aurocs), max(aurocs))
    assert summary["oracle"] is None
    assert f"worst {min(aurocs):.5f}" in capsys.readouterr().out
    assert stability.main(["--seeds", "2", "--", "--seed", "4"]) == 2
    assert stability.main(["--seeds", "1"]) == 2
    assert "error: --seeds 1\n  -> it must be at least 2" in capsys.readouterr().err


def test_convergence(tmp_path, monkeypatch, capsys):
    split = tmp_path / "split"
    write_split(split, {"train": [600], "valid": [200], "test": [300]}, table_sizes=(10, 50))
    for module in (venvs, convergence):
        monkeypatch.setattr(module, "BUILD", tmp_path / "build")
    monkeypatch.setattr("benchmarks.harness.BUILD", tmp_path / "build")
    monkeypatch.setattr("benchmarks.harness.start_logging", lambda: None)
    monkeypatch.setattr(convergence, "make_data", lambda rows_per_day: split)
    monkeypatch.setattr(convergence, "oracle_auroc", lambda log_path: 1.0)
    own = ["--optimizers=sgd,adam", "--global_batches=100", "--models=small"]
    assert convergence.main([*own, "--", "--max_steps=3"]) == 0
    found = json.loads((tmp_path / "build" / "convergence.json").read_text())
    values = {(one["system"], one["metric"]): one["median"] for one in found["results"]}
    said = capsys.readouterr().out
    for optimizer in ("sgd", "adam"):
        gap = values[optimizer, "gap"]
        assert gap == pytest.approx(1.0 - values[optimizer, "auroc"])
        assert f"{optimizer} small, B=100: {gap:.4f} below" in said
    assert convergence.main([*own, "--", "--batch_size=5"]) == 2
    assert convergence.main(["--optimizers=lbfgs"]) == 2
    assert convergence.main(["--global_batches=100", "--ranks=3"]) == 2
    said = capsys.readouterr().err
    for text in (
        "--batch_size=5 is set",
        "--optimizers lbfgs",
        "--global_batches 100 with --ranks",
    ):
        assert text in said
