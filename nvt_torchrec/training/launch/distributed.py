"""The process group and device of a rank, and its collectives. Nothing runs at import."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from nvt_torchrec.base.errors import ClickLogError, SettingsError
from nvt_torchrec.base.threads import count_cores

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Group:
    """This process among all that train together.

    Attributes:
        rank: The number of this process, from 0.
        world_size: The number of processes.
        local_world_size: The number of processes on this machine.
        device: The device that this process computes on.
        cpu: The process group for tensors in main memory (gloo).
    """

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    cpu: dist.ProcessGroup


@contextlib.contextmanager
def process_group() -> Iterator[Group]:
    """Join the process group of torchrun's environment, or make one of this process alone.

    The group uses nccl with one GPU per process if the machine has GPUs, otherwise gloo. After an
    error the group is not destroyed: its other members may be waiting in a collective, and the
    launcher ends them. At the end, PyTorch's settings, such as the number of threads, are restored.

    Raises:
        SettingsError: Another process uses the same GPU, or this one already has a group.
    """
    if dist.is_initialized():
        raise SettingsError(
            "this process already has a process group of torch.distributed",
            "end it with torch.distributed.destroy_process_group(); if two threads of a process "
            "train, run one after the other",
        )
    alone = "WORLD_SIZE" not in os.environ
    rank = 0 if alone else int(os.environ["RANK"])
    world_size = 1 if alone else int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if alone:
        store: dist.Store = dist.HashStore()
    else:
        shared = next(dist.rendezvous("env://", rank, world_size))[0]
        store = open_attempt_store(shared, rank, world_size)
    members: dict[str, Any] = {"store": store, "rank": rank, "world_size": world_size}
    restore = _remember_torch()
    if torch.cuda.is_available():
        device = choose_gpu(store, rank)
        torch.cuda.set_device(device)
        # CUDA's default stream and all blocking streams, such as those of libcudf's reads, wait for
        # each other, so training uses a separate stream.
        torch.cuda.set_stream(torch.cuda.Stream(device))
        dist.init_process_group("nccl", device_id=device, **members)
        cpu = dist.new_group(backend="gloo")
    else:
        device = torch.device("cpu")
        # Unless the user gives a number, torchrun sets 1, which would leave cores idle.
        given = os.environ.get("OMP_NUM_THREADS")
        if given is None or (given == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
            torch.set_num_threads(max(1, count_cores() // local_world_size))
        dist.init_process_group("gloo", **members)
        cpu = dist.GroupMember.WORLD
    succeeded = False
    try:
        yield Group(rank, world_size, local_world_size, device, cpu)
        succeeded = True
    finally:
        if succeeded or world_size == 1:
            dist.destroy_process_group()
        if device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.default_stream(device))
        restore()


def _remember_torch() -> Callable[[], None]:
    """Return a function that restores the PyTorch settings that a run changes.

    These settings are global: without this, a notebook would continue with those of the run.
    """
    threads = torch.get_num_threads()
    allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    cpu_random = torch.get_rng_state()
    gpu_random = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    def restore() -> None:
        torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32 = allow_tf32
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.set_rng_state(cpu_random)
        if gpu_random is not None:
            torch.cuda.set_rng_state(gpu_random)

    return restore


def choose_gpu(store: dist.Store, rank: int) -> torch.device:
    """Return this process's own GPU.

    A process may see all GPUs of its machine, or only its own, whatever ``LOCAL_RANK`` is. Without
    ``LOCAL_RANK`` the ranks of a machine are assumed to be consecutive.

    Raises:
        SettingsError: Another process uses the same GPU.
    """
    count = torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % count)
    uuid = torch.cuda.get_device_properties(device).uuid
    if store.add(f"gpu/{uuid}", 1) > 1:
        raise SettingsError(
            f"rank {rank}: another process uses its GPU, number {device.index} of {count} here",
            "start one process per GPU: -j 1xN, or --nproc-per-node N; any other launcher must "
            "set LOCAL_RANK",
        )
    return device


def open_attempt_store(store: dist.Store, rank: int, world_size: int) -> dist.Store:
    """Return torchrun's store with a key prefix that is unique to this start (collective).

    After a restart torchrun may offer the store of the first start. That still holds the addresses
    of processes that have ended, and a rank that is quicker than its peer would connect to them. So
    rank 0 chooses a random prefix, and each other rank asks for it under a new key.

    Raises:
        SettingsError: A rank did not ask, or rank 0 did not answer, within the store's timeout.
    """
    deadline = time.monotonic() + store.timeout.total_seconds()  # type: ignore[attr-defined]
    token = uuid.uuid4().hex
    if rank:
        store.set(f"ask/{rank}", token)
        try:
            prefix = store.get(f"answer/{token}").decode()  # waits until rank 0 has answered
        except dist.DistStoreError:
            raise _make_absence_error([0], world_size, store) from None
        store.set(f"known/{prefix}/{rank}", "")
        return dist.PrefixStore(prefix, store)
    # Rank 0's token is the prefix. Rank 0 answers every question it finds, even one that an earlier
    # start left, until all ranks have confirmed that they know the prefix.
    waiting = set(range(1, world_size))
    while waiting:
        for other in list(waiting):
            if store.check([f"ask/{other}"]):
                question = store.get(f"ask/{other}").decode()
                store.set(f"answer/{question}", token)
            if store.check([f"known/{token}/{other}"]):
                waiting.remove(other)
        if waiting and time.monotonic() > deadline:
            raise _make_absence_error(sorted(waiting), world_size, store)
        time.sleep(0.01)
    return dist.PrefixStore(token, store)


def _make_absence_error(ranks: list[int], world_size: int, store: dist.Store) -> SettingsError:
    return SettingsError(
        f"rank {', '.join(map(str, ranks))} of {world_size} did not start within "
        f"{store.timeout.total_seconds():g} s",  # type: ignore[attr-defined]
        "look at the first error of that rank, and check that its machine can reach this one",
    )


def reduce_sum(group: Group, *values: float | torch.Tensor) -> list[float]:
    """Return the sum of each value over all ranks, in float64, on every rank (collective)."""
    device = group.device
    total = torch.stack(
        [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]
    )
    dist.all_reduce(total)
    return total.tolist()


def broadcast_object(group: Group, value: T) -> T:
    """Return rank 0's ``value``, which must be picklable, on every rank (collective)."""
    values: list[Any] = [value]
    dist.broadcast_object_list(values, src=0, group=group.cpu)
    return values[0]


