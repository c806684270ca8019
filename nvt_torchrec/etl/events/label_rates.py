"""The rate of a label over all earlier events, and its weight in the rate of a key."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from nvt_torchrec.base.arrays import mark_begins
from nvt_torchrec.base.files.atomic import delete
from nvt_torchrec.base.files.growing import GrowingArray
from nvt_torchrec.base.files.mapping import map_array
from nvt_torchrec.formats.feature_spec.derivations import HOUR

# Bounds of the weight, in events.
_MIN_SMOOTHING = 1.0
_MAX_SMOOTHING = 10_000.0


@dataclasses.dataclass(frozen=True)
class LabelRates:
    """The rates over all events, toward which rates of keys are smoothed.

    Attributes:
        smoothing: The weight of the rate over all events, in events, by name of the aggregate.
        hours: See :func:`etl.units.hours.count_hours`.
        labels: The names of the labels, in the order of ``hours``.
    """

    smoothing: Mapping[str, float]
    hours: np.ndarray
    labels: tuple[str, ...]

    def find_prior(self, label: str, times: np.ndarray) -> np.ndarray:
        """Return the rate over all events known before the hour of each time.

        Before the first known event there is no rate, because any default would be estimated from
        later labels.

        Returns:
            float64 [n]; NaN before the first hour for which an event is known.
        """
        hours = times // HOUR
        # Most logs are sorted by time, so there are few runs of equal hours to look up.
        first = np.flatnonzero(mark_begins(hours))
        rates = self._hourly[label][np.searchsorted(self.hours[0], hours[first])]
        return np.repeat(rates, np.diff(first, append=len(hours)))

    @functools.cached_property
    def _hourly(self) -> dict[str, np.ndarray]:
        """The rate of each label before each hour, and after the last one; float64 [hours + 1]."""
        events, *positives = np.pad(np.cumsum(self.hours[1:], axis=1), ((0, 0), (1, 0)))
        none = np.full(len(events), np.nan)
        rates = {}
        for label, labelled in zip(self.labels, positives, strict=True):
            rates[label] = np.divide(labelled, events, out=none.copy(), where=events > 0)
        return rates


class KeyMoments:
    """Accumulates the sums over keys that :func:`fit_smoothing` needs.

    The result must not depend on the partitions, bit for bit. NumPy sums an array by halves, so
    partial sums would round differently; all terms are therefore collected in one array in a file.

    Args:
        path: The file.
        labels: Number of labels.
    """

    def __init__(self, path: Path, labels: int) -> None:
        self._path = path
        self._labels = labels
        self._terms = GrowingArray(path, np.float64, rows=2 + 2 * labels)

    def add(self, counts: np.ndarray) -> None:
        """Add keys; those without events do not count.

        Args:
            counts: int64 [1 + labels, keys], the number of events of each key, and the number of
                events with each label.
        """
        n, *positives = np.compress(counts[0] > 0, counts, axis=1).astype(np.float64)
        terms = [n, n * n]
        for p in positives:
            terms += [p, p * p / n]
        self._terms.append(np.array(terms))

    def sum(self) -> np.ndarray:
        """Return the sums, and delete the file.

        Returns:
            float64 [labels, 5]: the number of keys, Σn, Σn², Σp and Σp²/n, where n is the number of
            events of a key, and p the number of its events with the label.
        """
        self._terms.close()
        n, squares, *label_terms = map_array(self._path)
        moments = np.empty((self._labels, 5))
        for label in range(self._labels):
            positives, weighted = label_terms[2 * label : 2 * label + 2]
            sums = n.sum(), squares.sum(), positives.sum(), weighted.sum()
            moments[label] = len(n), *sums
        delete(self._path)
        return moments


def fit_smoothing(moments: np.ndarray) -> float:
    """Return the weight, in events, of the rate over all events in the rate of a key.

    The method of moments of DerSimonian and Laird (1986, "Meta-analysis in clinical trials")
    estimates how much the rates of keys vary beyond the variance that few events explain. If they
    do not, the weight is the maximum.

    Args:
        moments: float64 [5], see :meth:`KeyMoments.sum`.
    """
    keys, n, squares, positives, weighted = moments.tolist()
    if not n or not 0 < positives < n:
        return _MAX_SMOOTHING
    rate = positives / n
    excess = (weighted - n * rate * rate) / (rate * (1 - rate)) - (keys - 1)
    if excess <= 0:
        return _MAX_SMOOTHING
    return min(max((n - squares / n) / excess, _MIN_SMOOTHING), _MAX_SMOOTHING)
