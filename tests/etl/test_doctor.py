"""`python -m etl doctor`: on this machine, and with a fake of NVIDIA's driver (NVML)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from nvt_torchrec.base.versions import UnsupportedStackError
from nvt_torchrec.etl.commands import doctor
from nvt_torchrec.etl.commands.doctor import NOTE, OK, WRONG

ROOT = Path(__file__).resolve().parents[2]

H200 = {"name": "NVIDIA H200", "capability": (9, 0)}
OLD = {"name": "Tesla P100-PCIE-16GB", "capability": (6, 0)}


class FakeNvml:
    """NVML of a machine with some GPUs, by name and compute capability; handles are numbers."""

    NVMLError = pynvml.NVMLError

    def __init__(self, gpus, version="580.95.05", error=None) -> None:
        self.gpus, self.version, self.error = gpus, version, error

    def nvmlInit(self):  # noqa: N802
        if self.error:
            raise pynvml.NVMLError(self.error)

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetName(self, gpu):  # noqa: N802
        return self.gpus[gpu]["name"]

    def nvmlDeviceGetCudaComputeCapability(self, gpu):  # noqa: N802
        return self.gpus[gpu]["capability"]

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return self.version


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Give this machine the GPUs of a :class:`FakeNvml`; returns their handles and the reason."""

    def install(gpus, **options):
        monkeypatch.setattr(doctor, "pynvml", FakeNvml(gpus, **options))
        return doctor.open_driver()

    return install


def test_on_this_machine() -> None:
    """Whatever it has: a report that can be read by people and by programs."""
    command = [sys.executable, "-m", "etl", "doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    findings = [doctor.Diagnosis(**values) for values in json.loads(done.stdout)]
    assert done.returncode == int(any(finding.state == WRONG for finding in findings))
    subjects = [finding.subject for finding in findings]
    assert {"training", "ETL", "PyTorch", "FBGEMM", "RAPIDS"} <= set(subjects)
    text = doctor.report(findings)
    assert all(finding.what in text and finding.remedy in text for finding in findings)
    if subjects[0] == "GPU":  # without one, nothing is wrong
        assert done.returncode == 0
        assert "the CPU does the work" in findings[0].what


def test_driver(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    good = doctor.check_driver(*machine([H200]))
    assert [(line.subject, line.state, line.what) for line in good] == [
        ("GPU 0", OK, "NVIDIA H200, compute capability 9.0"), ("driver", OK, "580.95.05")
    ]  # fmt: skip
    assert len(doctor.check_driver(*machine([H200] * 8))) == 8 + 1
    bad = doctor.check_driver(*machine([OLD], version="535.183.01"))
    assert [line.state for line in bad] == [WRONG, WRONG]
    assert "nvidia-driver-580" in bad[1].remedy
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert doctor.check_driver(*machine([H200]))[-1].state == NOTE
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-41b3359c,MIG-65b79fff")
    assert len(doctor.check_driver(*machine([H200]))) == len(good)


def test_no_driver(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = doctor.check_driver(*machine([], error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    assert (line.state, "NVML Shared Library Not Found" in line.what) == (NOTE, True)
    (line,) = doctor.check_driver(*machine([]))
    assert (line.state, "NVML lists none" in line.what) == (NOTE, True)


@pytest.mark.parametrize(
    ("program", "gpus", "state", "what", "remedy"),
    [
        ("print(f'2.13, {GPUS} GPU(s)')", 2, OK, "2.13, 2 GPU(s)", ""),
        (
            "print(2, flush=True); raise SystemExit('for CPUs')",
            1,
            WRONG,
            "2: for CPUs",
            "gpu",
        ),
        ("import no_such_package", 0, WRONG, "cannot be imported: ModuleNotFoundError: No", "cpu"),
        ("raise OSError('libnvidia-ml.so.1: none')", 0, WRONG, "of NVIDIA's driver", "cpu"),
        ("import os; os.kill(os.getpid(), 11)", 0, WRONG, "exit status -11", "cpu"),
    ],
)
def test_packages_are_tried(program: str, gpus: int, state: str, what: str, remedy: str) -> None:
    line = doctor.try_package("PyTorch", program, gpus)
    assert (line.subject, line.state) == ("PyTorch", state)
    assert what in line.what
    assert line.remedy == (f"make env LOCK=requirements/{remedy}.txt" if remedy else "")


def test_builds_for_cpus_are_wrong_where_there_is_a_gpu() -> None:
    for program in (doctor._TORCH, doctor._FBGEMM):
        assert "a build for CPUs" in doctor.try_package("", program, 1).what


def test_rapids() -> None:
    assert doctor.check_rapids(0, True).state == NOTE
    assert doctor.check_rapids(1, False).state == WRONG


def test_shared_memory() -> None:
    assert not doctor.check_shared_memory(1, 0)
    assert not doctor.check_shared_memory(8, 64)
    (line,) = doctor.check_shared_memory(8, 0)
    assert (line.state, "--ipc=host" in line.remedy) == (WRONG, True)


def test_packages_that_do_not_fit() -> None:
    def check() -> None:
        raise UnsupportedStackError("found a; supported: b", "run `make env`")

    found = doctor.check_stack(check, "training")
    assert found == doctor.Diagnosis("training", WRONG, "found a; supported: b", "run `make env`")
