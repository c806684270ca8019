"""Check what this machine offers: driver, PyTorch, FBGEMM, RAPIDS, shared memory.

Exit status 0: nothing is wrong. That includes machines without a GPU, where the CPU engine and the
CPU trainer do the work. 1: something is wrong, and its remedy is printed below it. Packages are
imported in processes of their own, so that a crash is reported like any other error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.base.versions import (
    check_etl_stack,
    check_training_stack,
    installed_version,
)

OK, NOTE, WRONG = "ok", "note", "wrong"
#: What CUDA 13 needs (NVIDIA, CUDA 13.0 release notes, table of drivers), and RAPIDS: Turing on.
LEAST_DRIVER, LEAST_CAPABILITY = 580, (7, 5)
#: Time limit of a process that tries a package.
_SECONDS = 120

_INSTALL = "make env LOCK=requirements/gpu.txt"
_DRIVER = "install NVIDIA's driver 580 or later: sudo apt install nvidia-driver-580-server-open"

# Programs that try a package. The last line that they print is reported; after an error the last
# line on stderr. `GPUS` is the number that the driver lists.
_TORCH = """
import torch
cuda = torch.cuda.is_available()
nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda else "none"
print(f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, "
      f"{torch.cuda.device_count()} GPU(s), NCCL {nccl}", flush=True)
if GPUS and not torch.version.cuda:
    raise SystemExit("a build for CPUs")
if GPUS and not cuda:
    raise SystemExit("torch.cuda.is_available() is false: make nvidia-smi work for this user")
if cuda:
    torch.ones(8, device="cuda").sum().item()
"""
_FBGEMM = """
import torch
from nvt_torchrec.base.versions import FBGEMM_CPU, installed_version
device = "cuda" if torch.cuda.is_available() else "cpu"
kind = FBGEMM_CPU if installed_version(FBGEMM_CPU) else "fbgemm-gpu"
print(f"{kind} {installed_version(kind)}, on a {device}", flush=True)
try:
    import fbgemm_gpu
except OSError as error:  # torch says which library it loads, the cause what that lacks
    raise SystemExit(str(error.__cause__ or error))
if GPUS and kind == FBGEMM_CPU:
    raise SystemExit("a build for CPUs")
order = torch.tensor([1, 0], dtype=torch.int32, device=device)
lengths = torch.tensor([1, 2], dtype=torch.int32, device=device)
values = torch.tensor([7, 8, 9], device=device)
values = torch.ops.fbgemm.permute_1D_sparse_data(order, lengths, values)[1].tolist()
if values != [8, 9, 7]:
    raise SystemExit(f"permute_1D_sparse_data gives {values} instead of [8, 9, 7]")
"""
_CUDF = """
import nvt_torchrec.nvt_compat, cudf
from nvt_torchrec.base.versions import installed_version
from nvt_torchrec.etl.engines.hardware import gpu_count, gpu_memory
rest = ", ".join(f"{name} {installed_version(name)}" for name in ("dask-cudf-cu13", "dask-cuda"))
print(f"cuDF {cudf.__version__}, {rest}", flush=True)
if not gpu_count():
    raise SystemExit("Numba finds no GPU (it needs libNVVM): the ETL would run on the CPU")
assert int(cudf.Series([1, 2]).sum()) == 3, "sum"
print(f"cuDF {cudf.__version__}, {rest}; {gpu_count()} worker(s) of {gpu_memory() >> 30} GiB")
"""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """A line of the report.

    Attributes:
        subject: The part of the machine that was checked.
        state: :data:`OK`, :data:`NOTE` or :data:`WRONG`.
        what: What is there, or what is wrong.
        remedy: A command that helps, or what to do in words.
    """

    subject: str
    state: str
    what: str
    remedy: str = ""


def open_driver() -> tuple[list, str]:
    """Return NVML's handles of all GPUs, and the reason where there are none."""
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)], "NVML lists none"
    except pynvml.NVMLError as error:
        return [], str(error)


def _ask(default: Any, function: Callable, *arguments: Any) -> Any:
    """Call a function of NVML; return the default where a GPU or a container does not allow it."""
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return default


