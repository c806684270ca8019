"""The rate of a label in all events before, and its weight in the rate of a key."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from nvt_torchrec.base.arrays import mark_begins
from nvt_torchrec.formats.feature_spec.derivations import HOUR

#: The bounds of the weight of the rate of all events.
_MIN_SMOOTHING, _MAX_SMOOTHING = 1.0, 10_000.0


@dataclasses.dataclass(frozen=True)
class LabelRates:
    """What rates are smoothed by.

    Attributes:
        smoothing: By rate, the weight of the rate of all events, in events.
        hours: See :func:`etl.units.hours.count_hours`.
        labels: The names of the labels, in the order of ``hours``.
    """

    smoothing: Mapping[str, float]
    hours: np.ndarray
    labels: tuple[str, ...]

    def before(self, label: str, times: np.ndarray) -> np.ndarray:
        """Return the rate of all events known before the hours of some times.

        Nothing else is known then: a rate to start from would be one of later labels.

        Returns:
            float64 [n]; NaN before the first hour of which an event is known.
        """
        hours = times // HOUR
        first = np.flatnonzero(mark_begins(hours))  # few runs, as most logs are sorted by time
        rates = self._hourly[label][np.searchsorted(self.hours[0], hours[first])]
        return np.repeat(rates, np.diff(first, append=len(hours)))

    @functools.cached_property
    def _hourly(self) -> dict[str, np.ndarray]:
        """By label, its rate before each hour, and after the last one."""
        events, *positives = np.pad(np.cumsum(self.hours[1:], axis=1), ((0, 0), (1, 0)))
        none = np.full(len(events), np.nan)
        return {
            label: np.divide(of_label, events, out=none.copy(), where=events > 0)
            for label, of_label in zip(self.labels, positives, strict=True)
        }


def sum_keys(counts: np.ndarray) -> np.ndarray:
    """Return, for each label, the sums over keys that :func:`fit_smoothing` takes.

    Args:
        counts: int64 [1 + labels, keys], how many events each key has, and how many with each
            label; keys without events do not count.

    Returns:
        float64 [labels, 5]: the number of keys; Σn, Σn², Σp and Σp²/n of their numbers of events n
        and of events with the label p.
    """
    n, *positives = np.compress(counts[0] > 0, counts, axis=1).astype(np.float64)
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
        return _MAX_SMOOTHING
    rate = positives / n
    excess = (weighted - n * rate * rate) / (rate * (1 - rate)) - (keys - 1)
    if excess <= 0:
        return _MAX_SMOOTHING
    return min(max((n - squares / n) / excess, _MIN_SMOOTHING), _MAX_SMOOTHING)
