"""Check what this machine offers: driver, CUDA, RAPIDS, PyTorch, FBGEMM, NVLink, memory.

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
from itertools import combinations
from pathlib import Path
from typing import Any

try:
    import pynvml
except ImportError:
    pynvml = None  # reported by open_driver

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.base.versions import (
    FBGEMM_CPU,
    check_etl_stack,
    check_training_stack,
    installed_version,
)

OK, NOTE, WRONG = "ok", "note", "wrong"
#: What CUDA 13 needs (NVIDIA, CUDA 13.0 release notes, table of drivers), and RAPIDS: Turing on.
LEAST_DRIVER, LEAST_CUDA, LEAST_CAPABILITY = 580, (13, 0), (7, 5)
#: Time limit of a process that tries a package.
_SECONDS = 120

_INSTALL = "make env LOCK=requirements/gpu.txt"
_DRIVER = "install NVIDIA's driver 580 or later: sudo apt install nvidia-driver-580-server-open"

_TORCH = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": 0, "error": ""}
try:
    if torch.cuda.is_available():
        found["gpus"] = torch.cuda.device_count()
        found["sum"] = float(torch.ones(8, device="cuda").sum())
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception as error:
    found["error"] = str(error)
print(json.dumps(found))
"""
_FBGEMM = """
import json, torch
try:
    import fbgemm_gpu
except OSError as error:  # torch says which library it loads, the cause what that lacks
    print(json.dumps({"error": str(error.__cause__ or error)}))
    raise SystemExit
found = {"lookup": hasattr(torch.ops.fbgemm, "permute_1D_sparse_data"), "error": ""}
try:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    order = torch.tensor([1, 0], dtype=torch.int32, device=device)
    lengths = torch.tensor([1, 2], dtype=torch.int32, device=device)
    values = torch.tensor([7, 8, 9], device=device)
    found["values"] = torch.ops.fbgemm.permute_1D_sparse_data(order, lengths, values)[1].tolist()
    found["device"] = device
except Exception as error:
    found["error"] = str(error).splitlines()[0]
print(json.dumps(found))
"""
# The parts of cuDF that the ETL needs: its kernels, groups of strings, code that CuPy and Numba
# compile.
_CUDF = """
import json, nvt_torchrec.nvt_compat, cudf, numpy as np, pandas as pd
from cudf.core.abc import Serializable
from nvt_torchrec.etl.engines.hardware import gpu_count, gpu_memory
found = {"version": cudf.__version__, "sum": int(cudf.Series([1, 2]).sum()), "error": ""}
try:
    found["gpus"] = gpu_count()
    found["memory"] = gpu_memory() if found["gpus"] else 0
    groups = cudf.DataFrame({"text": ["a", None, "a"]}).groupby("text", dropna=False)
    assert sorted(groups.agg({"text": ["size"]}).to_pandas().iloc[:, 0]) == [1, 2], "groups"
    sent = cudf.ListDtype(pd.StringDtype(na_value=np.nan)).device_serialize()
    assert isinstance(Serializable.device_deserialize(*sent).element_type, pd.StringDtype), "lists"
    assert float(np.log(cudf.Series([1.0, 1.0])).sum()) == 0, "logarithm"
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
print(json.dumps(found))
"""
_PATH_FILES = (
    "packages in a PYTHONPATH lack what their .pth files do: "
    "put `import site; site.addsitedir(DIRECTORY)` into DIRECTORY/sitecustomize.py"
)


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """A line of the report.

    Attributes:
        subject: The part of the machine that was checked.
        state: :data:`OK`, :data:`NOTE` or :data:`WRONG`.
        what: What was found.
        remedy: A command that helps, or what to do in words.
    """

    subject: str
    state: str
    what: str
    remedy: str = ""


def open_driver() -> tuple[list, str]:
    """Return NVML's handles of all GPUs, and the reason where there are none."""
    if pynvml is None:
        return [], "nvidia-ml-py is not installed"
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


