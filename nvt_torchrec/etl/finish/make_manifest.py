"""Make the manifest of a run (:class:`formats.manifest.Manifest`) from the results of its units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.etl.state.run_record import content_digest
from nvt_torchrec.etl.units.writing import UnitResult, group_by_source
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.manifest import InputFile, Manifest, PartFile
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.formats.workflow_description import WorkflowDescription


def make_manifest(
    record: dict[str, Any],
    days: list[DayFile],
    results: list[UnitResult],
    written: dict[str, tuple[int, str]],
    description: WorkflowDescription,
    *,
    generation: int = 0,
    split: dict[str, Any] | None = None,
) -> Manifest:
    """Make the manifest of a run, or of the new day of an extension alone.

    Args:
        record: The plan of the run, see :func:`etl.state.run_record.plan_record`.
        days: The input files.
        results: The results of all units, in order.
        written: By part, its size in bytes and the digest of its footer.
        description: The description of the saved workflow.
        generation: The generation of the workflow.
        split: The rule that divided the rows, with its cuts; None for a split by days.
    """
    waits = bool(description.spec.label_files)
    results_of_files = group_by_source(results)
    inputs = []
    for day in days:
        rows = row_counts(results_of_files.get(day.source, []), waits=waits)
        fingerprint = record["inputs"][day.path]
        inputs.append(InputFile(day.day, day.path, fingerprint, rows, content_digest(day)))
    files = []
    for part in results:
        if part.has_part:
            size, footer = written[part.unit.file]
            files.append(
                PartFile(part.unit.file, part.rows, size, part.unit.day, generation, footer)
            )
    return Manifest(
        generation=generation,
        settings=record["settings"],
        **sum_up_counts(day_counts(results, description.spec), inputs),
        num_embeddings_per_feature=description.table_schema.num_embeddings_per_feature,
        workflow_digest=description.digest,
        versions=description.versions,
        files=files,
        next_parts={name: sum(part.split == name for part in files) for name in SPLITS},
        split=split,
    )


def row_counts(results: list[UnitResult], *, waits: bool) -> dict[str, int]:
    """Count the rows that were read, written and rejected.

    Args:
        results: The results of units.
        waits: Whether to count the rows that wait for clicks, even if there are none.

    Returns:
        The keys "in", "out" and "rejected"; "waiting" with ``waits``; and "drawn" if negatives were
        drawn.
    """
    waiting = sum(result.waiting for result in results)
    drawn = sum(result.drawn for result in results)
    written = sum(result.rows for result in results)
    rejected = sum(result.bad_count for result in results)
    counts = {"in": written - drawn + rejected, "out": written, "rejected": rejected}
    if waits:
        counts |= {"in": counts["in"] + waiting, "waiting": waiting}
    if drawn:
        counts["drawn"] = drawn
    return counts


def day_counts(
    results: list[UnitResult], spec: FeatureSpec
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the manifest's ``by_day_and_split``; see :class:`formats.manifest.Manifest`."""
    groups: dict[tuple[int, str], list[UnitResult]] = {}
    for result in results:
        groups.setdefault((result.unit.day, result.unit.split), []).append(result)
    counts: dict[str, dict[str, dict[str, Any]]] = {}
    for day in sorted({day for day, _ in groups}):
        counts[str(day)] = {}
        for split in SPLITS:
            if (day, split) in groups:
                counts[str(day)][split] = _sum_up_results(groups[day, split], spec)
    return counts


def _sum_up_results(results: list[UnitResult], spec: FeatureSpec) -> dict[str, Any]:
    """Return the counts of a day and split in the manifest."""

    def total(field: str, names: list[str]) -> dict[str, int]:
        counts = np.sum([getattr(result, field) for result in results], axis=0)
        return dict(zip(names, counts.tolist(), strict=True))

    return {
        "rows": sum(result.rows for result in results),
        "positives": sum(result.positives for result in results),
        "missing": {
            **total("dense_missing", spec.dense_names),
            **total("null", spec.categorical_names),
            **total("no_vector", [vector.name for vector in spec.vectors]),
        },
        "out_of_vocabulary": total("oov", spec.categorical_names),
    }


def add_counts(several: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up one or more dicts of counts with the same keys, which may be nested."""
    total = {}
    for key, value in several[0].items():
        values = [counts[key] for counts in several]
        total[key] = add_counts(values) if isinstance(value, dict) else sum(values)
    return total


def sum_up_counts(
    by_day_and_split: dict[str, dict[str, dict[str, Any]]], inputs: list[InputFile]
) -> dict[str, Any]:
    """Return the fields of a manifest with counts of rows: by file, by split and by day."""
    days_of_splits: dict[str, list[int]] = {split: [] for split in SPLITS}
    counts_of_splits: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    by_day = {}
    for day, splits in by_day_and_split.items():
        for split, counts in splits.items():
            days_of_splits[split].append(int(day))
            counts_of_splits[split].append(counts)
        by_day[day] = {
            "rows": sum(counts["rows"] for counts in splits.values()),
            "positives": sum(counts["positives"] for counts in splits.values()),
        }
    splits_with_rows = {}
    for split, several in counts_of_splits.items():
        if several:
            splits_with_rows[split] = add_counts(several)
    return {
        "inputs": inputs,
        "rows": add_counts([file.rows for file in inputs]),
        "days": {split: sorted(days) for split, days in days_of_splits.items()},
        "splits": splits_with_rows,
        "by_day_and_split": by_day_and_split,
        "by_day": by_day,
    }


# ---- splits whose rows all have the same label, which make AUROC undefined

_SHUFFLE = (
    "most likely the log is sorted by label: splits are cut in the order of the rows, so shuffle "
    "the rows (`shuf`, without a header line) and run the ETL again"
)
_CHANGE_SPLIT = "use more rows, or larger shares, other times or files in [split] of the spec"


def one_label(rows: int, positives: int) -> str:
    """Describe the problem of a split with only one label; return "" if it has both, or no rows."""
    if not rows or 0 < positives < rows:
        return ""
    return f"all {rows:,} rows have label {int(positives > 0)}, so AUROC is not defined"


def one_label_splits(splits: dict[str, dict[str, int]]) -> list[str]:
    """Describe each of a manifest's ``splits`` that has only one label."""
    problems = []
    for split, counts in splits.items():
        problem = one_label(counts["rows"], counts["positives"])
        if problem:
            problems.append(f"{split}: {problem}")
    return problems


def one_label_remedy(
    splits: Mapping[str, Mapping[str, int]], rule: Mapping[str, Any] | None
) -> str:
    """Return the remedy for splits with only one label.

    Args:
        splits: Rows and positives of each split.
        rule: The manifest's ``split``; None for a split by days.
    """
    rows = sum(split["rows"] for split in splits.values())
    positives = sum(split["positives"] for split in splits.values())
    if len(splits) > 1 and positives in (0, rows):
        return (
            f"no row has label {int(positives == 0)}: choose another column, or other values that "
            "are 1, in [label] of the spec, or use a log with rows of both labels"
        )
    return _CHANGE_SPLIT if rule else _SHUFFLE
