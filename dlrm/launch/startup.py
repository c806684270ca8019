"""What a process does before it imports PyTorch: choose its CPU cores and quieten the libraries.

``--bind_cpus`` does not use torchrun's ``--numa-binding``, which ends a rank on a machine without
GPUs or without the program ``numactl``, and which torchx's ``dist.ddp`` does not pass on. NVIDIA's
DLRM wraps each process in a script, ``bind.sh``; here the process does it itself. Memory follows
the cores: Linux takes it from the NUMA node of the core that first writes to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from pathlib import Path

#: The CPUs that are hyperthreads of one core, in order.
Core = tuple[int, ...]


def prepare_torch() -> None:
    """Set PyTorch up for a command line; call it before anything imports torch.

    Messages of PyTorch and TorchRec about each other's internals are left out, unless Python was
    started with -W.
    """
    # Read by OpenMP when torch is loaded: threads that wait sleep instead of spinning, which on
    # cores shared with the loader, other ranks or other programs makes steps several times faster.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", module=r"(torch|torchrec|fbgemm_gpu)(\.|$)")
        # TorchRec's state is in them; PyTorch warns of every call
        warnings.filterwarnings("ignore", message=".*ShardedTensor", category=FutureWarning)
        logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
        # FBGEMM 1.6 has no entry for itself; which versions fit is checked by base.versions.
        logging.getLogger().addFilter(
            lambda record: "_fbgemm_torch_compat_table" not in record.getMessage()
        )


def bind_cpus() -> list[int]:
    """Bind all threads of this process to its CPUs, and return them in order.

    Local rank and number of ranks on this machine are those of torchrun's environment.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cpus = choose_cpus(local_rank, ranks, os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):  # new threads inherit it
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cpus)
    return cpus


def choose_cpus(
    local_rank: int, ranks: int, allowed: set[int], root: Path = Path("/")
) -> list[int]:
    """Return the CPUs of one rank out of those that a machine's ``ranks`` share, in order.

    Ranks with a GPU share the cores of its NUMA node. Where the node of any GPU is unknown, and
    without GPUs, all ranks share all cores, node by node. A rank gets whole cores, with all
    hyperthreads. With more ranks than cores, several ranks get the same core.

    Args:
        local_rank: The rank on this machine, 0 … ranks - 1.
        ranks: The number of ranks on this machine, one per GPU if there are GPUs.
        allowed: The CPUs that the process may use.
        root: The directory that holds sys and proc.
    """
    nodes = _cpus_of_nodes(allowed, root)
    gpu_nodes = _nodes_of_gpus(root)[:ranks]
    if len(gpu_nodes) == ranks and set(gpu_nodes) <= set(nodes):
        node = gpu_nodes[local_rank]
        cores = _cores(nodes[node], root)
        index, sharing = gpu_nodes[:local_rank].count(node), gpu_nodes.count(node)
    else:
        cores = [core for node in sorted(nodes) for core in _cores(nodes[node], root)]
        index, sharing = local_rank, ranks
    first, end = index * len(cores) // sharing, (index + 1) * len(cores) // sharing
    return sorted(cpu for core in cores[first : max(end, first + 1)] for cpu in core)


def _cpus_of_nodes(allowed: set[int], root: Path) -> dict[int, set[int]]:
    """Return NUMA node → its allowed CPUs; a kernel without NUMA has one node."""
    nodes = {}
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = _read_cpus(path / "cpulist") & allowed
        if cpus:
            nodes[int(path.name.removeprefix("node"))] = cpus
    return nodes or {0: allowed}


def _cores(cpus: set[int], root: Path) -> list[Core]:
    """Return the cores that ``cpus`` are hyperthreads of, in order."""
    cores = set()
    for cpu in cpus:
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        threads = _read_cpus(siblings) & cpus if siblings.exists() else {cpu}
        cores.add(tuple(sorted(threads)))
    return sorted(cores)


def _nodes_of_gpus(root: Path) -> list[int]:
    """Return the NUMA node of each GPU that CUDA shows; -1 or an empty list if unknown."""
    nodes, uuids = [], []
    for gpu in sorted((root / "proc/driver/nvidia/gpus").glob("*")):  # by PCI address
        node = root / "sys/bus/pci/devices" / gpu.name / "numa_node"
        nodes.append(int(node.read_text()) if node.exists() else -1)
        lines = (gpu / "information").read_text().splitlines()
        uuids += [line.split(":")[1].strip() for line in lines if line.startswith("GPU UUID:")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not nodes:
        return nodes
    visible_nodes = []
    for name in map(str.strip, visible.split(",")):
        indices = [i for i, uuid in enumerate(uuids) if uuid.startswith(name)]
        if name.isdigit():
            indices = [int(name)]
        if len(indices) != 1 or indices[0] >= len(nodes):
            return []  # MIG instances, for example
        visible_nodes.append(nodes[indices[0]])
    return visible_nodes


def _read_cpus(path: Path) -> set[int]:
    """Read a list such as ``0-3,8``, which means {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in path.read_text().strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus |= set(range(int(first), int(last or first) + 1))
    return cpus
