"""Make the manifest of a run (:class:`formats.manifest.Manifest`) from what its units did."""

from __future__ import annotations

from typing import Any

import numpy as np

from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.etl.results import UnitResult, by_source
from nvt_torchrec.etl.state import content_digest
from nvt_torchrec.formats.manifest import InputFile, Manifest, PartFile
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.formats.workflow_description import WorkflowDescription


def make_manifest(
    record: dict[str, Any],
    days: list[DayFile],
    results: list[UnitResult],
    sizes: dict[str, int],
    description: WorkflowDescription,
    split: dict[str, Any] | None = None,
) -> Manifest:
    """Make the manifest of a run; ``python -m etl extend`` adds days to it.

    Args:
        record: The plan of the run, see :func:`etl.state.plan_record`.
        days: The input files.
        results: The results of all units, in order.
        sizes: The bytes of each part.
        description: The description of the saved workflow.
        split: The rule by which rows were divided, with its cuts; None by days.
    """
    return Manifest(
        generation=0,
        settings=record["settings"],
        **summed(day_counts(results, description.spec), input_entries(record, days, results)),
        **identity(description),
        files=file_entries(results, sizes, generation=0),
        next_parts={
            name: sum(r.unit.split == name and r.has_part for r in results) for name in SPLITS
        },
        split=split,
    )


def input_entries(
    record: dict[str, Any], days: list[DayFile], results: list[UnitResult]
) -> list[InputFile]:
    """Return the input files with the rows of each."""
    rows = {source: row_counts(of_file) for source, of_file in by_source(results).items()}
    return [
        InputFile(
            day.day,
            day.path,
            record["inputs"][day.path],
            rows.get(day.source, row_counts([])),
            content_digest(day),
        )
        for day in days
    ]


def file_entries(
    results: list[UnitResult], sizes: dict[str, int], generation: int
) -> list[PartFile]:
    """Return the parts that were written, by a workflow of a generation."""
    return [
        PartFile(
            result.unit.file,
            result.rows,
            sizes[result.unit.file],
            result.unit.day,
            generation,
        )
        for result in results
        if result.has_part
    ]


def row_counts(results: list[UnitResult]) -> dict[str, int]:
    """The rows that were read, written and rejected."""
    written = sum(result.rows for result in results)
    rejected = sum(result.bad_count for result in results)
    return {"in": written + rejected, "out": written, "rejected": rejected}


def day_counts(
    results: list[UnitResult], spec: FeatureSpec
) -> dict[str, dict[str, dict[str, Any]]]:
    """The manifest's ``by_day_and_split``; see :class:`formats.manifest.Manifest`."""
    groups: dict[tuple[int, str], list[UnitResult]] = {}
    for result in results:
        groups.setdefault((result.unit.day, result.unit.split), []).append(result)
    counts: dict[str, dict[str, dict[str, Any]]] = {}
    for day, split in sorted(groups, key=lambda key: (key[0], SPLITS.index(key[1]))):
        counts.setdefault(str(day), {})[split] = _counts(groups[day, split], spec)
    return counts


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


def summed(
    by_day_and_split: dict[str, dict[str, dict[str, Any]]], inputs: list[InputFile]
) -> dict[str, Any]:
    """Return what a manifest says of the rows: by file, by split and by day."""
    days = by_day_and_split.items()
    return {
        "inputs": inputs,
        "rows": add_counts([file.rows for file in inputs]),
        "days": {
            split: sorted(int(day) for day, splits in days if split in splits) for split in SPLITS
        },
        "splits": {
            split: add_counts([splits[split] for _, splits in days if split in splits])
            for split in SPLITS
        },
        "by_day_and_split": by_day_and_split,
        "by_day": {
            day: {
                name: sum(counts[name] for counts in splits.values())
                for name in ("rows", "positives")
            }
            for day, splits in days
        },
    }


def identity(description: WorkflowDescription) -> dict[str, Any]:
    """Return what a manifest says of the workflow."""
    return {
        "num_embeddings_per_feature": description.table_schema.num_embeddings_per_feature,
        "workflow_digest": description.digest,
        "versions": description.versions,
    }
