"""Write a fitted workflow to disk. All engines use it, so it does not need NVTabular.

:mod:`formats.workflow_description` describes the layout. The same state gives the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import string_parts, strings, to_arrow, to_numpy
from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.base.files import atomic
from nvt_torchrec.base.files.artifact import FileEntry
from nvt_torchrec.formats.feature_spec import CategoricalColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.columns import FIRST_OOV_ID, NULL_ID, PADDING_ID
from nvt_torchrec.formats.table_files import DIRECTORY as TABLES
from nvt_torchrec.formats.table_files import link_table, list_table_files
from nvt_torchrec.formats.vectors import IN_WORKFLOW as VECTORS
from nvt_torchrec.formats.vectors import VALUES, link_vectors
from nvt_torchrec.formats.vocabularies import (
    Generation,
    Vocabulary,
    VocabularyCounts,
    describe_vocabularies,
)
from nvt_torchrec.formats.workflow_description import GRAPH_FILE, METADATA_FILE, WorkflowDescription
from nvt_torchrec.workflows.description import derive_graph
from nvt_torchrec.workflows.nodes import list_vocabulary_directories
from nvt_torchrec.workflows.vocabulary import FittedVocabulary, PendingValues, to_arrow_array

#: Packages whose versions a workflow records, because its values may depend on them.
_VERSIONED_PACKAGES = (
    "nvt-torchrec", "nvtabular", "merlin-core", "dask", "pandas", "cudf", "numpy", "pyarrow",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The result of fitting a spec on the training days.

    Attributes:
        statistics: For each normalized dense column, ``{"mean": float, "std": float}`` of the
            values before normalization (after the logarithm, if the transform has one); std has
            n − 1 in its denominator and is 0 for fewer than two rows.
        vocabularies: The vocabularies, by ``column.vocabulary_name``.
        pending: By vocabulary, the values that were seen and have no id; vocabularies without such
            values may be left out. They are not part of the saved workflow, see
            :mod:`workflows.extension_state`.
    """

    statistics: dict[str, dict[str, float]]
    vocabularies: dict[str, FittedVocabulary]
    pending: dict[str, PendingValues] = dataclasses.field(default_factory=dict)


def write_workflow(
    path: Path | str,
    spec: FeatureSpec,
    fitted: Fitted,
    *,
    threads: int = 1,
    days: tuple[int, ...] = (0,),
    ancestors: tuple[Generation, ...] = (),
    tables: Path | None = None,
    known: Mapping[str, FileEntry] = MappingProxyType({}),
) -> WorkflowDescription:
    """Write a fitted workflow and its compiled form.

    An existing ``metadata.json`` is removed first, and the new one is written last: a directory
    without it is not a saved workflow.

    Args:
        path: The workflow's directory.
        spec: The columns.
        fitted: Their statistics and vocabularies.
        threads: Number of threads that write and compile vocabularies and compute digests; the
            bytes do not depend on it.
        days: The days that were counted in this generation and in no earlier one, ascending.
        ancestors: The earlier generations.
        tables: The directory of the tables, whose files are linked; needed for a spec with tables.
        known: Size and digest of the files of vectors that the previous generation has. These files
            never change, and are not read again.

    Raises:
        SchemaError: A vocabulary or a statistic is missing, or a statistic is not finite.
        OutputError: The directory cannot be written.
    """
    from nvt_torchrec.workflows import compiled  # imports Numba, which readers do not need

    path = Path(path)
    atomic.remove(path / METADATA_FILE)
    statistics = _check_statistics(spec, fitted)
    vocabularies = _describe_vocabularies(spec, fitted)

    def write_vocabulary(column: CategoricalColumn) -> dict[str, FileEntry]:
        described = vocabularies[column.name]
        with atomic.deferred() as written:
            entries = _write_vocabulary(
                path, described, column, fitted.vocabularies[described.name]
            )
        waiting.extend(written)
        return entries

    # Files are written under temporary names, and renamed together once all are complete.
    with atomic.removed_on_error() as waiting:
        files: dict[str, FileEntry] = {}
        with ThreadPoolExecutor(threads) as pool:
            digest = pool.submit(_compute_digest, spec, statistics, fitted)
            first = [columns[0] for columns in spec.vocabularies.values()]
            for entries in pool.map(write_vocabulary, first):
                files |= entries
        values = {name: len(fitted.vocabularies[name]) for name in spec.vocabularies}
        description = WorkflowDescription(
            path=path,
            spec=spec,
            statistics=statistics,
            vocabularies=vocabularies,
            versions=dict(_get_versions()),
            digest=digest.result(),
            files=files,
            lineage=(*ancestors, Generation(len(ancestors), digest.result(), days, values)),
        )
        with atomic.deferred() as others:
            atomic.write_text(path / GRAPH_FILE, _format_graph(derive_graph(description)))
        atomic.publish([*others, *waiting])
    for rule in spec.joined_tables:
        assert tables is not None
        link_table(spec, rule.name, tables / rule.name, path / TABLES / rule.name)
        for vector in spec.table_vectors(rule.name):
            link_vectors(tables / rule.name / VECTORS, path / VECTORS, vector.name)
    names = [*list_table_files(spec), *_list_vectors(path)]

    def describe_file(name: str) -> FileEntry:
        return known.get(name) or FileEntry.from_file(path / name)

    with ThreadPoolExecutor(threads) as pool:
        files |= dict(zip(names, pool.map(describe_file, names), strict=True))
    files[GRAPH_FILE] = FileEntry.from_file(path / GRAPH_FILE)
    compiled.build(path, description, threads=threads)
    description.write()
    return description


