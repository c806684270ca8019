"""Fit and transform blocks with NVTabular's own operators over Dask: cuDF on GPUs, pandas without.

NVTabular drops values without an id, and its means and standard deviations differ from those of the
other engines in their last bits. So the outputs of this engine cannot be extended.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import nvt_torchrec.nvt_compat  # noqa: F401

import dask.dataframe as dd
import numpy as np
import nvtabular
import pyarrow as pa
import pyarrow.compute as pc
from dask import delayed
from distributed import Client, get_worker
from distributed.client import ClosedClientError
from merlin.core.utils import set_dask_client
from merlin.dag import Graph
from nvtabular.ops import Categorify

from nvt_torchrec.clicklog.readers.raw import Block, read_block
from nvt_torchrec.etl.engines.cluster import readable_errors
from nvt_torchrec.etl.engines.workers import results, with_workflow
from nvt_torchrec.etl.output import CATEGORIES
from nvt_torchrec.etl.plan import Unit, by_block
from nvt_torchrec.etl.results import UnitResult
from nvt_torchrec.etl.row_split import divided, training_rows
from nvt_torchrec.etl.state import finish_unit
from nvt_torchrec.formats.rows import empty_rows
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.spec.columns import FIRST_OOV_ID
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.workflows import inspect, to_frame
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
    # Delayed tasks are not fused with others, so the graphs that NVTabular makes, one for each
    # operator with statistics, share the frames. (A worker counts a frame's memory three times, for
    # the task and two aliases of it, and so may spill early.)
    read = delayed(functools.partial(_read_frame, spec=spec, gpu=gpu, reject=reject))
    frame = dd.from_delayed([read(block) for block in blocks], meta=empty, verify_meta=False)
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


def _read_frame(block: Block, spec: FeatureSpec, gpu: bool, reject: bool | int):
    """Read the training rows of a block as a frame."""
    (rows,) = training_rows([read_block(block, spec, reject=reject)], block)
    with contextlib.suppress(ValueError):  # not in a worker
        get_worker().log_event(_PROGRESS, len(rows))
    return to_frame(rows, spec, gpu=gpu)


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
    task = with_workflow(
        encode_block, workflow_path, parts=parts, work=work, gpu=gpu, reject=reject
    )
    for of_block in results(client, task, by_block(units)):
        yield from of_block


def encode_block(
    units: Sequence[Unit],
    *,
    workflow_path: str,
    digest: str,
    parts: Path,
    work: Path,
    gpu: bool,
    reject: bool | int,
) -> list[UnitResult]:
    """Transform the units of a block in a worker; write their parts and records.

    See :func:`etl.engines.workers.with_workflow` for ``digest``.
    """
    log.debug("begin %s", units[0].file)
    workflow, schema, spec = _load_once(workflow_path, digest, gpu)
    rows = read_block(units[0].block, spec, reject=reject)
    (by_split,) = divided([rows], units[0].block, [unit.split for unit in units])
    finished = []
    for unit, own in zip(units, by_split, strict=True):
        table = transform_frame(to_frame(own, spec, gpu=gpu), workflow, schema, gpu=gpu)
        piece = own, table, _count_oov(table, spec)
        finished.append(finish_unit(unit, [piece], parts, work))
    return finished


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
    workflow, description = load(path, raw=False), inspect(path)
    if gpu and _ENTRY * sum(description.table_schema.table_sizes) <= VOCABULARY_BYTES:
        # copied to the GPU once instead of for every frame; Dask cannot spill them
        for node in Graph.get_nodes_by_op_type([workflow.output_node], Categorify):
            node.op.cat_cache = "device"
    return workflow, description.table_schema, description.spec
