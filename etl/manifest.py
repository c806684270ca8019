"""The manifest of a run: what it read, did and wrote. It is the last file of an output directory.

The same run writes the same bytes; its timings are in another file.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from clicklog.files.artifact import Format
from clicklog.readers.raw import DayFile
from clicklog.spec.feature_spec import FeatureSpec
from clicklog.splits import SPLITS
from etl.results import UnitResult, by_source
from workflows.description import WorkflowDescription

MANIFEST_VERSION = 2
_FORMAT = Format("", MANIFEST_VERSION, "the ETL's manifest")


def make_manifest(
    record: dict[str, Any],
    days: list[DayFile],
    results: list[UnitResult],
    sizes: dict[str, int],
    description: WorkflowDescription,
) -> dict[str, Any]:
    """The manifest.

    ``inputs`` has per file its fingerprint and rows in, out and rejected; ``splits`` per split
    rows, positives and, per column, rows that were missing and ids out of vocabulary; ``by_day``
    the click rate of each day; ``files`` rows and bytes of each part.

    Args:
        record: see :func:`etl.state.plan_record`.
        days: the input files.
        results: of all units, in order.
        sizes: bytes of each part.
        description: of the saved workflow.
    """
    schema, spec = description.table_schema, description.spec
    rows = {source: _rows(own) for source, own in by_source(results).items()}
    return {
        "format_version": MANIFEST_VERSION,
        "settings": record["settings"],
        "inputs": [
            {
                "day": day.day,
                "path": day.path,
                "fingerprint": record["inputs"][day.path],
                "rows": rows.get(day.source, _rows([])),
            }
            for day in days
        ],
        "rows": _rows(results),
        "splits": {split: _of_split(split, results, spec) for split in SPLITS},
        "by_day": _by_day(results),
        "num_embeddings_per_feature": schema.num_embeddings_per_feature,
        "workflow_digest": description.digest,
        "versions": description.versions,
        "files": [
            {"file": r.unit.file, "rows": r.rows, "bytes": sizes[r.unit.file]} for r in results
        ],
    }


@dataclasses.dataclass(frozen=True)
class _Input:
    path: str
    fingerprint: dict[str, Any]
    rows: dict[str, int]
    day: Any


@dataclasses.dataclass(frozen=True)
class _File:
    file: str
    rows: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class _Manifest:
    """What ``manifest.json`` holds."""

    settings: dict[str, Any]
    inputs: list[_Input]
    rows: dict[str, int]
    splits: dict[str, dict[str, Any]]
    by_day: dict[str, Any]
    num_embeddings_per_feature: str
    workflow_digest: str | None
    versions: dict[str, Any]
    files: list[_File]

    def __post_init__(self) -> None:
        for rows in (self.rows, *(file.rows for file in self.inputs)):
            if rows.keys() != {"in", "out", "rejected"}:
                raise ValueError(f"rows {', '.join(rows)}")


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a finished run, checked.

    Raises:
        BadInputError: it is damaged.
        SchemaError: another version of this program wrote it.
    """
    remedy = "choose another --output_path"
    copy = f"{remedy}, or copy the manifest again"
    content = _FORMAT.read(_Manifest, path, copy, other_version=remedy)
    return {_FORMAT.version_key: _FORMAT.version, **dataclasses.asdict(content)}


def inputs_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The fingerprints of a finished run's inputs, as a plan record has them."""
    return {file["path"]: file["fingerprint"] for file in manifest["inputs"]}


def _rows(results: list[UnitResult]) -> dict[str, int]:
    written = sum(result.rows for result in results)
    rejected = sum(result.bad_count for result in results)
    return {"in": written + rejected, "out": written, "rejected": rejected}


def _of_split(split: str, results: list[UnitResult], spec: FeatureSpec) -> dict[str, Any]:
    own = [result for result in results if result.unit.split == split]

    def total(field: str, names: list[str]) -> dict[str, int]:
        counts = np.sum([getattr(result, field) for result in own], axis=0)
        return dict(zip(names, counts.tolist(), strict=True))

    return {
        "rows": sum(result.rows for result in own),
        "positives": sum(result.positives for result in own),
        "missing": {
            **total("dense_missing", spec.dense_names),
            **total("null", spec.categorical_names),
        },
        "out_of_vocabulary": total("oov", spec.categorical_names),
    }


def _by_day(results: list[UnitResult]) -> dict[str, dict[str, int]]:
    days: dict[str, dict[str, int]] = {}
    for result in results:
        day = days.setdefault(str(result.unit.day), {"rows": 0, "positives": 0})
        day["rows"] += result.rows
        day["positives"] += result.positives
    return days