def _list_vectors(path: Path) -> list[str]:
    """Return the files of vectors of a workflow, relative to it."""
    return [str(file.relative_to(path)) for file in sorted((path / VECTORS).rglob(VALUES))]


def _check_statistics(spec: FeatureSpec, fitted: Fitted) -> dict[str, dict[str, float]]:
    statistics = {}
    for name in spec.normalized_names:
        if name not in fitted.statistics:
            raise SchemaError(f"column {name}: the workflow is not fitted")
        values = {kind: float(fitted.statistics[name][kind]) for kind in ("mean", "std")}
        if not all(map(math.isfinite, values.values())):
            raise SchemaError(
                f"column {name}: its statistics are not finite: {values}",
                'correct its largest values, or use transform = "log_normalize"',
            )
        statistics[name] = values
    return statistics


def _describe_vocabularies(spec: FeatureSpec, fitted: Fitted) -> dict[str, Vocabulary]:
    counted = {}
    for name, columns in spec.vocabularies.items():
        if name not in fitted.vocabularies:
            raise SchemaError(f"column {columns[0].name}: the workflow is not fitted")
        vocabulary = fitted.vocabularies[name]
        counted[name] = VocabularyCounts(len(vocabulary), vocabulary.observed)
    return describe_vocabularies(spec, counted, list_vocabulary_directories(spec))


def _write_vocabulary(
    path: Path, described: Vocabulary, column: CategoricalColumn, fitted: FittedVocabulary
) -> dict[str, FileEntry]:
    """Write a vocabulary's two files; return their sizes and digests."""
    name = described.name
    first_id = column.reserved_ids
    count = len(fitted)
    # NVTabular reads the file as a pandas frame, and takes its index as the ids.
    index = {"kind": "range", "name": None, "start": first_id, "stop": first_id + count, "step": 1}
    pandas = {"index_columns": [index], "column_indexes": [], "columns": []}
    counts = to_arrow(fitted.counts)
    values = pa.table({name: to_arrow_array(fitted.values), f"{name}_size": counts})
    observed = fitted.observed
    numbers = {
        "offset": [PADDING_ID, NULL_ID, FIRST_OOV_ID, first_id],
        "num_indices": [1, 1, column.oov_ids, count],
        "num_observed": [0, observed["null"], observed["oov"], observed["unique"]],
    }
    meta = {"kind": strings(["pad", "null", "oov", "unique"])}
    for key, integers in numbers.items():
        meta[key] = to_arrow(np.array(integers, np.int64))
    tables = {
        described.file: values.replace_schema_metadata({b"pandas": json.dumps(pandas).encode()}),
        described.meta_file: pa.table(meta),
    }
    entries = {}
    for file, table in tables.items():
        with atomic.atomic_path(path / file) as temporary:
            _write_table(table, temporary)
            entries[file] = FileEntry.from_file(temporary)
    return entries


def _write_table(table: pa.Table, file: Path) -> None:
    pq.write_table(table, file, compression="none", use_dictionary=False, write_page_checksum=True)


def _format_graph(graph: dict[str, Any]) -> str:
    """Format the graph with a line for each node; indenting it would take half a second."""
    records = ",\n".join(map(json.dumps, graph["nodes"]))
    head = {key: value for key, value in graph.items() if key != "nodes"}
    return f'{json.dumps(head)[:-1]}, "nodes": [\n{records}\n]}}\n'


def _compute_digest(spec: FeatureSpec, statistics: dict, fitted: Fitted) -> str:
    columns = {key: value for key, value in spec.to_dict().items() if key not in ("input", "split")}
    digest = hashlib.sha256(json.dumps([columns, statistics], sort_keys=True).encode())
    for name in spec.vocabularies:
        values = to_arrow_array(fitted.vocabularies[name].values)
        digest.update(name.encode())
        if pa.types.is_string(values.type):
            offsets, data = string_parts(values)
            begin, end = int(offsets[0]), int(offsets[-1])
            digest.update((offsets - begin).astype("<i8").tobytes())
            digest.update(data[begin:end].data)
        else:
            digest.update(to_numpy(values).astype("<i8", copy=False).tobytes())
    return digest.hexdigest()


@functools.cache  # because reading the metadata of each package is slow
def _get_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that fitted the workflow.

    NVTabular's loader compares the versions of Python, nvtabular and pandas with its own. If they
    differ, it prints the recorded version of nvtabular, and then fails to find a pickle. So that
    version says how to open the workflow.
    """
    versions = {"python": sys.version}
    for name in _VERSIONED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    if "nvtabular" in versions:
        versions["nvtabular"] += (
            " (to open it, import nvt_torchrec.workflows.store before nvtabular)"
        )
    return versions
