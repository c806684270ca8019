"""Drift of the served rows, as Prometheus metrics: the index of each vocabulary, and dense means.

The model's thread counts the rows of a sliding window. prometheus_client adds the counts of several
processes up, and the index is computed from the sums when metrics are read, so any process answers
for the whole server.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from prometheus_client import CollectorRegistry, Gauge, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import Jagged
from nvt_torchrec.workflows.compiled.compiled_workflow import CompiledWorkflow, EncodedRows
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.drift_cells import (
    BUCKETS,
    Buckets,
    compared,
    population_stability,
    read_buckets,
)

log = logging.getLogger(__name__)

#: Returns the time in seconds.
Clock: TypeAlias = Callable[[], float]

#: The probability with which a column's index exceeds ``inference_psi_limit`` without a shift.
ERROR_RATE = 1e-4
_NORMAL_LIMIT = NormalDist().inv_cdf(1 - ERROR_RATE / 2)
_BUCKET_NAMES = [*(f"{10 * i}-{10 * (i + 1)}" for i in range(BUCKETS)), "rest"]
#: Parts of the window, the oldest of which is dropped at once.
_SLOTS = 12
#: Rows that are counted together: single ones would cost more in calls than in counting.
_TOGETHER = 128
#: Larger values, in standard deviations, count as this, so that a single one does not decide.
_LARGEST = 100.0


class CountWindow:
    """Counts the rows of the last seconds: by vocabulary the values in each bucket, and dense sums.

    Columns that share a vocabulary are counted together, because their training counts are stored
    together. Of dense columns a workflow holds mean and standard deviation only; the values that
    the model sees are normalized by them, so the mean of a window is 0 without a shift.

    Args:
        spec: The spec of the rows.
        buckets: The buckets of the vocabularies, see :func:`workflows.drift_cells.read_buckets`.
        seconds: The length of the window.
        clock: Returns the time in seconds.

    Attributes:
        buckets: The buckets of the vocabularies that are counted.
        dense: The dense columns that are summed.
    """

    def __init__(
        self, spec: FeatureSpec, buckets: dict[str, Buckets], seconds: float, clock: Clock
    ) -> None:
        columns = compared(spec)
        self._vocabulary_of = {
            j: column.vocabulary_name
            for j, column in enumerate(spec.categorical)
            if column.name in columns and column.vocabulary_name in buckets
        }
        self.buckets = {name: buckets[name] for name in self._vocabulary_of.values()}
        self.dense = [name for name in spec.normalized_names if name in columns]
        self._places = [spec.dense_names.index(name) for name in self.dense]
        self._slot_s, self._clock = seconds / _SLOTS, clock
        self._lock = threading.Lock()
        self._counts = {name: np.zeros((_SLOTS, BUCKETS + 1), np.int64) for name in self.buckets}
        self._sums = np.zeros((_SLOTS, 1 + len(self.dense)))  # rows, and the sum of each column
        self._slot = 0
        self._waiting: list[EncodedRows] = []

    def add(self, batches: Sequence[EncodedRows]) -> None:
        """Count some rows."""
        with self._lock:
            self._move()
            self._waiting += batches
            if sum(map(len, self._waiting)) >= _TOGETHER:
                self._count()

    def totals(self) -> tuple[dict[str, np.ndarray], float, dict[str, float]]:
        """Return the values in each bucket by vocabulary, the rows, and the sums of the columns."""
        with self._lock:
            self._move()
            self._count()
            rows, *sums = self._sums.sum(axis=0).tolist()
            counts = {name: of.sum(axis=0) for name, of in self._counts.items()}
        return counts, rows, dict(zip(self.dense, sums, strict=True))

    def _move(self) -> None:
        """Begin a new slot, if it is time for it, and empty those that left the window."""
        now = int(self._clock() / self._slot_s)
        if now == self._slot:
            return
        self._count()
        left = [number % _SLOTS for number in range(max(self._slot, now - _SLOTS) + 1, now + 1)]
        for counts in (self._sums, *self._counts.values()):
            counts[left] = 0
        self._slot = now

    def _count(self) -> None:
        """Count the rows that wait, in the slot of now."""
        batches, self._waiting = self._waiting, []
        if not batches:
            return
        slot = self._slot % _SLOTS
        dense = np.concatenate([rows.dense[self._places] for rows in batches], axis=1)
        self._sums[slot, 0] += dense.shape[1]
        self._sums[slot, 1:] += dense.clip(-_LARGEST, _LARGEST).sum(axis=1, dtype=np.float64)
        for j, name in self._vocabulary_of.items():
            columns = [rows.ids[j] for rows in batches]
            ids = [column.values if isinstance(column, Jagged) else column for column in columns]
            self._counts[name][slot] += self.buckets[name].count(np.concatenate(ids))


class DriftMetrics:
    """Metrics of a sliding window over the served rows.

    Args:
        registry: The registry of the process.
        window_s: The length of the window in seconds.
        clock: Returns the time in seconds.

    Attributes:
        registry: The registry of the process.
    """

    def __init__(
        self, registry: CollectorRegistry, window_s: float, clock: Clock = time.monotonic
    ) -> None:
        self.registry, self._window_s, self._clock = registry, window_s, clock
        self._watched: CompiledWorkflow | None = None
        self._window: CountWindow | None = None
        gauge = functools.partial(Gauge, multiprocess_mode="livesum", registry=registry)
        self._counts = gauge(
            "inference_window_values",
            "Values in the sliding window by vocabulary and tenth of the training values",
            ["column", "bucket"],
        )
        self._rows = gauge("inference_window_rows", "Rows in the sliding window")
        self._sums = gauge(
            "inference_window_dense_accumulated",
            "Sum of the normalized values in the window",
            ["column"],
        )

    def watch(self, workflow: CompiledWorkflow) -> None:
        """Read the vocabularies of a workflow, and begin a new window; until then count nothing."""
        self._window, self._watched = None, workflow
        try:
            buckets = read_buckets(inspect(workflow.path))
        except BadInputError as error:
            log.error("drift is not measured: %s", error)
            return
        window = CountWindow(workflow.spec, buckets, self._window_s, self._clock)
        if self._watched is workflow:  # no other one has taken its place meanwhile
            self._window = window

    def observe(self, requests: Sequence[EncodedRows]) -> None:
        """Count scored rows."""
        if (window := self._window) is not None:
            window.add(requests)

    def set_gauges(self) -> None:
        """Write the counts of the window where metrics are read."""
        if (window := self._window) is None:
            return
        counts, rows, sums = window.totals()
        self._rows.set(rows)
        for name, total in sums.items():
            self._sums.labels(name).set(total)
        for name, values in counts.items():
            for bucket, value in zip(_BUCKET_NAMES, values.tolist(), strict=True):
                self._counts.labels(name, bucket).set(value)

    def page(self, registry: CollectorRegistry) -> bytes:
        """Return the text for Prometheus: all metrics of a registry, and the indices."""
        metrics = list(registry.collect())
        if (window := self._window) is not None:
            metrics += _indices(window, metrics)
        return generate_latest(types.SimpleNamespace(collect=lambda: metrics))


def _indices(window: CountWindow, metrics: list[Metric]) -> list[Metric]:
    """Compute what follows from the counts of a window, which ``metrics`` has of all processes."""
    values = Counter(  # 0 of a window that has begun just now
        {
            (sample.name, sample.labels.get("column"), sample.labels.get("bucket")): sample.value
            for metric in metrics
            for sample in metric.samples
        }
    )
    rows = values["inference_window_rows", None, None]
    means, indices, limits = {}, {}, {}
    for name in window.dense:
        means[name] = values["inference_window_dense_accumulated", name, None] / max(rows, 1)
    for name, buckets in window.buckets.items():
        counts = [values["inference_window_values", name, bucket] for bucket in _BUCKET_NAMES]
        then, now = buckets.counts, np.array(counts, np.int64)
        indices[name], limits[name] = population_stability(then, now, ERROR_RATE)
    limit = _NORMAL_LIMIT / math.sqrt(rows) if rows else math.inf
    by_chance = f"exceeds without a shift with a probability of {ERROR_RATE:g}"
    psi = "Population stability index of the sliding window against the training days"
    mean = "Mean in the sliding window, in standard deviations of the training days"
    return [
        _gauge("inference_psi", psi, indices),
        _gauge("inference_psi_limit", f"What the index {by_chance}", limits),
        _gauge("inference_dense_mean", mean, means),
        GaugeMetricFamily("inference_dense_mean_limit", f"What it {by_chance}", value=limit),
    ]


def _gauge(name: str, text: str, values: dict[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=["column"])
    for column, value in values.items():
        family.add_metric([column], value)
    return family
