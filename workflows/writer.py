"""Writing a fitted workflow, by whichever engine it was fitted. Imports no NVTabular.

The layout is in :mod:`workflows.description`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from importlib import metadata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clicklog.errors import SchemaError
from clicklog.files import atomic_path, write_json
from clicklog.spec import FIRST_OOV_ID, NULL_ID, PADDING_ID, CategoricalColumn, FeatureSpec
from workflows.description import WORKFLOW_FILE, Vocabulary, WorkflowDescription
from workflows.vocabulary import FittedVocabulary, finish

__all__ = ["Fitted", "FittedVocabulary", "finish", "write_workflow"]

_VERSIONS_OF = ("nvt-torchrec", "nvtabular", "merlin-core", "dask", "pandas", "cudf-cu13", "numpy")


@dataclasses.dataclass(frozen=True)
class Fitted:
    """What fitting a spec on the training days gives.

    Attributes:
        statistics: per normalized dense column ``{"mean": float, "std": float}`` of the values
            before normalization (after the logarithm, if there is one); std has n − 1 in its
            denominator and is 0 for fewer than two rows. Empty for ``dense_transform = "log"``.
        vocabularies: by ``column.vocabulary_name``.
    """

    statistics: dict[str, dict[str, float]]
    vocabularies: dict[str, FittedVocabulary]


def write_workflow(path: Path | str, spec: FeatureSpec, fitted: Fitted) -> WorkflowDescription:
    """Write a fitted workflow; the description is written last.

    Raises:
        SchemaError: a vocabulary is missing, or a statistic is not finite.
        OutputError: the directory cannot be written.
    """
    path = Path(path)
    (path / WORKFLOW_FILE).unlink(missing_ok=True)
    statistics = {name: fitted.statistics[name] for name in sorted(fitted.statistics)}
    for name, values in statistics.items():
        if not all(map(math.isfinite, values.values())):
            raise SchemaError(f"column {name}: its statistics are not finite: {values}")
    digest = hashlib.sha256(json.dumps([spec.to_dict(), statistics], sort_keys=True).encode())
    vocabularies = {}
    for name, columns in spec.vocabularies.items():
        if name not in fitted.vocabularies:
            raise SchemaError(f"column {columns[0].name}: the workflow is not fitted")
        written = _write_vocabulary(columns[0], name, fitted.vocabularies[name], path, digest)
        vocabularies |= {column.name: written for column in columns}
    description = WorkflowDescription(
        spec=spec,
        statistics=statistics,
        vocabularies={column.name: vocabularies[column.name] for column in spec.categorical},
        versions=_versions(),
        digest=digest.hexdigest(),
    )
    write_json(path / WORKFLOW_FILE, description.to_dict())
    return description


def _write_vocabulary(
    column: CategoricalColumn, name: str, fitted: FittedVocabulary, path: Path, digest
) -> Vocabulary:
    values = pa.array(fitted.values)
    _add_to_digest(digest, name, values)
    first_id = column.reserved_ids
    index = {"kind": "range", "name": None, "start": first_id, "stop": first_id + len(values)}
    described = {"index_columns": [{**index, "step": 1}], "column_indexes": [], "columns": []}
    table = pa.table({name: values, f"{name}_size": fitted.counts})
    table = table.replace_schema_metadata({b"pandas": json.dumps(described).encode()})
    file = Path("categories") / f"unique.{name}.parquet"
    with atomic_path(path / file) as temporary:
        pq.write_table(table, temporary, compression="none")
    observed = fitted.observed
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


def _add_to_digest(digest: hashlib._Hash, name: str, values: pa.Array) -> None:
    digest.update(name.encode())
    if pa.types.is_string(values.type):
        lengths = np.array([len(v) for v in values.cast(pa.binary()).to_pylist()], "<i8")
        digest.update(lengths.tobytes())
        digest.update("".join(values.to_pylist()).encode())
    else:
        digest.update(values.to_numpy().astype("<i8", copy=False).tobytes())


def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONS_OF:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
