"""NVTabular Workflows: built from a spec's operators (:mod:`workflows.nodes`), and loaded.

:mod:`formats.workflow_description` describes the files. Importing this module also makes
``nvtabular.Workflow.load`` open them: the released function looks for a pickle, which a saved
workflow does not contain, and raises FileNotFoundError.
"""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import nvt_torchrec.nvt_compat  # noqa: F401
from nvt_torchrec.nvt_compat.patching import replace

import fsspec
import numpy as np
import nvtabular
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem
from merlin.dag import Graph
from merlin.dag.ops.concat_columns import ConcatColumns
from merlin.dag.ops.selection import SelectionOp
from merlin.io.worker import clean_worker_cache
from merlin.schema import ColumnSchema, Schema
from nvtabular import ColumnSelector, Workflow, ops
from nvtabular.ops.operator import Operator
from nvtabular.workflow.node import WorkflowNode

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.clicklog.in_memory.frames import check_columns, read_features
from nvt_torchrec.formats.feature_spec import CategoricalColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.workflow_description import FORMAT
from nvt_torchrec.workflows import functions, nodes
from nvt_torchrec.workflows.description import derive_graph, inspect
from nvt_torchrec.workflows.vocabulary import OBSERVED, FittedVocabulary, fit_vocabulary
from nvt_torchrec.workflows.workflow_frames import features_to_frame
from nvt_torchrec.workflows.writer import Fitted


def build(spec: FeatureSpec, categories_path: Path | str = "./") -> nvtabular.Workflow:
    """Return an unfitted Workflow.

    Its output has ids as int32 (lists of int32 for multi-hot columns), dense columns as float32,
    and the labels and the weight unchanged. Select ``spec.columns`` for the order of the spec.

    Hashed columns need no fitting: each gets an empty vocabulary, a file below ``categories_path``.

    Args:
        spec: Columns, vocabulary policies and the dense transform.
        categories_path: Directory to which fitting writes the vocabularies.

    Raises:
        SettingsError: NVTabular would use one name for two columns or vocabularies.
    """
    workflow = realize(nodes.build_nodes(spec))
    hashed = {column.name: column.raw for column in spec.categorical if column.hash_buckets}
    for node in find_nodes(workflow, ops.Categorify):
        node.op.out_path = str(categories_path)
        empty = {}
        for name in node.parents[0].selector.names:
            if name in hashed:
                is_text = RAW_TYPES[hashed[name]].is_text
                empty[name] = pd.Series([], dtype="object" if is_text else "int64")
        node.op.vocabs = node.op.process_vocabs(empty)
        node.op.clear()  # in NVTabular, this turns the given vocabularies into fitted ones
    return workflow


def realize(
    records: list[nodes.Record], directory: Path | None = None, raw: FeatureSpec | None = None
) -> nvtabular.Workflow:
    """Return the Workflow described by records of :mod:`workflows.nodes`.

    Args:
        records: Parents before children, the output last.
        directory: Directory of the artifacts of fitted records; None for an unfitted Workflow.
        raw: The spec by which the Workflow first reads raw columns, and in whose order it returns
            columns; None if it takes the frames of :func:`workflows.workflow_frames.to_frame`.
    """
    made: dict[int, WorkflowNode] = {}
    for record in records:
        node = WorkflowNode()
        node.op = _OPERATORS[record["op_class"]](record["op_params"])
        if isinstance(node.op, SelectionOp):
            node.selector = node.op.selector
            if raw is not None:
                reader = ReadRawValues(raw, _to_schemas(record["input_schema"]))
                node.add_parent(ColumnSelector(reader.sources) >> reader)
        if directory is not None:
            _restore(node.op, record, directory)
        for parent in record["parent_ids"]:
            node.add_parent(made[parent])
        for other in record["dependency_ids"]:
            node.add_dependency(made[other])
        made[record["id"]] = node
    if raw is None:
        return Workflow(node)
    return RawWorkflow(node[sorted(records[-1]["selector"]["names"], key=raw.columns.index)])


def _restore(operator: object, record: nodes.Record, directory: Path) -> None:
    """Give an operator its fitted state."""
    state = record["op_state"]
    if isinstance(operator, ops.Normalize):
        operator.means = state["means"]
        operator.stds = state["stds"]
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


def find_nodes(workflow: nvtabular.Workflow, kind: type) -> list[WorkflowNode]:
    """Return the nodes whose operator is of a type."""
    return Graph.get_nodes_by_op_type([workflow.output_node], kind)


def _make_selection(params: nodes.Record) -> SelectionOp:
    names = params["selector"]["names"]
    groups = params["selector"].get("groups", [])
    grouped = set(chain.from_iterable(groups))
    alone = [name for name in names if name not in grouped]
    return SelectionOp(nvtabular.ColumnSelector([*alone, *map(tuple, groups)]))


