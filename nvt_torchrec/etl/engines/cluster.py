"""A Dask cluster: one that runs already, or one on this machine, a worker per GPU or core."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import dask
from distributed import Client, KilledWorker, LocalCluster
from distributed.comm import CommClosedError

from nvt_torchrec.base.errors import ClickLogError, SettingsError
from nvt_torchrec.base.threads import count_cores
from nvt_torchrec.etl.engines.device import first_gpu, gpu_count, gpu_memory
from nvt_torchrec.etl.state.output import DASK

log = logging.getLogger(__name__)

#: The share of a GPU's memory that RMM's pool takes.
POOL_SHARE = 0.7
#: The share of a GPU's memory from which on Dask spills to the host.
SPILL_SHARE = 0.8
#: How many tasks a worker with a GPU does at once, unless NVTabular's operators run: while the last
#: blocks of one are written and synced, blocks of the other are on the GPU.
TASKS_PER_GPU = 2
#: Time limits: to reach a running scheduler;
CONNECT_SECONDS = 10
#: to start a worker, which takes seconds, on a busy machine a minute;
START_SECONDS = 300
#: to close a client or a cluster.
CLOSE_SECONDS = 20
#: Seconds that a cluster may have no worker: one that died is replaced within seconds.
LOST_SECONDS = 60


class WorkerLostError(ClickLogError):
    """Dask workers died repeatedly, nearly always because they ran out of memory."""


@contextlib.contextmanager
def cluster(
    scheduler: str | None, workers: int | None, work: Path, frames: bool = False
) -> Iterator[tuple[Client, bool]]:
    """Connect to a running cluster, or start one on this machine.

    Args:
        scheduler: The address of a running Dask cluster that sees the same files; None starts a
            :func:`local_cluster`.
        workers: See :func:`local_cluster`.
        work: The directory of the run's state, which every worker must see.
        frames: Whether NVTabular's operators run, on frames. With GPUs, the client and the
            scheduler handle frames of cuDF, too.

    Yields:
        A client of the cluster, and whether its workers have GPUs.

    Raises:
        SettingsError: No scheduler answers at the address, it has no workers, they do not see
            the shared directory, some of them have no GPU or the GPU of another, or frames need
            one where there is none, or workers of one thread.
    """
    if not scheduler:
        with local_cluster(workers, work / DASK, frames) as client:
            yield client, gpu_count() > 0
        return
    try:
        client = Client(scheduler, timeout=CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"--scheduler {scheduler}: {error}", "start one with `dask scheduler`"
        ) from error
    with client:
        yield client, _check_workers(client, f"--scheduler {scheduler}", work, frames)


def _check_workers(client: Client, name: str, shared: Path, frames: bool) -> bool:
    """Check the workers of a running cluster; return whether they have GPUs."""
    try:
        gpus = client.run(gpu_count)
        if not gpus:
            raise SettingsError(f"{name}: no workers", "start workers for this scheduler")
        sees = client.run(os.path.isdir, str(shared))
        all_have_gpus = all(gpus.values())
        # What a worker's first GPU is, is known only where it has one.
        used_gpus = set(client.run(first_gpu).values()) if all_have_gpus else None
        scheduler_gpus = 0
        if frames and all_have_gpus:
            scheduler_gpus = client.run_on_scheduler(gpu_count)
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
    if any(gpus.values()) and not all_have_gpus:
        raise SettingsError(
            f"{name}: {sum(map(bool, gpus.values()))} of {len(gpus)} workers have GPUs",
            "use workers of one kind; without GPUs: CUDA_VISIBLE_DEVICES='' for each",
        )
    if used_gpus is not None and len(used_gpus) < len(gpus):
        raise SettingsError(
            f"{name}: some of its {len(gpus)} workers use the same GPU",
            "start them with `dask cuda worker`, which gives each GPU of a host one worker",
        )
    if frames and all_have_gpus:
        threads = max(client.nthreads().values())
        if threads > 1:
            raise SettingsError(
                f"{name}: a worker has {threads} threads, and --engine nvtabular needs one for "
                "each GPU",
                "start them with `dask cuda worker --nthreads 1`; more are for the other engines",
            )
        hosts = {"this machine": gpu_count(), "the scheduler's host": scheduler_gpus}
        for host, num_gpus in hosts.items():
            if not num_gpus:
                raise SettingsError(
                    f"{name}: its workers have GPUs, and {host} has none that cuDF can use",
                    "start the run, and `dask scheduler`, on hosts with a GPU: with --engine "
                    "nvtabular both handle cuDF frames",
                )
    return all_have_gpus


@contextlib.contextmanager
def local_cluster(workers: int | None, directory: Path, frames: bool = False) -> Iterator[Client]:
    """Start workers on this machine, and stop them at the end of the context.

    Args:
        workers: The number of workers; None for one per GPU, or one per core without GPUs.
        directory: The directory for data that they spill.
        frames: Whether they run NVTabular's operators.

    Yields:
        A client, which is Dask's default client during the context.

    Raises:
        SettingsError: There are fewer GPUs than workers.
        WorkerLostError: The workers do not start.
    """
    # Dask logs every connection, and asyncio those that Ctrl-C cuts off; errors are raised anyway.
    for name in ("distributed", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    gpus = gpu_count()
    if frames or gpus:  # NVTabular takes seconds to import, in each worker
        import nvt_torchrec.nvt_compat  # noqa: F401  # workers then import it, too
    options = {
        "n_workers": workers or gpus or count_cores(),
        # NVTabular's operators keep frames and vocabularies of cuDF, which are not made for two
        # threads.
        "threads_per_worker": TASKS_PER_GPU if gpus and not frames else 1,
        "local_directory": str(directory),
        "dashboard_address": "127.0.0.1:0",  # 8787 may be taken by another run
        "scheduler_kwargs": {"dashboard": False},
        "worker_dashboard_address": None,
        "silence_logs": logging.CRITICAL,
    }
    if gpus:
        if workers and workers > gpus:
            raise SettingsError(f"{workers} workers for {gpus} GPUs", f"--workers {gpus} at most")
        from dask_cuda import LocalCUDACluster
        from dask_cuda.utils import has_device_memory_resource

        # LocalCUDACluster sets its own preload, so workers load nvt_compat by pre_import. The sizes
        # are in bytes because it would compute shares of the whole GPU for a MIG instance.
        memory = gpu_memory()
        options["rmm_pool_size"] = int(POOL_SHARE * memory)
        # An integrated GPU has no memory of its own to spill from.
        can_spill = has_device_memory_resource()
        options["device_memory_limit"] = int(SPILL_SHARE * memory) if can_spill else None
        options["pre_import"] = "nvt_torchrec.nvt_compat"
        started = _start_without_sigint(lambda: LocalCUDACluster(**options))
    else:
        started = _start_without_sigint(lambda: LocalCluster(**options, processes=True))
    with contextlib.ExitStack() as stack:
        # Dask would give up a worker that takes longer than 15 s to start again.
        patient = {"distributed.deploy.lost-worker-timeout": START_SECONDS}
        stack.enter_context(dask.config.set(patient))
        stack.callback(_close, started)
        client = Client(started)
        stack.callback(_close, client)
        yield client


def _close(opened: Client | LocalCluster) -> None:
    """Close a client or a cluster, with a time limit: Dask may wait forever for a killed worker.

    Worker processes end with this process in any case.
    """
    with contextlib.suppress(TimeoutError):
        opened.close(timeout=CLOSE_SECONDS)


def _start_without_sigint(start: Callable) -> Any:
    """Call ``start`` so that the processes it starts do not receive SIGINT.

    Ctrl-C reaches all processes of a terminal, but this process stops the workers, without their
    tracebacks. Processes inherit the signal mask of the thread that starts them, so another thread
    blocks SIGINT and starts them. This thread still receives it, and raises KeyboardInterrupt once
    the workers can be stopped.
    """
    remedy = "run `python -m etl doctor`, and see whether other processes use up the memory"
    # multiprocessing's resource tracker, if it starts later, would unblock SIGINT in that thread
    resource_tracker.ensure_running()
    mask = (signal.SIG_BLOCK, {signal.SIGINT})
    pool = ThreadPoolExecutor(1, "start-workers", signal.pthread_sigmask, mask)
    starting = pool.submit(start)
    try:
        return starting.result(START_SECONDS)
    except KeyboardInterrupt:
        with contextlib.suppress(Exception):
            starting.result(START_SECONDS).close()
        raise
    except Exception as error:
        if not starting.done():
            what = f"Dask workers did not start in {START_SECONDS} s"
            raise WorkerLostError(what, remedy) from None
        what = f"Dask workers did not start: {_first_cause(error)!r}"
        raise WorkerLostError(what, remedy) from error
    finally:
        pool.shutdown(wait=False)


def _first_cause(error: BaseException) -> BaseException:
    """Return the error of a worker that Dask hides behind "Nanny failed to start."."""
    while type(error) is RuntimeError and error.__cause__:
        error = error.__cause__
    return error


@contextlib.contextmanager
def readable_errors(client: Client | None = None) -> Iterator[None]:
    """Silence NVTabular's logging of tracebacks, and explain why workers were lost.

    Raises:
        WorkerLostError: Workers died repeatedly, or the cluster lost its scheduler or all workers.
    """
    loggers = [logging.getLogger(name) for name in ("merlin", "nvtabular")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    lost = threading.Event()
    try:
        with _watch_workers(client, lost) if client else contextlib.nullcontext():
            yield
    except (KilledWorker, MemoryError) as error:
        raise WorkerLostError(
            f"Dask workers most likely ran out of memory: {error!r}",
            "use a smaller --block_mb, fewer --workers, or cap the vocabularies; the same "
            "command keeps what is finished",
        ) from error
    except Exception as error:
        if lost.is_set():  # then of whatever kind: the client is closed
            what = f"the cluster has had no worker for {LOST_SECONDS} s"
        elif isinstance(error, CommClosedError | CancelledError):
            what = f"the scheduler of the cluster is lost: {error}"
        else:
            raise
        remedy = "see the output of scheduler and workers for the reason, start them again, "
        raise WorkerLostError(what, f"{remedy}and run this again") from None
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _watch_workers(client: Client, lost: threading.Event) -> Iterator[None]:
    """Log lost workers; close the client, which ends all waiting, once there was none for long."""
    stop = threading.Event()

    def watch() -> None:
        last_seen = time.monotonic()
        known: set[str] = set()
        while not stop.wait(min(2, LOST_SECONDS / 4)):
            workers = set(client.scheduler_info(n_workers=-1)["workers"])
            for worker in sorted(known - workers):
                log.warning("worker %s is lost, and %d are left", worker, len(workers))
            known = workers
            if workers:
                last_seen = time.monotonic()
            elif time.monotonic() - last_seen > LOST_SECONDS:
                lost.set()
                client.close(timeout=5)
                return

    thread = threading.Thread(target=watch, name="watch-workers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
