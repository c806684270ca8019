"""Save and load fitted Workflows. :mod:`formats.workflow_description` describes the layout."""

from __future__ import annotations

import math
from pathlib import Path

import nvt_torchrec.nvt_compat  # noqa: F401

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from merlin.io.worker import clean_worker_cache
from merlin.schema import ColumnSchema, Schema
from nvtabular import Workflow, ops

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.base.files.atomic import read_json
from nvt_torchrec.formats.spec.feature_spec import CategoricalColumn, FeatureSpec
from nvt_torchrec.formats.spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.workflow_description import GRAPH_FILE, WorkflowDescription
from nvt_torchrec.workflows import nodes
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.graph import nodes_of, realize
from nvt_torchrec.workflows.vocabulary import OBSERVED, FittedVocabulary, finish
from nvt_torchrec.workflows.writer import Fitted, write_workflow


def save(workflow: Workflow, spec: FeatureSpec, path: Path | str) -> WorkflowDescription:
    """Write a fitted workflow that :func:`workflows.graph.build` made from ``spec``.

    Raises:
        SchemaError: the workflow is not fitted, or a statistic is not finite.
        OutputError: the directory cannot be written.
    """
    return write_workflow(path, spec, fitted_state(workflow, spec))


def load(path: Path | str, *, label: bool = True) -> Workflow:
    """Load a fitted Workflow, which can ``transform`` frames or Datasets.

    Every file is compared with its digest. Nothing that is read is executed: operators and
    functions are looked up by name in :mod:`workflows.graph` and :mod:`workflows.functions`.

    Args:
        path: directory that :func:`save` wrote.
        label: whether labels and weight are passed through (training), or there are none
            (inference).

    Raises:
        BadInputError: there is no saved workflow, or one of its files is missing, damaged or
            replaced.
        SchemaError: it was saved in another version of the format.
    """
    path = Path(path).resolve()
    description = inspect(path)
    description.verify()
    records = read_json(path / GRAPH_FILE, "the graph of a saved workflow")["nodes"]
    workflow = realize(records, path).fit_schema(_input_schema(records))
    # NVTabular caches vocabularies by path, which may have contained another workflow.
    clean_worker_cache()
    return workflow if label else workflow.remove_inputs(nodes.passed_through(description.spec))


def fitted_state(workflow: Workflow, spec: FeatureSpec) -> Fitted:
    """Return the fitted state of a Workflow that :func:`workflows.graph.build` made from ``spec``.

    Raises:
        SchemaError: it is not fitted.
    """
    statistics = {}
    for node in nodes_of(workflow, ops.Normalize):
        for name in node.op.means:
            # Without a second row std is NaN; with 0, NVTabular only subtracts the mean.
            std = node.op.stds[name]
            statistics[name] = {"mean": node.op.means[name], "std": 0.0 if math.isnan(std) else std}
    vocabularies = {}
    for name, columns in spec.vocabularies.items():
        # Categorify's name: of the column, or of the columns that were counted together
        stored = nodes.joint_name([column.name for column in columns])
        files = [
            node.op.categories[stored]
            for node in nodes_of(workflow, ops.Categorify)
            if stored in node.op.categories
        ]
        if not files:
            raise SchemaError(f"column {columns[0].name}: the workflow is not fitted")
        vocabularies[name] = _vocabulary(columns[0], stored, Path(files[0]))
    return Fitted(statistics, vocabularies)


def _vocabulary(column: CategoricalColumn, stored: str, file: Path) -> FittedVocabulary:
    """Read a vocabulary that Categorify wrote; pandas has counted integers as float64."""
    text = RAW_TYPES[column.raw].is_text
    table = pq.read_table(file)
    values = table[stored].cast(pa.string() if text else pa.int64()).combine_chunks()
    if column.hash_buckets:
        return finish(values if text else values.to_numpy(), np.empty(0, np.int64), column, 0)
    counts = table[f"{stored}_size"].cast(pa.int64()).combine_chunks().to_numpy()
    meta = pq.read_table(file.with_name(f"meta.{stored}.parquet"))
    observed = dict(zip(meta["kind"].to_pylist(), meta["num_observed"].to_pylist(), strict=True))
    return FittedVocabulary(
        values if text else values.to_numpy(),
        counts,
        {kind: int(observed[kind] or 0) for kind in OBSERVED},
    )


def _input_schema(records: list[nodes.Record]) -> Schema:
    """Return Merlin's schema of the pandas frames of :func:`workflows.frames.to_frame`."""
    columns = [
        column
        for record in records
        if record["op_class"] == nodes.SELECT
        for column in record["input_schema"]
    ]
    return Schema(
        [
            ColumnSchema(
                column["name"],
                dtype=column["dtype"]["name"],
                dims=tuple((size["min"], size["max"]) for size in column["dtype"]["shape"]),
            )
            for column in columns
        ]
    )