def _make_categorify(params: nodes.Record) -> ops.Categorify:
    with warnings.catch_warnings():
        # NVTabular warns of two things that cannot happen here: CPU and GPU hash differently, which
        # nvt_compat repairs, and buckets alone do not cap the table, which the spec does not allow.
        warnings.filterwarnings("ignore", message="Performing a hash-based transformation")
        return ops.Categorify(**params | {"dtype": np.dtype(params["dtype"]["name"])})


def _make_lambda(params: nodes.Record) -> ops.LambdaOp:
    function = functions.NAMED[params["f"]["qualname"]]
    return ops.LambdaOp(function, dtype=np.dtype(params["dtype"]["name"]))


_OPERATORS: dict[str, Callable[[nodes.Record], object]] = {
    nodes.SELECT: _make_selection,
    nodes.CONCAT: lambda params: ConcatColumns(label="+"),
    nodes.CATEGORIFY: _make_categorify,
    nodes.FILL: lambda params: ops.FillMissing(**params),
    nodes.CLIP: lambda params: ops.Clip(**params),
    nodes.LAMBDA: _make_lambda,
    nodes.NORMALIZE: lambda params: ops.Normalize(out_dtype=np.dtype(params["out_dtype"]["name"])),
}


def load(path: Path | str, *, label: bool = True, raw: bool = True) -> Workflow:
    """Load a fitted Workflow, which can ``transform`` frames or Datasets.

    Every file is compared with its digest. Nothing that is read is executed: operators and
    functions follow from the spec, and ``graph.json`` must agree with it.

    Args:
        path: Directory that :func:`workflows.writer.write_workflow` wrote.
        label: True if the input has labels and weight, which are passed through (training); False
            if it has none (inference).
        raw: True if the Workflow takes columns of the raw log, as text or typed values. Its first
            nodes read them by the spec (:class:`workflows.store.ReadRawValues`), and it returns
            columns in the order of the parquet. False if it takes frames of
            :func:`workflows.workflow_frames.to_frame`; it returns columns in the order of
            ``graph.json``.

    Raises:
        BadInputError: The path has no saved workflow, or one of its files is missing, damaged or
            replaced.
        SchemaError: It was saved in another version of the format.
    """
    path = Path(path).resolve()
    description = inspect(path)
    description.verify()
    spec = description.spec
    records = derive_graph(description)["nodes"]
    if not label:
        records = _drop_selection(records, nodes.list_unchanged_columns(spec))
    workflow = realize(records, path, spec if raw else None)
    # NVTabular caches vocabularies by path, where another workflow may have been before.
    clean_worker_cache()
    columns = []
    for record in records:
        if _get_selected_columns(record):
            columns += _to_schemas(record["input_schema"])
    if raw:
        columns = list(map(ColumnSchema, ReadRawValues(spec, columns).sources))
    return workflow.fit_schema(Schema(columns))


def _get_selected_columns(record: nodes.Record) -> list[str]:
    """Return the input columns that a node selects; [] for a node of another operator."""
    return record["selector"]["names"] if record["op_class"] == nodes.SELECT else []


def _drop_selection(records: list[nodes.Record], names: list[str]) -> list[nodes.Record]:
    """Leave out the node that selects exactly these columns, which only the output node uses."""
    (dropped,) = (record["id"] for record in records if _get_selected_columns(record) == names)
    kept = []
    for record in records:
        if record["id"] == dropped:
            continue
        others = [i for i in record["dependency_ids"] if i != dropped]
        kept_names = [name for name in record["selector"]["names"] if name not in names]
        kept.append({**record, "dependency_ids": others, "selector": {"names": kept_names}})
    return kept


def extract_fitted(workflow: Workflow, spec: FeatureSpec) -> Fitted:
    """Return the fitted state of a Workflow that :func:`build` made from ``spec``.

    Statistics and vocabularies of operators that are not fitted are left out.
    """
    statistics = {}
    for node in find_nodes(workflow, ops.Normalize):
        for name in node.op.means:
            # std is NaN for a single row. 0 makes NVTabular subtract only the mean.
            std = node.op.stds[name]
            statistics[name] = {"mean": node.op.means[name], "std": 0.0 if math.isnan(std) else std}
    vocabularies = {}
    for name, columns in spec.vocabularies.items():
        # Categorify uses the name of the column, or the joined names of columns counted together.
        stored = nodes.join_names([column.name for column in columns])
        for node in find_nodes(workflow, ops.Categorify):
            if stored in node.op.categories:
                file = Path(node.op.categories[stored])
                vocabularies[name] = _read_categories(columns[0], stored, file)
    return Fitted(statistics, vocabularies)


