"""The metrics of a server, in Prometheus' text format."""

from __future__ import annotations

import functools
import math
import os

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

from nvt_torchrec.inference.server.batching import RequestBatch
from nvt_torchrec.inference.server.reload import Served
from nvt_torchrec.inference.server.serve_settings import SHARED_VALUES

# Upper bounds of the buckets of histograms.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ROWS = (1, 4, 16, 64, 256, 1024, 4096, 16_384)


class ServerMetrics:
    """Counters, gauges and histograms of one server.

    Args:
        columns: The names of the categorical columns.
        labels: The names of the labels whose probabilities are predicted.

    Attributes:
        registry: The registry of the metrics.
        shared: True if the values of several processes are added up.
        reloads: Counts the bundles that were put in place of another.
        reload_failures: Counts the bundles that could not be put in place.
        in_flight: The number of requests that have arrived completely and are not answered yet.
        queue_rows: The number of rows that wait for the model.
    """

    def __init__(self, columns: tuple[str, ...], labels: tuple[str, ...]) -> None:
        self.registry = registry = CollectorRegistry()
        counter = functools.partial(Counter, registry=registry)
        seconds = functools.partial(Histogram, buckets=_SECONDS, registry=registry)
        gauge = functools.partial(Gauge, multiprocess_mode="livesum", registry=registry)
        # fmt: off
        self._requests = counter(
            "inference_requests", "Answers to POST /predict by status", ["code"])
        self._request_seconds = seconds(
            "inference_request_seconds", "Time from a request's headers to its answer, except 503")
        self._queue_seconds = seconds(
            "inference_queue_seconds", "Time that requests waited for the model")
        self._model_seconds = seconds(
            "inference_model_seconds", "Time that the model took for a batch")
        self._batch_rows = Histogram(
            "inference_batch_rows", "Rows of a batch", buckets=_ROWS, registry=registry)
        self._rows = counter("inference_rows", "Rows scored")
        probability_sum = counter(
            "inference_probability_sum",
            "Sum of the probabilities of a label; divided by the rows, the mean prediction",
            ["label"])
        null = counter(
            "inference_null_values", "Missing values by categorical column", ["column"])
        oov = counter(
            "inference_oov_values", "Out-of-vocabulary values by categorical column", ["column"])
        self._bundle_info = gauge(
            "inference_bundle_info",
            "Processes that serve a bundle, by the beginning of its digest and by its generation",
            ["bundle", "generation"])
        time = functools.partial(Gauge, multiprocess_mode="livemax", registry=registry)
        self._trained = time(
            "inference_bundle_trained_timestamp_seconds",
            "Time at which the served bundle was trained, in seconds since 1970; 0 if unknown")
        self._published = time(
            "inference_bundle_published_timestamp_seconds",
            "Time at which the served bundle was published, in seconds since 1970; 0 if unknown")
        self.reloads = counter(
            "inference_bundle_reloads", "Bundles that were put in place of another")
        self.reload_failures = counter(
            "inference_bundle_reload_failures",
            "Bundles that could not be put in place, so that the previous one stayed in service")
        self.in_flight = gauge(
            "inference_requests_under_way", "Requests that have arrived and are not answered yet")
        self.queue_rows = gauge("inference_queue_rows", "Rows waiting for the model")
        # fmt: on
        self._sums = [probability_sum.labels(label) for label in labels]
        # Looked up only once, because finding a column's counter takes longer than counting.
        self._null_counters = [null.labels(column) for column in columns]
        self._oov_counters = [oov.labels(column) for column in columns]
        self.shared = SHARED_VALUES in os.environ
        if not self.shared:
            ProcessCollector(registry=registry)

    def count_answer(self, status: int, seconds: float) -> None:
        """Count an answer to ``POST /predict``."""
        self._requests.labels(status).inc()
        if status != 503:
            self._request_seconds.observe(seconds)

    def record_served(self, now: Served, before: Served | None = None) -> None:
        """Record that the bundle ``now`` is served instead of ``before``."""
        if before is not None:
            # It is set to 0, because a value that processes share cannot be removed.
            self._bundle_info.labels(*before.metric_labels).set(0)
        self._bundle_info.labels(*now.metric_labels).set(1)
        self._trained.set(now.trained)
        self._published.set(now.published)

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format, summed over all processes."""
        registry = self.registry
        if self.shared:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        return generate_latest(registry)

    def observe(self, batch: RequestBatch) -> None:
        """Count a scored batch."""
        for seconds in batch.waited:
            self._queue_seconds.observe(seconds)
        self._model_seconds.observe(batch.seconds)
        self._batch_rows.observe(len(batch.probabilities))
        self._rows.inc(len(batch.probabilities))
        sums = batch.probabilities.sum(0, dtype=np.float64).tolist()
        if not all(map(math.isfinite, sums)):
            # Leave NaN out: a counter would stay NaN for ever. The request itself gets an error
            # from check_finite.
            finite = np.where(np.isfinite(batch.probabilities), batch.probabilities, 0)
            sums = finite.sum(0, dtype=np.float64).tolist()
        for counter, value in zip(self._sums, sums, strict=True):
            counter.inc(value)
        for rows in batch.requests:
            _count_values(self._null_counters, rows.null)
            _count_values(self._oov_counters, rows.oov)


def _count_values(counters: list[Counter], values: np.ndarray) -> None:
    """Add the values of columns, int64 [columns], to their counters."""
    for counter, value in zip(counters, values.tolist(), strict=True):
        if value:  # skip the call for 0, the most common value
            counter.inc(value)
