"""Which columns are known only with the label, or later than the time of a row."""

from __future__ import annotations

import numpy as np

from nvt_torchrec.base.arrays import to_arrow
from nvt_torchrec.base.auroc import TOO_GOOD, bin_numbers, column_auroc
from nvt_torchrec.etl.guess.label_choice import is_event
from nvt_torchrec.etl.guess.names import contains_outcome, is_called, is_code
from nvt_torchrec.etl.guess.values import Profile

#: With fewer rows of either label an AUROC is chance.
_MIN_ROWS = 20
#: Numbers with more distinct values are compared by bins of equal counts.
_MAX_DISTINCT = 100
#: The AUROC from which on how long something took is taken for a part of the outcome: the length
#: of a call that ends in a sale has 0.8, the length of a loan, known before it is paid back, 0.6.
_STRONG = 0.75
#: Distinct times of a column that may say when a row happened: the dates of a week.
_MIN_TIMES = 5
#: A time with at least such a share of the distinct values of the finest one is as fine.
_AS_FINE = 0.8
#: The share of rows in which a time is not earlier than in the row before, or than another time.
_MOSTLY = 0.99
#: The share of rows in which a time that follows another is later than that.
_OFTEN = 0.5


def find_outcomes(
    columns: list[Profile], labels: list[Profile], truth: dict[str, np.ndarray]
) -> dict[str, str]:
    """Return why columns must not be features, by their names.

    Args:
        columns: The columns that are no labels.
        labels: The labels.
        truth: By their names, the labels of the rows, NaN where missing.
    """
    outcomes: dict[str, str] = {}
    leaks = []
    for column in columns:
        reason = _judge_name(column)
        if not reason and column.name and column.kind != "empty":
            reason = _judge_values(column, truth)
            if reason and not is_code(column.name):  # what a user is like comes with no outcome
                leaks.append(column.name)
        if reason:
            outcomes[column.name] = reason
    for column in columns:
        if column.name not in outcomes and not column.multi_hot:
            reason = _compare_names(column.name, labels, leaks)
            if reason:
                outcomes[column.name] = reason
    kept = [column for column in columns if column.name not in outcomes]
    time = find_time(kept)
    if time:
        for column in kept:
            if _follows(column, time):
                outcomes[column.name] = (
                    f"it is later than {time.name}, the time of the row: make it a feature only if "
                    "it is known by then"
                )
    return outcomes


def _judge_name(column: Profile) -> str:
    """Return why the name of a column says that it must not be a feature; "" if it does not."""
    name = column.name
    if is_event(column) or is_called(name, "outcome"):
        return "looks like a label, or is known only with it"
    if is_called(name, "weight"):
        return "looks like the weight of a row, which no feature is; [weight] takes it"
    return ""


def _compare_names(name: str, labels: list[Profile], leaks: list[str]) -> str:
    """Return why a name says that a column comes with a label, or with a column that leaks it."""
    for label in labels:
        if label.name and contains_outcome(name, label.name):
            return f"known only with the label {label.name}, as its name says"
    for leak in leaks:
        if contains_outcome(name, leak):
            return f"comes with {leak}, as its name says, which gives the label away"
    return ""


def _judge_values(column: Profile, truth: dict[str, np.ndarray]) -> str:
    """Return why a column gives a label away, whatever its name; "" if it does not."""
    codes = column.codes
    # By the words of the reason, what is compared with the label.
    forms = {"its values give": codes, "whether it is missing gives": (codes < 0).astype(int)}
    if column.is_number and column.distinct > _MAX_DISTINCT:
        bins = codes.copy()
        bins[codes >= 0] = bin_numbers(column.numbers[codes[codes >= 0]])
        forms["its numbers give"] = bins
    for name, labels in truth.items():
        known = ~np.isnan(labels)
        labels = labels[known]
        if min(np.sum(labels == 1), np.sum(labels == 0)) < _MIN_ROWS:
            continue
        aurocs = {}
        for words, values in forms.items():
            aurocs[words] = column_auroc(to_arrow(values[known]), labels) or 0
        # Of equal ones, that it is missing says most.
        best = max(aurocs, key=lambda words: (round(aurocs[words], 3), "missing" in words))
        auroc = aurocs[best]
        if auroc > TOO_GOOD:
            return (
                f"{best} {name} away (AUROC alone {auroc:.3f}): make it a feature only if it is "
                "known before the label is"
            )
        if auroc > _STRONG and is_called(column.name, "duration"):
            return (
                f"how long something took, with an AUROC alone of {auroc:.3f} for {name}: make it "
                "a feature only if it is known before the label is"
            )
    return ""


def find_time(columns: list[Profile]) -> Profile | None:
    """Return the column that says when a row happened, or None.

    Of the times with the most distinct values it is the one by which the log is sorted, else the
    earliest, as the others follow it.
    """
    times = []
    for column in columns:
        is_time = column.kind == "time" and column.name and not is_called(column.name, "birth")
        if is_time and not column.missing and column.distinct >= _MIN_TIMES:
            times.append(column)
    finest = max((column.distinct for column in times), default=0)
    fine = [column for column in times if column.distinct >= _AS_FINE * finest]
    sorted_times = [column for column in fine if _is_sorted(column)]
    candidates = sorted_times or fine
    return min(candidates, key=lambda column: column.numbers[column.codes].mean(), default=None)


def _is_sorted(column: Profile) -> bool:
    steps = np.diff(column.numbers[column.codes])
    return bool(np.mean(steps >= 0) >= _MOSTLY) if len(steps) else False


def _follows(column: Profile, time: Profile) -> bool:
    """Return whether a time is mostly later than the time of the row, and never much earlier."""
    if column is time or column.kind != "time" or is_called(column.name, "birth"):
        return False
    both = column.codes >= 0
    later = column.numbers[column.codes[both]] - time.numbers[time.codes[both]]
    return bool(np.mean(later >= 0) >= _MOSTLY and np.mean(later > 0) >= _OFTEN)
