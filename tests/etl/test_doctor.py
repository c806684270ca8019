"""`python -m etl doctor`: on this machine, and where nvidia-smi lists GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from nvt_torchrec.base.versions import UnsupportedStackError
from nvt_torchrec.etl.commands import doctor
from tests.shell import python


def test_on_this_machine() -> None:
    """Whatever it has: a line for each part of it."""
    done = python("-m", "etl", "doctor")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert done.returncode == int(any(line[0] == "wrong" for line in lines))
    for subject in ("training", "ETL", "PyTorch, FBGEMM"):
        assert subject in done.stdout
    if "the CPU does the work" in done.stdout:  # without a GPU, nothing is wrong
        assert done.returncode == 0


def test_where_there_are_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 9.0, 580.95'\necho 'NVIDIA H200, 9.0, 580.95'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert doctor.find_gpus() == ["NVIDIA H200, 9.0, 580.95"] * 2
    monkeypatch.setattr(doctor, "_TRAINING", "print(f'{GPUS} GPUs')")
    monkeypatch.setattr(doctor, "_CUDF", "raise SystemExit('no libNVVM')")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(total=64 << 20))
    assert doctor.run() == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == ["GPU NVIDIA H200, 9.0, 580.95"] * 2
    assert "ok PyTorch, FBGEMM 2 GPUs" in lines
    assert lines[-5:-1] == [
        "wrong RAPIDS cannot be imported: no libNVVM",
        "-> make env LOCK=requirements/gpu.txt",
        "wrong shared memory /dev/shm holds 64 MiB, too little for NCCL with several GPUs",
        "-> start the container with docker run --ipc=host, or --shm-size=16g",
    ]
    assert lines[-1].startswith("ok NUMA ")


@pytest.mark.parametrize(
    ("program", "what"),
    [
        ("print(2, flush=True); raise SystemExit('for CPUs')", "2: for CPUs"),
        ("import no_such_package", "cannot be imported: ModuleNotFoundError: No"),
        ("import os; os.kill(os.getpid(), 11)", "exit status -11"),
        (doctor._TRAINING, "not compiled with CUDA"),  # a build for CPUs where there is a GPU
    ],
)
def test_packages_that_fail(program: str, what: str) -> None:
    with pytest.raises(UnsupportedStackError, match=what):
        doctor.try_package(program, 1)


def test_packages_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def check() -> None:
        raise UnsupportedStackError("found a; supported: b", "run `make env`")

    monkeypatch.setattr(doctor, "check_training_stack", check)
    monkeypatch.setattr(doctor, "try_package", lambda *_: "")
    assert doctor.run() == 1
    assert "training         found a; supported: b\n" in capsys.readouterr().out


def test_what_is_not_installed_is_not_wrong(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """As after `pip install .`, which is enough for the ETL."""
    monkeypatch.setattr(doctor, "find_installed_version", lambda name: None)
    monkeypatch.setattr(doctor, "find_gpus", list)
    assert doctor.run() == 0
    printed = capsys.readouterr().out
    assert "wrong" not in printed
    for package in ("torchrec", "nvtabular", "torch"):
        assert f"not installed: {package}\n{'':23}-> " in printed


@pytest.mark.parametrize(("nodes", "says"), [(1, "nothing to bind"), (2, "--numa-binding node")])
def test_numa_nodes(tmp_path: Path, nodes: int, says: str) -> None:
    for name in [*(f"node{number}" for number in range(nodes)), "power"]:
        (tmp_path / name).mkdir()
    assert says in doctor.describe_numa_nodes(tmp_path)
