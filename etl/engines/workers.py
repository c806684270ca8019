"""Count and encode blocks on the workers of a Dask cluster.

Workers run the same functions on the same blocks as threads of this process do, so that what is
written does not depend on where it was made.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import Client, Future
from distributed.client import ClosedClientError

from nvt_torchrec.base.files.artifact import FileEntry
from nvt_torchrec.base.files.atomic import publish
from nvt_torchrec.clicklog.readers.raw import Block
from nvt_torchrec.etl.engines.block import count_block, encode_block
from nvt_torchrec.etl.engines.cluster import readable_errors
from nvt_torchrec.etl.engines.fitting import open_runs
from nvt_torchrec.etl.engines.runs import run_name, write_run
from nvt_torchrec.etl.plan import Unit, by_block
from nvt_torchrec.etl.results import UnitResult
from nvt_torchrec.etl.state import record
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.workflow_description import METADATA_FILE
from nvt_torchrec.workflows import compiled

if TYPE_CHECKING:
    from nvt_torchrec.workflows.compiled import CompiledWorkflow

log = logging.getLogger(__name__)


def count(
    blocks: list[Block],
    spec: FeatureSpec,
    directory: Path,
    client: Client,
    *,
    reject: bool | int,
    report: Callable[[float], object],
) -> None:
    """Count all blocks; see :func:`etl.engines.threads.count`.

    Raises:
        BadRowError: A row is malformed; of several such rows, the first in the order of ``blocks``.
        BadInputError: A block cannot be read.
        OutputError: ``directory`` cannot be written.
        WorkerLostError: Workers ran out of memory.
    """
    missing = missing_blocks(directory, blocks, spec, report)
    task = functools.partial(_count_block, spec=spec, directory=directory, reject=reject)
    for rows in results(client, task, missing, [blocks[index] for index in missing]):
        report(rows)


def missing_blocks(
    directory: Path, blocks: list[Block], spec: FeatureSpec, report: Callable[[float], object]
) -> list[int]:
    """Return which blocks no run in the directory is over; report the rows of the others."""
    with open_runs(blocks, spec, directory) as runs:
        report(sum(int(run.array("rows")) for run in runs.files))
        return runs.missing


def _count_block(
    index: int, block: Block, *, spec: FeatureSpec, directory: Path, reject: bool | int
) -> int:
    """Count a block in a worker, and write the counts durably; return its rows."""
    log.debug("begin fit %s:%d", block.source, block.begin)
    run = count_block(block, spec, reject)
    path = directory / run_name(index, index + 1)
    write_run(path, run.rows, run.nulls, run.moments, run.counts)
    return run.rows


def encode(
    units: list[Unit],
    workflow_path: Path,
    parts: Path,
    work: Path,
    client: Client,
    *,
    reject: bool | int,
) -> Iterator[UnitResult]:
    """Encode units with a saved workflow; see :func:`etl.engines.threads.encode`.

    Raises:
        BadRowError: A row is malformed. Of several errors the first is raised, and the remaining
            units are cancelled.
        OutputError: A part cannot be written.
        WorkerLostError: Workers ran out of memory.
    """
    task = with_workflow(_encode_block, workflow_path, parts=parts, work=work, reject=reject)
    for several in results(client, task, by_block(units)):
        yield from several


def with_workflow(task: Callable, workflow_path: Path, **options: Any) -> functools.partial:
    """Give a task the path of a saved workflow, the digest of its description, and options.

    Workers keep the workflow that they have loaded, and the path may come to hold another one. The
    workflow's own digest would not do: it is the same for specs that differ in the file format.
    """
    digest = FileEntry.of(workflow_path / METADATA_FILE).sha256
    return functools.partial(task, workflow_path=str(workflow_path), digest=digest, **options)


def _encode_block(
    units: tuple[Unit, ...],
    *,
    workflow_path: str,
    digest: str,
    parts: Path,
    work: Path,
    reject: bool | int,
) -> list[UnitResult]:
    """Encode the units of a block in a worker; write their parts and records, durably."""
    log.debug("begin %s", units[0].file)
    workflow = _load_once(workflow_path, digest)
    block_results, written = encode_block(units, workflow, parts, work, reject=reject)
    publish(written)
    record(work, block_results)
    return block_results


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
