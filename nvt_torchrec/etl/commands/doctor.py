"""Check what this machine offers: driver, PyTorch, FBGEMM, RAPIDS, shared memory.

Exit status 0: nothing is wrong. That includes machines without a GPU, where the CPU engine and the
CPU trainer do the work. 1: something is wrong, and its remedy is printed below it. Packages are
imported in processes of their own, so that a crash is reported like any other error.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import pynvml
except ImportError:
    pynvml = None

from nvt_torchrec.base.errors import IS_CHECKOUT, ClickLogError
from nvt_torchrec.base.versions import (
    check_etl_stack,
    check_training_stack,
    install_command,
    installed_version,
)

OK, NOTE, WRONG = "ok", "note", "wrong"
#: What CUDA 13 needs (NVIDIA, CUDA 13.0 release notes, table of drivers), and RAPIDS: Turing on.
LEAST_DRIVER, LEAST_CAPABILITY = 580, (7, 5)
#: Time limit of a process that tries a package.
_SECONDS = 120

_SHARED_MEMORY = "docker run --ipc=host, or --shm-size=16g"
_ANOTHER_GPU = "use another GPU: RAPIDS needs compute capability 7.5"
_DRIVER = "install NVIDIA's driver 580 or later: sudo apt install nvidia-driver-580-server-open"

# Programs that try a package. The last line that they print is reported; after an error the last
# line on stderr. `GPUS` is the number that the driver lists.
_TRAINING = """
import torch
from nvt_torchrec.base.versions import FBGEMM_CPU, installed_version
print(f"PyTorch {torch.__version__}, CUDA {torch.version.cuda or 'none'}", flush=True)
torch.ones(8, device="cuda" if GPUS else "cpu").sum().item()
if GPUS and installed_version(FBGEMM_CPU):
    raise SystemExit(f"{FBGEMM_CPU} is a build for CPUs")
try:
    import fbgemm_gpu
except OSError as error:  # torch says which library it loads, the cause what that lacks
    raise SystemExit(str(error.__cause__ or error))
ones = torch.ones(2, dtype=torch.int32, device="cuda" if GPUS else "cpu")
torch.ops.fbgemm.asynchronous_complete_cumsum(ones).tolist()
print(f"PyTorch {torch.__version__}, FBGEMM {fbgemm_gpu.__version__}")
"""
_CUDF = """
import nvt_torchrec.nvt_compat, cudf
from nvt_torchrec.etl.engines.device import gpu_count, gpu_memory
print(f"cuDF {cudf.__version__}", flush=True)
if not gpu_count():
    raise SystemExit("Numba finds no GPU (it needs libNVVM): the ETL would run on the CPU")
assert int(cudf.Series([1, 2]).sum()) == 3, "sum"
print(f"cuDF {cudf.__version__}; {gpu_count()} worker(s) of {gpu_memory() >> 30} GiB")
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


def check_driver() -> tuple[int, list[Diagnosis]]:
    """Return the number of GPUs that NVIDIA's driver lists, and what is wrong with them."""
    if pynvml is None:
        what = "unknown: the package nvidia-ml-py is not installed"
        return 0, [Diagnosis("GPU", NOTE, what, _install("cpu"))]
    lines, reason = [], "NVML lists none"
    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        for i in range(pynvml.nvmlDeviceGetCount()):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(i)
            capability = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(gpu))
            what = f"{pynvml.nvmlDeviceGetName(gpu)}, compute capability "
            what += ".".join(map(str, capability))
            lines.append(_check_least(LEAST_CAPABILITY, capability, f"GPU {i}", what, _ANOTHER_GPU))
    except pynvml.NVMLError as error:
        reason = str(error)
    if not lines:
        return 0, [Diagnosis("GPU", NOTE, f"none ({reason}): the CPU does the work here")]
    major = int(version.split(".")[0])
    return len(lines), [*lines, _check_least(LEAST_DRIVER, major, "driver", version, _DRIVER)]


def _install(kind: str) -> str:
    return f"make env LOCK=requirements/{kind}.txt" if IS_CHECKOUT else install_command(kind)


def _check_least(least: Any, value: Any, subject: str, what: str, remedy: str) -> Diagnosis:
    if value < least:
        return Diagnosis(subject, WRONG, what, remedy)
    return Diagnosis(subject, OK, what)


def try_package(subject: str, program: str, gpus: int) -> Diagnosis:
    """Run a program that tries a package, in a process of its own."""
    command = [sys.executable, "-c", f"GPUS = {gpus}\n{program}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Diagnosis(subject, WRONG, f"no answer within {_SECONDS} s", _install("gpu"))
    (words,) = done.stdout.strip().splitlines()[-1:] or ["cannot be imported"]
    if not done.returncode:
        return Diagnosis(subject, OK, words)
    (error,) = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
    return Diagnosis(subject, WRONG, f"{words}: {error}", _install("gpu" if gpus else "cpu"))


def check_stack(check: Callable[[], None], subject: str) -> Diagnosis:
    """Check the versions of packages against the table in :mod:`base.versions`."""
    try:
        check()
    except ClickLogError as error:
        return Diagnosis(subject, WRONG, error.what, error.remedy)
    return Diagnosis(subject, OK, "the versions are a supported combination")


def examine() -> list[Diagnosis]:
    """Check this machine."""
    gpus, lines = check_driver()
    lines += [
        check_stack(check_training_stack, "training"),
        check_stack(check_etl_stack, "ETL"),
        try_package("PyTorch, FBGEMM", _TRAINING, gpus),
    ]
    if not gpus:
        lines.append(Diagnosis("RAPIDS", NOTE, "not needed without a GPU"))
    elif installed_version("cudf-cu13") is None:
        what = "not installed: the ETL runs on the CPU"
        lines.append(Diagnosis("RAPIDS", WRONG, what, _install("gpu")))
    else:
        lines.append(try_package("RAPIDS", _CUDF, gpus))
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    if gpus > 1 and shared < 1 << 30:  # of a container it is 64 MB by default
        what = f"/dev/shm holds {shared >> 20} MiB, NCCL needs some for each GPU"
        lines.append(Diagnosis("/dev/shm", WRONG, what, _SHARED_MEMORY))
    return lines


def report(diagnoses: list[Diagnosis]) -> str:
    """Format a line for each diagnosis, followed by one for its remedy."""
    width = max(len(line.subject) for line in diagnoses)
    lines = []
    for line in diagnoses:
        lines.append(f"{line.state:5}  {line.subject:{width}}  {line.what}")
        if line.remedy:
            lines.append(f"{'':{width + 9}}-> {line.remedy}")
    return "\n".join(lines)


DESCRIPTION = __doc__
SETTINGS = ()


def run() -> int:
    """Check this machine and print the report; return the exit status."""
    diagnoses = examine()
    print(report(diagnoses))
    return 1 if any(diagnosis.state == WRONG for diagnosis in diagnoses) else 0
