"""A workflow that NVTabular 23.08 pickled → a saved workflow of this project.

Opening a pickle runs the code in it; nothing here can make that safe. So it takes a flag, and logs
a warning. The result is no pickle.

Imported are Categorify (with the same ids) and dense columns that are filled and then normalized,
or put into the logarithm of this project, or both; see :mod:`workflows.store`. Before the result
gets its name, both workflows transform the same rows, and the results must agree.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import warnings
from collections import Counter
from pathlib import Path

import nvt_torchrec.nvt_compat  # noqa: F401

import numpy as np
import nvtabular
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from nvtabular import ops

from nvt_torchrec import workflows
from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.base.files.atomic import new_directory
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.spec.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.spec.toml_file import load_spec
from nvt_torchrec.workflows.store import nodes_of
from nvt_torchrec.workflows.vocabulary import FittedVocabulary
from nvt_torchrec.workflows.writer import Fitted, write_workflow

log = logging.getLogger(__name__)

_NOT_IMPORTED = "fit a workflow with `python -m etl run`, or keep using this one in NVTabular"
#: Operators of dense columns that are imported between FillMissing and Normalize.
_LOGARITHM = (ops.Clip, ops.LambdaOp, ops.LogOp)


def import_workflow(
    source: Path, target: Path, *, trust_pickle: bool, spec: str | None = None
) -> workflows.WorkflowDescription:
    """Convert ``source/workflow.pkl`` into ``target/workflow``.

    Args:
        source: A directory that NVTabular's ``Workflow.save`` wrote.
        target: The directory in which ``workflow`` is made.
        trust_pickle: Whether to run the code in the pickle.
        spec: The name or path of a spec of the raw rows with the columns of the workflow. Without
            it, columns with vocabularies of integers get raw type ``int``, of text ``string``.

    Raises:
        BadInputError: The pickle is not trusted, or cannot be opened.
        SchemaError: The workflow has an operator or setting that this project's graph lacks.
        OutputError: ``target/workflow`` exists, or cannot be written.
    """
    workflow = _open(source, trust_pickle)
    written = _spec(workflow, load_spec(spec) if spec else None)
    path = EtlOutput(target).workflow
    with new_directory(path) as unchecked:
        try:
            write_workflow(unchecked, written, _fitted(workflow, written))
        except (KeyError, OSError, pa.ArrowException) as error:
            raise BadInputError(
                f"{source}: a vocabulary cannot be imported: {error}",
                "copy the whole directory that Workflow.save wrote",
            ) from error
        _compare(workflow, written, unchecked)
    return workflows.inspect(path)


def _open(source: Path, trust_pickle: bool) -> nvtabular.Workflow:
    file = source / "workflow.pkl"
    if not trust_pickle:
        raise BadInputError(
            f"{file}: a pickle; opening it runs the code in it, whatever that does",
            "if you trust its source, set --trust_pickle",
        )
    log.warning("%s: --trust_pickle is set: running the code in this pickle", file)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Loading workflow generated")
            workflow = nvtabular.Workflow.load(str(source))
    except Exception as error:  # the code in a pickle may raise anything
        raise BadInputError(
            f"{file}: cannot be opened: {type(error).__name__}: {error}",
            "it needs the packages and modules it was saved with",
        ) from error
    if not isinstance(workflow, nvtabular.Workflow) or not workflow.output_schema:
        raise BadInputError(f"{file}: no fitted NVTabular Workflow", "fit it, and save it again")
    return workflow


def _spec(workflow: nvtabular.Workflow, given: FeatureSpec | None) -> FeatureSpec:
    """The spec whose graph is that of the workflow, and whose vocabularies have its policies."""
    labels, dense, categorical, transforms = [], [], [], {}
    for name in workflow.output_schema.column_names:
        chain = _chain(workflow.output_node, name)
        if not chain:
            labels.append(name)
        elif isinstance(chain[-1], ops.Categorify):
            categorical.append(_categorical(workflow, name, chain))
        else:
            column, transforms[name] = _dense(workflow, name, chain)
            dense.append(column)
    if len(labels) > 1:
        raise SchemaError(
            f"columns {', '.join(labels)} pass through as they are; one of them is the label",
            _NOT_IMPORTED,
        )
    usual = Counter(transforms.values()).most_common(1)
    transform = usual[0][0] if usual else "log_normalize"
    dense = [
        column
        if transforms[column.name] == transform
        else dataclasses.replace(column, transform=transforms[column.name])
        for column in dense
    ]
    if given is None:
        label = labels[0] if labels else "label"
        return FeatureSpec(label, tuple(dense), tuple(categorical), transform)
    return _merged(given, labels, dense, categorical, transform)


def _merged(
    given: FeatureSpec, labels: list[str], dense: list, categorical: list, transform: str
) -> FeatureSpec:
    """The given spec with the workflow's policies."""
    imported = {column.name: column for column in [*dense, *categorical]}
    names = [*given.dense_names, *given.categorical_names]
    if set(names) != set(imported) or (labels and labels != [given.label]):
        differing = sorted(set(names) ^ set(imported)) or [given.label]
        raise SchemaError(
            f"the spec and the workflow differ in columns: {', '.join(differing[:5])}",
            "give the spec of the rows that the workflow was fitted on",
        )
    kinds = {column.name for column in dense}
    if set(given.dense_names) != kinds:
        raise SchemaError(
            f"dense in the spec or in the workflow alone: "
            f"{', '.join(sorted(set(given.dense_names) ^ kinds)[:5])}",
            "give the spec of the rows that the workflow was fitted on",
        )
    for column in given.categorical:
        text = RAW_TYPES[imported[column.name].raw].is_text
        if text != RAW_TYPES[column.raw].is_text:
            raise SchemaError(
                f"column {column.name}: {column.raw} in the spec, its vocabulary is "
                f"{'text' if text else 'integers'}",
                'raw = "string" is for text, hex32 or int for integers',
            )
    return dataclasses.replace(
        given,
        dense=tuple(
            dataclasses.replace(
                column, fill=imported[column.name].fill, transform=imported[column.name].transform
            )
            for column in given.dense
        ),
        categorical=tuple(
            dataclasses.replace(imported[column.name], raw=column.raw)
            for column in given.categorical
        ),
        dense_transform=transform,
    )


