"""`python -m etl doctor`: here, and on texts in the form in which nvidia-smi prints them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from clicklog.versions import UnsupportedStackError
from etl.commands import doctor
from etl.commands.doctor import NOTE, OK, WRONG

ROOT = Path(__file__).resolve().parents[2]

H200 = "0, NVIDIA H200, 143771, 4, 580.95.05, 9.0, Disabled\n"
EIGHT = "".join(H200.replace("0, N", f"{i}, N", 1) for i in range(8))
OLD = "0, Tesla P100-PCIE-16GB, 16384, [N/A], 535.183.01, 6.0, [N/A]\n"
HEAD = """\
Sat Nov 21 17:00:00 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.95.05              Driver Version: 580.95.05      CUDA Version: 13.0     |
+-----------------------------------------+------------------------+----------------------+
"""
TOPOLOGY = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-95\t0\t\tN/A
GPU1\tNV18\t X \tNODE\tPXB\t0-95\t0\t\tN/A
GPU2\tSYS\tNODE\t X \tSYS\t96-191\t1\t\tN/A
NIC0\tPIX\tPXB\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""
NVLINK = """\
GPU 0: NVIDIA H200 (UUID: GPU-7a6f)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H200 (UUID: GPU-81b0)
\t Link 0: <inactive>
"""


def test_on_this_machine() -> None:
    """Whatever it has: a report that can be read by people and by programs."""
    command = [sys.executable, "-m", "etl", "doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    findings = [doctor.Finding(**one) for one in json.loads(done.stdout)]
    assert done.returncode == int(any(one.state == WRONG for one in findings))
    subjects = [one.subject for one in findings]
    for subject in ("training", "ETL", "PyTorch", "FBGEMM", "RAPIDS", "memory", "NVLink"):
        assert subject in subjects
    text = doctor.report(findings)
    assert all(one.what in text and one.mend in text for one in findings)
    if subjects[0] == "GPU":  # without one, nothing is wrong
        assert done.returncode == 0
        assert "the CPU does the work" in findings[0].what


def test_cards() -> None:
    (gpu,) = doctor.parse_gpus(H200)
    assert gpu == doctor.Gpu(0, "NVIDIA H200", 143771, 4, "580.95.05", (9, 0), False)
    assert len(doctor.parse_gpus(EIGHT)) == 8
    assert doctor.parse_gpus("No devices were found\n") == []
    assert doctor.parse_gpus("NVIDIA-SMI has failed because it couldn't communicate, x\n") == []
    assert doctor.parse_cuda(HEAD) == (13, 0)
    assert doctor.parse_cuda("") is None


def test_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    good = doctor.check_driver(doctor.parse_gpus(H200), (13, 0), True)
    assert [one.state for one in good] == [OK, OK, OK]
    assert "NVIDIA H200, 140 GiB" in good[0].what
    bad = doctor.check_driver(doctor.parse_gpus(OLD), (12, 2), True)
    assert [one.state for one in bad] == [WRONG, WRONG, WRONG]
    assert "nvidia-driver-580" in bad[1].mend
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert doctor.check_driver(doctor.parse_gpus(H200), (13, 0), True)[-1].state == NOTE
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-41b3359c,MIG-65b79fff")
    assert len(doctor.check_driver(doctor.parse_gpus(H200), (13, 0), True)) == len(good)
    assert doctor.check_driver([], None, False)[0].state == NOTE


def test_torch() -> None:
    cpu = {"version": "2.13.0+cpu", "cuda": None, "gpus": 0, "error": ""}
    gpu = {"version": "2.13.0", "cuda": "13.0", "gpus": 1, "error": "", "nccl": "2.29.7"}
    assert doctor.check_torch(0, cpu).state == OK
    assert "a build for CPUs" in doctor.check_torch(1, cpu).what
    assert "gpu.txt" in doctor.check_torch(1, cpu).mend
    assert doctor.check_torch(1, gpu).state == OK
    assert doctor.check_torch(1, gpu | {"gpus": 0}).state == WRONG
    assert doctor.check_torch(0, {"error": "No module named 'torch'"}).state == WRONG


def test_fbgemm_and_rapids() -> None:
    told = {"values": [8, 9, 7], "device": "cuda", "error": ""}

    def version(*names: str):
        return lambda name: "26.10.2" if name in names else None

    assert doctor.check_fbgemm(1, told, version("fbgemm-gpu")).state == OK
    assert doctor.check_fbgemm(1, told, version("fbgemm-gpu-cpu")).state == WRONG
    assert doctor.check_fbgemm(0, told, version("fbgemm-gpu-cpu")).state == OK
    failed = doctor.check_fbgemm(1, {"error": "no kernel image"}, version("fbgemm-gpu"))
    assert (failed.state, "no kernel image" in failed.what) == (WRONG, True)
    assert doctor.check_rapids(0, None).state == NOTE
    assert doctor.check_rapids(1, None).state == WRONG
    lacking = doctor.check_fbgemm(0, {"error": "libnvidia-ml.so.1: none"}, version("fbgemm-gpu"))
    assert "of NVIDIA's driver" in lacking.what
    assert lacking.mend.endswith("cpu.txt")
    good = {"sum": 3, "version": "26.10.02", "gpus": 7, "memory": 18 << 30, "error": ""}
    assert doctor.check_rapids(1, good, version("x")).state == OK
    assert "7 worker(s) of 18 GiB" in doctor.check_rapids(1, good, version("x")).what
    assert "Numba finds no GPU" in doctor.check_rapids(1, good | {"gpus": 0}, version("x")).what
    assert "nvrtc" in doctor.check_rapids(1, good | {"error": "no nvrtc"}, version("x")).what
    assert "libcudf.so" in doctor.check_rapids(1, {"error": "libcudf.so: not found"}).what
    overlaid = doctor.check_rapids(1, {"error": "No module named 'numba.cuda.core'"})
    assert "sitecustomize.py" in overlaid.mend


def test_links() -> None:
    pairs = doctor.parse_topology(TOPOLOGY)
    assert pairs == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "NODE"}
    links = doctor.parse_nvlink(NVLINK)
    assert links == {0: [26.562, 26.562], 1: []}
    found = doctor.check_links(3, pairs, links)
    assert found.state == NOTE
    assert "0-2 SYS, 1-2 NODE" in found.what
    found = doctor.check_links(2, {(0, 1): "NV18"}, links)
    assert (found.state, found.what) == (OK, "all 2 cards, NV18, 53.124 GB/s from card 0")
    assert doctor.check_links(1, {}, {}).state == NOTE
    assert "unknown" in doctor.check_links(2, {}, {}).what


def test_memory_and_storage() -> None:
    text = "MemTotal:       134217728 kB\nMemFree:        1 kB\n"
    assert doctor.parse_meminfo(text) == 128
    (one,) = doctor.check_memory(doctor.parse_gpus(H200), 512, 64)
    assert one.state == OK
    small, shared = doctor.check_memory(doctor.parse_gpus(EIGHT), 128, 0)
    assert (small.state, shared.state) == (NOTE, WRONG)
    assert "--ipc=host" in shared.mend
    states = {
        (fs, cufile, mode): doctor.check_storage(1, fs, cufile, mode).state
        for fs in (False, True)
        for cufile in (False, True)
        for mode in ("", "ON")
    }
    assert [key for key, state in states.items() if state == OK] == [(True, True, "")]
    assert set(states.values()) == {OK, NOTE}


def test_packages_that_do_not_fit() -> None:
    def check() -> None:
        raise UnsupportedStackError("found a; supported: b; to mend it, run `make env`")

    found = doctor.check_stack(check, "training")
    assert found == doctor.Finding("training", WRONG, "found a; supported: b", "`make env`")


def test_what_crashes_is_reported() -> None:
    assert doctor._tried("import no_such_module")["error"].startswith("ModuleNotFoundError")
    assert "exit status" in doctor._tried("import os; os._exit(7)")["error"]
    assert doctor._said("no-such-program") is None
    assert doctor._said(sys.executable, "-c", "raise SystemExit(1)") is None
