"""Fitting and transforming blocks with NVTabular over Dask: cuDF on GPUs, pandas without."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import nvt_compat  # noqa: F401

import dask.dataframe as dd
import numpy as np
import nvtabular
import pyarrow as pa
from distributed import Client, KilledWorker, as_completed, get_worker
from merlin.dag import Graph
from nvtabular.ops import StatOperator

from clicklog.errors import ClickLogError
from clicklog.raw import Block, read_block
from clicklog.schema import TableSchema
from clicklog.spec import FIRST_OOV_ID, NULL_ID, FeatureSpec
from clicklog.tokenizer import RawRows, parse_rows
from etl.parquet import arrow_schema, write_part
from etl.plan import Unit
from workflows import inspect, to_frame
from workflows.graph import build
from workflows.store import load

_PROGRESS = "etl-rows"


class WorkerLostError(ClickLogError):
    """A Dask worker died again and again, in nearly all cases for want of memory."""


@dataclasses.dataclass
class UnitResult:
    """What became of a unit.

    Attributes:
        unit: the unit.
        rows: rows written.
        bad_count: rows left out.
        bad: line in the unit, from 0, and reason of the first of them.
        positives: rows with label 1.
        dense_missing: per dense column, rows in which it was missing.
        null: per categorical column, rows in which it was missing.
        oov: per categorical column, rows with an out-of-vocabulary value.
    """

    unit: Unit
    rows: int
    bad_count: int
    bad: list[tuple[int, str]]
    positives: int
    dense_missing: np.ndarray
    null: np.ndarray
    oov: np.ndarray


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
        report: called with the rows that were done since the last call, in fractions too.

    Raises:
        BadRowError: a row breaks the spec.
        WorkerLostError: workers run out of memory.
    """
    empty = to_frame(parse_rows(b"", spec, label=True), spec, gpu=gpu)
    frame = dd.from_map(
        _read_frame, blocks, spec=spec, gpu=gpu, reject=reject, meta=empty, enforce_metadata=False
    )
    workflow = build(spec, str(directory))
    # NVTabular makes a graph for each operator that has statistics, and each reads the blocks.
    passes = len(Graph.get_nodes_by_op_type([workflow.output_node], StatOperator))
    client.subscribe_topic(_PROGRESS, lambda event: report(event[1] / passes))
    try:
        with readable_errors():
            return workflow.fit(nvtabular.Dataset(frame, cpu=not gpu))
    finally:
        client.unsubscribe_topic(_PROGRESS)


def _read_frame(block: Block, spec: FeatureSpec, gpu: bool, reject: bool):
    rows = read_block(block, spec, reject=reject)
    with contextlib.suppress(ValueError):  # outside of a worker nobody listens
        get_worker().log_event(_PROGRESS, len(rows))
    return to_frame(rows, spec, gpu=gpu)


def transform(
    units: list[Unit],
    workflow_path: Path,
    split_root: Path,
    client: Client,
    *,
    gpu: bool,
    reject: bool,
) -> Iterator[UnitResult]:
    """Transform units with a saved workflow and write their parts; yields as they finish.

    The workflow is the saved one, so that training data are made by what inference will load.

    Raises:
        BadRowError, OutputError: of the first unit that fails; the others are cancelled.
        WorkerLostError: workers run out of memory.
    """
    futures = client.map(
        transform_unit,
        units,
        workflow_path=str(workflow_path),
        digest=inspect(workflow_path).digest,
        split_root=str(split_root),
        gpu=gpu,
        reject=reject,
        pure=False,
        batch_size=1000,
    )
    try:
        with readable_errors():
            for future in as_completed(futures):
                yield future.result()
                future.release()
    finally:
        client.cancel([future for future in futures if not future.done()])


def transform_unit(
    unit: Unit, *, workflow_path: str, digest: str, split_root: str, gpu: bool, reject: bool
) -> UnitResult:
    """Transform one unit and write its part."""
    workflow, schema, spec = _loaded(workflow_path, digest)
    rows = read_block(unit.block, spec, reject=reject)
    table = transform_rows(rows, workflow, schema, spec, gpu=gpu)
    write_part(table, Path(split_root) / unit.file)
    ids = [table[name].to_numpy() for name in schema.categorical]
    first_ids = [column.reserved_ids for column in spec.categorical]
    return UnitResult(
        unit=unit,
        rows=len(rows),
        bad_count=rows.bad_count,
        bad=[(bad.line, bad.what) for bad in rows.bad],
        positives=int(rows.label.sum()),
        dense_missing=_count_bits(rows.dense_missing, len(spec.dense)),
        null=np.array([np.count_nonzero(column == NULL_ID) for column in ids]),
        oov=np.array(
            [
                np.count_nonzero((column >= FIRST_OOV_ID) & (column < first))
                for column, first in zip(ids, first_ids, strict=True)
            ]
        ),
    )


def transform_rows(
    rows: RawRows,
    workflow: nvtabular.Workflow,
    schema: TableSchema,
    spec: FeatureSpec,
    *,
    gpu: bool,
) -> pa.Table:
    """The columns of the training parquet for parsed rows with labels."""
    if not len(rows):  # NVTabular's operators look at a first value
        return arrow_schema(schema).empty_table()
    frame = workflow.transform(to_frame(rows, spec, gpu=gpu))[spec.columns]
    table = (
        frame.to_arrow(preserve_index=False)
        if gpu
        else pa.Table.from_pandas(frame, preserve_index=False)
    )
    return table.replace_schema_metadata(None).cast(arrow_schema(schema))


def _count_bits(mask: np.ndarray, bits: int) -> np.ndarray:
    return np.array([np.count_nonzero(mask & (np.uint64(1) << np.uint64(j))) for j in range(bits)])


@functools.lru_cache(maxsize=1)
def _loaded(path: str, digest: str):
    """The workflow at ``path``; a worker may outlive it, so its digest is part of the key."""
    description = inspect(path)
    return load(path), description.table_schema, description.spec


@contextlib.contextmanager
def readable_errors() -> Iterator[None]:
    """Silence NVTabular's own logging of tracebacks; name the cause of lost workers."""
    loggers = [logging.getLogger(name) for name in ("merlin", "nvtabular")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    except (KilledWorker, MemoryError) as error:
        raise WorkerLostError(
            f"Dask workers ran out of memory, most likely: {error!r}",
            "use a smaller --block_mb, fewer --workers, or cap the vocabularies",
        ) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
