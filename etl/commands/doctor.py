"""Whether this machine can do what it is for: driver, CUDA, RAPIDS, PyTorch, FBGEMM, links, disk.

Exit status 0: nothing is wrong; without a GPU too, where the CPU engine and the CPU trainer do the
work. 1: something is wrong, and the command that mends it stands below it. Every program and
package is tried in a process of its own, so that what crashes is reported.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from clicklog.command_line import Settings, flag
from clicklog.errors import ClickLogError
from clicklog.versions import (
    FBGEMM_CPU,
    check_etl_stack,
    check_training_stack,
    installed_version,
)

OK, NOTE, WRONG = "ok", "note", "wrong"
#: What CUDA 13 needs (NVIDIA, CUDA 13.0 release notes, table of drivers), and RAPIDS: Turing on.
LEAST_DRIVER, LEAST_CUDA, LEAST_CAPABILITY = 580, (13, 0), (7, 5)
_SECONDS = 120
_QUERY = "index,name,memory.total,memory.used,driver_version,compute_cap,mig.mode.current"

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
# What the ETL needs of cuDF: its kernels, groups of strings, and what CuPy and Numba compile.
_CUDF = """
import json, nvt_compat, cudf, numpy as np, pandas as pd
from cudf.core.abc import Serializable
from etl.engines.hardware import gpu_count, gpu_memory
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
class Finding:
    """One line of the report: ``state`` is ok, note or wrong; ``mend`` a command, or words."""

    subject: str
    state: str
    what: str
    mend: str = ""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A card as nvidia-smi lists it; memory in MiB, ``capability`` as (8, 0)."""

    index: int
    name: str
    memory: int
    used: int
    driver: str
    capability: tuple[int, ...]
    mig: bool


def parse_gpus(text: str) -> list[Gpu]:
    """What ``nvidia-smi --query-gpu=… --format=csv,noheader,nounits`` prints."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(_QUERY.split(",")) or not fields[0].isdigit():
            continue
        index, name, memory, used, driver, capability, mig = fields
        numbers = [int(value) if value.isdigit() else 0 for value in (memory, used)]
        version = tuple(int(part) for part in re.findall(r"\d+", capability))
        found.append(Gpu(int(index), name, *numbers, driver, version, mig == "Enabled"))
    return found


