"""Saving a fitted Workflow, and loading it. The layout is in :mod:`workflows.description`."""

from __future__ import annotations

import hashlib
import json
import math
from importlib import metadata
from pathlib import Path

import nvt_compat  # noqa: F401

import numpy as np
import nvtabular
import pyarrow as pa
import pyarrow.parquet as pq
from merlin.dag import Graph
from merlin.io.worker import clean_worker_cache
from merlin.schema import ColumnSchema, Schema
from nvtabular import ops

from clicklog.errors import BadInputError, SchemaError
from clicklog.files import atomic_path, write_json
from clicklog.spec import FIRST_OOV_ID, NULL_ID, PADDING_ID, CategoricalColumn, FeatureSpec
from workflows.description import WORKFLOW_FILE, Vocabulary, WorkflowDescription, inspect
from workflows.graph import build

_VERSIONS_OF = ("nvt-torchrec", "nvtabular", "merlin-core", "dask", "pandas", "cudf-cu13", "numpy")


def save(workflow: nvtabular.Workflow, spec: FeatureSpec, path: Path | str) -> WorkflowDescription:
    """Write a fitted workflow that :func:`workflows.graph.build` made from ``spec``.

    The description is written last: a directory without it is no saved workflow.

    Raises:
        SchemaError: the workflow is not fitted, or a statistic is not finite.
        OutputError: the directory cannot be written.
    """
    path = Path(path)
    (path / WORKFLOW_FILE).unlink(missing_ok=True)
    statistics = _statistics(workflow)
    digest = _begin_digest(spec, statistics)
    files = _vocabulary_files(workflow)
    vocabularies = {}
    for column in spec.categorical:
        if column.name not in files:
            raise SchemaError(f"column {column.name}: the workflow is not fitted")
        vocabularies[column.name] = _save_vocabulary(column, files[column.name], path, digest)
    description = WorkflowDescription(
        spec=spec,
        statistics=statistics,
        vocabularies=vocabularies,
        versions=_versions(),
        digest=digest.hexdigest(),
    )
    write_json(path / WORKFLOW_FILE, description.to_dict())
    return description


def load(path: Path | str, *, label: bool = True) -> nvtabular.Workflow:
    """The Workflow a directory holds, fitted, ready to ``transform`` frames or Datasets.

    Args:
        path: directory that :func:`save` wrote, here or elsewhere.
        label: pass the label through (training), or expect no such column (inference).

    Raises:
        BadInputError: no saved workflow there, or a file of it missing or damaged.
        SchemaError: saved in a format of another version.
    """
    path = Path(path).resolve()
    description = inspect(path)
    spec = description.spec
    digest = _begin_digest(spec, description.statistics)
    for name, vocabulary in description.vocabularies.items():
        _add_to_digest(digest, name, _read_vocabulary(path / vocabulary.file, name))
    if digest.hexdigest() != description.digest:
        raise BadInputError(
            f"{path}: its files are not those it was saved with (digest {digest.hexdigest()[:12]}…"
            f", {WORKFLOW_FILE} says {description.digest[:12]}…)",
            "copy the whole workflow directory again, or fit it again",
        )
    workflow = build(spec, str(path), label=label)
    # Each operator gets the state of all columns; it looks up those it is selected for.
    files = {name: str(path / v.file) for name, v in description.vocabularies.items()}
    for node in _nodes(workflow, ops.Categorify):
        node.op.vocabs = files
        node.op.clear()  # takes them over
        node.op.fitted = True
    for node in _nodes(workflow, ops.Normalize):
        node.op.means = {name: s["mean"] for name, s in description.statistics.items()}
        node.op.stds = {name: s["std"] for name, s in description.statistics.items()}
        node.op.fitted = True
    # NVTabular caches vocabularies by path; this path may have held another workflow.
    clean_worker_cache()
    return workflow.fit_schema(input_schema(spec, label=label))


