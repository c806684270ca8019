"""The Dask cluster on this machine: a worker process per GPU, or per core without one."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import nvt_compat  # noqa: F401

from distributed import Client, LocalCluster

from clicklog.errors import ClickLogError, SettingsError
from etl.engines.hardware import cores, gpu_count, gpu_memory

#: Shares of a GPU's memory: RMM's pool, and where Dask begins to spill to the host.
POOL_SHARE, SPILL_SHARE = 0.7, 0.8
CONNECT_SECONDS = 10
#: A worker takes seconds to start, on a busy machine a minute.
START_SECONDS = 300
CLOSE_SECONDS = 20


class WorkerLostError(ClickLogError):
    """A Dask worker died again and again, in nearly all cases for want of memory."""


@contextlib.contextmanager
def cluster(
    scheduler: str | None, workers: int | None, directory: Path, shared: Path
) -> Iterator[tuple[Client, bool]]:
    """A client, and whether its workers have GPUs.

    Args:
        scheduler: address of a Dask cluster that runs already and sees the same files; without,
            :func:`local_cluster`.
        workers: see :func:`local_cluster`.
        directory: see :func:`local_cluster`.
        shared: a directory that every worker must see.

    Raises:
        SettingsError: no scheduler answers at the address, it has no workers, they do not see
            the shared directory, or they have GPUs and this machine or the scheduler's has none.
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
        yield client, _checked(client, f"--scheduler {scheduler}", shared)


def _checked(client: Client, name: str, shared: Path) -> bool:
    """Whether the workers of a cluster that runs already have GPUs."""
    try:
        gpus = client.run(gpu_count)
        if not gpus:
            raise SettingsError(f"{name}: no workers", "start some for it")
        sees = client.run(os.path.isdir, str(shared))
        at_scheduler = any(gpus.values()) and client.run_on_scheduler(gpu_count)
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"{name}: its workers, or the scheduler, have no module {error.name}",
            "install this project on every host of the cluster, or put it into PYTHONPATH there",
        ) from error
    blind = sorted(worker for worker, seen in sees.items() if not seen)
    if blind:
        raise SettingsError(
            f"{name}: {len(blind)} of {len(sees)} workers do not see {shared}: {blind[0]} …",
            "choose an --output_path on a file system that all hosts share at the same path",
        )
    if any(gpus.values()) and not all(gpus.values()):
        raise SettingsError(
            f"{name}: {sum(map(bool, gpus.values()))} of {len(gpus)} workers have GPUs",
            "use workers of one kind; without GPUs: CUDA_VISIBLE_DEVICES='' for each",
        )
    gpu = all(gpus.values())
    if gpu and not gpu_count():
        raise SettingsError(
            f"{name}: its workers have GPUs, and this machine has none that cuDF can use",
            "start the run on one of the cluster's hosts: the workflow is built here, with cuDF",
        )
    if gpu and not at_scheduler:
        raise SettingsError(
            f"{name}: its workers have GPUs, and the scheduler's host has none that cuDF can use",
            "start `dask scheduler` on a host with a GPU: it unpacks empty cuDF frames",
        )
    return gpu


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

        # It sets a preload of its own, so nvt_compat reaches its workers by pre_import. It would
        # take shares of the whole card where a worker has an instance of one.
        memory = gpu_memory()
        options |= {
            "rmm_pool_size": int(POOL_SHARE * memory),
            "device_memory_limit": int(SPILL_SHARE * memory),
            "pre_import": "nvt_compat",
        }
        started = _uninterrupted(lambda: LocalCUDACluster(**options))
    else:
        started = _uninterrupted(lambda: LocalCluster(**options, processes=True))
    with contextlib.ExitStack() as stack:
        stack.callback(_close, started)
        client = Client(started)
        stack.callback(_close, client)
        yield client


def _close(one: Client | LocalCluster) -> None:
    """Close it, but do not wait for ever, as Dask does at times after a worker was killed.

    The processes of workers end with this one, whatever they do.
    """
    with contextlib.suppress(TimeoutError):
        one.close(timeout=CLOSE_SECONDS)


def _uninterrupted(start: Callable):
    """``start()``, the processes of which never see Ctrl-C.

    It reaches all processes of a terminal; it is ours to stop the workers, without tracebacks.
    They inherit the signal mask of the thread that starts them, so it is another than this one:
    Ctrl-C still reaches us, and is raised once there is something to stop.
    """
    outcome: dict = {}

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            outcome["value"] = start()
        except Exception as error:
            outcome["error"] = error

    # multiprocessing's helper, once it runs, lifts the mask of the thread that started it
    resource_tracker.ensure_running()
    thread = threading.Thread(target=run, name="start-workers", daemon=True)
    thread.start()
    try:
        thread.join(START_SECONDS)
    except KeyboardInterrupt:
        thread.join(START_SECONDS)
        if "value" in outcome:
            outcome["value"].close()
        raise
    remedy = "see what `python -m etl doctor` says, and the memory that others have left"
    if thread.is_alive():
        raise WorkerLostError(f"Dask workers did not start in {START_SECONDS} s", remedy)
    if "error" in outcome:
        error = outcome["error"]
        raise WorkerLostError(
            f"Dask workers did not start: {_first_cause(error)!r}", remedy
        ) from error
    return outcome["value"]


def _first_cause(error: BaseException) -> BaseException:
    """What went wrong in a worker, behind Dask's "Nanny failed to start."."""
    while type(error) is RuntimeError and error.__cause__:
        error = error.__cause__
    return error
