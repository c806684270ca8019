"""Compare a model with the baselines in words, for the page and the last line of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nvt_torchrec.training.baselines.baselines import REGRESSION, TREES

#: AUROCs that differ by less than this count as equal.
_SAME = 0.001
#: The baselines that a model should beat, and their names in sentences.
_NAMES = {REGRESSION: f"the {REGRESSION}", TREES: TREES}

#: The fields of :class:`models.metrics.Metrics` by name, as in events.
Values = Mapping[str, Any]


def describe_result(model: str, name: str, result: Values, baselines: Mapping[str, Values]) -> str:
    """Return sentences that compare a model's AUROC and log loss with those of the baselines.

    Args:
        model: The value of ``--model``.
        name: The split, and the label if several are trained.
        result: The model's metrics.
        baselines: The metrics of the baselines by name; empty before they are reported.

    Returns:
        The sentences; "" if the model has no AUROC.
    """
    if result["auroc"] is None:
        return ""
    sentences: list[str] = []
    for baseline, noun in _NAMES.items():
        values = baselines.get(baseline)
        if values is None or values["auroc"] is None:
            continue
        subject = "It" if sentences else f"On {name}, {model}"
        sentences.append(
            f"{subject} is {_compare(result, values)} {noun}: AUROC {result['auroc']:.4f} "
            f"against {values['auroc']:.4f}, log loss {result['log_loss']:.4f} against "
            f"{values['log_loss']:.4f}."
        )
    if not sentences:
        return (
            f"On {name}, {model} has an AUROC of {result['auroc']:.4f}; no baseline has been "
            "fitted yet."
        )
    return " ".join(sentences)


def describe_lag(model: str, name: str, result: Values, baselines: Mapping[str, Values]) -> str:
    """Return a line with the baselines that are better than a model; "" if none is better.

    The arguments are the same as for :func:`describe_result`.
    """
    if result["auroc"] is None:
        return ""
    better = []
    for baseline, noun in _NAMES.items():
        values = baselines.get(baseline)
        if values is None or values["auroc"] is None:
            continue
        if _compare(result, values) == "worse than":
            better.append(f"{noun} ({values['auroc']:.4f})")
    if not better:
        return ""
    return (
        f"on {name}, {model} is still worse than {' and '.join(better)}: "
        f"its AUROC is {result['auroc']:.4f}"
    )


def estimate_deviation(clicks: float, rest: float) -> float:
    """Return the standard deviation of the AUROC of random scores (Hanley & McNeil 1982).

    Args:
        clicks: The number of rows with a click.
        rest: The number of rows without a click.
    """
    if not clicks or not rest:
        return math.inf
    return math.sqrt((clicks + rest + 1) / (12 * clicks * rest))


def _compare(result: Values, baseline: Values) -> str:
    """Return how a model's AUROC compares with a baseline's: "better than", for example."""
    margin = _SAME
    if result["samples"] != baseline["samples"]:
        # On a large split, baselines are measured on fewer rows, so chance adds to the difference.
        clicks = baseline["positives"]
        margin += estimate_deviation(clicks, baseline["samples"] - clicks)
    gain = result["auroc"] - baseline["auroc"]
    if abs(gain) < margin:
        return "as good as"
    return "better than" if gain > 0 else "worse than"
