"""CPUs per rank: chosen for machines that are not there, and bound on the one that is."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from nvt_torchrec.dlrm.launch.startup import choose_cpus
from tests.dlrm.runs import MODEL, run_command


def write_machine(root: Path, nodes: int, cores: int, gpus: list[int]) -> set[int]:
    """/sys and /proc of a machine; CPU c and c + nodes · cores are one core. Returns its CPUs.

    ``gpus``: the NUMA node of each, in the order of their PCI addresses.
    """
    total = nodes * cores
    for node in range(nodes):
        path = root / f"sys/devices/system/node/node{node}"
        path.mkdir(parents=True)
        first, last = node * cores, (node + 1) * cores - 1
        (path / "cpulist").write_text(f"{first}-{last},{first + total}-{last + total}\n")
    for cpu in range(2 * total):
        path = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        path.mkdir(parents=True)
        (path / "thread_siblings_list").write_text(f"{cpu % total},{cpu % total + total}\n")
    for i, node in enumerate(gpus):
        address = f"0000:{i + 1:02x}:00.0"
        for path in (f"proc/driver/nvidia/gpus/{address}", f"sys/bus/pci/devices/{address}"):
            (root / path).mkdir(parents=True)
        (root / path / "numa_node").write_text(f"{node}\n")
        information = root / f"proc/driver/nvidia/gpus/{address}/information"
        information.write_text(f"Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-{i}aaa\n")
    return set(range(2 * total))


@pytest.fixture(autouse=True)
def all_gpus_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_ranks_share_the_node_of_their_gpus(tmp_path):
    cpus = write_machine(tmp_path, nodes=2, cores=4, gpus=[1, 0, 1, 0])
    chosen = [choose_cpus(rank, 4, cpus, tmp_path) for rank in range(4)]
    assert chosen == [[4, 5, 12, 13], [0, 1, 8, 9], [6, 7, 14, 15], [2, 3, 10, 11]]


def test_visible_devices_say_which_gpus(tmp_path, monkeypatch):
    cpus = write_machine(tmp_path, nodes=2, cores=2, gpus=[0, 0, 1, 1])
    for visible in ("3,0", "GPU-3aaa,GPU-0aaa"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert choose_cpus(0, 2, cpus, tmp_path) == [2, 3, 6, 7]
        assert choose_cpus(1, 2, cpus, tmp_path) == [0, 1, 4, 5]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")  # whose GPU is not known
    assert choose_cpus(1, 2, cpus, tmp_path) == [2, 3, 6, 7]


@pytest.mark.parametrize("gpus", [[], [-1, -1]])
def test_without_gpus_all_cores_are_shared_node_by_node(tmp_path, gpus):
    cpus = write_machine(tmp_path, nodes=2, cores=3, gpus=gpus)
    assert choose_cpus(0, 1, cpus, tmp_path) == sorted(cpus)
    assert choose_cpus(1, 2, cpus, tmp_path) == [3, 4, 5, 9, 10, 11]
    four = [choose_cpus(rank, 4, cpus, tmp_path) for rank in range(4)]
    assert sorted(cpu for one in four for cpu in one) == sorted(cpus)
    many = [choose_cpus(rank, 8, cpus, tmp_path) for rank in range(8)]
    assert all(len(one) == 2 for one in many)


def test_only_what_the_process_may_use(tmp_path):
    """A container's CPUs, or those that Slurm gave."""
    write_machine(tmp_path, nodes=2, cores=4, gpus=[0, 1])
    allowed = {4, 5, 6, 12}  # none of node 0
    assert choose_cpus(0, 2, allowed, tmp_path) == [4, 12]
    assert choose_cpus(1, 2, allowed, tmp_path) == [5, 6]


def test_no_sysfs(tmp_path):
    assert choose_cpus(1, 2, {0, 1, 2, 3}, tmp_path) == [2, 3]


BOUND = """
import json, os, sys
import train_torchrec
status = train_torchrec.main(sys.argv[2:])
import torch
found = {
    "cpus": [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")],
    "threads": torch.get_num_threads(),
}
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
sys.exit(status)
"""


def test_every_thread_of_a_rank_is_bound(data, tmp_path):
    """As the second of two ranks on this machine; it trains without the first."""
    script = tmp_path / "bound.py"
    script.write_text(BOUND)
    flags = [*MODEL, f"--binary_path={data}", "--limit_train_batches=3", "--learning_rate=0.1"]
    place = ["env", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2"]
    file = tmp_path / "found.json"
    result = run_command([*place, sys.executable, str(script), str(file), *flags, "--bind_cpus"])
    assert result.returncode == 0, result.stderr
    found = json.loads(file.read_text())
    expected = choose_cpus(1, 2, os.sched_getaffinity(0))
    assert len(found["cpus"]) > 1, "several threads"
    assert all(cpus == expected for cpus in found["cpus"])
    assert found["threads"] == len(expected)
