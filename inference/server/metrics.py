"""What a server counts, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from inference.server.batching import Batch

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_ROWS = tuple(4**k for k in range(8))


class ServerMetrics:
    """Counters and histograms of one server.

    Args:
        columns: names of the categorical columns.
    """

    def __init__(self, columns: tuple[str, ...]) -> None:
        self.registry = CollectorRegistry()
        registry = {"registry": self.registry}
        self.requests = Counter(
            "inference_requests", "Answers to POST /predict by status", ["code"], **registry
        )
        self.request_seconds = Histogram(
            "inference_request_seconds",
            "From the head of a request to its answer, those with 503 aside",
            buckets=_SECONDS,
            **registry,
        )
        self._queue_seconds = Histogram(
            "inference_queue_seconds",
            "What requests waited for the model",
            buckets=_SECONDS,
            **registry,
        )
        self._model_seconds = Histogram(
            "inference_model_seconds", "What the model took for a batch", buckets=_SECONDS,
            **registry,
        )  # fmt: skip
        self._batch_rows = Histogram(
            "inference_batch_rows", "Rows of a batch", buckets=_ROWS, **registry
        )
        ProcessCollector(**registry)
        self._rows = _Rows(columns)
        self.registry.register(self._rows)

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a number that is asked for whenever metrics are."""
        Gauge(name, text, registry=self.registry).set_function(value)

    def observe(self, batch: Batch) -> None:
        """Count a batch that was scored."""
        for seconds in batch.waited:
            self._queue_seconds.observe(seconds)
        self._model_seconds.observe(batch.seconds)
        self._batch_rows.observe(len(batch.probabilities))
        self._rows.add(batch)


class _Rows:
    """Totals over all scored rows. One thread adds."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self._columns = columns
        self._null = np.zeros(len(columns), np.int64)
        self._oov = np.zeros(len(columns), np.int64)
        self._rows = 0
        self._sum = 0.0

    def add(self, batch: Batch) -> None:
        for rows in batch.requests:
            self._null += rows.null
            self._oov += rows.oov
        self._rows += len(batch.probabilities)
        self._sum += float(batch.probabilities.sum(dtype=np.float64))

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("inference_rows", "Rows scored", self._rows)
        yield CounterMetricFamily(
            "inference_probability_sum",
            "Sum of all probabilities: over the rows, the mean prediction",
            self._sum,
        )
        for name, text, values in (
            ("null", "Missing values by categorical column", self._null),
            ("oov", "Values outside of the vocabulary by categorical column", self._oov),
        ):
            family = CounterMetricFamily(f"inference_{name}_values", text, labels=["column"])
            for column, value in zip(self._columns, values.tolist(), strict=True):
                family.add_metric([column], value)
            yield family
