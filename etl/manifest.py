"""The manifest of a run: what it read, did and wrote. It is the last file of an output directory.

The same run writes the same bytes; its timings are in another file.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from clicklog.errors import BadInputError
from clicklog.files.artifact import Format
from clicklog.files.atomic import read_json
from clicklog.readers.raw import DayFile
from clicklog.spec.feature_spec import FeatureSpec
from clicklog.splits import SPLITS
from etl.results import UnitResult, by_source
from workflows.description import WorkflowDescription

MANIFEST_VERSION = 3
#: Versions that can be read. The older one says neither which day a part is of nor a generation.
READABLE_VERSIONS = (2, MANIFEST_VERSION)
_FORMATS = {version: Format("", version, "the ETL's manifest") for version in READABLE_VERSIONS}


def make_manifest(
    record: dict[str, Any],
    days: list[DayFile],
    results: list[UnitResult],
    sizes: dict[str, int],
    description: WorkflowDescription,
    split: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The manifest of a run; ``python -m etl extend`` adds days to it.

    ``inputs`` has per file its fingerprint and rows in, out and rejected; ``splits`` per split
    rows, positives and, per column, rows that were missing and ids out of vocabulary;
    ``by_day_and_split`` the same for each day; ``by_day`` the click rate of each day; ``days`` the
    days of each split; ``files`` rows and bytes of each part, its day, the generation of the
    workflow that encoded it, and the digest of a part without page checksums; ``next_parts`` the
    number of the next part of each split.

    Args:
        record: see :func:`etl.state.plan_record`.
        days: the input files.
        results: of all units, in order.
        sizes: bytes of each part.
        description: of the saved workflow.
        split: the rule by which rows were divided, with its cuts; None by days, and then there is
            no such key.
    """
    by_day_and_split = day_counts(results, description.spec)
    if record["settings"].get("shuffle", "none") != "none":  # these parts were written again
        results = [
            dataclasses.replace(result, sha256="") if result.unit.split == "train" else result
            for result in results
        ]
    return {
        "format_version": MANIFEST_VERSION,
        "generation": 0,
        "settings": record["settings"],
        "extensions": [],
        "inputs": input_entries(record, days, results),
        "rows": row_counts(results),
        "days": days_of_splits(by_day_and_split),
        "splits": {split: split_counts(by_day_and_split, split) for split in SPLITS},
        "by_day_and_split": by_day_and_split,
        "by_day": click_counts(by_day_and_split),
        "num_embeddings_per_feature": description.table_schema.num_embeddings_per_feature,
        "workflow_digest": description.digest,
        "versions": description.versions,
        "files": file_entries(results, sizes, generation=0),
        "next_parts": {
            name: sum(r.unit.split == name and r.has_part for r in results) for name in SPLITS
        },
        **({"split": split} if split else {}),
    }


def input_entries(
    record: dict[str, Any], days: list[DayFile], results: list[UnitResult]
) -> list[dict[str, Any]]:
    """The manifest's ``inputs``; see :func:`make_manifest`."""
    rows = {source: row_counts(own) for source, own in by_source(results).items()}
    return [
        {
            "day": day.day,
            "path": day.path,
            "fingerprint": record["inputs"][day.path],
            "rows": rows.get(day.source, row_counts([])),
        }
        for day in days
    ]


def file_entries(
    results: list[UnitResult], sizes: dict[str, int], generation: int
) -> list[dict[str, Any]]:
    """The manifest's ``files``; see :func:`make_manifest`."""
    return [
        {
            "file": result.unit.file,
            "rows": result.rows,
            "bytes": sizes[result.unit.file],
            "day": result.unit.day,
            "generation": generation,
            **({"sha256": result.sha256} if result.sha256 else {}),
        }
        for result in results
        if result.has_part
    ]


@dataclasses.dataclass(frozen=True)
class _Input:
    day: Any
    path: str
    fingerprint: dict[str, Any]
    rows: dict[str, int]


@dataclasses.dataclass(frozen=True)
class _File:
    file: str
    rows: int
    bytes: int
    day: int | None = None
    generation: int | None = None
    sha256: str | None = None


