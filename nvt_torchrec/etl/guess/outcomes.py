"""Find the columns that are known only with the label, or later than the time of a row."""

from __future__ import annotations

import numpy as np

from nvt_torchrec.base.arrays import to_arrow
from nvt_torchrec.base.auroc import TOO_GOOD, bin_numbers, column_auroc
from nvt_torchrec.etl.guess.label_choice import is_event
from nvt_torchrec.etl.guess.names import contains_outcome, is_called, is_code
from nvt_torchrec.etl.guess.values import Profile

#: Minimum number of rows with each label; with fewer, an AUROC is chance.
_MIN_ROWS = 20
#: Numbers with more distinct values are compared by bins of equal counts.
_MAX_DISTINCT = 100
#: A duration with a higher AUROC is a part of the outcome: the length of a call that ends in a sale
#: has 0.8; the length of a loan, which is known before it is paid back, has 0.6.
_MAX_DURATION_AUROC = 0.75
#: Minimum number of distinct times of the column of the row's time: the dates of a week.
_MIN_TIMES = 5
#: A time with at least this share of the distinct values of the finest time is as fine.
_MIN_SHARE_OF_FINEST = 0.8
#: Minimum share of rows with a time not earlier than the previous row's, for a sorted column, or
#: not earlier than the row's time, for a later one.
_MIN_SHARE_NOT_EARLIER = 0.99
#: Minimum share of rows in which a later column is strictly later than the row's time.
_MIN_SHARE_LATER = 0.5


def find_outcomes(
    columns: list[Profile], labels: list[Profile], truth: dict[str, np.ndarray]
) -> dict[str, str]:
    """Find the columns that must not be features; return the reasons by their names.

    Args:
        columns: The columns that are not labels.
        labels: The columns of the labels.
        truth: By the name of a label, its value in each row: float [rows], NaN if missing.
    """
    outcomes: dict[str, str] = {}
    leaks = []
    for column in columns:
        reason = _judge_name(column)
        if not reason and column.name and column.kind != "empty":
            reason = _judge_values(column, truth)
            # A code that gives the label away is an attribute of a user or an item; columns that
            # share its name do not leak because of that.
            if reason and not is_code(column.name):
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
                    "it is known at that time"
                )
    return outcomes


def _judge_name(column: Profile) -> str:
    """Return why a column must not be a feature, judging by its name; "" if it may be one."""
    name = column.name
    if is_event(column) or is_called(name, "outcome"):
        return "looks like a label, or is known only with it"
    if is_called(name, "weight"):
        return "looks like the weight of a row, which is not a feature: [weight] reads it"
    return ""


def _compare_names(name: str, labels: list[Profile], leaks: list[str]) -> str:
    """Return why a name relates a column to a label, or to a column that leaks it; "" if not."""
    for label in labels:
        if label.name and contains_outcome(name, label.name):
            return f"known only with the label {label.name}, as its name says"
    for leak in leaks:
        if contains_outcome(name, leak):
            return f"its name says that it comes with {leak}, which gives the label away"
    return ""


def _judge_values(column: Profile, truth: dict[str, np.ndarray]) -> str:
    """Return why a column gives a label away, whatever its name; "" if it does not."""
    codes = column.codes
    # Beginning of the reason → the values whose AUROC is computed.
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
        # Of equal AUROCs, prefer the missing values, which say most about the cause.
        best = max(aurocs, key=lambda words: (round(aurocs[words], 3), "missing" in words))
        auroc = aurocs[best]
        if auroc > TOO_GOOD:
            return (
                f"{best} {name} away (AUROC alone {auroc:.3f}): make it a feature only if it is "
                "known before the label is"
            )
        if auroc > _MAX_DURATION_AUROC and is_called(column.name, "duration"):
            return (
                f"a duration that has AUROC {auroc:.3f} alone for {name}: make it a feature only "
                "if it is known before the label is"
            )
    return ""


def find_time(columns: list[Profile]) -> Profile | None:
    """Return the column with the time of a row, or None.

    Among the times with the most distinct values, it is the one by which the log is sorted, or else
    the earliest, because the others follow it.
    """
    times = []
    for column in columns:
        is_time = column.kind == "time" and column.name and not is_called(column.name, "birth")
        if is_time and not column.missing and column.distinct >= _MIN_TIMES:
            times.append(column)
    finest = max((column.distinct for column in times), default=0)
    fine = [column for column in times if column.distinct >= _MIN_SHARE_OF_FINEST * finest]
    sorted_times = [column for column in fine if _is_sorted(column)]
    candidates = sorted_times or fine
    return min(candidates, key=lambda column: column.numbers[column.codes].mean(), default=None)


def _is_sorted(column: Profile) -> bool:
    """Return True if the times of consecutive rows rarely decrease."""
    steps = np.diff(column.numbers[column.codes])
    return bool(np.mean(steps >= 0) >= _MIN_SHARE_NOT_EARLIER) if len(steps) else False


def _follows(column: Profile, time: Profile) -> bool:
    """Return True if a time is often later than the time of the row, and rarely earlier."""
    if column is time or column.kind != "time" or is_called(column.name, "birth"):
        return False
    both = column.codes >= 0
    later = column.numbers[column.codes[both]] - time.numbers[time.codes[both]]
    is_rarely_earlier = np.mean(later >= 0) >= _MIN_SHARE_NOT_EARLIER
    return bool(is_rarely_earlier and np.mean(later > 0) >= _MIN_SHARE_LATER)
