"""Check what this machine offers: GPUs, PyTorch, FBGEMM, RAPIDS, shared memory.

Exit status 0: nothing is wrong. That includes machines without a GPU, where the CPU engine and the
CPU trainer do the work, and installations without the packages of training or NVTabular, which the
ETL and serving do not need. 1: something is wrong, and its remedy is printed below it. Packages are
imported in processes of their own, so that a crash is reported like any other error.
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

#: Time limit of a process that tries a package, and of nvidia-smi.
_SECONDS = 120
_SUPPORTED = "the versions are a supported combination"
#: Packages by what they are for: without any of them it is not installed, which is nothing wrong.
_OPTIONAL = {
    "training": ("torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"),
    "ETL": ("nvtabular", "merlin-core", "merlin-dataloader"),
    "PyTorch, FBGEMM": ("torch",),
}

# Programs that try a package. The last line that they print is reported; after an error the last
# line on stderr. `GPUS` is the number that the driver lists.
_TRAINING = """
import torch
from nvt_torchrec.base.versions import FBGEMM_CPU, find_installed_version
print(f"PyTorch {torch.__version__}, CUDA {torch.version.cuda or 'none'}", flush=True)
torch.ones(8, device="cuda" if GPUS else "cpu").sum().item()
if GPUS and find_installed_version(FBGEMM_CPU):
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


def find_gpus() -> list[str]:
    """Return name, compute capability and driver of each GPU that nvidia-smi lists."""
    asked = "--query-gpu=name,compute_cap,driver_version"
    command = ["nvidia-smi", asked, "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def try_package(program: str, gpus: int) -> str:
    """Run a program that tries a package, in a process of its own; return what it printed last.

    Raises:
        UnsupportedStackError: It failed, or took too long.
    """
    kind = "gpu" if gpus else "cpu"
    remedy = f"make env LOCK=requirements/{kind}.txt" if IS_CHECKOUT else make_install_command(kind)
    command = [sys.executable, "-c", f"GPUS = {gpus}\n{program}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise UnsupportedStackError(f"no answer within {_SECONDS} s", remedy) from None
    printed = done.stdout.strip().splitlines() or ["cannot be imported"]
    if not done.returncode:
        return printed[-1]
    errors = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    raise UnsupportedStackError(f"{printed[-1]}: {errors[-1]}", remedy)


def check_shared_memory(gpus: int) -> str:
    """Return the size of /dev/shm. Raises :class:`ClickLogError` if NCCL may have too little."""
    total = shutil.disk_usage("/dev/shm").total
    size = f"/dev/shm holds {total >> 20} MiB"
    if gpus > 1 and total < 1 << 30:  # in a container, by default 64
        what = f"{size}, NCCL needs some for each GPU"
        raise ClickLogError(what, "docker run --ipc=host, or --shm-size=16g")
    return size


def describe_numa_nodes(nodes: Path = Path("/sys/devices/system/node")) -> str:
    """Return how many NUMA nodes the machine has, and how ranks are bound to that of their GPU."""
    count = len([*nodes.glob("node[0-9]*")])
    if count < 2:
        return "one node: nothing to bind"
    return (
        f"{count} nodes: train by `torchrun --numa-binding node …` (needs numactl), "
        "as torchx binds no rank to the node of its GPU"
    )


DESCRIPTION = __doc__
SETTINGS = ()


def run() -> int:
    """Check this machine and print a line for each part; return the exit status."""
    gpus = find_gpus()
    for gpu in gpus or ["nvidia-smi lists none: the CPU does the work here"]:
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
