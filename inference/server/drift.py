"""Drift of the served rows: the population stability index of each categorical column, and the mean
of each dense one.

The values of the last hour are counted by their frequency in the training days
(:mod:`workflows.frequency_buckets`), in the model's thread, and compared with the counts of the
fitted workflow. prometheus_client adds the counts of several processes up, and the index is
computed from the sums when metrics are read, so any process answers for the whole server.

Of dense columns a workflow holds mean and standard deviation only. The values that the model sees
are normalized by them, so the mean of a window is 0 without a shift, and by chance about 1/√rows.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import NormalDist

import numpy as np
from numba import types
from prometheus_client import CollectorRegistry, Gauge, Metric
from prometheus_client.core import GaugeMetricFamily

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.base.stability import population_stability
from nvt_torchrec.formats.rows import Jagged
from nvt_torchrec.inference.server.batching import join
from nvt_torchrec.workflows.compiled.workflow import CompiledWorkflow, EncodedRows, Ids
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.frequency_buckets import BUCKETS, FrequencyBuckets, read_buckets
from nvt_torchrec.workflows.moments import normalized_names

log = logging.getLogger(__name__)

#: The probability with which a column's index exceeds ``inference_psi_limit`` without a shift.
ERROR_RATE = 1e-4
#: Rows that are counted together: single ones would cost more in calls than in counting.
_TOGETHER = 128
#: Parts of the window, the oldest of which is dropped at once.
_SLOTS = 12
#: The first ids of a vocabulary, most of which are frequent, are looked up in a table of one byte
#: each: 1,024 rows of 26 columns take 0.03 ms instead of 0.3 ms.
_TABLE_IDS = 1 << 12
#: Larger values, in standard deviations, count as this, so that a single one does not decide.
_LARGEST = 100.0
_COUNTS, _ROWS, _SUMS = (
    "inference_window_values", "inference_window_rows", "inference_window_dense_sum",
)  # fmt: skip
_BUCKET_NAMES = [
    *(f"{100 // BUCKETS * i}-{100 // BUCKETS * (i + 1)}" for i in range(BUCKETS)),
    "rest",
]


class DriftMetrics:
    """Counts the values of a sliding window by bucket, and computes their stability index.

    Columns that share a vocabulary are counted together, under its name, because their training
    counts are stored together. Hashed columns have none and are left out.

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
        self.registry = registry
        self._slot_s, self._clock = window_s / _SLOTS, clock
        self._gauge = Gauge(
            _COUNTS,
            "Values in the sliding window by vocabulary and bucket: the most frequent 0 to 10 % of "
            "the training values, …, and the rest (rare and out of vocabulary)",
            ["column", "bucket"],
            multiprocess_mode="livesum",
            registry=registry,
        )
        self._rows_gauge, self._sums_gauge = (
            Gauge(name, text, labels, multiprocess_mode="livesum", registry=registry)
            for name, text, labels in (
                (_ROWS, "Rows in the sliding window", []),
                (_SUMS, "Sum of the normalized values of the sliding window", ["column"]),
            )
        )
        self._lock = threading.Lock()
        self._watched: CompiledWorkflow | None = None
        self._buckets: _Buckets | None = None
        self._slots = np.zeros((_SLOTS, 0, BUCKETS + 2), np.int64)
        self._dense_slots = np.zeros((_SLOTS, 1))  # rows, and the sum of each dense column
        self._last_slot = 0
        self._waiting: list[EncodedRows] = []
        self._waiting_rows = 0
        self._written: dict[str, list[int]] = {}  # what is in the gauges

    def watch(self, workflow: CompiledWorkflow) -> threading.Thread:
        """Count from now on with the buckets of a workflow; begin a new window.

        Its vocabularies are read in a thread, which is returned. Until it ends, nothing is counted.
        """
        with self._lock:
            self._buckets, self._watched = None, workflow
            self._waiting, self._waiting_rows = [], 0
        thread = threading.Thread(
            target=self._read, args=(workflow,), name="drift baseline", daemon=True
        )
        thread.start()
        return thread

    def _read(self, workflow: CompiledWorkflow) -> None:
        try:
            buckets = _Buckets(workflow, read_buckets(workflow.path, inspect(workflow.path)))
        except BadInputError as error:
            log.error("drift is not measured: %s", error)
            return
        with self._lock:
            if self._watched is not workflow:  # another one has taken its place meanwhile
                return
            self._buckets = buckets
            self._slots = np.zeros((_SLOTS, len(buckets.names), BUCKETS + 2), np.int64)
            self._dense_slots = np.zeros((_SLOTS, 1 + len(buckets.dense)))

    def observe(self, requests: Sequence[EncodedRows]) -> None:
        """Count scored rows."""
        with self._lock:
            if self._buckets is not None:
                self._move_window()
                self._waiting += requests
                self._waiting_rows += sum(map(len, requests))
                if self._waiting_rows >= _TOGETHER:
                    self._count_waiting()

    def _count_waiting(self) -> None:
        if self._waiting and self._buckets is not None:
            slot = self._last_slot % _SLOTS
            dense, ids = join(self._waiting)
            self._buckets.count(ids, self._slots[slot])
            _sum_dense(dense, self._buckets.dense_places, self._dense_slots[slot])
        self._waiting, self._waiting_rows = [], 0

    def _move_window(self) -> None:
        """Begin a new slot, if it is time for it, and empty those that left the window."""
        now = int(self._clock() / self._slot_s)
        if now == self._last_slot:
            return
        self._count_waiting()
        passed = min(now - self._last_slot, _SLOTS)
        for number in range(now - passed + 1, now + 1):
            self._slots[number % _SLOTS] = 0
            self._dense_slots[number % _SLOTS] = 0
        self._last_slot = now

    def set_gauges(self) -> None:
        """Write the counts of the window where metrics are read."""
        with self._lock:
            if self._buckets is None:
                return
            self._move_window()
            self._count_waiting()
            names, counts = self._buckets.names, self._slots.sum(axis=0)
            dense, sums = self._buckets.dense, self._dense_slots.sum(axis=0)
        self._rows_gauge.set(sums[0])
        for name, total in zip(dense, sums[1:].tolist(), strict=True):
            self._sums_gauge.labels(name).set(total)
        for name, values in zip(names, counts[:, : BUCKETS + 1].tolist(), strict=True):
            if self._written.get(name) == values:
                continue
            for bucket, value in zip(_BUCKET_NAMES, values, strict=True):
                self._gauge.labels(name, bucket).set(value)
            self._written[name] = values

    def with_psi(self, registry: CollectorRegistry) -> _WithPsi:
        """Return a registry with all metrics of another one, and the index computed from them."""
        with self._lock:
            return _WithPsi(registry, {} if self._buckets is None else self._buckets.then)


