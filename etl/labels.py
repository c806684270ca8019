"""Detection of splits whose rows all have the same label, which make AUROC undefined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SORTED = (
    "most likely the log is sorted by label: splits are cut in the order of the rows, so put the "
    "rows into random order (`shuf`, without a header line) and run the ETL again"
)


_DIVIDED = (
    "no row of the other label is in this split: use larger shares, other times or other files in "
    "the spec's [split], and run the ETL again"
)


def one_label_remedy(rule: Mapping[str, Any] | None) -> str:
    """Return what to do about such a split.

    Args:
        rule: The manifest's ``split``; None by days, where splits are cut in the order of the rows.
    """
    return _DIVIDED if rule else _SORTED


def one_label(rows: int, positives: int) -> str:
    """Describe what is wrong with the labels of a split; "" if it has both labels, or no rows."""
    if not rows or 0 < positives < rows:
        return ""
    return f"all {rows:,} rows have label {int(positives > 0)}, so AUROC is not defined"


def one_label_splits(splits: dict[str, dict[str, int]]) -> list[str]:
    """Describe each of a manifest's ``splits`` that has only one label."""
    found = {
        split: one_label(counts["rows"], counts["positives"]) for split, counts in splits.items()
    }
    return [f"{split}: {what}" for split, what in found.items() if what]
