"""Make NVTabular Workflows of records of operators (:mod:`workflows.nodes`)."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import nvt_torchrec.nvt_compat  # noqa: F401

import numpy as np
import nvtabular
import pandas as pd
from merlin.dag import Graph
from merlin.dag.ops.concat_columns import ConcatColumns
from merlin.dag.ops.selection import SelectionOp
from nvtabular import ops
from nvtabular.workflow.node import WorkflowNode

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.spec.raw_types import RAW_TYPES
from nvt_torchrec.workflows import functions, nodes


def build(spec: FeatureSpec, categories_path: Path | str = "./") -> nvtabular.Workflow:
    """Return an unfitted Workflow.

    Its output has ids as int32 (lists of int32 for multi-hot columns), dense columns as float32 and
    the unchanged labels and weight. Select ``spec.columns`` for the order of the spec.

    Hashed columns need no fitting: they get an empty vocabulary, a file below ``categories_path``.

    Args:
        spec: columns, vocabulary policies and the dense transform.
        categories_path: directory to which fitting writes the vocabularies.

    Raises:
        SettingsError: NVTabular would use one name for two columns or vocabularies.
    """
    workflow = realize(nodes.unfitted(spec))
    hashed = {column.name: column.raw for column in spec.categorical if column.hash_buckets}
    for node in nodes_of(workflow, ops.Categorify):
        node.op.out_path = str(categories_path)
        names = [name for name in node.parents[0].selector.names if name in hashed]
        empty = {
            name: pd.Series([], dtype="object" if RAW_TYPES[hashed[name]].is_text else "int64")
            for name in names
        }
        node.op.vocabs = node.op.process_vocabs(empty)
        node.op.clear()  # takes them over
    return workflow


def realize(records: list[nodes.Record], directory: Path | None = None) -> nvtabular.Workflow:
    """Return the Workflow of a list of records, made of known operators and functions only.

    Args:
        records: parents before children, the output last.
        directory: directory of the artifacts of fitted records; None: the Workflow is unfitted.

    Raises:
        BadInputError: an unknown operator or function.
    """
    made: dict[int, WorkflowNode] = {}
    for record in records:
        if record["op_class"] not in _OPERATORS:
            raise BadInputError(
                f"operator {record['op_class']!r} is not one that a workflow is made of",
                "fit the workflow again with `python -m etl run`",
            )
        node = WorkflowNode()
        node.op = _OPERATORS[record["op_class"]](record["op_params"])
        if isinstance(node.op, SelectionOp):
            node.selector = node.op.selector
        if directory is not None:
            _restore(node.op, record, directory)
        for parent in record["parent_ids"]:
            node.add_parent(made[parent])
        for other in record["dependency_ids"]:
            node.add_dependency(made[other])
        made[record["id"]] = node
    return nvtabular.Workflow(node)


def _restore(operator: object, record: nodes.Record, directory: Path) -> None:
    """Give an operator its fitted state."""
    state = record["op_state"]
    if isinstance(operator, ops.Normalize):
        operator.means, operator.stds = state["means"], state["stds"]
        operator.fitted = True
    if isinstance(operator, ops.Categorify):
        artifacts = directory / "artifacts" / f"node_{record['id']}"
        operator.out_path = str(artifacts)
        operator.categories = {
            category["key"][0]: str(artifacts / category["path"])
            for category in state["categories"]
        }
        operator.storage_name = state["storage_name"]
        operator.fitted = True


def nodes_of(workflow: nvtabular.Workflow, kind: type) -> list[WorkflowNode]:
    """Return the nodes whose operator is of a type."""
    return Graph.get_nodes_by_op_type([workflow.output_node], kind)


def _select(params: nodes.Record) -> SelectionOp:
    names, groups = params["selector"]["names"], params["selector"].get("groups", [])
    grouped = {name for group in groups for name in group}
    alone = [name for name in names if name not in grouped]
    return SelectionOp(nvtabular.ColumnSelector([*alone, *map(tuple, groups)]))


def _categorify(params: nodes.Record) -> ops.Categorify:
    with warnings.catch_warnings():
        # NVTabular warns that CPU and GPU hash differently, which nvt_compat repairs, and that
        # buckets do not cap the table by themselves, which the spec forbids.
        warnings.filterwarnings("ignore", message="Performing a hash-based transformation")
        return ops.Categorify(**params | {"dtype": np.dtype(params["dtype"]["name"])})


def _call(params: nodes.Record) -> ops.LambdaOp:
    named = json.loads(nodes.with_own_functions(json.dumps(params["f"])))
    function = functions.NAMED.get(named["qualname"])
    if named["module"] != functions.__name__ or function is None:
        raise BadInputError(
            f"function {named['module']}.{named['qualname']} is not in {functions.__name__}",
            "fit the workflow again with `python -m etl run`",
        )
    return ops.LambdaOp(function, dtype=np.dtype(params["dtype"]["name"]))


def _normalize(params: nodes.Record) -> ops.Normalize:
    return ops.Normalize(out_dtype=np.dtype(params["out_dtype"]["name"]))


_OPERATORS: dict[str, Callable[[nodes.Record], object]] = {
    nodes.SELECT: _select,
    nodes.CONCAT: lambda params: ConcatColumns(label="+"),
    nodes.CATEGORIFY: _categorify,
    nodes.FILL: lambda params: ops.FillMissing(**params),
    nodes.CLIP: lambda params: ops.Clip(**params),
    nodes.LAMBDA: _call,
    nodes.NORMALIZE: _normalize,
}
