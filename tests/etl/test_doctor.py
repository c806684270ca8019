"""`python -m etl doctor`: on this machine, and with a fake of NVIDIA's driver (NVML)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pynvml
import pytest

from nvt_torchrec.base.versions import UnsupportedStackError
from nvt_torchrec.etl.commands import doctor
from nvt_torchrec.etl.commands.doctor import NOTE, OK, WRONG
from tests.shell import python

H200, OLD = ("NVIDIA H200", (9, 0)), ("Tesla P100-PCIE-16GB", (6, 0))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give this machine GPUs, by name and compute capability, and a driver."""

    def install(gpus: list, version: str = "580.95.05", error: int = 0) -> None:
        def initialize() -> None:
            if error:
                raise pynvml.NVMLError(error)

        fakes = {
            "nvmlInit": initialize,
            "nvmlSystemGetDriverVersion": lambda: version,
            "nvmlDeviceGetCount": lambda: len(gpus),
            "nvmlDeviceGetHandleByIndex": lambda i: gpus[i],
            "nvmlDeviceGetName": lambda gpu: gpu[0],
            "nvmlDeviceGetCudaComputeCapability": lambda gpu: gpu[1],
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(pynvml, name, fake)

    return install


def test_on_this_machine() -> None:
    """Whatever it has: a line for each part of it."""
    done = python("-m", "etl", "doctor")
    states = [line.split()[0] for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert set(states) <= {OK, NOTE, WRONG}
    assert done.returncode == int(WRONG in states)
    for subject in ("training", "ETL", "PyTorch, FBGEMM", "RAPIDS"):
        assert subject in done.stdout
    if "GPU " in done.stdout.splitlines()[0]:  # without one, nothing is wrong
        assert done.returncode == 0
        assert "the CPU does the work" in done.stdout


def test_driver(machine) -> None:
    machine([H200] * 2)
    gpus, good = doctor.check_driver()
    assert gpus == 2
    assert [(line.subject, line.state, line.what) for line in good[1:]] == [
        ("GPU 1", OK, "NVIDIA H200, compute capability 9.0"), ("driver", OK, "580.95.05")
    ]  # fmt: skip
    machine([OLD], version="535.183.01")
    _, bad = doctor.check_driver()
    assert [line.state for line in bad] == [WRONG, WRONG]
    assert "nvidia-driver-580" in bad[1].remedy


@pytest.mark.parametrize(
    ("error", "reason"),
    [(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "NVML Shared Library Not Found"),
     (0, "NVML lists none")],
)  # fmt: skip
def test_no_driver(machine, error: int, reason: str) -> None:
    machine([], error=error)
    gpus, (line,) = doctor.check_driver()
    assert (gpus, line.state, reason in line.what) == (0, NOTE, True)


def test_without_the_package_that_lists_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "pynvml", None)
    gpus, (line,) = doctor.check_driver()
    assert (gpus, line.state, "nvidia-ml-py is not installed" in line.what) == (0, NOTE, True)


@pytest.mark.parametrize(
    ("program", "gpus", "state", "what", "remedy"),
    [
        ("print(f'2.13, {GPUS} GPU(s)')", 2, OK, "2.13, 2 GPU(s)", ""),
        ("print(2, flush=True); raise SystemExit('for CPUs')", 1, WRONG, "2: for CPUs", "gpu"),
        ("import no_such_package", 0, WRONG, "cannot be imported: ModuleNotFoundError: No", "cpu"),
        ("import os; os.kill(os.getpid(), 11)", 0, WRONG, "exit status -11", "cpu"),
    ],
)
def test_packages_are_tried(program: str, gpus: int, state: str, what: str, remedy: str) -> None:
    line = doctor.try_package("PyTorch", program, gpus)
    assert (line.subject, line.state) == ("PyTorch", state)
    assert what in line.what
    assert line.remedy == (f"make env LOCK=requirements/{remedy}.txt" if remedy else "")


def test_builds_for_cpus_are_wrong_where_there_is_a_gpu() -> None:
    assert "not compiled with CUDA" in doctor.try_package("", doctor._TRAINING, 1).what


def test_rapids_and_shared_memory(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine([H200] * 2)
    monkeypatch.setattr(
        doctor, "try_package", lambda subject, *_: doctor.Diagnosis(subject, OK, "")
    )
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(total=64 << 20))
    *_, rapids, shared = doctor.examine()
    assert (rapids.state, rapids.what) == (WRONG, "not installed: the ETL runs on the CPU")
    assert "--ipc=host" in shared.remedy


def test_packages_that_do_not_fit() -> None:
    def check() -> None:
        raise UnsupportedStackError("found a; supported: b", "run `make env`")

    found = doctor.check_stack(check, "training")
    assert found == doctor.Diagnosis("training", WRONG, "found a; supported: b", "run `make env`")
