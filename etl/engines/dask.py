"""Fitting and transforming blocks with NVTabular over Dask: cuDF on GPUs, pandas without."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nvt_compat  # noqa: F401

import dask.dataframe as dd
import numpy as np
import nvtabular
import pyarrow as pa
import pyarrow.compute as pc
from dask import delayed
from distributed import Client, KilledWorker, as_completed, get_worker
from distributed.client import ClosedClientError
from merlin.dag import Graph
from nvtabular.ops import Categorify

from clicklog.files.artifact import FileEntry
from clicklog.readers.raw import Block, read_block
from clicklog.rows import RawRows, empty_rows
from clicklog.schema import TableSchema
from clicklog.spec.feature_spec import FIRST_OOV_ID, FeatureSpec
from etl.engines.choice import BLOCKS_AT_ONCE
from etl.engines.cluster import WorkerLostError
from etl.plan import Unit
from etl.results import UnitResult
from etl.state import finish_unit
from workflows import inspect, to_frame
from workflows.description import METADATA_FILE
from workflows.frames import joined, to_table
from workflows.graph import build
from workflows.store import load

log = logging.getLogger(__name__)

_PROGRESS = "etl-rows"
#: Vocabularies that stay on a worker's GPU, in bytes of all columns' tables (value and id).
VOCABULARY_BYTES, _ENTRY = 2 << 30, 16
#: How long a cluster may be without a worker: one that died is replaced within seconds.
LOST_SECONDS = 60


def fit(
    blocks: list[Block],
    spec: FeatureSpec,
    directory: Path,
    client: Client,
    *,
    gpu: bool,
    reject: bool,
    report: Callable[[float], object],
) -> nvtabular.Workflow:
    """Fit a Workflow on blocks.

    Partial counts and sums are merged in a tree over the blocks in their order, so the result
    does not depend on the number of workers.

    Args:
        blocks: of the training days.
        spec: the columns.
        directory: for the vocabularies.
        client: of a Dask cluster.
        gpu: use cuDF frames.
        reject: leave bad rows out instead of raising.
        report: called with the rows that were done since the last call, in the end also with
            those of the first block again.

    Raises:
        BadRowError: a row breaks the spec.
        WorkerLostError: workers run out of memory.
    """
    empty = to_frame(empty_rows(spec, label=True), spec, gpu=gpu)
    # NVTabular looks at a row of the first group before and after, for its types.
    groups = [blocks[:1], *_groups(blocks[1:], BLOCKS_AT_ONCE[gpu])]
    # Tasks of their own, which Dask fuses with nothing: so the graphs that NVTabular makes, one for
    # each operator with statistics, share what was read. (A worker weighs a frame three times, for
    # the task and two aliases of it, and so may spill early.)
    read = delayed(functools.partial(_read_frame, spec=spec, gpu=gpu, reject=reject))
    frame = dd.from_delayed([read(group) for group in groups], meta=empty, verify_meta=False)
    with readable_errors(client):
        dataset = nvtabular.Dataset(frame, cpu=not gpu)
        client.subscribe_topic(_PROGRESS, lambda event: report(event[1]))
        try:
            return build(spec, str(directory)).fit(dataset)
        finally:
            with contextlib.suppress(ClosedClientError):
                client.unsubscribe_topic(_PROGRESS)


def _read_frame(blocks: Sequence[Block], spec: FeatureSpec, gpu: bool, reject: bool):
    rows, frame = _read(blocks, spec, gpu=gpu, reject=reject)
    with contextlib.suppress(ValueError):  # outside of a worker nobody listens
        get_worker().log_event(_PROGRESS, sum(map(len, rows)))
    return frame


def _read(
    blocks: Sequence[Block], spec: FeatureSpec, *, gpu: bool, reject: bool
) -> tuple[list[RawRows], Any]:
    """The rows of each block, and the frame of all of them."""
    make = to_table if gpu else to_frame

    def read(block: Block) -> tuple[RawRows, Any]:
        rows = read_block(block, spec, reject=reject)
        return rows, make(rows, spec)

    rows, parts = zip(*_each(read, blocks), strict=True)
    return list(rows), joined(parts, gpu=gpu)


def _groups(values: list, size: int) -> list[list]:
    return [values[i : i + size] for i in range(0, len(values), size)]


def _each(function: Callable, values: Sequence) -> list:
    """``function`` of each value, in threads; the first error in their order is raised."""
    if len(values) == 1:
        return [function(values[0])]
    with ThreadPoolExecutor(len(values)) as pool:
        return list(pool.map(function, values))


def transform(
    units: list[Unit],
    workflow_path: Path,
    parts: Path,
    work: Path,
    client: Client,
    *,
    gpu: bool,
    reject: bool,
) -> Iterator[UnitResult]:
    """Transform units with a saved workflow and write their parts; yields as they finish.

    The workflow is the saved one, so that training data are made by what inference will load.

    Args:
        units: what to do.
        workflow_path: of the saved workflow.
        parts: directory of the splits' parts.
        work: for the records of finished units.
        client: of a Dask cluster.
        gpu: use cuDF frames.
        reject: leave bad rows out instead of raising.

    Raises:
        BadRowError, OutputError: of the first unit that fails; the others are cancelled.
        WorkerLostError: workers run out of memory.
    """
    # not so many at once that workers are left without
    workers = max(1, len(client.scheduler_info(n_workers=-1)["workers"]))
    at_once = max(1, min(BLOCKS_AT_ONCE[gpu], len(units) // workers))
    futures = client.map(
        transform_units,
        _groups(units, at_once),
        workflow_path=str(workflow_path),
        digest=FileEntry.of(workflow_path / METADATA_FILE).sha256,
        parts=parts,
        work=work,
        gpu=gpu,
        reject=reject,
        pure=False,
        batch_size=1000,
    )
    try:
        with readable_errors(client):
            for future in as_completed(futures):
                yield from future.result()
                future.release()
    finally:
        with contextlib.suppress(CancelledError, ClosedClientError):
            client.cancel([future for future in futures if not future.done()])


def transform_units(
    units: Sequence[Unit],
    *,
    workflow_path: str,
    digest: str,
    parts: Path,
    work: Path,
    gpu: bool,
    reject: bool,
) -> list[UnitResult]:
    """Transform units, and write their parts and their records; ``digest``: see :func:`_loaded`."""
    for unit in units:
        log.debug("begin %s", unit.file)
    workflow, schema, spec = _loaded(workflow_path, digest, gpu)
    rows, frame = _read([unit.block for unit in units], spec, gpu=gpu, reject=reject)
    whole = transform_frame(frame, workflow, schema, gpu=gpu)
    del frame
    ends = np.cumsum([0, *map(len, rows)]).tolist()

    def finish(i: int) -> UnitResult:
        table = whole.slice(ends[i], ends[i + 1] - ends[i])
        return finish_unit(units[i], [(rows[i], table, _count_oov(table, spec))], parts, work)

    return _each(finish, range(len(units)))


def _count_oov(table: pa.Table, spec: FeatureSpec) -> np.ndarray:
    """Out-of-vocabulary ids per categorical column: int64 [categorical columns]."""
    counts = []
    for column in spec.categorical:
        ids = table[column.name]
        ids = (pc.list_flatten(ids) if column.multi_hot else ids).to_numpy()
        counts.append(np.count_nonzero((ids >= FIRST_OOV_ID) & (ids < column.reserved_ids)))
    return np.array(counts, np.int64)


def transform_frame(
    frame: Any, workflow: nvtabular.Workflow, schema: TableSchema, *, gpu: bool
) -> pa.Table:
    """The columns of the training parquet for a frame of raw columns with labels."""
    if not len(frame):  # NVTabular's operators look at a first value
        return schema.arrow.empty_table()
    frame = workflow.transform(frame)[list(schema.arrow.names)]
    table = (
        frame.to_arrow(preserve_index=False)
        if gpu
        else pa.Table.from_pandas(frame, preserve_index=False)
    )
    return table.replace_schema_metadata(None).cast(schema.arrow)


@functools.lru_cache(maxsize=1)
def _loaded(path: str, digest: str, gpu: bool):
    """The workflow at ``path``, and the spec that rows are read by.

    A worker may outlive them, so ``digest`` is that of their description: the workflow's own
    digest does not tell specs of other file formats apart.
    """
    workflow, description = load(path), inspect(path)
    if gpu and _ENTRY * sum(description.table_schema.table_sizes) <= VOCABULARY_BYTES:
        # They go to the device once, not for every frame; Dask spills nothing of them.
        for node in Graph.get_nodes_by_op_type([workflow.output_node], Categorify):
            node.op.cat_cache = "device"
    return workflow, description.table_schema, description.spec


@contextlib.contextmanager
def readable_errors(client: Client | None = None) -> Iterator[None]:
    """Silence NVTabular's own logging of tracebacks; name the cause of lost workers.

    Raises:
        WorkerLostError: workers died again and again, or there are none any more.
    """
    loggers = [logging.getLogger(name) for name in ("merlin", "nvtabular")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    lost = threading.Event()
    try:
        with _watched(client, lost) if client else contextlib.nullcontext():
            yield
    except (KilledWorker, MemoryError) as error:
        raise WorkerLostError(
            f"Dask workers ran out of memory, most likely: {error!r}",
            "use a smaller --block_mb, fewer --workers, or cap the vocabularies; with --resume "
            "what is done is not done again",
        ) from error
    except (CancelledError, ClosedClientError):  # waiting for a result, or about to ask
        if not lost.is_set():
            raise
        raise WorkerLostError(
            f"the cluster has had no worker for {LOST_SECONDS} s",
            "see the workers' own output for the reason, start them, and run again with --resume",
        ) from None
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _watched(client: Client, lost: threading.Event) -> Iterator[None]:
    """Close the client, which ends all waiting, when its cluster is without workers for long."""
    stop = threading.Event()

    def watch() -> None:
        last = time.monotonic()
        while not stop.wait(min(2, LOST_SECONDS / 4)):
            if client.scheduler_info(n_workers=-1)["workers"]:
                last = time.monotonic()
            elif time.monotonic() - last > LOST_SECONDS:
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