@dataclasses.dataclass(frozen=True)
class _Extension:
    generation: int
    day: int
    settings: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Manifest:
    """What ``manifest.json`` holds; format version 2 lacks what has a default."""

    settings: dict[str, Any]
    inputs: list[_Input]
    rows: dict[str, int]
    splits: dict[str, dict[str, Any]]
    by_day: dict[str, Any]
    num_embeddings_per_feature: str
    workflow_digest: str | None
    versions: dict[str, Any]
    files: list[_File]
    generation: int | None = None
    extensions: list[_Extension] = dataclasses.field(default_factory=list)
    days: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    by_day_and_split: dict[str, dict[str, dict[str, Any]]] = dataclasses.field(default_factory=dict)
    next_parts: dict[str, int] = dataclasses.field(default_factory=dict)
    split: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for rows in (self.rows, *(file.rows for file in self.inputs)):
            if rows.keys() != {"in", "out", "rejected"}:
                raise ValueError(f"rows {', '.join(rows)}")

    def names_days(self) -> bool:
        """Return whether it says the days of all splits and parts, as version 3 does."""
        complete = all(own.keys() == set(SPLITS) for own in (self.days, self.next_parts))
        return complete and all(file.day is not None for file in self.files)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a finished run, checked.

    Raises:
        BadInputError: it is damaged.
        SchemaError: another version of this program wrote it.
    """
    remedy = "choose another --output_path"
    copy = f"{remedy}, or copy the manifest again"
    value = read_json(path, "the ETL's manifest", copy)
    version = value.get("format_version") if isinstance(value, dict) else None
    written = _FORMATS[version if version in READABLE_VERSIONS else MANIFEST_VERSION]
    content = written.read(_Manifest, path, copy, other_version=remedy)
    if version == MANIFEST_VERSION and not content.names_days():
        raise BadInputError(f"{path}: damaged: it does not say which days the splits have", copy)
    found = {written.version_key: written.version, **dataclasses.asdict(content)}
    if content.split is None:
        del found["split"]
    for part in found["files"]:
        if part["sha256"] is None:
            del part["sha256"]
    return found


def inputs_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The fingerprints of a finished run's inputs, as a plan record has them."""
    return {file["path"]: file["fingerprint"] for file in manifest["inputs"]}


def without_extensions(manifest: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs, as a plan record has them, but those that the output was extended by."""
    extended = {extension["day"] for extension in manifest["extensions"]}
    added = [file for file in manifest["inputs"] if file["day"] in extended]
    known = {file["path"]: file["fingerprint"] for file in added}
    return {path: value for path, value in inputs.items() if known.get(path) != value}


def row_counts(results: list[UnitResult]) -> dict[str, int]:
    """The rows that were read, written and rejected."""
    written = sum(result.rows for result in results)
    rejected = sum(result.bad_count for result in results)
    return {"in": written + rejected, "out": written, "rejected": rejected}


def day_counts(
    results: list[UnitResult], spec: FeatureSpec
) -> dict[str, dict[str, dict[str, Any]]]:
    """The manifest's ``by_day_and_split``; see :func:`make_manifest`."""
    own: dict[tuple[int, str], list[UnitResult]] = {}
    for result in results:
        own.setdefault((result.unit.day, result.unit.split), []).append(result)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for day, split in sorted(own, key=lambda key: (key[0], SPLITS.index(key[1]))):
        found.setdefault(str(day), {})[split] = _counts(own[day, split], spec)
    return found


def _counts(results: list[UnitResult], spec: FeatureSpec) -> dict[str, Any]:
    def total(field: str, names: list[str]) -> dict[str, int]:
        counts = np.sum([getattr(result, field) for result in results], axis=0)
        return dict(zip(names, counts.tolist(), strict=True))

    return {
        "rows": sum(result.rows for result in results),
        "positives": sum(result.positives for result in results),
        "missing": {
            **total("dense_missing", spec.dense_names),
            **total("null", spec.categorical_names),
        },
        "out_of_vocabulary": total("oov", spec.categorical_names),
    }


def add_counts(several: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up counts of the same keys, at least one; they may be nested."""
    return {
        key: add_counts([counts[key] for counts in several])
        if isinstance(value, dict)
        else sum(counts[key] for counts in several)
        for key, value in several[0].items()
    }


def split_counts(
    by_day_and_split: dict[str, dict[str, dict[str, Any]]], split: str
) -> dict[str, Any]:
    """The counts of a split over its days, of which there is at least one."""
    return add_counts([own[split] for own in by_day_and_split.values() if split in own])


def days_of_splits(by_day_and_split: dict[str, dict[str, Any]]) -> dict[str, list[int]]:
    """The days of each split, in ascending order; halves of a day are in two splits."""
    return {
        split: sorted(int(day) for day, own in by_day_and_split.items() if split in own)
        for split in SPLITS
    }


def click_counts(
    by_day_and_split: dict[str, dict[str, dict[str, Any]]],
) -> dict[str, dict[str, int]]:
    """The rows and clicks of each day."""
    return {
        day: {name: sum(counts[name] for counts in own.values()) for name in ("rows", "positives")}
        for day, own in by_day_and_split.items()
    }