def _chain(node, name: str) -> list:
    """The operators that a column goes through, first to last; those that only add tags aside."""
    parents = [
        parent
        for parent in node.parents_with_dependencies
        if name in parent.output_schema.column_names
    ]
    if len(parents) > 1:
        parents = parents[:1]
    before = _chain(parents[0], name) if parents else []
    if type(node.op).__module__.startswith("merlin.dag") or isinstance(node.op, ops.AddMetadata):
        return before
    if not parents:
        raise SchemaError(
            f"column {name}: {type(node.op).__name__} makes it of other columns", _NOT_IMPORTED
        )
    return [*before, node.op]


def _categorical(workflow: nvtabular.Workflow, name: str, chain: list) -> CategoricalColumn:
    *before, op = chain
    if before:
        raise SchemaError(
            f"column {name}: {type(before[0]).__name__} before Categorify; this project applies "
            "Categorify to the raw values",
            _NOT_IMPORTED,
        )

    def setting(value) -> int:
        return int((value.get(name) if isinstance(value, dict) else value) or 0)

    if name in op.storage_name or op.encode_type != "joint" or op.single_table:
        raise SchemaError(
            f"column {name}: Categorify with column groups or a single table", _NOT_IMPORTED
        )
    if setting(op.num_buckets):
        raise SchemaError(
            f"column {name}: Categorify(num_buckets={setting(op.num_buckets)}); this project "
            "hashes rare values differently, so they would get other ids",
            _NOT_IMPORTED,
        )
    if name not in op.categories:
        raise SchemaError(f"column {name}: Categorify is not fitted", "fit it, and save it again")
    kind = pq.read_schema(op.categories[name]).field(name).type
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return CategoricalColumn(
        name,
        raw="int" if number else "string",
        multi_hot=bool(workflow.input_schema[name].is_list),
        freq_threshold=setting(op.freq_threshold),
        max_table_size=setting(op.max_size),
    )


def _dense(workflow: nvtabular.Workflow, name: str, chain: list) -> tuple[DenseColumn, str]:
    """The column, and which transform of this project its operators amount to."""
    fill, *rest = chain
    if not isinstance(fill, ops.FillMissing) or fill.add_binary_cols:
        what = (
            f"{type(fill).__name__} first" if type(fill) is not ops.FillMissing else "FillMissing"
        )
        raise SchemaError(
            f"column {name}: {what}; needed is FillMissing without flags", _NOT_IMPORTED
        )
    normalized = bool(rest) and isinstance(rest[-1], ops.Normalize)
    logarithm = rest[:-1] if normalized else rest
    for op in logarithm:
        if not isinstance(op, _LOGARITHM):
            raise SchemaError(f"column {name}: {type(op).__name__} in its chain", _NOT_IMPORTED)
    if not rest:
        raise SchemaError(f"column {name}: FillMissing without a transform after it", _NOT_IMPORTED)
    kind = workflow.input_schema[name].dtype
    raw = "float" if kind.element_type.value == "float" else "int32"
    value = float(fill.fill_val)
    column = DenseColumn(name, fill=int(value) if value.is_integer() else value, raw=raw)
    if normalized:
        return column, "log_normalize" if logarithm else "normalize"
    return column, "log"