class _WithPsi:
    """The part of a registry that ``generate_latest`` needs."""

    def __init__(self, registry: CollectorRegistry, baseline: dict[str, np.ndarray]) -> None:
        self._registry, self._baseline = registry, baseline

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, and those made of them."""
        counts = {name: np.zeros(BUCKETS + 1, np.int64) for name in self._baseline}
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
        yield from _psi_metrics(self._baseline, counts)
        yield from _mean_metrics(sums, rows)


def _psi_metrics(
    baseline: dict[str, np.ndarray], counts: dict[str, np.ndarray]
) -> Iterable[GaugeMetricFamily]:
    psi = GaugeMetricFamily(
        "inference_psi",
        "Population stability index of the values in the sliding window, against the training days",
        labels=["column"],
    )
    limit = GaugeMetricFamily(
        "inference_psi_limit",
        f"What the index exceeds by chance, without a shift, with a probability of {ERROR_RATE:g}",
        labels=["column"],
    )
    for name, then in baseline.items():
        found = population_stability(then, counts[name], ERROR_RATE)
        psi.add_metric([name], found.psi)
        limit.add_metric([name], found.limit)
    return (psi, limit)


def _mean_metrics(sums: dict[str, float], rows: float) -> Iterable[GaugeMetricFamily]:
    mean = GaugeMetricFamily(
        "inference_dense_mean",
        "Mean of the dense values in the sliding window, in standard deviations of the training "
        "days from their mean",
        labels=["column"],
    )
    limit = GaugeMetricFamily(
        "inference_dense_mean_limit",
        f"What it exceeds by chance, up or down, with a probability of {ERROR_RATE:g}",
        value=NormalDist().inv_cdf(1 - ERROR_RATE / 2) / math.sqrt(rows) if rows else math.inf,
    )
    for name, total in sums.items():
        mean.add_metric([name], total / rows if rows else 0.0)
    return (mean, limit) if sums else ()


class _Buckets:
    """The buckets of all vocabularies in the form that the kernel reads; normalized columns."""

    def __init__(self, workflow: CompiledWorkflow, buckets: dict[str, FrequencyBuckets]) -> None:
        self.names = list(buckets)
        spec = workflow.spec
        self.dense = normalized_names(spec)
        self.dense_places = np.flatnonzero(np.isin(spec.dense_names, self.dense))
        self.then = {name: of_one.counts for name, of_one in buckets.items()}
        runs = [of_one.begins for of_one in buckets.values()]
        self._begins = np.concatenate([*runs, np.empty(0, np.int32)])
        self._of_runs = np.concatenate(
            [*(of_one.buckets for of_one in buckets.values()), np.empty(0, np.uint8)]
        )
        ids = np.arange(_TABLE_IDS)
        self._table = np.zeros((len(runs), _TABLE_IDS), np.uint8)
        for v, of_one in enumerate(buckets.values()):
            self._table[v] = of_one.buckets[np.searchsorted(of_one.begins, ids, "right") - 1]
        ends = np.cumsum([0, *map(len, runs)])
        places = np.full((len(workflow.spec.categorical), 3), -1, np.int64)
        for j, column in enumerate(workflow.spec.categorical):
            if column.vocabulary_name in buckets:
                v = self.names.index(column.vocabulary_name)
                places[j] = v, ends[v], ends[v + 1]
        self._places = places

    def count(self, ids: np.ndarray | list[Ids], counts: np.ndarray) -> None:
        """Add ids to counts, int64 [vocabularies, BUCKETS + 2]."""
        columns = [ids] if isinstance(ids, np.ndarray) else map(_values_of, ids)
        first = 0
        for values in columns:
            places = self._places[first : first + len(values)]
            _count_buckets(values, places, self._table, self._begins, self._of_runs, counts)
            first += len(values)


def _values_of(ids: Ids) -> np.ndarray:
    """Return the ids of one column as [1, n]."""
    return (ids.values if isinstance(ids, Jagged) else ids)[None]


@compiled(
    types.void(
        types.Array(types.int32, 2, "A", readonly=True),
        types.Array(types.int64, 2, "C", readonly=True),
        types.Array(types.uint8, 2, "C", readonly=True),
        types.Array(types.int32, 1, "C", readonly=True),
        types.Array(types.uint8, 1, "C", readonly=True),
        types.Array(types.int64, 2, "C"),
    ),
    nogil=False,  # a few microseconds
)
def _count_buckets(ids, places, table, begins, buckets, counts):
    """Add ids [columns, n] to the counts of their buckets.

    ``places`` has for each column its vocabulary, or −1, and its first and end run; ``table`` the
    buckets of the first ids of each vocabulary.
    """
    of_column = np.zeros(counts.shape[1], np.int64)
    for j in range(len(places)):
        vocabulary, first, end = places[j]
        if vocabulary < 0:
            continue
        of_column[:] = 0
        for i in range(ids.shape[1]):
            value = ids[j, i]
            if value < table.shape[1]:
                of_column[table[vocabulary, value]] += 1
                continue
            at, left = first, end - first
            while left > 1:
                half = left >> 1
                at += half * np.int64(begins[at + half] <= value)
                left -= half
            of_column[buckets[at]] += 1
        for bucket in range(len(of_column)):
            counts[vocabulary, bucket] += of_column[bucket]


@compiled(
    types.void(
        types.Array(types.float32, 2, "A", readonly=True),
        types.Array(types.int64, 1, "C"),
        types.Array(types.float64, 1, "C"),
    ),
    nogil=False,
)
def _sum_dense(dense, places, sums):
    """Add rows [columns, n] to their number, and some columns of them to the sum of each."""
    sums[0] += dense.shape[1]
    for k in range(len(places)):
        total = 0.0
        for i in range(dense.shape[1]):
            total += min(max(dense[places[k], i], -_LARGEST), _LARGEST)
        sums[1 + k] += total
