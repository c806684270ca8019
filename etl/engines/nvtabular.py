"""Fit and transform blocks with NVTabular's own operators over Dask: cuDF on GPUs, pandas without.

NVTabular drops values without an id, and its means and standard deviations differ from those of the
other engines in their last bits. So the outputs of this engine cannot be extended.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nvt_torchrec.nvt_compat  # noqa: F401

import dask.dataframe as dd
import numpy as np
import nvtabular
import pyarrow as pa
import pyarrow.compute as pc
from dask import delayed
from distributed import Client, as_completed, get_worker
from distributed.client import ClosedClientError
from merlin.core.utils import set_dask_client
from merlin.dag import Graph
from nvtabular.ops import Categorify

from nvt_torchrec.clicklog.readers.raw import Block, read_block
from nvt_torchrec.etl.engines.cluster import readable_errors
from nvt_torchrec.etl.engines.hardware import BLOCKS_AT_ONCE
from nvt_torchrec.etl.engines.workers import with_workflow
from nvt_torchrec.etl.output import CATEGORIES
from nvt_torchrec.etl.plan import Unit, by_block
from nvt_torchrec.etl.results import UnitResult
from nvt_torchrec.etl.row_split import divided, training_rows
from nvt_torchrec.etl.state import finish_unit
from nvt_torchrec.formats.rows import RawRows, empty_rows
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.spec.feature_spec import FIRST_OOV_ID, FeatureSpec
from nvt_torchrec.workflows import inspect, to_frame
from nvt_torchrec.workflows.frames import joined, to_table
from nvt_torchrec.workflows.store import build, fitted_state, load
from nvt_torchrec.workflows.writer import Fitted

log = logging.getLogger(__name__)

_PROGRESS = "etl-rows"
#: Vocabularies up to this size stay on a worker's GPU; an entry is a value and its id.
VOCABULARY_BYTES, _ENTRY = 2 << 30, 16


def fit(
    blocks: list[Block],
    spec: FeatureSpec,
    work: Path,
    client: Client,
    *,
    gpu: bool,
    reject: bool | int,
    report: Callable[[float], object],
) -> Fitted:
    """Fit a Workflow on blocks, and return its state.

    Partial counts and sums are merged in a tree over the blocks in their order, so the result
    does not depend on the number of workers.

    Args:
        blocks: The blocks of the training days.
        spec: The columns.
        work: The directory of the run's state, which all workers can write.
        client: A client of a Dask cluster.
        gpu: Whether to use cuDF frames.
        reject: Whether to leave malformed rows out instead of raising.
        report: A function that is called with the number of rows done since the last call; the
            rows of the first block are reported twice.

    Raises:
        BadRowError: A row is malformed.
        WorkerLostError: Workers ran out of memory.
    """
    empty = to_frame(empty_rows(spec, label=True), spec, gpu=gpu)
    # NVTabular reads the first group once more, for the types of the columns: one block only
    groups = [blocks[:1], *_batches(blocks[1:], BLOCKS_AT_ONCE[gpu])]
    # Delayed tasks are not fused with others, so the graphs that NVTabular makes, one for each
    # operator with statistics, share the frames. (A worker counts a frame's memory three times, for
    # the task and two aliases of it, and so may spill early.)
    read = delayed(functools.partial(_read_frame, spec=spec, gpu=gpu, reject=reject))
    frame = dd.from_delayed([read(group) for group in groups], meta=empty, verify_meta=False)
    with readable_errors(client):
        dataset = nvtabular.Dataset(frame, cpu=not gpu)
        client.subscribe_topic(_PROGRESS, lambda event: report(event[1]))
        try:
            with _merlin_client(client):
                workflow = build(spec, str(work / CATEGORIES)).fit(dataset)
        finally:
            with contextlib.suppress(ClosedClientError):
                client.unsubscribe_topic(_PROGRESS)
    return fitted_state(workflow, spec)


@contextlib.contextmanager
def _merlin_client(client: Client) -> Iterator[None]:
    """Let Merlin compute on this client's cluster.

    It would take the client that it last used, of whichever cluster, or none at all.
    """
    with client.as_current():
        set_dask_client("auto")
        try:
            yield
        finally:
            set_dask_client("auto")


def _read_frame(blocks: Sequence[Block], spec: FeatureSpec, gpu: bool, reject: bool | int):
    """Read the training rows of blocks as one frame."""
    make = to_table if gpu else to_frame

    def read(block: Block) -> tuple[int, Any]:
        (rows,) = training_rows([read_block(block, spec, reject=reject)], block)
        return len(rows), make(rows, spec)

    rows, frames = zip(*_map_in_threads(read, blocks), strict=True)
    with contextlib.suppress(ValueError):  # not in a worker
        get_worker().log_event(_PROGRESS, sum(rows))
    return joined(list(frames), gpu=gpu)


def _read(
    groups: Sequence[tuple[Unit, ...]], spec: FeatureSpec, *, gpu: bool, reject: bool | int
) -> tuple[list[RawRows], Any]:
    """Read the units of some blocks; return the rows of each unit, and one frame of all of them."""
    make = to_table if gpu else to_frame

    def read(units: tuple[Unit, ...]) -> list[tuple[RawRows, Any]]:
        rows = read_block(units[0].block, spec, reject=reject)
        (by_split,) = divided([rows], units[0].block, [unit.split for unit in units])
        return [(rows, make(rows, spec)) for rows in by_split]

    pairs = [pair for pairs in _map_in_threads(read, groups) for pair in pairs]
    rows, frames = zip(*pairs, strict=True)
    return list(rows), joined(frames, gpu=gpu)


def _batches(values: list, size: int) -> list[list]:
    return [values[i : i + size] for i in range(0, len(values), size)]


def _map_in_threads(function: Callable, values: Sequence) -> list:
    """Call a function with each value, each in a thread; raise the first error in their order."""
    if len(values) == 1:
        return [function(values[0])]
    with ThreadPoolExecutor(len(values)) as pool:
        return list(pool.map(function, values))


def encode(
    units: list[Unit],
    workflow_path: Path,
    parts: Path,
    work: Path,
    client: Client,
    *,
    gpu: bool,
    reject: bool | int,
) -> Iterator[UnitResult]:
    """Transform units with a saved workflow and write their parts.

    The workflow is loaded from disk, so training data are made by the same one as inference uses.

    Args:
        units: The units of work.
        workflow_path: The path of the saved workflow.
        parts: The directory of the splits' parts.
        work: The directory of the run's state, for the records of finished units.
        client: A client of a Dask cluster.
        gpu: Whether to use cuDF frames.
        reject: Whether to leave malformed rows out instead of raising.

    Yields:
        The result of each unit as it finishes.

    Raises:
        BadRowError: A row is malformed. Of several errors the first is raised, and the remaining
            units are cancelled.
        OutputError: A part cannot be written.
        WorkerLostError: Workers ran out of memory.
    """
    # fewer at once where workers would otherwise have nothing to do
    workers = max(1, len(client.scheduler_info(n_workers=-1)["workers"]))
    groups = by_block(units)
    at_once = max(1, min(BLOCKS_AT_ONCE[gpu], len(groups) // workers))
    task = with_workflow(
        encode_units, workflow_path, parts=parts, work=work, gpu=gpu, reject=reject
    )
    futures = client.map(task, _batches(groups, at_once), pure=False, batch_size=1000)
    try:
        with readable_errors(client):
            for future in as_completed(futures):
                yield from future.result()
                future.release()
    finally:
        with contextlib.suppress(CancelledError, ClosedClientError):
            client.cancel([future for future in futures if not future.done()])


def encode_units(
    groups: Sequence[tuple[Unit, ...]],
    *,
    workflow_path: str,
    digest: str,
    parts: Path,
    work: Path,
    gpu: bool,
    reject: bool | int,
) -> list[UnitResult]:
    """Transform the units of some blocks in a worker; write their parts and records.

    See :func:`etl.engines.workers.with_workflow` for ``digest``.
    """
    units = [unit for group in groups for unit in group]
    for unit in units:
        log.debug("begin %s", unit.file)
    workflow, schema, spec = _load_once(workflow_path, digest, gpu)
    rows, frame = _read(groups, spec, gpu=gpu, reject=reject)
    whole = transform_frame(frame, workflow, schema, gpu=gpu)
    del frame
    ends = np.cumsum([0, *map(len, rows)]).tolist()

    def finish(i: int) -> UnitResult:
        table = whole.slice(ends[i], ends[i + 1] - ends[i])
        return finish_unit(units[i], [(rows[i], table, _count_oov(table, spec))], parts, work)

    return _map_in_threads(finish, range(len(units)))


def _count_oov(table: pa.Table, spec: FeatureSpec) -> np.ndarray:
    """Count out-of-vocabulary ids per categorical column: int64 [categorical columns]."""
    counts = []
    for column in spec.categorical:
        ids = table[column.name]
        ids = (pc.list_flatten(ids) if column.multi_hot else ids).to_numpy()
        counts.append(np.count_nonzero((ids >= FIRST_OOV_ID) & (ids < column.reserved_ids)))
    return np.array(counts, np.int64)


def transform_frame(
    frame: Any, workflow: nvtabular.Workflow, schema: TableSchema, *, gpu: bool
) -> pa.Table:
    """Transform a frame of raw columns with labels to the columns of the training parquet."""
    if not len(frame):  # NVTabular's operators need a first value
        return schema.arrow.empty_table()
    frame = workflow.transform(frame)[list(schema.arrow.names)]
    table = (
        frame.to_arrow(preserve_index=False)
        if gpu
        else pa.Table.from_pandas(frame, preserve_index=False)
    )
    return table.replace_schema_metadata(None).cast(schema.arrow)


@functools.lru_cache(maxsize=1)
def _load_once(path: str, digest: str, gpu: bool):
    """Load the workflow, its table schema and its spec; keep the last one loaded.

    See :func:`etl.engines.workers.with_workflow` for ``digest``.
    """
    workflow, description = load(path), inspect(path)
    if gpu and _ENTRY * sum(description.table_schema.table_sizes) <= VOCABULARY_BYTES:
        # copied to the GPU once instead of for every frame; Dask cannot spill them
        for node in Graph.get_nodes_by_op_type([workflow.output_node], Categorify):
            node.op.cat_cache = "device"
    return workflow, description.table_schema, description.spec