def call_on_rank_0(group: Group, function: Callable[..., T], *args: Any) -> T:
    """Call a function on rank 0, and return its result on every rank (collective).

    Raises:
        ClickLogError: The function's error, on every rank.
    """
    value: Any = None
    if group.rank == 0:
        try:
            value = function(*args)
        except ClickLogError as error:
            value = error
    value = broadcast_object(group, value)
    if isinstance(value, ClickLogError):
        raise value
    return value


def gather_objects(group: Group, value: Any) -> list[Any]:
    """Return all ranks' values, which must be picklable, on every rank, by rank (collective)."""
    values: list[Any] = [None] * group.world_size
    dist.all_gather_object(values, value, group=group.cpu)
    return values


def was_restarted(group: Group) -> bool:
    """Return whether torchrun has started this job before (collective)."""
    # On several machines, only the agents whose own ranks failed count a restart.
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    return reduce_sum(group, restarts)[0] > 0


def gather_rows(group: Group, rows: np.ndarray) -> np.ndarray | None:
    """Concatenate the ranks' ``rows`` [n_rank, …] in rank order (collective).

    Returns:
        The rows [sum of n_rank, …] on rank 0, None on the others.
    """
    if group.world_size == 1:
        return rows
    parts: list[Any] | None = None if group.rank else [None] * group.world_size
    dist.gather_object(rows, parts, dst=0, group=group.cpu)
    return np.concatenate(parts) if parts else None
