"""Describe a model beside the baselines, on the page and in the last line of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nvt_torchrec.training.baselines.baselines import REGRESSION, TREES

#: AUROCs that differ by less are called equal.
_SAME = 0.001
#: The baselines that a model should beat, as sentences name them.
_NAMES = {REGRESSION: f"the {REGRESSION}", TREES: TREES}

#: The fields of :class:`models.metrics.Metrics` by name, as in an event.
Values = Mapping[str, Any]


def describe_result(model: str, name: str, result: Values, baselines: Mapping[str, Values]) -> str:
    """Return sentences on a model's AUROC and log loss beside the baselines'.

    Args:
        model: The value of ``--model``.
        name: The split, and the label if several are trained.
        result: The model's metrics there.
        baselines: Those of the baselines, by their names; none before they are reported.

    Returns:
        The sentences; "" without an AUROC.
    """
    if result["auroc"] is None:
        return ""
    sentences: list[str] = []
    for baseline, noun in _NAMES.items():
        beside = baselines.get(baseline)
        if beside is None or beside["auroc"] is None:
            continue
        subject = "It" if sentences else f"On {name}, {model}"
        sentences.append(
            f"{subject} is {_compare(result, beside)} {noun}: AUROC {result['auroc']:.4f} "
            f"against {beside['auroc']:.4f}, log loss {result['log_loss']:.4f} against "
            f"{beside['log_loss']:.4f}."
        )
    if not sentences:
        return f"On {name}, {model} has AUROC {result['auroc']:.4f}; no baseline was fitted yet."
    return " ".join(sentences)


def describe_lag(model: str, name: str, result: Values, baselines: Mapping[str, Values]) -> str:
    """Return a line that names the baselines that a model is worse than; "" if there is none.

    The arguments are those of :func:`describe_result`.
    """
    if result["auroc"] is None:
        return ""
    better = []
    for baseline, noun in _NAMES.items():
        beside = baselines.get(baseline)
        if beside is None or beside["auroc"] is None:
            continue
        if _compare(result, beside) == "worse than":
            better.append(f"{noun} ({beside['auroc']:.4f})")
    if not better:
        return ""
    return (
        f"on {name}, {model} is still worse than {' and '.join(better)}: "
        f"its AUROC is {result['auroc']:.4f}"
    )


def estimate_deviation(clicks: float, rest: float) -> float:
    """Return the standard deviation of the AUROC of random scores (Hanley & McNeil 1982).

    Args:
        clicks, rest: The numbers of rows with and without a click.
    """
    if not clicks or not rest:
        return math.inf
    return math.sqrt((clicks + rest + 1) / (12 * clicks * rest))


def _compare(result: Values, beside: Values) -> str:
    """Return how the AUROC of a model compares with a baseline's."""
    margin = _SAME
    if result["samples"] != beside["samples"]:
        # Baselines are measured on a part of a large split, where chance adds to the difference.
        clicks = beside["positives"]
        margin += estimate_deviation(clicks, beside["samples"] - clicks)
    gain = result["auroc"] - beside["auroc"]
    if abs(gain) < margin:
        return "as good as"
    return "better than" if gain > 0 else "worse than"