def _read_categories(column: CategoricalColumn, stored: str, file: Path) -> FittedVocabulary:
    """Read a vocabulary that Categorify wrote; pandas has counted integers as float64."""
    is_text = RAW_TYPES[column.raw].is_text
    table = pq.read_table(file)
    values = table[stored].cast(pa.string() if is_text else pa.int64()).combine_chunks()
    if not is_text:
        values = values.to_numpy()
    if column.hash_buckets:
        return fit_vocabulary(values, np.empty(0, np.int64), column, 0)
    counts = table[f"{stored}_size"].cast(pa.int64()).combine_chunks().to_numpy()
    meta = pq.read_table(file.with_name(f"meta.{stored}.parquet"))
    observed = dict(zip(meta["kind"].to_pylist(), meta["num_observed"].to_pylist(), strict=True))
    return FittedVocabulary(values, counts, {kind: int(observed[kind] or 0) for kind in OBSERVED})


def _to_schemas(columns: list[nodes.Record]) -> list[ColumnSchema]:
    """Return Merlin's schemas of columns of :func:`workflows.workflow_frames.to_frame`."""
    schemas = []
    for column in columns:
        dims = tuple((size["min"], size["max"]) for size in column["dtype"]["shape"])
        schemas.append(ColumnSchema(column["name"], dtype=column["dtype"]["name"], dims=dims))
    return schemas


class ReadRawValues(Operator):
    """Read columns of the log by a feature spec, from pandas or cuDF frames, on the host.

    Raises:
        SchemaError: In ``transform``, a column has a type that cannot hold the raw type.
        InvalidRowError: In ``transform``, a value is malformed; the message names row and column.
    """

    def __init__(self, spec: FeatureSpec, columns: Sequence[ColumnSchema]) -> None:
        """Initialize the operator.

        Args:
            spec: The feature spec.
            columns: The columns to read: features of the spec, or its labels and weight.
        """
        super().__init__()
        self._spec = spec
        self._columns = Schema(list(columns))
        self._mapping = {column.name: spec.field_sources(column.name) for column in columns}

    @property
    def sources(self) -> list[str]:
        """The columns of the log that are read."""
        return list(dict.fromkeys(chain.from_iterable(self._mapping.values())))

    def transform(self, col_selector: ColumnSelector, df: Any) -> Any:
        """Return the typed columns, with the index of ``df``."""
        features = read_features(df, self._spec, self._columns.column_names)
        gpu = not isinstance(df, pd.DataFrame)
        frame = features_to_frame(features, nodes.list_unchanged_columns(self._spec), gpu=gpu)
        frame.index = df.index
        return frame

    def column_mapping(self, col_selector: ColumnSelector) -> dict[str, list[str]]:
        """Return the columns of the log that each column is read or derived from."""
        return self._mapping

    def compute_output_schema(
        self, input_schema: Schema, col_selector: ColumnSelector, prev_output_schema: Any = None
    ) -> Schema:
        """Return the types of the columns that are read, regardless of the input's types."""
        return self._columns


class RawWorkflow(nvtabular.Workflow):
    """A Workflow whose error names the columns of the log that are missing in its input.

    Raises:
        MissingColumnError: In ``transform``, the input lacks a column that is read.
    """

    def _transform_df(self, df: Any) -> Any:
        check_columns(df.columns, self._input_columns())
        return super()._transform_df(df)

    def _transform_impl(self, dataset: Any, capture_dtypes: bool = False) -> Any:
        check_columns(dataset.to_ddf().columns, self._input_columns())
        return super()._transform_impl(dataset, capture_dtypes)


def _read_format_name(fs: fsspec.AbstractFileSystem, directory: str) -> str | None:
    """Return the format in metadata.json; None for NVTabular's own workflows."""
    try:
        with fs.open(f"{directory}/metadata.json") as file:
            return json.load(file).get("format")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None  # NVTabular's loader reports what is wrong


def _make_load(stock: Callable[..., Workflow]) -> classmethod:
    """Return a ``Workflow.load`` for this project's workflows that leaves others to ``stock``."""

    @functools.wraps(stock)
    def load_workflow(cls: type[Workflow], path: Path | str, client: Any = None) -> Workflow:
        fs, _, [directory] = fsspec.get_fs_token_paths(str(path))
        if _read_format_name(fs, directory) != FORMAT.name:
            return stock(cls, path, client=client)
        if not isinstance(fs, LocalFileSystem):
            raise BadInputError(f"{path}: not a local directory", "copy the workflow here first")
        workflow = load(directory)
        workflow.client = client
        return workflow

    return classmethod(load_workflow)


replace(Workflow, "load", _make_load(Workflow.load.__func__), expect='"workflow.pkl"')
