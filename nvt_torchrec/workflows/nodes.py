"""The graph of operators of a feature spec, as the records of ``graph.json``.

This is the only definition of the graph: :mod:`workflows.store` builds a Workflow from these
records, and :mod:`workflows.writer` writes them with the fitted state. Every engine uses them, so
nothing here imports NVTabular. The format is ``format_version`` 1 of NVTabular's main branch of
2026.

Categorical columns have one ``Categorify`` for each vocabulary policy. Their missing values are not
filled, because Categorify gives them id 1. Dense columns have one chain of operators for each
transform in use (:mod:`formats.feature_spec.transforms`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby
from typing import Any

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.transforms import TRANSFORMS, DenseTransform
from nvt_torchrec.formats.schema import suggest_embedding_dimension
from nvt_torchrec.workflows import functions

GRAPH_FORMAT_VERSION = 1

SELECT = "merlin.dag.ops.selection.SelectionOp"
CONCAT = "merlin.dag.ops.concat_columns.ConcatColumns"
CATEGORIFY = "nvtabular.ops.categorify.Categorify"
FILL = "nvtabular.ops.fill.FillMissing"
CLIP = "nvtabular.ops.clip.Clip"
LAMBDA = "nvtabular.ops.lambdaop.LambdaOp"
NORMALIZE = "nvtabular.ops.normalize.Normalize"

Record = dict[str, Any]


def build_nodes(spec: FeatureSpec) -> list[Record]:
    """Return the nodes, parents before children and output last, without state and schemas."""
    nodes = _Nodes()
    ends = _add_categorical(spec, nodes)
    ends += _add_dense(spec, nodes)
    ends.append(nodes.select(list_unchanged_columns(spec)))
    nodes.add(CONCAT, {}, ends[:1], ends[1:])
    return nodes.records


def build_graph(
    spec: FeatureSpec, statistics: dict[str, dict[str, float]], sizes: dict[str, int]
) -> Record:
    """Return the content of ``graph.json``.

    Args:
        spec: The columns.
        statistics: Mean and std of each normalized dense column.
        sizes: Number of values of each vocabulary, by its name.
    """
    records = build_nodes(spec)
    # The current schema of each column. Parents come before children, so every node finds here the
    # output of its parents.
    schemas = {column["name"]: column for column in _make_input_schema(spec)}
    for record in records:
        names = record["selector"]["names"]
        record["op_state"] = _make_op_state(record, spec, statistics)
        record["input_schema"] = [schemas[name] for name in names]
        for name in names:
            schemas[name] = _derive_schema(schemas[name], record, spec, sizes)
        record["output_schema"] = [schemas[name] for name in names]
    return {
        "format_version": GRAPH_FORMAT_VERSION,
        "output_node_id": records[-1]["id"],
        "nodes": records,
    }


def list_vocabulary_directories(spec: FeatureSpec) -> dict[str, str]:
    """Return the directory of each vocabulary's files: the artifacts of its Categorify."""
    directories = {}
    for record in build_nodes(spec):
        if record["op_class"] == CATEGORIFY:
            for name in _find_vocabularies(record, spec):
                directories[name] = f"artifacts/node_{record['id']}/categories"
    return directories


def list_unchanged_columns(spec: FeatureSpec) -> list[str]:
    """Return the columns that the graph leaves unchanged: the labels and the weight."""
    columns = list(spec.labels)
    if spec.weight:
        columns.append(spec.weight)
    return columns


