"""The rate of a label in all events before, and its weight in the rate of a key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from nvt_torchrec.etl.events.extract import FIRST_LABEL, KNOWN, ROW
from nvt_torchrec.formats.feature_spec.derivations import HOUR

#: The bounds of the weight of the rate of all events.
_LEAST_SMOOTHING, _MOST_SMOOTHING = 1.0, 10_000.0


@dataclasses.dataclass(frozen=True)
class LabelRates:
    """What rates are smoothed by.

    Attributes:
        smoothing: By rate, the weight of the rate of all events, in events.
        rate: By label, its rate in the training rows, which counts as one event.
        hours: See :func:`count_hours`.
        labels: The names of the labels, in the order of ``hours``.
    """

    smoothing: Mapping[str, float]
    rate: Mapping[str, float]
    hours: np.ndarray
    labels: tuple[str, ...]

    def before(self, label: str, times: np.ndarray) -> np.ndarray:
        """Return the rate of all events known before the hours of some times, float64 [n]."""
        row = 2 + self.labels.index(label)
        sums = np.pad(np.cumsum(self.hours[[1, row]], axis=1), ((0, 0), (1, 0)))
        events, positives = sums[:, np.searchsorted(self.hours[0], times // HOUR)]
        return (positives + self.rate[label]) / (events + 1)


def sum_keys(key: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return, for each label, the sums over keys that :func:`fit_smoothing` takes.

    Args:
        key: int64 [n], the keys of events.
        counts: int64 [1 + labels, n], how many each is, and how many with each label.

    Returns:
        float64 [labels, 5]: the number of keys; Σn, Σn², Σp and Σp²/n of their numbers of events n
        and of events with the label p.
    """
    labels = len(counts) - 1
    if not len(key):
        return np.zeros((labels, 5))
    order = np.argsort(key, kind="stable")
    key = key[order]
    first = np.flatnonzero(np.diff(key, prepend=key[0] - 1))
    n, *positives = np.add.reduceat(counts[:, order], first, axis=1).astype(np.float64)
    return np.array(
        [[len(n), n.sum(), (n * n).sum(), p.sum(), (p * p / n).sum()] for p in positives]
    )


def fit_smoothing(moments: np.ndarray) -> float:
    """Return the weight, in events, of the rate of all events in the rate of a key.

    The method of moments of DerSimonian and Laird (1986, "Meta-analysis in clinical trials"): the
    variance of the keys' rates beyond that of their events. Without such variance it is the most.

    Args:
        moments: float64 [5], see :func:`sum_keys`.
    """
    keys, n, squares, positives, weighted = moments.tolist()
    if not n or not 0 < positives < n:
        return _MOST_SMOOTHING
    rate = positives / n
    excess = (weighted - n * rate * rate) / (rate * (1 - rate)) - (keys - 1)
    if excess <= 0:
        return _MOST_SMOOTHING
    return min(max((n - squares / n) / excess, _LEAST_SMOOTHING), _MOST_SMOOTHING)


def count_hours(events: Sequence[np.ndarray], labels: int) -> np.ndarray:
    """Count the events, and those with each label, by the hour from which they are known.

    Args:
        events: The events of each block, int64 [4, n].
        labels: How many labels there are.

    Returns:
        int64 [2 + labels, hours]: the hours since 1970, rising; events; events with each label.
    """
    counted = []
    for array in events:
        hours, place = np.unique(array[KNOWN] // HOUR, return_inverse=True)
        counts = [np.bincount(place, minlength=len(hours))]
        for label in range(labels):
            positive = (array[ROW] >> (FIRST_LABEL + label) & 1).astype(bool)
            counts.append(np.bincount(place[positive], minlength=len(hours)))
        counted.append(np.stack([hours, *counts]).astype(np.int64))
    return add_hours(counted)


def add_hours(counted: Sequence[np.ndarray]) -> np.ndarray:
    """Add up counts of hours, see :func:`count_hours`."""
    every = np.concatenate(counted, axis=1)
    hours, place = np.unique(every[0], return_inverse=True)
    total = np.zeros((len(every), len(hours)), np.int64)
    total[0] = hours
    for row in range(1, len(every)):
        np.add.at(total[row], place, every[row])
    return total
