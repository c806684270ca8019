"""Detection of splits whose rows all have the same label, which make AUROC undefined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SORTED = (
    "most likely the log is sorted by label: splits are cut in the order of the rows, so put the "
    "rows into random order (`shuf`, without a header line) and run the ETL again"
)
#: By the rule of the split; other rules have too few rows in a split.
_BY = {
    "days": _SORTED,
    "time": "most likely the label changed with time: set other times or shares in [split] of the "
    "spec, and run the ETL again",
    "files": "put rows of both labels into the files of each split, or change [split] in the spec",
}
_FEW = "use more rows, or larger shares of valid and test in [split] of the spec"


def one_label(rows: int, positives: int) -> str:
    """Describe what is wrong with the labels of a split; "" if it has both labels, or no rows."""
    if not rows or 0 < positives < rows:
        return ""
    return f"all {rows:,} rows have label {int(positives > 0)}, so AUROC is not defined"


def one_label_splits(splits: dict[str, dict[str, int]]) -> list[str]:
    """Describe each of a manifest's ``splits`` that has only one label."""
    problems = {
        split: one_label(counts["rows"], counts["positives"]) for split, counts in splits.items()
    }
    return [f"{split}: {what}" for split, what in problems.items() if what]


def one_label_remedy(
    splits: Mapping[str, Mapping[str, int]], rule: Mapping[str, Any] | None
) -> str:
    """Return what to do about splits with one label.

    Args:
        splits: Rows and positives of each split.
        rule: The manifest's ``split``; None by days.
    """
    rows, positives = (
        sum(split[key] for split in splits.values()) for key in ("rows", "positives")
    )
    if len(splits) > 1 and positives in (0, rows):
        return (
            f"no row has label {int(positives == 0)}: choose another column, or other values that "
            "are 1, in [label] of the spec, or use a log with rows of both labels"
        )
    return _BY.get((rule or {"by": "days"})["by"], _FEW)