def _memory(gpu: Any) -> tuple[int, int]:
    """Return the total and the used bytes of a GPU's memory."""
    memory = _ask(None, pynvml.nvmlDeviceGetMemoryInfo, gpu)
    return (memory.total, memory.used) if memory else (0, 0)


def _run_snippet(code: str) -> dict:
    """Run Python code in another process and return the JSON that it prints.

    A process that ends in another way gives a dictionary with the reason as ``error``.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {_SECONDS} s"}
    except (IndexError, ValueError):
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return {"error": last[0]}


def check_driver(gpus: list, reason: str) -> list[Diagnosis]:
    """Check the GPUs, their driver, the CUDA it supports, and which GPUs are hidden."""
    if not gpus:
        return [Diagnosis("GPU", NOTE, f"none ({reason}): the CPU does the work here")]
    found = []
    for i, gpu in enumerate(gpus):
        total, used = _memory(gpu)
        capability = tuple(_ask((0, 0), pynvml.nvmlDeviceGetCudaComputeCapability, gpu))
        mig = _ask((0, 0), pynvml.nvmlDeviceGetMigMode, gpu)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
        words = (
            f"{_ask('unknown', pynvml.nvmlDeviceGetName, gpu)}, {total / 2**30:.0f} GiB, "
            f"{used / 2**30:.1f} used, compute capability {'.'.join(map(str, capability))}"
        )
        old = capability < LEAST_CAPABILITY
        remedy = "use another GPU: RAPIDS needs compute capability 7.5" if old else ""
        words += ", MIG" if mig else ""
        found.append(Diagnosis(f"GPU {i}", WRONG if old else OK, words, remedy))
    version = _ask("0 (unknown)", pynvml.nvmlSystemGetDriverVersion)
    old = int(version.split(".")[0].split()[0]) < LEAST_DRIVER
    found.append(Diagnosis("driver", WRONG if old else OK, version, _DRIVER if old else ""))
    if cuda := _ask(0, pynvml.nvmlSystemGetCudaDriverVersion_v2):
        major, minor = cuda // 1000, cuda % 1000 // 10
        old = (major, minor) < LEAST_CUDA
        words = f"the driver supports {major}.{minor}"
        found.append(Diagnosis("CUDA", WRONG if old else OK, words, _DRIVER if old else ""))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not hidden.startswith("MIG-"):
        words = f"CUDA_VISIBLE_DEVICES={hidden!r} hides GPUs from all programs"
        found.append(Diagnosis("visible", NOTE, words, "unset CUDA_VISIBLE_DEVICES"))
    return found


def check_torch(gpus: int, found: dict) -> Diagnosis:
    """Check that PyTorch is a build for GPUs where there are some, and sees them."""
    if "version" not in found:
        return Diagnosis("PyTorch", WRONG, found.get("error", "no answer"), "make env")
    words = f"{found['version']}, CUDA {found['cuda'] or 'none'}, {found['gpus']} GPU(s)"
    words += f", NCCL {found['nccl']}" if "nccl" in found else ""
    if gpus and not found["cuda"]:
        return Diagnosis("PyTorch", WRONG, f"{words}: a build for CPUs", _INSTALL)
    if gpus and not found["gpus"]:
        reason = found["error"] or "torch.cuda.is_available() is false"
        return Diagnosis(
            "PyTorch", WRONG, f"{words}: {reason}", "make nvidia-smi work for this user"
        )
    if found["error"]:
        return Diagnosis("PyTorch", WRONG, f"{words}: {found['error']}", _INSTALL)
    return Diagnosis("PyTorch", OK, words)


def check_fbgemm(
    gpus: int, found: dict, version: Callable[[str], str | None] = installed_version
) -> Diagnosis:
    """Check that FBGEMM is the package for this device, and run one of its operators."""
    kind = FBGEMM_CPU if version(FBGEMM_CPU) else "fbgemm-gpu"
    words = f"{kind} {version(kind)}"
    if found.get("error") or found.get("values") != [8, 9, 7]:
        error = found.get("error", "")
        remedy = _INSTALL if gpus else "make env LOCK=requirements/cpu.txt"
        if "libnvidia-ml" in error and not gpus:
            error += " (a library of NVIDIA's driver, which the build for GPUs needs)"
        return Diagnosis("FBGEMM", WRONG, f"{words}: {error}", remedy)
    if gpus and kind == FBGEMM_CPU:
        return Diagnosis("FBGEMM", WRONG, f"{words}: a build for CPUs", _INSTALL)
    return Diagnosis("FBGEMM", OK, f"{words}, on a {found['device']}")


def check_rapids(
    gpus: int, found: dict | None, version: Callable[[str], str | None] = installed_version
) -> Diagnosis:
    """Check that cuDF is installed where there are GPUs, and works."""
    if found is None:
        if not gpus:
            return Diagnosis("RAPIDS", NOTE, "not installed; not needed without a GPU")
        return Diagnosis("RAPIDS", WRONG, "not installed: the ETL runs on the CPU", _INSTALL)
    if not gpus:
        return Diagnosis("RAPIDS", NOTE, f"cuDF {version('cudf-cu13')} without a GPU to run on")
    if found.get("sum") != 3 or found["error"]:
        error = found.get("error", "")
        remedy = _PATH_FILES if "numba.cuda.core" in error else _INSTALL
        return Diagnosis("RAPIDS", WRONG, f"cuDF does not work: {error}", remedy)
    if not found["gpus"]:
        words = "Numba finds no GPU (it needs libNVVM): the ETL would run on the CPU"
        return Diagnosis("RAPIDS", WRONG, words, _INSTALL)
    rest = ", ".join(f"{name} {version(name)}" for name in ("dask-cudf-cu13", "dask-cuda"))
    workers = f"{found['gpus']} worker(s) of {found['memory'] >> 30} GiB"
    return Diagnosis("RAPIDS", OK, f"cuDF {found['version']}, {rest}; {workers}")


def check_links(gpus: list) -> Diagnosis:
    """Check that all GPUs are connected by NVLink, which the all-to-all of training uses."""
    if len(gpus) < 2:
        return Diagnosis("NVLink", NOTE, "fewer than two GPUs: nothing to connect")
    missing = [
        f"{i}-{j}"
        for (i, gpu), (j, other) in combinations(enumerate(gpus), 2)
        if _ask(None, pynvml.nvmlDeviceGetP2PStatus, gpu, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        != pynvml.NVML_P2P_STATUS_OK
    ]
    if missing:
        words = f"missing between some GPUs ({', '.join(missing)}): their messages go over PCIe"
        return Diagnosis("NVLink", NOTE, words, "nvidia-smi nvlink --status; nvidia-smi topo -m")
    return Diagnosis("NVLink", OK, f"between all {len(gpus)} GPUs")


def check_memory(gpus: list, host: int, shared: int) -> list[Diagnosis]:
    """Check main memory, to which GPUs spill, and shared memory, for NCCL; both in GiB."""
    needed = sum(_memory(gpu)[0] for gpu in gpus) >> 30
    found = [Diagnosis("memory", OK, f"{host} GiB")]
    if needed > host:
        words = f"{host} GiB, less than the GPUs' {needed}: data that they spill may not fit"
        found = [Diagnosis("memory", NOTE, words, "use a smaller --block_mb and fewer --workers")]
    if len(gpus) > 1 and shared < 1:
        words = f"/dev/shm holds {shared} GiB, NCCL needs some for each GPU"
        found.append(
            Diagnosis("/dev/shm", WRONG, words, "docker run --ipc=host, or --shm-size=16g")
        )
    return found


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
    cudf = None
    if installed_version("cudf-cu13"):
        cudf = _run_snippet(_CUDF) if gpus else {}
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    shared = shutil.disk_usage("/dev/shm").total >> 30 if Path("/dev/shm").is_dir() else 0
    return [
        *check_driver(handles, reason),
        check_stack(check_training_stack, "training"),
        check_stack(check_etl_stack, "ETL"),
        check_torch(gpus, _run_snippet(_TORCH)),
        check_fbgemm(gpus, _run_snippet(_FBGEMM)),
        check_rapids(gpus, cudf),
        *check_memory(handles, host, shared),
        check_links(handles),
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
