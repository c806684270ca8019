"""Splits with one label only, which training cannot learn from and metrics cannot be taken of."""

from __future__ import annotations

ONE_LABEL_REMEDY = (
    "the log is sorted by label, most likely: splits are cut in the order of the rows, so put "
    "these into random order (`shuf`, without a header line) and run the ETL again"
)


def one_label(rows: int, positives: int) -> str:
    """What is wrong with the labels of a split; "" if it has both, or no rows."""
    if not rows or 0 < positives < rows:
        return ""
    return f"all {rows:,} rows have label {int(positives > 0)}, so that AUROC is not defined"


def one_label_splits(splits: dict[str, dict[str, int]]) -> list[str]:
    """A sentence for each of a manifest's ``splits`` that has one label only."""
    found = {name: one_label(one["rows"], one["positives"]) for name, one in splits.items()}
    return [f"{name}: {what}" for name, what in found.items() if what]
