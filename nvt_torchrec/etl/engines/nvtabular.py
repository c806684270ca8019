"""Fit and transform blocks with NVTabular's own operators over Dask, on cuDF or pandas frames.

The counts of values without an id are lost in NVTabular, and its means and standard deviations
differ from those of the other engines in the last bits. So outputs of this engine cannot be
extended.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
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

from nvt_torchrec.clicklog.readers.log_format import Block, read_block_chunks
from nvt_torchrec.etl.engines.cluster import readable_errors
from nvt_torchrec.etl.engines.engine import Job, Report
from nvt_torchrec.etl.engines.workers import Workers
from nvt_torchrec.etl.state.output import CATEGORIES
from nvt_torchrec.etl.units.unit_plan import Unit
from nvt_torchrec.etl.units.writing import (
    Encoded,
    UnitResult,
    divide_rows,
    finish_units,
    write_units,
)
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.columns import FIRST_OOV_ID
from nvt_torchrec.formats.rows import RawRows, make_empty_rows
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.store import build, extract_fitted, load
from nvt_torchrec.workflows.workflow_frames import to_frame
from nvt_torchrec.workflows.writer import Fitted

log = logging.getLogger(__name__)

_PROGRESS = "etl-rows"
#: Vocabularies up to this size stay on a worker's GPU.
VOCABULARY_BYTES = 2 << 30
#: Bytes of an entry of a vocabulary: a value and its id.
_ENTRY_BYTES = 16


class NVTabular(Workers):
    """NVTabular's operators on the workers of a cluster, on cuDF frames if they have GPUs."""

    def fit(self, blocks: list[Block], report: Report) -> Fitted:
        """Fit a Workflow on blocks, and return its state.

        Partial counts and sums are merged in a tree over the blocks in order, so the result does
        not depend on the number of workers. The rows of the first block are reported twice.
        """
        job = self.job
        client = self.client
        gpu = self.gpu
        empty = to_frame(make_empty_rows(job.spec, label=True), job.spec, gpu=gpu)
        # Delayed tasks are not fused with others, so the graphs of NVTabular, one for each operator
        # with statistics, share the frames. (A worker counts the memory of a frame three times, for
        # the task and its two aliases, and so may spill early.)
        read = delayed(functools.partial(_read_frame, job=job, gpu=gpu))
        frame = dd.from_delayed([read(block) for block in blocks], meta=empty, verify_meta=False)
        with readable_errors(client):
            dataset = nvtabular.Dataset(frame, cpu=not gpu)
            client.subscribe_topic(_PROGRESS, lambda event: report(event[1]))
            try:
                with _merlin_client(client):
                    workflow = build(job.spec, str(job.work / CATEGORIES)).fit(dataset)
            finally:
                with contextlib.suppress(ClosedClientError, RuntimeError):
                    client.unsubscribe_topic(_PROGRESS)
        return extract_fitted(workflow, job.spec)

    def _uses_gpus(self, blocks: Iterable[Block]) -> bool:
        """Return False: our own kernels are never used."""
        return False

    def _encode_block(self) -> Callable[..., list[UnitResult]]:
        """See :meth:`Workers._encode_block`."""
        return functools.partial(encode_block, gpu=self.gpu)


@contextlib.contextmanager
def _merlin_client(client: Client) -> Iterator[None]:
    """Let Merlin compute on this client's cluster.

    By default it uses the client that it used last, which may belong to another cluster, or none.
    """
    with client.as_current():
        set_dask_client("auto")
        try:
            yield
        finally:
            set_dask_client("auto")


def _read_frame(block: Block, job: Job, gpu: bool) -> Any:
    """Read the training rows of a block as a frame."""
    read = read_block_chunks(block, job.spec, max_bad_rows=job.max_bad_rows, chunk_bytes=None)
    ((rows,),) = divide_rows(read, block, ["train"])
    with contextlib.suppress(ValueError):  # not in a worker
        get_worker().log_event(_PROGRESS, len(rows))
    return to_frame(rows, job.spec, gpu=gpu)


def encode_block(
    units: tuple[Unit, ...], *, job: Job, workflow: tuple[str, str], gpu: bool
) -> list[UnitResult]:
    """Transform the units of a block in a worker; write their parts and records."""
    log.debug("begin %s", units[0].file)
    loaded, schema, spec = _load_once(*workflow, gpu)

    def encode(rows: RawRows) -> Encoded:
        table = transform_frame(to_frame(rows, spec, gpu=gpu), loaded, schema, gpu=gpu)
        return table, _count_oov(table, spec)

    rows = read_block_chunks(units[0].block, spec, max_bad_rows=job.max_bad_rows, chunk_bytes=None)
    return finish_units(job.work, *write_units(units, rows, encode, job.work))


def _count_oov(table: pa.Table, spec: FeatureSpec) -> np.ndarray:
    """Count the out-of-vocabulary ids of each categorical column; int64 [categorical columns]."""
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
    if not len(frame):  # NVTabular's operators fail without a first value
        return schema.arrow.empty_table()
    frame = workflow.transform(frame)[list(schema.arrow.names)]
    if gpu:
        table = frame.to_arrow(preserve_index=False)
    else:
        table = pa.Table.from_pandas(frame, preserve_index=False)
    return table.replace_schema_metadata(None).cast(schema.arrow)


@functools.lru_cache(maxsize=1)
def _load_once(path: str, digest: str, gpu: bool) -> tuple[Any, TableSchema, FeatureSpec]:
    """Load the workflow, its table schema and its spec; keep the last one loaded.

    See :func:`etl.engines.workers._load_once`.
    """
    workflow = load(path, raw=False)
    description = inspect(path)
    if gpu and _ENTRY_BYTES * sum(description.table_schema.table_sizes) <= VOCABULARY_BYTES:
        # Copy the vocabularies to the GPU once, not for every frame. Dask cannot spill them, so
        # this is done only if they are small.
        for node in Graph.get_nodes_by_op_type([workflow.output_node], Categorify):
            node.op.cat_cache = "device"
    return workflow, description.table_schema, description.spec
