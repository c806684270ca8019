"""Check this machine: GPUs, PyTorch, FBGEMM, RAPIDS, shared memory.

Exit status: 0 if nothing is wrong; 1 if something is, with the remedy printed below it. A missing
GPU is not an error: the CPU engine and the CPU trainer do the work. Neither are missing packages of
training or NVTabular, which the ETL and serving do not need. Each package is imported in a separate
process, so that a crash is reported like any other error.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from nvt_torchrec.base.errors import IS_CHECKOUT, ClickLogError
from nvt_torchrec.base.versions import (
    UnsupportedStackError,
    check_etl_stack,
    check_training_stack,
    find_installed_version,
    make_install_command,
)

#: Time limit for nvidia-smi, and for each process that tries a package.
_TIMEOUT_SECONDS = 120
_SUPPORTED = "the versions are a supported combination"
#: Packages by check. If none of them is installed, the check is skipped, which is not an error.
_OPTIONAL = {
    "training": ("torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"),
    "ETL": ("nvtabular", "merlin-core", "merlin-dataloader"),
    "PyTorch, FBGEMM": ("torch",),
}

# Programs that try a package. The last line of stdout is reported and, if the program fails, the
# last line of stderr. `GPUS` is the number of GPUs that the driver lists.
_TRAINING = """
import torch
from nvt_torchrec.base.versions import FBGEMM_CPU, find_installed_version
print(f"PyTorch {torch.__version__}, CUDA {torch.version.cuda or 'none'}", flush=True)
torch.ones(8, device="cuda" if GPUS else "cpu").sum().item()
if GPUS and find_installed_version(FBGEMM_CPU):
    raise SystemExit(f"{FBGEMM_CPU} is a build for CPUs")
try:
    import fbgemm_gpu
except OSError as error:  # torch names the library, the cause what is missing for it
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


def find_gpus() -> list[str]:
    """Return name, compute capability and driver of each GPU that nvidia-smi lists."""
    query = "--query-gpu=name,compute_cap,driver_version"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def try_package(program: str, gpus: int) -> str:
    """Run a program that tries a package, in a separate process; return the last line it printed.

    Raises:
        UnsupportedStackError: The program failed or took too long.
    """
    kind = "gpu" if gpus else "cpu"
    remedy = f"make env LOCK=requirements/{kind}.txt" if IS_CHECKOUT else make_install_command(kind)
    command = [sys.executable, "-c", f"GPUS = {gpus}\n{program}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise UnsupportedStackError(f"no answer within {_TIMEOUT_SECONDS} s", remedy) from None
    printed = done.stdout.strip().splitlines() or ["cannot be imported"]
    if not done.returncode:
        return printed[-1]
    errors = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    raise UnsupportedStackError(f"{printed[-1]}: {errors[-1]}", remedy)


def check_shared_memory(gpus: int) -> str:
    """Return the size of /dev/shm. Raises :class:`ClickLogError` if NCCL may have too little."""
    total = shutil.disk_usage("/dev/shm").total
    size = f"/dev/shm holds {total >> 20} MiB"
    if gpus > 1 and total < 1 << 30:  # Docker's default is 64 MiB
        raise ClickLogError(
            f"{size}, too little for NCCL with several GPUs",
            "start the container with docker run --ipc=host, or --shm-size=16g",
        )
    return size


def describe_numa_nodes(nodes: Path = Path("/sys/devices/system/node")) -> str:
    """Describe the machine's NUMA nodes, and how to bind each rank to the node of its GPU."""
    count = len([*nodes.glob("node[0-9]*")])
    if count < 2:
        return "one node: nothing to bind"
    return (
        f"{count} nodes: train with `torchrun --numa-binding node …` (needs numactl); "
        "torchx does not bind ranks to the node of their GPU"
    )


DESCRIPTION = __doc__
SETTINGS = ()


def run() -> int:
    """Check this machine and print a line for each part; return the exit status."""
    gpus = find_gpus()
    for gpu in gpus or ["nvidia-smi lists none: the CPU does the work"]:
        print(f"{'':6}{'GPU':17}{gpu}")
    checks: dict[str, Callable[[], str | None]] = {
        "training": check_training_stack,
        "ETL": check_etl_stack,
        "PyTorch, FBGEMM": lambda: try_package(_TRAINING, len(gpus)),
    }
    if gpus:
        checks["RAPIDS"] = lambda: try_package(_CUDF, len(gpus))
        checks["shared memory"] = lambda: check_shared_memory(len(gpus))
        checks["NUMA"] = describe_numa_nodes
    wrong = False
    for subject, check in checks.items():
        packages = _OPTIONAL.get(subject, ())
        if packages and not any(map(find_installed_version, packages)):
            command = make_install_command("gpu" if gpus else "cpu")
            print(f"{'-':6}{subject:17}not installed: {packages[0]}\n{'':23}-> {command}")
            continue
        try:
            print(f"{'ok':6}{subject:17}{check() or _SUPPORTED}", flush=True)
        except ClickLogError as error:
            wrong = True
            print(f"{'wrong':6}{subject:17}{error.what}\n{'':23}-> {error.remedy}", flush=True)
    return int(wrong)