def input_schema(spec: FeatureSpec, *, label: bool = True) -> Schema:
    """Merlin's schema of the frames of :func:`workflows.frames.to_frame` (pandas)."""
    columns = [ColumnSchema(spec.label, dtype=np.float32)] if label else []
    names = spec.dense_names + spec.categorical_names
    return Schema(columns + [ColumnSchema(name, dtype=np.float64) for name in names])


def _nodes(workflow: nvtabular.Workflow, kind: type) -> list:
    return Graph.get_nodes_by_op_type([workflow.output_node], kind)


def _statistics(workflow: nvtabular.Workflow) -> dict[str, dict[str, float]]:
    statistics = {}
    for node in _nodes(workflow, ops.Normalize):
        for name in node.op.means:
            # With one row, or none, there is no spread: NVTabular then only subtracts the mean.
            std = node.op.stds[name]
            values = {"mean": node.op.means[name], "std": 0.0 if math.isnan(std) else std}
            if not all(map(math.isfinite, values.values())):
                raise SchemaError(f"column {name}: its statistics are not finite: {values}")
            statistics[name] = values
    return dict(sorted(statistics.items()))


def _vocabulary_files(workflow: nvtabular.Workflow) -> dict[str, str]:
    files = {}
    for node in _nodes(workflow, ops.Categorify):
        files.update(node.op.categories)
    return files


def _save_vocabulary(
    column: CategoricalColumn, source: str, path: Path, digest: hashlib._Hash
) -> Vocabulary:
    """Copy one vocabulary in canonical form: integers, ids as pandas' index, no padding."""
    name, first_id = column.name, column.reserved_ids
    table = pq.read_table(source, columns=[name, f"{name}_size"])
    values = table[name].cast(pa.int64()).combine_chunks()
    sizes = table[f"{name}_size"].cast(pa.int64()).combine_chunks()
    _add_to_digest(digest, name, values)
    index = {"kind": "range", "name": None, "start": first_id, "stop": first_id + len(values)}
    described = {"index_columns": [{**index, "step": 1}], "column_indexes": [], "columns": []}
    canonical = pa.table({name: values, f"{name}_size": sizes}).replace_schema_metadata(
        {b"pandas": json.dumps(described).encode()}
    )
    file = Path("categories") / f"unique.{name}.parquet"
    with atomic_path(path / file) as temporary:
        pq.write_table(canonical, temporary, compression="none")
    meta = pq.read_table(Path(source).with_name(f"meta.{name}.parquet"))
    observed = dict(zip(meta["kind"].to_pylist(), meta["num_observed"].to_pylist(), strict=True))
    observed = {kind: int(observed[kind] or 0) for kind in ("null", "oov", "unique")}
    meta = pa.table(
        {
            "kind": ["pad", "null", "oov", "unique"],
            "offset": [PADDING_ID, NULL_ID, FIRST_OOV_ID, first_id],
            "num_indices": [1, 1, column.oov_ids, len(values)],
            "num_observed": [0, observed["null"], observed["oov"], observed["unique"]],
        }
    )
    with atomic_path(path / "categories" / f"meta.{name}.parquet") as temporary:
        pq.write_table(meta, temporary)
    return Vocabulary(str(file), len(values), first_id + len(values), observed)


def _read_vocabulary(file: Path, name: str) -> pa.Array:
    try:
        return pq.read_table(file, columns=[name])[name].combine_chunks()
    except (OSError, KeyError, pa.ArrowException) as error:
        raise BadInputError(
            f"{file}: cannot be read, the vocabulary of column {name}: {error}",
            "copy the whole workflow directory again, or fit it again",
        ) from error


def _begin_digest(spec: FeatureSpec, statistics: dict) -> hashlib._Hash:
    return hashlib.sha256(json.dumps([spec.to_dict(), statistics], sort_keys=True).encode())


def _add_to_digest(digest: hashlib._Hash, name: str, values: pa.Array) -> None:
    digest.update(name.encode())
    digest.update(values.to_numpy().astype("<i8", copy=False).tobytes())


def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONS_OF:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
