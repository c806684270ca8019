"""The Dask cluster on this machine: a worker process per GPU, or per core without one."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import nvt_compat  # noqa: F401

from distributed import Client, LocalCluster

from clicklog.errors import SettingsError

#: Shares of a GPU's memory: RMM's pool, and where Dask begins to spill to the host.
POOL_SHARE, SPILL_SHARE = 0.7, 0.8


def gpu_count() -> int:
    """GPUs that cuDF can use here (``CUDA_VISIBLE_DEVICES`` counts); 0 without cuDF."""
    if find_spec("cudf") is None or find_spec("dask_cuda") is None:
        return 0
    from numba import cuda

    return len(cuda.gpus) if cuda.is_available() else 0


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
        "n_workers": workers or gpus or os.cpu_count(),
        "threads_per_worker": 1,
        "local_directory": str(directory),
        "scheduler_kwargs": {"dashboard": False},
        "worker_dashboard_address": None,
        "silence_logs": logging.CRITICAL,
    }
    if gpus:
        if options["n_workers"] > gpus:
            raise SettingsError(f"{workers} workers for {gpus} GPUs", f"--workers {gpus} at most")
        from dask_cuda import LocalCUDACluster

        # It sets a preload of its own, so nvt_compat reaches its workers by pre_import.
        cluster = LocalCUDACluster(
            **options,
            rmm_pool_size=POOL_SHARE,
            device_memory_limit=SPILL_SHARE,
            pre_import="nvt_compat",
        )
    else:
        cluster = LocalCluster(**options, processes=True)
    with cluster, Client(cluster) as client:
        yield client
