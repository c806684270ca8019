"""What a run read, did and wrote, as ``manifest.json``: the last file of an output directory."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from clicklog.raw import DayFile
from clicklog.splits import SPLITS
from workflows import WorkflowDescription

if TYPE_CHECKING:
    from etl.engine_dask import UnitResult
    from etl.run import EtlSettings

MANIFEST_VERSION = 1


def make_manifest(
    settings: EtlSettings,
    days: list[DayFile],
    results: list[UnitResult],
    description: WorkflowDescription,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """The manifest.

    ``rows``: read, written, rejected; ``splits`` has per split rows, positives and, per column,
    rows that were missing or out of vocabulary; ``by_day`` the click rate of each day.
    """
    schema, spec = description.table_schema, description.spec
    written = sum(result.rows for result in results)
    rejected = sum(result.bad_count for result in results)
    work = seconds.get("fit", 0.0) + seconds.get("transform", 0.0)
    return {
        "format_version": MANIFEST_VERSION,
        "settings": settings.to_dict(),
        "inputs": [dataclasses.asdict(day) for day in days],
        "rows": {"in": written + rejected, "out": written, "rejected": rejected},
        "rows_per_s": round(written / work) if work else None,
        "seconds": seconds,
        "splits": {split: _of_split(split, results, spec) for split in SPLITS},
        "by_day": _by_day(results),
        "num_embeddings_per_feature": schema.num_embeddings_per_feature,
        "workflow_digest": description.digest,
        "versions": description.versions,
        "files": [
            {"file": result.unit.file, "rows": result.rows, "rejected": result.bad_count}
            for result in results
        ],
    }


def _of_split(split: str, results: list[UnitResult], spec) -> dict[str, Any]:
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
