"""Count and encode blocks on the workers of a Dask cluster.

Workers run the same functions on the same blocks as the threads of the ``cpu`` engine, so the
output does not depend on the engine.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, TypeVar

from distributed import Client, Future, wait
from distributed.client import ClosedClientError

from nvt_torchrec.base.device import device_errors, fall_back
from nvt_torchrec.base.files.artifact import FileEntry
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.etl.engines.cluster import readable_errors
from nvt_torchrec.etl.engines.device import gpu_workers as device
from nvt_torchrec.etl.engines.engine import Engine, Job, Report, open_runs
from nvt_torchrec.etl.engines.host import count_block, encode_block
from nvt_torchrec.etl.engines.runs import run_name, write_run
from nvt_torchrec.etl.state.output import FIT
from nvt_torchrec.etl.units.unit_plan import Unit, group_by_block
from nvt_torchrec.etl.units.writing import UnitResult, finish_units
from nvt_torchrec.formats.workflow_description import METADATA_FILE
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.compiled import CompiledWorkflow

log = logging.getLogger(__name__)
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

#: Time limit for comparing the first block, which takes seconds, and for compiling the kernels.
COMPARE_SECONDS = 300
_REMEDY = "begin again with --engine cpu --restart"


class Workers(Engine):
    """Counts and encodes on the workers of a cluster, on their GPUs if they have any.

    Args:
        job: The job.
        client: A client of the cluster.
        gpu: Whether its workers have GPUs.
    """

    def __init__(self, job: Job, client: Client, gpu: bool) -> None:
        super().__init__(job)
        self.client = client
        self.gpu = gpu

    def count(self, blocks: list[Block], report: Report) -> None:
        """See :meth:`Engine.count`."""
        with open_runs(self.job, blocks) as runs:
            report(runs.rows)
            numbered = [(index, blocks[index]) for index in runs.missing]
        on_gpus = self._uses_gpus(blocks)
        if on_gpus:
            log.info("Criteo's format: kernels on the GPUs parse, count and encode text")
        if on_gpus and self._agrees("counting", device.compare_counts, blocks[0]):
            tasks = device.divide_tasks(numbered, self.client)
            results = self._run(device.count_blocks, tasks, on_gpus)
        else:
            results = self._run(_count_block, numbered)
        for rows in results:
            report(rows)

    def encode(self, units: list[Unit], workflow: Path) -> Iterator[UnitResult]:
        """See :meth:`Engine.encode`."""
        # Workers cache the workflow that they loaded, but the path may later hold another one. So
        # the digest of its description identifies it. (The digest of the workflow itself is the
        # same for specs that differ only in the file format.)
        saved = (str(workflow), str(FileEntry.from_file(workflow / METADATA_FILE).sha256))
        on_gpus = self._uses_gpus(unit.block for unit in units)
        on_gpus = on_gpus and device.has_room(workflow, self.client)
        if on_gpus and self._agrees("encoding", device.compare_codes, units[0], saved):
            tasks = device.divide_tasks(units, self.client)
            results = self._run(device.encode_units, tasks, on_gpus, workflow=saved)
        else:
            results = self._run(self._encode_block(), group_by_block(units), workflow=saved)
        for results_of_task in results:
            yield from results_of_task

    def _encode_block(self) -> Callable[..., list[UnitResult]]:
        """Return the task that encodes the units of a block on a host."""
        return _encode_block

    def _uses_gpus(self, blocks: Iterable[Block]) -> bool:
        """Return True if the workers' GPUs can count and encode the blocks."""
        return self.gpu and device.takes(self.job.spec, blocks)

    def _agrees(self, what: str, task: Callable[..., str], *first: Any) -> bool:
        """Compare each worker's GPU with the host on the first block; return True if all agree.

        Raises:
            DeviceError: A GPU disagrees, or its worker died or hangs, and the settings are strict.
        """
        begin = time.perf_counter()
        # If a worker has died, another one may run its task.
        options = {"pure": False, "allow_other_workers": True}
        futures = []
        for worker in self.client.scheduler_info(n_workers=-1)["workers"]:
            future = self.client.submit(task, self.job, *first, workers=[worker], **options)
            futures.append(future)
        try:
            wait(futures, COMPARE_SECONDS)
            differences = self.client.gather(futures)
            why = next((difference for difference in differences if difference), "")
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self._restart_busy(futures)
        self.compare_seconds += time.perf_counter() - begin
        if why:
            fall_back(f"{what} on the GPU", why, "the CPU does it", strict=self.job.strict_gpu)
        return not why

    def _restart_busy(self, futures: list[Future]) -> None:
        """Cancel tasks, and restart workers that hang in them, as they can run no other task."""
        with contextlib.suppress(Exception):  # the workers have no nanny, or the cluster is gone
            tasks_of_workers = self.client.processing()
            keys = {future.key for future in futures}
            self.client.cancel(futures)
            busy = [worker for worker, tasks in tasks_of_workers.items() if keys & set(tasks)]
            self.client.restart_workers(busy)

    def map_tasks(
        self, work: Callable[[_Task], _Result], tasks: Iterable[_Task]
    ) -> Iterator[_Result]:
        """See :meth:`Engine.map_tasks`."""
        return self._results(work, list(tasks))

    def _run(
        self, task: Callable[..., Any], items: list, on_gpus: bool = False, **options: Any
    ) -> Iterator[Any]:
        """Run a task of the job for each item; yield the results in their order."""
        return self._results(functools.partial(task, job=self.job, **options), items, on_gpus)

    def _results(
        self, task: Callable[[Any], Any], items: list, on_gpus: bool = False
    ) -> Iterator[Any]:
        """Run a task for each item; yield the results in their order."""
        futures: list[Future] = self.client.map(task, items, pure=False, batch_size=1000)
        try:
            explained = device_errors(_REMEDY) if on_gpus else contextlib.nullcontext()
            with readable_errors(self.client), explained:
                for future in futures:
                    yield future.result()
                    future.release()
        finally:
            # RuntimeError: the event loop was closed together with the client.
            with contextlib.suppress(CancelledError, ClosedClientError, RuntimeError):
                self.client.cancel([future for future in futures if not future.done()])


def _count_block(numbered: tuple[int, Block], *, job: Job) -> int:
    """Count a block in a worker, and write the counts durably; return the number of rows."""
    index, block = numbered
    log.debug("begin fit %s:%d", block.source, block.begin)
    run = count_block(block, job.spec, job.max_bad_rows, job.event_files, job.additions)
    write_run(job.work / FIT / run_name(index, index + 1), run)
    return run.rows


def _encode_block(
    units: tuple[Unit, ...], *, job: Job, workflow: tuple[str, str]
) -> list[UnitResult]:
    """Encode the units of a block in a worker; write their parts and records, durably."""
    log.debug("begin %s", units[0].file)
    loaded = _load_once(*workflow)
    encoded = encode_block(
        units,
        loaded,
        job.work,
        max_bad_rows=job.max_bad_rows,
        events=job.events,
        additions=job.additions,
    )
    return finish_units(job.work, *encoded)


@functools.lru_cache(maxsize=1)
def _load_once(path: str, digest: str) -> CompiledWorkflow:
    """Load a workflow, and cache the last one; ``digest`` is a part of the cache's key."""
    return compiled.load(path)
