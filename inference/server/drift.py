"""Drift of the served rows, as Prometheus metrics: the index of each vocabulary, and dense means.

:class:`workflows.drift_cells.Window` counts in the model's thread. prometheus_client adds the
counts of several processes up, and the index is computed from the sums when metrics are read, so
any process answers for the whole server.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist

import numpy as np
from prometheus_client import CollectorRegistry, Gauge, Metric
from prometheus_client.core import GaugeMetricFamily

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.workflows.compiled.workflow import CompiledWorkflow, EncodedRows
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.drift import population_stability
from nvt_torchrec.workflows.drift_cells import BUCKETS, Window, read_buckets

log = logging.getLogger(__name__)

#: The probability with which a column's index exceeds ``inference_psi_limit`` without a shift.
ERROR_RATE = 1e-4
_NORMAL_LIMIT = NormalDist().inv_cdf(1 - ERROR_RATE / 2)
_COUNTS, _ROWS, _SUMS = (
    "inference_window_values", "inference_window_rows", "inference_window_dense_sum",
)  # fmt: skip
_BUCKET_NAMES = [*(f"{10 * i}-{10 * (i + 1)}" for i in range(BUCKETS)), "rest"]


class DriftMetrics:
    """Metrics of a sliding window over the served rows.

    Args:
        registry: The registry of the process.
        window_s: The length of the window in seconds.
        clock: The time in seconds.

    Attributes:
        registry: The registry of the process.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        window_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry, self._window_s, self._clock = registry, window_s, clock
        self._watched: CompiledWorkflow | None = None
        self._window: Window | None = None
        self._counts, self._rows, self._sums = (
            Gauge(name, text, labels, multiprocess_mode="livesum", registry=registry)
            for name, text, labels in (
                (
                    _COUNTS,
                    "Values in the sliding window by vocabulary and bucket: the most frequent 0 to "
                    "10 % of the training values, …, and the rest (rare and out of vocabulary)",
                    ["column", "bucket"],
                ),
                (_ROWS, "Rows in the sliding window", []),
                (_SUMS, "Sum of the normalized values of the sliding window", ["column"]),
            )
        )

    def watch(self, workflow: CompiledWorkflow) -> threading.Thread:
        """Begin a new window for a workflow.

        Its vocabularies are read in a thread, which is returned. Until it ends, nothing is counted.
        """
        self._window, self._watched = None, workflow
        thread = threading.Thread(
            target=self._read, args=(workflow,), name="drift baseline", daemon=True
        )
        thread.start()
        return thread

    def _read(self, workflow: CompiledWorkflow) -> None:
        try:
            buckets = read_buckets(workflow.path, inspect(workflow.path))
        except BadInputError as error:
            log.error("drift is not measured: %s", error)
            return
        window = Window(workflow.spec, buckets, self._window_s, self._clock)
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

    def with_psi(self, registry: CollectorRegistry) -> _WithPsi:
        """Return a registry with all metrics of another one, and the index computed from them."""
        return _WithPsi(registry, self._window)


class _WithPsi:
    """The part of a registry that ``generate_latest`` needs."""

    def __init__(self, registry: CollectorRegistry, window: Window | None) -> None:
        self._registry, self._window = registry, window

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, and those made of them."""
        buckets = self._window.buckets if self._window else {}
        counts = {name: np.zeros(BUCKETS + 1, np.int64) for name in buckets}
        rows, sums = 0.0, {}
        for metric in self._registry.collect():
            yield metric
            if metric.name == _ROWS:
                rows = sum(sample.value for sample in metric.samples)
            elif metric.name == _SUMS:
                sums = {sample.labels["column"]: sample.value for sample in metric.samples}
            elif metric.name == _COUNTS:
                for sample in metric.samples:
                    if (name := sample.labels["column"]) in counts:
                        bucket = _BUCKET_NAMES.index(sample.labels["bucket"])
                        counts[name][bucket] = sample.value
        stability = {
            name: population_stability(buckets[name].counts, now, ERROR_RATE)
            for name, now in counts.items()
        }
        yield _gauge(
            "inference_psi",
            "Population stability index of the values in the sliding window, against the training "
            "days",
            {name: psi for name, (psi, _) in stability.items()},
        )
        yield _gauge(
            "inference_psi_limit",
            f"What the index exceeds by chance, without a shift, with a probability of "
            f"{ERROR_RATE:g}",
            {name: limit for name, (_, limit) in stability.items()},
        )
        if sums:
            yield _gauge(
                "inference_dense_mean",
                "Mean of the dense values in the sliding window, in standard deviations of the "
                "training days from their mean",
                {name: total / rows if rows else 0.0 for name, total in sums.items()},
            )
            yield GaugeMetricFamily(
                "inference_dense_mean_limit",
                f"What it exceeds by chance, up or down, with a probability of {ERROR_RATE:g}",
                value=_NORMAL_LIMIT / math.sqrt(rows) if rows else math.inf,
            )


def _gauge(name: str, text: str, values: dict[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=["column"])
    for column, value in values.items():
        family.add_metric([column], value)
    return family
