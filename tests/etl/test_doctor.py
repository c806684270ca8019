"""`python -m etl doctor`: on this machine, and with a fake of NVIDIA's driver (NVML)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from nvt_torchrec.base.versions import UnsupportedStackError
from nvt_torchrec.etl.commands import doctor
from nvt_torchrec.etl.commands.doctor import NOTE, OK, WRONG

ROOT = Path(__file__).resolve().parents[2]

H200 = {"name": "NVIDIA H200", "memory": (143771 << 20, 4 << 20), "capability": (9, 0)}
OLD = {"name": "Tesla P100-PCIE-16GB", "memory": None, "capability": (6, 0)}


class FakeNvml:
    """NVML of a machine with some GPUs; handles are their numbers.

    Args:
        gpus: of each, its name, (total, used) bytes or None, and compute capability.
        version: of the driver.
        cuda: as NVML returns it.
        unlinked: pairs that no NVLink connects.
    """

    NVMLError = pynvml.NVMLError
    NVML_P2P_CAPS_INDEX_NVLINK = pynvml.NVML_P2P_CAPS_INDEX_NVLINK
    NVML_P2P_STATUS_OK = pynvml.NVML_P2P_STATUS_OK

    def __init__(self, gpus, version="580.95.05", cuda=13000, unlinked=(), error=None) -> None:
        self.gpus, self.version, self.cuda = gpus, version, cuda
        self.unlinked, self.error = unlinked, error

    def _not_supported(self):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlInit(self):  # noqa: N802
        if self.error:
            raise pynvml.NVMLError(self.error)

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetName(self, gpu):  # noqa: N802
        return self.gpus[gpu]["name"]

    def nvmlDeviceGetMemoryInfo(self, gpu):  # noqa: N802
        total, used = self.gpus[gpu]["memory"] or self._not_supported()
        return SimpleNamespace(total=total, used=used)

    def nvmlDeviceGetCudaComputeCapability(self, gpu):  # noqa: N802
        return self.gpus[gpu]["capability"]

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return self.version

    def nvmlSystemGetCudaDriverVersion_v2(self):  # noqa: N802
        return self.cuda

    def nvmlDeviceGetP2PStatus(self, one, other, index):  # noqa: N802
        assert index == self.NVML_P2P_CAPS_INDEX_NVLINK
        return self.NVML_P2P_STATUS_OK if (one, other) not in self.unlinked else 5


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
    findings = [doctor.Diagnosis(**one) for one in json.loads(done.stdout)]
    assert done.returncode == int(any(one.state == WRONG for one in findings))
    subjects = [one.subject for one in findings]
    for subject in ("training", "ETL", "PyTorch", "FBGEMM", "RAPIDS", "memory", "NVLink"):
        assert subject in subjects
    text = doctor.report(findings)
    assert all(one.what in text and one.remedy in text for one in findings)
    if subjects[0] == "GPU":  # without one, nothing is wrong
        assert done.returncode == 0
        assert "the CPU does the work" in findings[0].what


def test_driver(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    good = doctor.check_driver(*machine([H200]))
    assert [(line.subject, line.state) for line in good] == [
        ("GPU 0", OK), ("driver", OK), ("CUDA", OK)
    ]  # fmt: skip
    assert good[0].what == "NVIDIA H200, 140 GiB, compute capability 9.0"
    assert [line.what for line in good[1:]] == ["580.95.05", "the driver supports 13.0"]
    assert len(doctor.check_driver(*machine([H200] * 8))) == 8 + 2
    bad = doctor.check_driver(*machine([OLD], version="535.183.01", cuda=12020))
    assert [line.state for line in bad] == [WRONG, WRONG, WRONG]
    assert "nvidia-driver-580" in bad[1].remedy
    assert "12.2" in bad[2].what
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


def test_links(machine) -> None:
    gpus, _ = machine([H200] * 3, unlinked={(0, 2), (1, 2)})
    found = doctor.check_links(gpus)
    assert found.state == NOTE
    assert "(0-2, 1-2)" in found.what
    found = doctor.check_links(machine([H200] * 2)[0])
    assert (found.state, found.what) == (OK, "between all 2 GPUs")
    assert doctor.check_links(machine([H200])[0]).state == NOTE
    assert doctor.check_links([]).state == NOTE


def test_memory(machine) -> None:
    (one,) = doctor.check_memory(machine([H200])[0], 512, 64)
    assert one.state == OK
    small, shared = doctor.check_memory(machine([H200] * 8)[0], 128, 0)
    assert (small.state, shared.state) == (NOTE, WRONG)
    assert "1123" in small.what
    assert "--ipc=host" in shared.remedy


def test_packages_that_do_not_fit() -> None:
    def check() -> None:
        raise UnsupportedStackError("found a; supported: b", "run `make env`")

    found = doctor.check_stack(check, "training")
    assert found == doctor.Diagnosis("training", WRONG, "found a; supported: b", "run `make env`")
