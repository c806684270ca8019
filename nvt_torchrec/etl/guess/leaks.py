"""Columns that give a label away: known only when it is known, whatever their names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.auroc import TOO_GOOD, column_auroc
from nvt_torchrec.etl.guess.values import Profile

#: With fewer rows of either label an AUROC is chance.
_ENOUGH = 20
#: Numbers with more distinct values are compared by the hundredth in which they are.
_HUNDRED = 100


def labels_of_rows(column: Profile, rule: dict[str, Any]) -> np.ndarray:
    """Return the label of each row by the keys of ``[label]``, NaN where it is missing."""
    if "positive" in rule:
        known: dict[Any, bool] = {text: text in rule["positive"] for text in column.counts}
    else:
        least = rule.get("threshold", 1)
        known = {text: column.number(text) >= least for text in column.counts}
    return np.array([known.get(text, np.nan) for text in column.of_rows()], np.float64)


def find_leak(column: Profile, labels: dict[str, np.ndarray]) -> str:
    """Return why a column gives one of some labels away; "" if it does not.

    Args:
        column: The column.
        labels: By their names, the labels of the rows, NaN where missing.
    """
    values = pa.array(column.of_rows(), pa.string())
    for name, truth in labels.items():
        known = ~np.isnan(truth)
        truth = truth[known]
        if min(np.sum(truth == 1), np.sum(truth == 0)) < _ENOUGH:
            continue
        forms = {"its values give": values, "whether it is missing gives": values.is_null()}
        if column.kind in ("int", "float") and column.distinct > _HUNDRED and not column.multi_hot:
            forms["its numbers give"] = _hundredths(column)
        areas = {what: column_auroc(form.filter(known), truth) or 0 for what, form in forms.items()}
        what = max(areas, key=lambda what: (round(areas[what], 3), "missing" in what))
        if areas[what] > TOO_GOOD:
            return (
                f"{what} {name} away (AUROC alone {areas[what]:.3f}): make it a feature only if it "
                "is known before the label is"
            )
    return ""


def _hundredths(column: Profile) -> pa.Array:
    """Return in which hundredth of the rows, by size, the number of each row is."""
    numbers = np.array(column.numbers, np.float64)
    of_rows = np.repeat(numbers, list(column.counts.values()))
    edges = np.quantile(of_rows, np.arange(1, _HUNDRED) / _HUNDRED)
    place = dict(zip(column.counts, np.searchsorted(edges, numbers).tolist(), strict=True))
    return pa.array([place.get(text or "") for text in column.of_rows()])
