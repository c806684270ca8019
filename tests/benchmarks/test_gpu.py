"""benchmarks.gpu: the order of its steps, its parts on a CPU, and what a crash leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import harness
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.__main__ import Step, all_steps, chosen, measure
from benchmarks.gpu.worker import GpuSettings
from nvt_torchrec.base.errors import SettingsError
from tests.shell import python


@pytest.fixture
def small(tmp_path: Path) -> GpuSettings:
    return GpuSettings(
        device="cpu", data=tmp_path / "data", rows=2000, log_rows=3000, max_table_rows=500,
        batch_sizes=(64, 256), seconds=0.01,
        model=("--embedding_dim=8", "--dense_arch_layer_sizes=8", "--over_arch_layer_sizes=8,1"),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu, "OUTPUTS", tmp_path)
    monkeypatch.setattr(harness, "BUILD", tmp_path)
    return tmp_path


def _step(name: str, code: str, seconds: float = 60) -> Step:
    return Step(name, ("timeit", "-n1", "-r1", code), seconds)


def test_steps_are_chosen_by_patterns(
    small: GpuSettings, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = all_steps(small)
    assert chosen(steps, ()) == steps
    assert [step.name for step in chosen(steps, ("copies", "doc*"))] == ["doctor", "copies"]
    with pytest.raises(SettingsError, match="--only nothing: no such step\n  -> one of doctor"):
        chosen(steps, ("nothing",))


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = python("-m", "benchmarks.gpu", "--only=copies")
    assert done.returncode == 2
    assert "torch sees no GPU here" in done.stderr


def test_a_crash_costs_one_step(outputs: Path) -> None:
    steps = [
        _step("first", "print('hello')"),
        _step("crash", "import os; os.abort()"),
        _step("hangs", "import time; time.sleep(60)", seconds=1),
        Step("rapids", ("this",), 1, rapids=True),
        _step("last", "1"),
    ]
    failed = measure(steps, "cpu").failed
    assert failed.keys() == {("step crash", ""), ("step hangs", "")}
    assert "killed after 1 s" in failed["step hangs", ""]
    assert "hello" in (outputs / "first.out").read_text()
    assert len(json.loads((outputs / "gpu.json").read_text())["failed"]) == 2


def test_figures_become_a_table(small: GpuSettings) -> None:
    """Steps that need no GPU, and make their data."""
    names = ("copies", "loader", "engine/cpu", "training/bf16*/B=256")
    table = measure(chosen(all_steps(small), names), "cpu")
    assert not table.failed
    text = table.text()
    for words in ("copy from pageable memory", "ours, CPU", "TorchRec npy", "cpu engine: both"):
        assert words in text
    full, half = (
        table.outputs("limit", f"train bf16{kind} B=256")[0]["table_gib"]
        for kind in ("", " fp16 tables")
    )
    assert half < 0.8 * full