def parse_cuda(text: str) -> tuple[int, int] | None:
    """The CUDA version that a driver can do, in the head of what ``nvidia-smi`` prints."""
    found = re.search(r"CUDA(?: UMD)? Version:\s*(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """How cards are connected (``nvidia-smi topo -m``): NV18, PIX, NODE, SYS … by pair."""
    found, columns = {}, 0
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        cells = line.split()
        if cells[:1] == ["GPU0"] and not columns:  # the head of the columns
            columns = sum(bool(re.fullmatch(r"GPU\d+", cell)) for cell in cells)
        elif cells and (row := re.fullmatch(r"GPU(\d+)", cells[0])):
            for column in range(int(row[1]) + 1, columns):
                found[int(row[1]), column] = cells[1 + column]
    return found


def parse_nvlink(text: str) -> dict[int, list[float]]:
    """GB/s of each active link of each card (``nvidia-smi nvlink --status``)."""
    found: dict[int, list[float]] = {}
    links: list[float] = []
    for line in text.splitlines():
        if card := re.match(r"GPU (\d+):", line):
            links = found.setdefault(int(card[1]), [])
        elif link := re.search(r"Link \d+: ([\d.]+) GB/s", line):
            links.append(float(link[1]))
    return found


def parse_meminfo(text: str) -> int:
    """GiB of main memory, from ``/proc/meminfo``."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) >> 20 if found else 0


def _said(*command: str) -> str | None:
    """What a program prints; None if it is not there or fails."""
    if not shutil.which(command[0]):
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _tried(code: str) -> dict:
    """What a snippet of Python prints as JSON; ``error`` if it ends otherwise."""
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


def check_driver(gpus: list[Gpu], cuda: tuple[int, int] | None, smi: bool) -> list[Finding]:
    """Cards, their driver, the CUDA it can do, and MIG."""
    if not gpus:
        seen = "nvidia-smi lists none" if smi else "there is no nvidia-smi"
        return [Finding("GPU", NOTE, f"none ({seen}): the CPU does the work here")]
    found = []
    for gpu in gpus:
        mig = ", MIG" if gpu.mig else ""
        memory = f"{gpu.memory / 1024:.0f} GiB, {gpu.used / 1024:.1f} used"
        capability = ".".join(map(str, gpu.capability))
        state = OK if gpu.capability >= LEAST_CAPABILITY else WRONG
        mend = "" if state == OK else "RAPIDS needs compute capability 7.5 or more: another card"
        words = f"{gpu.name}, {memory}, compute capability {capability}{mig}"
        found.append(Finding(f"GPU {gpu.index}", state, words, mend))
    driver = gpus[0].driver
    old = int(driver.split(".")[0] or 0) < LEAST_DRIVER
    found.append(Finding("driver", WRONG if old else OK, driver, _DRIVER if old else ""))
    if cuda is not None:
        state = OK if cuda >= LEAST_CUDA else WRONG
        words = f"{cuda[0]}.{cuda[1]}, by the driver"
        found.append(Finding("CUDA", state, words, "" if state == OK else _DRIVER))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not hidden.startswith("MIG-"):
        words = f"CUDA_VISIBLE_DEVICES={hidden!r} hides cards from all programs"
        found.append(Finding("visible", NOTE, words, "unset CUDA_VISIBLE_DEVICES"))
    return found


def check_torch(gpus: int, told: dict) -> Finding:
    """PyTorch: whether it sees the cards that the driver sees."""
    if "version" not in told:
        return Finding("PyTorch", WRONG, told.get("error", "no answer"), "make env")
    words = f"{told['version']}, CUDA {told['cuda'] or 'none'}, {told['gpus']} GPU(s)"
    words += f", NCCL {told['nccl']}" if "nccl" in told else ""
    if gpus and not told["cuda"]:
        return Finding("PyTorch", WRONG, f"{words}: a build for CPUs", _INSTALL)
    if gpus and not told["gpus"]:
        reason = told["error"] or "torch.cuda.is_available() is false"
        return Finding("PyTorch", WRONG, f"{words}: {reason}", "nvidia-smi must work as this user")
    if told["error"]:
        return Finding("PyTorch", WRONG, f"{words}: {told['error']}", _INSTALL)
    return Finding("PyTorch", OK, words)


def check_fbgemm(
    gpus: int, told: dict, version: Callable[[str], str | None] = installed_version
) -> Finding:
    """FBGEMM: the package that goes with the device, and one operator of it on the device."""
    kind = FBGEMM_CPU if version(FBGEMM_CPU) else "fbgemm-gpu"
    words = f"{kind} {version(kind)}"
    if told.get("error") or told.get("values") != [8, 9, 7]:
        error = told.get("error", "")
        mend = _INSTALL if gpus else "make env LOCK=requirements/cpu.txt"
        if "libnvidia-ml" in error and not gpus:
            error += " (of NVIDIA's driver: the build for GPUs needs it)"
        return Finding("FBGEMM", WRONG, f"{words}: {error}", mend)
    if gpus and kind == FBGEMM_CPU:
        return Finding("FBGEMM", WRONG, f"{words}: a build for CPUs", _INSTALL)
    return Finding("FBGEMM", OK, f"{words}, on a {told['device']}")


def check_rapids(
    gpus: int, told: dict | None, version: Callable[[str], str | None] = installed_version
) -> Finding:
    """cuDF: installed where there are GPUs, and able to add."""
    if told is None:
        if not gpus:
            return Finding("RAPIDS", NOTE, "not installed, and nothing to run on")
        return Finding("RAPIDS", WRONG, "not installed: the ETL runs on the CPU", _INSTALL)
    if not gpus:
        return Finding("RAPIDS", NOTE, f"cuDF {version('cudf-cu13')}, and no GPU to run on")
    if told.get("sum") != 3 or told["error"]:
        error = told.get("error", "")
        mend = _PATH_FILES if "numba.cuda.core" in error else _INSTALL
        return Finding("RAPIDS", WRONG, f"cuDF does not work: {error}", mend)
    if not told["gpus"]:
        words = "Numba finds no GPU (it needs libNVVM): the ETL would run on the CPU"
        return Finding("RAPIDS", WRONG, words, _INSTALL)
    rest = ", ".join(f"{name} {version(name)}" for name in ("dask-cudf-cu13", "dask-cuda"))
    workers = f"{told['gpus']} worker(s) of {told['memory'] >> 30} GiB"
    return Finding("RAPIDS", OK, f"cuDF {told['version']}, {rest}; {workers}")


def check_links(gpus: int, pairs: dict[tuple[int, int], str], links: dict) -> Finding:
    """NVLink: what the all-to-all of several cards goes over."""
    if gpus < 2:
        return Finding("NVLink", NOTE, "one card or none: nothing to connect")
    slow = {pair: kind for pair, kind in pairs.items() if not kind.startswith("NV")}
    speed = f", {sum(links[0]):g} GB/s from card 0" if links.get(0) else ""
    if slow or not pairs:
        kinds = ", ".join(f"{a}-{b} {kind}" for (a, b), kind in slow.items()) or "unknown"
        words = f"not all cards are linked ({kinds}): messages between them go over PCIe"
        return Finding("NVLink", NOTE, words, "nvidia-smi nvlink --status; nvidia-smi topo -m")
    return Finding("NVLink", OK, f"all {gpus} cards, {min(pairs.values())}{speed}")


def check_memory(gpus: list[Gpu], host: int, shared: int) -> list[Finding]:
    """Main memory for what GPUs spill, and shared memory for NCCL; both in GiB."""
    needed = sum(gpu.memory for gpu in gpus) >> 10
    found = [Finding("memory", OK, f"{host} GiB")]
    if needed > host:
        words = f"{host} GiB, less than the cards' {needed}: what they spill may not fit"
        found = [Finding("memory", NOTE, words, "give --block_mb and --workers small values")]
    if len(gpus) > 1 and shared < 1:
        words = f"/dev/shm holds {shared} GiB, and NCCL needs some for each card"
        found.append(Finding("/dev/shm", WRONG, words, "docker run --ipc=host, or --shm-size=16g"))
    return found


def check_storage(gpus: int, fs: bool, cufile: bool, mode: str) -> Finding:
    """GPUDirect Storage: libcudf's reads from disk into the card's memory (KvikIO, cuFile)."""
    if not gpus:
        return Finding("GPUDirect", NOTE, "no GPU to read into")
    if not cufile:
        return Finding("GPUDirect", NOTE, "no libcufile: reads go through main memory", _INSTALL)
    if mode.lower() in ("on", "true", "1", "yes"):
        words = f"KVIKIO_COMPAT_MODE={mode}: reads go through main memory"
        return Finding("GPUDirect", NOTE, words, "unset KVIKIO_COMPAT_MODE")
    if not fs:
        words = "no kernel module nvidia-fs: KvikIO reads through main memory"
        return Finding(
            "GPUDirect", NOTE, words, "sudo apt install nvidia-fs-dkms, if the disks can"
        )
    return Finding("GPUDirect", OK, "nvidia-fs and libcufile; KvikIO chooses by file system")


def check_stack(check: Callable[[], None], subject: str) -> Finding:
    """The versions of packages, by the table in :mod:`clicklog.versions`."""
    try:
        check()
    except ClickLogError as error:
        what, _, mend = str(error).partition("; to mend it, run ")
        return Finding(subject, WRONG, what, mend)
    return Finding(subject, OK, "versions fit each other")


def examine() -> list[Finding]:
    """Look at this machine."""
    told = _said("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
    gpus = parse_gpus(told or "")
    count = len(gpus)
    head = _said("nvidia-smi") or ""
    cudf = _tried(_CUDF) if installed_version("cudf-cu13") and count else None
    if cudf is None and installed_version("cudf-cu13"):
        cudf = {}
    topology = parse_topology(_said("nvidia-smi", "topo", "-m") or "") if count > 1 else {}
    links = parse_nvlink(_said("nvidia-smi", "nvlink", "--status") or "") if count > 1 else {}
    shared = shutil.disk_usage("/dev/shm").total >> 30 if Path("/dev/shm").is_dir() else 0
    return [
        *check_driver(gpus, parse_cuda(head), told is not None),
        check_stack(check_training_stack, "training"),
        check_stack(check_etl_stack, "ETL"),
        check_torch(count, _tried(_TORCH)),
        check_fbgemm(count, _tried(_FBGEMM)),
        check_rapids(count, cudf),
        *check_memory(gpus, parse_meminfo(Path("/proc/meminfo").read_text()), shared),
        check_links(count, topology, links),
        check_storage(
            count,
            Path("/proc/driver/nvidia-fs").exists(),
            bool(installed_version("nvidia-cufile") or installed_version("nvidia-cufile-cu13")),
            os.environ.get("KVIKIO_COMPAT_MODE", ""),
        ),
    ]


def report(findings: list[Finding]) -> str:
    """A line for each finding, and one for what to do about it."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:5}  {finding.subject:{width}}  {finding.what}")
        if finding.mend:
            lines.append(f"{'':{width + 9}}-> {finding.mend}")
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class DoctorSettings(Settings):
    """The settings of ``python -m etl doctor``."""

    json: bool = flag("print the findings as JSON", False)


DESCRIPTION = __doc__
SETTINGS = (DoctorSettings,)


def run(settings: DoctorSettings) -> int:
    """Examine, report; the exit status."""
    findings = examine()
    if settings.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        print(report(findings))
    return 1 if any(finding.state == WRONG for finding in findings) else 0