def check_driver(gpus: list, reason: str) -> list[Diagnosis]:
    """Check the GPUs and their driver, and which GPUs are hidden."""
    if not gpus:
        return [Diagnosis("GPU", NOTE, f"none ({reason}): the CPU does the work here")]

    def diagnosis(subject: str, what: str, is_old: bool, remedy: str) -> Diagnosis:
        return Diagnosis(subject, WRONG if is_old else OK, what, remedy if is_old else "")

    lines = []
    for i, gpu in enumerate(gpus):
        capability = tuple(_ask((0, 0), pynvml.nvmlDeviceGetCudaComputeCapability, gpu))
        name = _ask("unknown", pynvml.nvmlDeviceGetName, gpu)
        words = f"{name}, compute capability {'.'.join(map(str, capability))}"
        remedy = "use another GPU: RAPIDS needs compute capability 7.5"
        lines.append(diagnosis(f"GPU {i}", words, capability < LEAST_CAPABILITY, remedy))
    version = _ask("0 (unknown)", pynvml.nvmlSystemGetDriverVersion)
    is_old = int(version.split(".")[0].split()[0]) < LEAST_DRIVER
    lines.append(diagnosis("driver", version, is_old, _DRIVER))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not hidden.startswith("MIG-"):
        words = f"CUDA_VISIBLE_DEVICES={hidden!r} hides GPUs from all programs"
        lines.append(Diagnosis("visible", NOTE, words, "unset CUDA_VISIBLE_DEVICES"))
    return lines


def try_package(subject: str, program: str, gpus: int) -> Diagnosis:
    """Run a program that tries a package, in a process of its own."""
    command = [sys.executable, "-c", f"GPUS = {gpus}\n{program}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Diagnosis(subject, WRONG, f"no answer within {_SECONDS} s", _INSTALL)
    (words,) = done.stdout.strip().splitlines()[-1:] or ["cannot be imported"]
    if not done.returncode:
        return Diagnosis(subject, OK, words)
    (error,) = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
    if "libnvidia-ml" in error and not gpus:
        error += " (a library of NVIDIA's driver, which the build for GPUs needs)"
    remedy = _INSTALL if gpus else "make env LOCK=requirements/cpu.txt"
    return Diagnosis(subject, WRONG, f"{words}: {error}", remedy)


def check_rapids(gpus: int, is_installed: bool) -> Diagnosis:
    """Check that cuDF is installed where there are GPUs, and works."""
    if is_installed and gpus:
        return try_package("RAPIDS", _CUDF, gpus)
    if gpus:
        return Diagnosis("RAPIDS", WRONG, "not installed: the ETL runs on the CPU", _INSTALL)
    return Diagnosis("RAPIDS", NOTE, "not needed without a GPU")


def check_shared_memory(gpus: int, gigabytes: int) -> list[Diagnosis]:
    """Check the shared memory that NCCL needs; of a container it is 64 MB by default."""
    if gpus < 2 or gigabytes >= 1:
        return []
    words = f"/dev/shm holds {gigabytes} GiB, NCCL needs some for each GPU"
    remedy = "docker run --ipc=host, or --shm-size=16g"
    return [Diagnosis("/dev/shm", WRONG, words, remedy)]


def check_stack(check: Callable[[], None], subject: str) -> Diagnosis:
    """Check the versions of packages against the table in :mod:`base.versions`."""
    try:
        check()
    except ClickLogError as error:
        return Diagnosis(subject, WRONG, error.what, error.remedy)
    return Diagnosis(subject, OK, "the versions are a supported combination")


def examine() -> list[Diagnosis]:
    """Check this machine."""
    handles, reason = open_driver()
    gpus = len(handles)
    shared = shutil.disk_usage("/dev/shm").total >> 30 if Path("/dev/shm").is_dir() else 0
    return [
        *check_driver(handles, reason),
        check_stack(check_training_stack, "training"),
        check_stack(check_etl_stack, "ETL"),
        try_package("PyTorch", _TORCH, gpus),
        try_package("FBGEMM", _FBGEMM, gpus),
        check_rapids(gpus, installed_version("cudf-cu13") is not None),
        *check_shared_memory(gpus, shared),
    ]


def report(diagnoses: list[Diagnosis]) -> str:
    """Format a line for each diagnosis, followed by one for its remedy."""
    width = max(len(line.subject) for line in diagnoses)
    lines = []
    for line in diagnoses:
        lines.append(f"{line.state:5}  {line.subject:{width}}  {line.what}")
        if line.remedy:
            lines.append(f"{'':{width + 9}}-> {line.remedy}")
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class DoctorSettings(Settings):
    """The settings of ``python -m etl doctor``."""

    json: bool = flag("print the diagnoses as JSON", False)


DESCRIPTION = __doc__
SETTINGS = (DoctorSettings,)


def run(settings: DoctorSettings) -> int:
    """Check this machine and print the report; return the exit status."""
    diagnoses = examine()
    if settings.json:
        print(json.dumps([dataclasses.asdict(diagnosis) for diagnosis in diagnoses], indent=1))
    else:
        print(report(diagnoses))
    return 1 if any(diagnosis.state == WRONG for diagnosis in diagnoses) else 0
