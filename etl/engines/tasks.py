"""The functions of the cpu engine as tasks on the workers of a Dask cluster.

Workers run the same compiled loops on the same blocks, so that what is written does not depend on
where it was made. The workers need neither NVTabular nor pandas.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import Client, Future
from distributed.client import ClosedClientError

from nvt_torchrec.base.files.artifact import FileEntry
from nvt_torchrec.base.files.atomic import publish
from nvt_torchrec.clicklog.readers.raw import Block
from nvt_torchrec.etl.engines.cluster import readable_errors
from nvt_torchrec.etl.engines.cpu import count_block, day_counts, runs_of, write_block
from nvt_torchrec.etl.engines.cpu_runs import Runs, run_name, write_run
from nvt_torchrec.etl.engines.hardware import cores
from nvt_torchrec.etl.plan import Unit, by_block
from nvt_torchrec.etl.results import UnitResult
from nvt_torchrec.etl.state import record
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.workflow_description import METADATA_FILE
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.extension.workflow import DayCounts

if TYPE_CHECKING:
    from nvt_torchrec.workflows.compiled import CompiledWorkflow

log = logging.getLogger(__name__)


def count_day(
    day: int,
    blocks: list[Block],
    spec: FeatureSpec,
    directory: Path,
    client: Client,
    *,
    reject: bool,
    report: Callable[[float], object],
) -> DayCounts:
    """Count what a workflow is extended by; see :func:`etl.engines.cpu.count_day`.

    Raises:
        BadRowError: A row is malformed; of several such rows, the first in the order of ``blocks``.
        BadInputError: A block cannot be read, or there are no rows.
        OutputError: ``directory`` cannot be written.
        WorkerLostError: Workers ran out of memory.
    """
    missing = missing_blocks(directory, blocks, spec, report)
    task = functools.partial(_count_block, spec=spec, directory=directory, reject=reject)
    for rows in results(client, task, missing, [blocks[index] for index in missing]):
        report(rows)
    with open_runs(directory, blocks, spec) as runs, ThreadPoolExecutor(cores(), "etl") as pool:
        return day_counts(day, runs.files, spec, pool)


def missing_blocks(
    directory: Path, blocks: list[Block], spec: FeatureSpec, report: Callable[[float], object]
) -> list[int]:
    """Return which blocks no run in the directory is over; report the rows of the others."""
    with open_runs(directory, blocks, spec) as runs:
        report(sum(int(run.array("rows")) for run in runs.files))
        return runs.missing


def open_runs(directory: Path, blocks: list[Block], spec: FeatureSpec) -> Runs:
    """Open the runs in a directory, in which all vocabularies are counted."""
    return runs_of(blocks, spec, set(spec.vocabularies), directory)


def _count_block(
    index: int, block: Block, *, spec: FeatureSpec, directory: Path, reject: bool
) -> int:
    """Count a block in a worker, and write the counts durably; return its rows."""
    log.debug("begin fit %s:%d", block.source, block.begin)
    run = count_block(block, spec, reject)
    path = directory / run_name(index, index + 1)
    write_run(path, run.rows, run.nulls, run.moments, run.counts)
    return run.rows


def transform(
    units: list[Unit],
    workflow_path: Path,
    parts: Path,
    work: Path,
    client: Client,
    *,
    reject: bool,
) -> Iterator[UnitResult]:
    """Transform units with a saved workflow; see :func:`etl.engines.cpu.transform`.

    Raises:
        BadRowError: A row is malformed. Of several errors the first is raised, and the remaining
            units are cancelled.
        OutputError: A part cannot be written.
        WorkerLostError: Workers ran out of memory.
    """
    task = with_workflow(_transform_block, workflow_path, parts=parts, work=work, reject=reject)
    for several in results(client, task, by_block(units)):
        yield from several


def with_workflow(task: Callable, workflow_path: Path, **options: Any) -> functools.partial:
    """Give a task the path of a saved workflow, the digest of its description, and options.

    Workers keep the workflow that they have loaded, and the path may come to hold another one. The
    workflow's own digest would not do: it is the same for specs that differ in the file format.
    """
    digest = FileEntry.of(workflow_path / METADATA_FILE).sha256
    return functools.partial(task, workflow_path=str(workflow_path), digest=digest, **options)


def _transform_block(
    units: tuple[Unit, ...],
    *,
    workflow_path: str,
    digest: str,
    parts: Path,
    work: Path,
    reject: bool,
) -> list[UnitResult]:
    """Transform the units of a block in a worker; write their parts and records, durably."""
    log.debug("begin %s", units[0].file)
    workflow = _load_once(workflow_path, digest)
    found, written = write_block(units, workflow, parts, work, reject=reject)
    publish(written)
    record(work, found)
    return found


@functools.lru_cache(maxsize=1)
def _load_once(path: str, digest: str) -> CompiledWorkflow:
    """Load a workflow; keep the last one loaded. See :func:`with_workflow` for ``digest``."""
    return compiled.load(path)


def results(client: Client, task: Callable, *arguments: list) -> Iterator[Any]:
    """Run a task for each of the arguments; yield the results in their order."""
    futures: list[Future] = client.map(task, *arguments, pure=False, batch_size=1000)
    try:
        with readable_errors(client):
            for future in futures:
                yield future.result()
                future.release()
    finally:
        with contextlib.suppress(CancelledError, ClosedClientError):
            client.cancel([future for future in futures if not future.done()])
