"""The metrics of a server, in Prometheus' text format."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

from nvt_torchrec.inference.server.batching import Batch
from nvt_torchrec.inference.server.drift import DriftMetrics
from nvt_torchrec.inference.server.settings import SHARED_VALUES

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ROWS = tuple(4**k for k in range(8))


class ServerMetrics:
    """Counters and histograms of one server.

    Args:
        columns: Names of the categorical columns.
        drift_window_s: Seconds over which drift is measured.

    Attributes:
        registry: The registry of the metrics.
        shared: Whether several processes add their values up.
        drift: The drift of the categorical columns.
    """

    def __init__(self, columns: tuple[str, ...], drift_window_s: float = 3600.0) -> None:
        self.registry = CollectorRegistry()
        self.drift = DriftMetrics(self.registry, drift_window_s)
        registry = {"registry": self.registry}
        self.requests = Counter(
            "inference_requests",
            "Answers to POST /predict by status, and 401 to any request",
            ["code"],
            **registry,
        )
        self.request_seconds = Histogram(
            "inference_request_seconds",
            "Time from a request's headers to its answer, except 503",
            buckets=_SECONDS,
            **registry,
        )
        self._queue_seconds = Histogram(
            "inference_queue_seconds",
            "Time that requests waited for the model",
            buckets=_SECONDS,
            **registry,
        )
        self._model_seconds = Histogram(
            "inference_model_seconds", "Time that the model took for a batch", buckets=_SECONDS,
            **registry,
        )  # fmt: skip
        self._batch_rows = Histogram(
            "inference_batch_rows", "Rows of a batch", buckets=_ROWS, **registry
        )
        self.connections_ended = Counter(
            "inference_connections_ended",
            "Connections that the server ended, by reason",
            ["reason"],
            **registry,
        )
        self._rows = Counter("inference_rows", "Rows scored", **registry)
        self._sum = Counter(
            "inference_probability_sum",
            "Sum of all probabilities; divided by the rows, the mean prediction",
            **registry,
        )
        self._null, self._oov = (
            [counter.labels(column) for column in columns]
            for counter in (
                Counter(f"inference_{name}_values", text, ["column"], **registry)
                for name, text in (
                    ("null", "Missing values by categorical column"),
                    ("oov", "Out-of-vocabulary values by categorical column"),
                )
            )
        )
        self._gauges: list[tuple[Gauge, Callable[[], float]]] = []
        self.shared = SHARED_VALUES in os.environ
        if not self.shared:
            ProcessCollector(**registry)

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge whose value is read whenever metrics are."""
        gauge = Gauge(name, text, registry=self.registry, multiprocess_mode="livesum")
        self._gauges.append((gauge, value))

    def share(self) -> None:
        """Write the gauges where the other processes read them."""
        if self.shared:
            self._set_gauges()

    def _set_gauges(self) -> None:
        for gauge, value in self._gauges:
            gauge.set(value())
        self.drift.set_gauges()

    def page(self) -> bytes:
        """Return the text for Prometheus: the sums over all processes."""
        self._set_gauges()
        registry = self.registry
        if self.shared:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        return generate_latest(self.drift.with_psi(registry))

    def observe(self, batch: Batch) -> None:
        """Count a scored batch."""
        self.drift.observe(batch.requests)
        for seconds in batch.waited:
            self._queue_seconds.observe(seconds)
        self._model_seconds.observe(batch.seconds)
        self._batch_rows.observe(len(batch.probabilities))
        self._rows.inc(len(batch.probabilities))
        finite = batch.probabilities[np.isfinite(batch.probabilities)]
        self._sum.inc(float(finite.sum(dtype=np.float64)))
        for counters, values in (
            (self._null, sum(rows.null for rows in batch.requests)),
            (self._oov, sum(rows.oov for rows in batch.requests)),
        ):
            for column in np.flatnonzero(values):  # most are 0
                counters[column].inc(int(values[column]))