class _Nodes:
    """A graph under construction."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def select(self, names: list[str], groups: list[list[str]] | None = None) -> int:
        """Add a node that selects input columns; columns of a group are counted together."""
        selector: Record = {"names": names, "tags": []}
        if groups:
            selector["groups"] = groups
        return self.add(SELECT, {"selector": selector}, names=names)

    def add(
        self,
        kind: str,
        params: Record,
        parents: Sequence[int] = (),
        others: Sequence[int] = (),
        names: list[str] | None = None,
    ) -> int:
        """Add a node and return its id.

        Args:
            kind: The class of its operator.
            params: The parameters of the operator.
            parents: The ids of its parents.
            others: The ids of nodes whose columns a CONCAT adds to those of its parent.
            names: Its columns; by default all output columns of ``parents`` and ``others``.
        """
        if names is None:
            before = [self.records[i]["selector"]["names"] for i in (*parents, *others)]
            names = list(chain.from_iterable(before))
        self.records.append(
            {
                "id": len(self.records),
                "op_class": kind,
                "op_params": params,
                "parent_ids": list(parents),
                "dependency_ids": list(others),
                "selector": {"names": names, "tags": []},
            }
        )
        return len(self.records) - 1


def _add_categorical(spec: FeatureSpec, nodes: _Nodes) -> list[int]:
    """Add the categorical nodes, one Categorify for each policy; return their ids."""

    def policy(columns: tuple[CategoricalColumn, ...]) -> tuple[int, ...]:
        return tuple(columns[0].policy.values())

    _check_joint_names(spec)
    ends = []
    for _, same_policy in groupby(sorted(spec.vocabularies.values(), key=policy), key=policy):
        vocabularies = list(same_policy)
        names: list[str] = []
        groups = []
        for columns in vocabularies:
            shared = [column.name for column in columns]
            names += shared
            if len(columns) > 1:
                groups.append(shared)
        params = _make_categorify_params(vocabularies, groups)
        ends.append(nodes.add(CATEGORIFY, params, [nodes.select(names, groups)]))
    return ends


def join_names(group: list[str]) -> str:
    """Return the name that Categorify gives to a vocabulary of several columns."""
    return "_".join(group)


def _check_joint_names(spec: FeatureSpec) -> None:
    """Check that names are unique: Categorify names the files of a group by its joined columns."""
    taken = {name: f"column {name}" for name in spec.columns}
    for name, columns in spec.vocabularies.items():
        joined = join_names([column.name for column in columns])
        if len(columns) > 1 and joined in taken:
            raise SettingsError(
                f"vocabulary {name} and {taken[joined]}: NVTabular would name both {joined!r}",
                "rename a column",
            )
        taken[joined] = f"vocabulary {name}"


def _make_categorify_params(
    vocabularies: list[tuple[CategoricalColumn, ...]], groups: list[list[str]]
) -> Record:
    """Return the parameters of a Categorify, whose columns have the same policy."""
    first = vocabularies[0][0]
    buckets = first.hash_buckets or first.num_buckets
    # Categorify looks up num_buckets by column; by group while fitting; by vocabulary once fitted.
    keys = [column.name for column in chain.from_iterable(vocabularies)]
    keys += [join_names(group) for group in groups]
    keys += [columns[0].vocabulary_name for columns in vocabularies]
    return {
        "freq_threshold": first.freq_threshold,
        "cat_cache": "host",
        "dtype": {"name": "int32"},
        "on_host": True,
        "encode_type": "joint",
        "name_sep": "_",
        "search_sorted": False,
        "num_buckets": dict.fromkeys(keys, buckets) if buckets else None,
        # A hashed column has no vocabulary: its table consists of the reserved ids and the buckets.
        "max_size": first.reserved_ids if first.hash_buckets else first.max_table_size,
        "single_table": False,
        "cardinality_memory_limit": None,
        "split_out": 1,
        "split_every": 8,
    }


def _add_dense(spec: FeatureSpec, nodes: _Nodes) -> list[int]:
    """Add the dense nodes, one chain for each transform in use; return the ids of their ends."""
    ends = []
    for transform in TRANSFORMS.values():
        columns = [column for column in spec.dense if spec.get_transform(column) is transform]
        if columns:
            ends.append(_add_dense_chain(transform, columns, nodes))
    return ends


def _add_dense_chain(transform: DenseTransform, chosen: list[DenseColumn], nodes: _Nodes) -> int:
    """Add the nodes of a transform: one FillMissing for each fill value, then one chain for all."""
    filled = []
    by_fill = sorted(chosen, key=lambda column: column.fill)
    for fill, columns in groupby(by_fill, key=lambda column: column.fill):
        selected = nodes.select([column.name for column in columns])
        filled.append(nodes.add(FILL, {"fill_val": fill, "add_binary_cols": False}, [selected]))
    end = filled[0]
    if len(filled) > 1:
        end = nodes.add(CONCAT, {}, filled[:1], filled[1:])
    if transform.function:
        bounds = {"min_value": transform.minimum, "max_value": None}
        end = nodes.add(CLIP, bounds, [end])
        end = nodes.add(LAMBDA, _make_lambda_params(transform.function, "float64"), [end])
    if not transform.normalized:
        return nodes.add(
            LAMBDA, _make_lambda_params(functions.as_float32.__name__, "float32"), [end]
        )
    return nodes.add(NORMALIZE, {"out_dtype": {"name": "float32"}}, [end])


def _make_lambda_params(function: str, dtype: str) -> Record:
    """Return the parameters of a LambdaOp that calls a function of :mod:`workflows.functions`."""
    return {
        "f": {"module": functions.__name__, "qualname": function},
        "dependency": [],
        "dtype": _make_dtype(dtype),
        "tags": [],
        "properties": {},
    }


def _find_vocabularies(record: Record, spec: FeatureSpec) -> dict[str, list[str]]:
    """Return the columns of each vocabulary of a Categorify node, by its name."""
    names = set(record["selector"]["names"])
    vocabularies = {}
    for name, columns in spec.vocabularies.items():
        if columns[0].name in names:
            vocabularies[name] = [column.name for column in columns]
    return vocabularies


def _make_op_state(record: Record, spec: FeatureSpec, statistics: dict) -> Record:
    """Return the fitted state of an operator; empty for operators that are not fitted."""
    if record["op_class"] == NORMALIZE:
        names = record["selector"]["names"]
        means = {name: statistics[name]["mean"] for name in names}
        stds = {name: statistics[name]["std"] for name in names}
        return {"means": means, "stds": stds}
    if record["op_class"] == CATEGORIFY:
        categories = []
        storage_name = {}
        for name, columns in _find_vocabularies(record, spec).items():
            categories.append({"key": [name], "path": f"categories/unique.{name}.parquet"})
            # For a column without an entry, Categorify takes its name as the vocabulary's name.
            for column in columns:
                if column != name or len(columns) > 1:
                    storage_name[column] = name
        return {"categories": categories, "storage_name": storage_name}
    return {}


def _make_input_schema(spec: FeatureSpec) -> list[Record]:
    """Return the schema of the pandas frames of :func:`workflows.workflow_frames.to_frame`."""
    columns = [_make_column_schema(name, "float32") for name in list_unchanged_columns(spec)]
    columns += [_make_column_schema(name, "float64") for name in spec.dense_names]
    for column in spec.categorical:
        columns.append(_make_column_schema(column.name, get_raw_dtype(column), column.multi_hot))
    return columns


def get_raw_dtype(column: CategoricalColumn) -> str:
    """Return the dtype of a raw categorical column in a pandas frame.

    Integers are float64, because they may be missing, and are exact in it; lists hold integers.
    """
    if RAW_TYPES[column.raw].is_text:
        return "str"
    return "int64" if column.multi_hot else "float64"


def _make_column_schema(name: str, dtype: str, is_list: bool = False) -> Record:
    return {
        "name": name,
        "tags": [],
        "properties": {"value_count": {"min": 0, "max": None}} if is_list else {},
        "dtype": _make_dtype(dtype, 1 + is_list),
        "is_list": is_list,
        "is_ragged": is_list,
    }


def _make_dtype(name: str, dimensions: int = 0) -> Record:
    kind = name.rstrip("0123456789")
    described: Record = {"name": name, "element_type": "string" if kind == "str" else kind}
    if kind != "str":
        described |= {"element_size": int(name.removeprefix(kind)), "signed": True}
    if dimensions:
        described["shape"] = [{"min": 0, "max": None}] * dimensions
    return described


def _derive_schema(
    schema: Record, record: Record, spec: FeatureSpec, sizes: dict[str, int]
) -> Record:
    """Return the schema of a column after a node, given the schema before it."""
    kind = record["op_class"]
    params = record["op_params"]
    if kind == NORMALIZE:
        return schema | {"tags": ["Tags.CONTINUOUS"], "dtype": _make_dtype("float32", 1)}
    if kind == LAMBDA:
        return schema | {"dtype": params["dtype"] | {"shape": schema["dtype"]["shape"]}}
    if kind != CATEGORIFY:
        return schema
    column = next(column for column in spec.categorical if column.name == schema["name"])
    rows = column.reserved_ids + sizes[column.vocabulary_name]
    buckets = params["num_buckets"]
    properties = {
        "num_buckets": buckets[column.name] if buckets else None,
        "freq_threshold": params["freq_threshold"],
        "max_size": params["max_size"],
        "domain": {"min": 0, "max": rows - 1, "name": column.vocabulary_name},
        "embedding_sizes": {"cardinality": rows, "dimension": suggest_embedding_dimension(rows)},
    }
    return schema | {
        "tags": ["Tags.CATEGORICAL"],
        "dtype": _make_dtype("int32", 1 + column.multi_hot),
        "properties": schema["properties"] | properties,
    }