def _fitted(workflow: nvtabular.Workflow, spec: FeatureSpec) -> Fitted:
    """Means, deviations and vocabularies, in the order of their ids.

    ``Workflow.save`` does not write how many rows were null or out of vocabulary.
    """
    statistics = {}
    for node in nodes_of(workflow, ops.Normalize):
        for name, mean in node.op.means.items():
            std = float(node.op.stds[name])
            statistics[name] = {"mean": float(mean), "std": 0.0 if math.isnan(std) else std}
    files = {}
    for node in nodes_of(workflow, ops.Categorify):
        files |= node.op.categories
    vocabularies = {}
    for column in spec.categorical:
        table = pq.read_table(files[column.name])
        kind = pa.string() if RAW_TYPES[column.raw].is_text else pa.int64()
        values = table[column.name].cast(kind).combine_chunks()
        counts = table[f"{column.name}_size"].cast(pa.int64()).to_numpy()
        vocabularies[column.name] = FittedVocabulary(
            values if RAW_TYPES[column.raw].is_text else values.to_numpy(),
            counts,
            {"null": 0, "oov": 0, "unique": int(counts.sum())},
        )
    return Fitted(statistics, vocabularies)


def _compare(workflow: nvtabular.Workflow, spec: FeatureSpec, path: Path) -> None:
    """Both workflows transform the same rows: known, unknown and missing values."""
    frame = _probe(spec, path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LogOp: ")  # of the rows made here
        expected = workflow.transform(frame.copy())
    actual = workflows.load(path).transform(frame.copy())
    for column in spec.categorical:
        theirs, ours = (_flat(each[column.name]) for each in (expected, actual))
        if not np.array_equal(theirs, ours):
            raise SchemaError(
                f"column {column.name}: ids differ, for example {theirs[theirs != ours][:1]} of "
                f"NVTabular, {ours[theirs != ours][:1]} of this project"
                if len(theirs) == len(ours)
                else f"column {column.name}: lists of other lengths",
                _NOT_IMPORTED,
            )
    for dense in spec.dense:
        name = dense.name
        theirs, ours = (each[name].to_numpy().astype(np.float64) for each in (expected, actual))
        wrong = np.isfinite(theirs) & ~np.isclose(theirs, ours, rtol=1e-4, atol=1e-5)
        if wrong.any() or not np.isfinite(theirs).any():
            at = int(np.argmax(wrong))
            operators = " >> ".join(type(op).__name__ for op in _chain(workflow.output_node, name))
            raise SchemaError(
                f"column {name}: {operators} makes {theirs[at]:g} of {frame[name][at]:g}, this "
                f"project's {spec.transform_of(dense).name} makes {ours[at]:g}",
                _NOT_IMPORTED,
            )


_PROBE_ROWS = 200


def _probe(spec: FeatureSpec, path: Path) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    columns = {spec.label: np.zeros(_PROBE_ROWS, np.float32)}
    description = workflows.inspect(path)
    for column in spec.dense:
        values = np.concatenate([np.arange(-2, 98), rng.integers(0, 10**6, 100)]).astype(float)
        values[7] = np.nan
        columns[column.name] = values
    for column in spec.categorical:
        file = path / description.vocabularies[column.name].file
        known = pq.read_table(file, columns=[column.vocabulary_name])[0]
        some = rng.integers(0, max(len(known), 1), _PROBE_ROWS) if len(known) else []
        values: list = known.take(pa.array(some, pa.int64())).to_pylist()
        values = (values + [None] * _PROBE_ROWS)[:_PROBE_ROWS]
        values[3] = None
        values[5] = "no such value" if RAW_TYPES[column.raw].is_text else 2**40 + 5
        if column.multi_hot:
            columns[column.name] = [[value] if value is not None else [] for value in values]
        elif RAW_TYPES[column.raw].is_text:
            columns[column.name] = np.array(values, dtype=object)
        else:
            columns[column.name] = np.array(values, dtype=np.float64)
    return pd.DataFrame(columns)


def _flat(column: pd.Series) -> np.ndarray:
    if column.dtype == object:
        lists = column.tolist()
        return np.concatenate([np.asarray([len(ids), *ids], np.int64) for ids in lists])
    return column.to_numpy().astype(np.int64)
