"""The Dask cluster on this machine: a worker process per GPU, or per core without one."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import nvt_compat  # noqa: F401

from distributed import Client, LocalCluster

from clicklog.errors import SettingsError

#: Shares of a GPU's memory: RMM's pool, and where Dask begins to spill to the host.
POOL_SHARE, SPILL_SHARE = 0.7, 0.8
CONNECT_SECONDS = 10


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def gpu_count() -> int:
    """GPUs that cuDF can use here (``CUDA_VISIBLE_DEVICES`` counts); 0 without cuDF."""
    if find_spec("cudf") is None or find_spec("dask_cuda") is None:
        return 0
    from numba import cuda

    return len(cuda.gpus) if cuda.is_available() else 0


@contextlib.contextmanager
def cluster(
    scheduler: str | None, workers: int | None, directory: Path
) -> Iterator[tuple[Client, bool]]:
    """A client, and whether its workers have GPUs.

    Args:
        scheduler: address of a Dask cluster that runs already and sees the same files; without,
            :func:`local_cluster`.
        workers: see :func:`local_cluster`.
        directory: see :func:`local_cluster`.

    Raises:
        SettingsError: no scheduler answers at the address, or it has no workers.
    """
    if not scheduler:
        with local_cluster(workers, directory) as client:
            yield client, gpu_count() > 0
        return
    try:
        client = Client(scheduler, timeout=CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"--scheduler {scheduler}: {error}", "start one with `dask scheduler`"
        ) from error
    with client:
        gpus = client.run(gpu_count)
        if not gpus:
            raise SettingsError(f"--scheduler {scheduler}: no workers", "start some for it")
        yield client, all(gpus.values())


@contextlib.contextmanager
def local_cluster(workers: int | None, directory: Path) -> Iterator[Client]:
    """Start workers, yield their client (Dask's default while it lives), stop them.

    Args:
        workers: how many; without, one per GPU, or one per core.
        directory: for their spilled data.

    Raises:
        SettingsError: more workers than GPUs.
    """
    # It tells of every connection that opens and closes; errors reach us as exceptions.
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    gpus = gpu_count()
    options = {
        "n_workers": workers or gpus or cores(),
        "threads_per_worker": 1,
        "local_directory": str(directory),
        "dashboard_address": "127.0.0.1:0",  # 8787 may be taken by another run
        "scheduler_kwargs": {"dashboard": False},
        "worker_dashboard_address": None,
        "silence_logs": logging.CRITICAL,
    }
    if gpus:
        if options["n_workers"] > gpus:
            raise SettingsError(f"{workers} workers for {gpus} GPUs", f"--workers {gpus} at most")
        from dask_cuda import LocalCUDACluster

        # It sets a preload of its own, so nvt_compat reaches its workers by pre_import.
        started = LocalCUDACluster(
            **options,
            rmm_pool_size=POOL_SHARE,
            device_memory_limit=SPILL_SHARE,
            pre_import="nvt_compat",
        )
    else:
        started = LocalCluster(**options, processes=True)
    with started, Client(started) as client:
        # Ctrl-C reaches them too; it is ours to stop them, without tracebacks.
        client.run(_ignore_interrupts)
        yield client
