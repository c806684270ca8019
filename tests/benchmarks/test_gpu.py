"""benchmarks.gpu: the order of its steps, its parts on a CPU, and what a crash leaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import runner
from benchmarks.gpu.__main__ import as_table, main
from benchmarks.gpu.runner import FAILED, OK, SKIPPED, read_records, run_steps
from benchmarks.gpu.steps import Step, all_steps, chosen
from benchmarks.gpu.training import WAYS
from benchmarks.gpu.worker import GpuSettings
from nvt_torchrec.base.errors import SettingsError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def small(tmp_path: Path) -> GpuSettings:
    return GpuSettings(
        device="cpu", data=tmp_path / "data", rows=2000, log_rows=3000, max_table_rows=500,
        batch_sizes=(64, 256), seconds=0.01,
        model=("--embedding_dim=8", "--dense_arch_layer_sizes=8", "--over_arch_layer_sizes=8,1"),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "OUTPUTS", tmp_path / "outputs")


def _step(name: str, code: str, seconds: float = 60) -> Step:
    return Step(name, ("timeit", "-n1", "-r1", code), seconds)


def test_what_comes_first_tells_most(small: GpuSettings) -> None:
    names = [step.name for step in all_steps(small)]
    assert len(set(names)) == len(names)
    order = [
        "doctor", "tests/tests/gpu/test_etl.py", "copies", "stages",
        "training/bf16/B=256", "training/bf16/B=64", "training/bf16 compiled/B=64",
        "training/tf32/B=256", "training/fp32/B=256", "loader", "engine/cpu",
        "profile",
    ]  # fmt: skip
    assert [name for name in names if name in order] == order
    ways = {name.split("/")[1] for name in names if name.startswith("training/")}
    assert ways == WAYS.keys()
    assert "tests/tests/nvt_loader/test_gpu.py" in names


def test_steps_are_chosen_by_patterns(
    small: GpuSettings, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = all_steps(small)
    assert chosen(steps, ()) == steps
    assert [step.name for step in chosen(steps, ("copies", "doc*"))] == ["doctor", "copies"]
    with pytest.raises(SettingsError, match="--only nothing: no such step\n  -> one of doctor"):
        chosen(steps, ("nothing",))
    monkeypatch.setattr("benchmarks.harness.start_logging", lambda: None)  # it handles signals
    assert main(["--list", "--only", "engine/*"]) == 0
    assert "engine/dask" in capsys.readouterr().out


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    command = [sys.executable, "-m", "benchmarks.gpu", "--only=copies"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "torch sees no GPU here" in done.stderr


def test_a_crash_costs_one_step(small: GpuSettings, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    steps = [
        _step("first", "print('hello')"),
        _step("crash", "import os; os.abort()"),
        _step("hangs", "import time; time.sleep(60)", seconds=1),
        Step("rapids", ("this",), 1, rapids=True),
        _step("last", "1"),
    ]
    run_steps(steps, small, resume=False, path=path)
    found = read_records(path)
    assert [record.status for record in found.values()] == [OK, FAILED, FAILED, SKIPPED, OK]
    assert "killed after 1 s" in found["hangs"].error
    assert found["crash"].error
    assert "hello" in (tmp_path / "outputs" / "first.out").read_text()
    assert len(path.read_text().splitlines()) == len(steps)


def test_resuming_leaves_out_what_succeeded(small: GpuSettings, tmp_path: Path) -> None:
    path, marks = tmp_path / "records.jsonl", tmp_path / "marks"
    mark = f"open({str(marks)!r}, 'a').write"
    steps = [
        _step("good", f"{mark}('g')"),
        _step("bad", f"{mark}('b'); 1 / 0"),
        _step("changed", f"{mark}('c')"),
    ]
    run_steps(steps, small, resume=True, path=path)
    with open(path, "a") as file:  # the machine went away meanwhile, or had another version
        file.write('{"step": "good", "status": "fai\n{"step": "good"}\n')
    steps[2] = _step("changed", f"{mark}('d')")
    run_steps(steps, small, resume=True, path=path)
    assert marks.read_text() == "gbcbd"
    run_steps(steps, small, resume=False, path=path)
    assert marks.read_text() == "gbcbdgbd"
    assert read_records(tmp_path / "none.jsonl") == {}


def test_figures_become_a_table(small: GpuSettings, tmp_path: Path) -> None:
    """Steps that need no GPU, with data that are made beside them."""
    names = ("copies", "loader", "engine/cpu", "training/bf16*/B=256")
    records = run_steps(
        chosen(all_steps(small), names), small, resume=False, path=tmp_path / "records.jsonl"
    )
    assert [(record.status, record.error) for record in records] == [(OK, "")] * 5
    text = as_table(records, "cpu").text()
    for words in ("copy from pageable memory", "ours, CPU", "TorchRec npy", "cpu engine: both"):
        assert words in text
    results = [result for record in records for result in record.results]
    gib = {result["case"]: result["table_gib"] for result in results if "table_gib" in result}
    assert gib["train bf16 fp16 tables B=256"] < 0.8 * gib["train bf16 B=256"]
