"""Each rank on CPUs of its own, near its GPU: read from /sys, set before PyTorch starts threads.

What NVIDIA's ``bind.sh`` does around each process of their DLRM, done by the process itself. Memory
follows: Linux takes it from the NUMA node of the CPU that first writes to it, and all threads of
the rank run on these CPUs.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

#: CPUs that are hyperthreads of one core, in order.
Core = tuple[int, ...]


def bind_cpus() -> list[int]:
    """Keep this process, and the threads that it has, to its CPUs. Returns them, in order.

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
    """The CPUs of one rank out of those that a machine's ``ranks`` share, in order.

    Ranks with a GPU share the cores of the NUMA node that it is attached to; where that is not
    known of every GPU, and without GPUs, all ranks share all cores, node by node. Whole cores are
    dealt, with both hyperthreads. With more ranks than cores, several ranks get the same one.

    Args:
        local_rank: 0 … ranks - 1.
        ranks: on this machine, one per GPU if there are GPUs.
        allowed: CPUs that the process may use at all.
        root: where /sys and /proc are.
    """
    nodes = _nodes(allowed, root)
    near = _nodes_of_gpus(root)[:ranks]
    if len(near) == ranks and set(near) <= set(nodes):
        cores = _cores(nodes[near[local_rank]], root)
        place, sharing = near[:local_rank].count(near[local_rank]), near.count(near[local_rank])
    else:
        cores = [core for node in sorted(nodes) for core in _cores(nodes[node], root)]
        place, sharing = local_rank, ranks
    first, end = place * len(cores) // sharing, (place + 1) * len(cores) // sharing
    return sorted(cpu for core in cores[first : max(end, first + 1)] for cpu in core)


def _nodes(allowed: set[int], root: Path) -> dict[int, set[int]]:
    """NUMA node → allowed CPUs; a kernel without NUMA has one node."""
    nodes = {}
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = _read_list(path / "cpulist") & allowed
        if cpus:
            nodes[int(path.name.removeprefix("node"))] = cpus
    return nodes or {0: allowed}


def _cores(cpus: set[int], root: Path) -> list[Core]:
    """The cores that ``cpus`` are hyperthreads of, in order."""
    cores = set()
    for cpu in cpus:
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        same = _read_list(siblings) & cpus if siblings.exists() else {cpu}
        cores.add(tuple(sorted(same)))
    return sorted(cores)


def _nodes_of_gpus(root: Path) -> list[int]:
    """The NUMA node of each GPU that CUDA shows, in order; -1 or nothing where it is unknown."""
    nodes, ids = [], []
    for gpu in sorted((root / "proc/driver/nvidia/gpus").glob("*")):  # by PCI address
        node = root / "sys/bus/pci/devices" / gpu.name / "numa_node"
        nodes.append(int(node.read_text()) if node.exists() else -1)
        lines = (gpu / "information").read_text().splitlines()
        ids += [line.split(":")[1].strip() for line in lines if line.startswith("GPU UUID:")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not nodes:
        return nodes
    found = []
    for name in visible.split(","):
        match = [i for i, uuid in enumerate(ids) if uuid.startswith(name.strip())]
        if name.strip().isdigit():
            match = [int(name)]
        if len(match) != 1 or match[0] >= len(nodes):
            return []  # MIG instances, for example
        found.append(nodes[match[0]])
    return found


def _read_list(path: Path) -> set[int]:
    """``0-3,8`` → {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in path.read_text().strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus |= set(range(int(first), int(last or first) + 1))
    return cpus
