"""The server's drift: the sliding window, the index, several processes, and a running server."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from nvt_torchrec.inference.server.batching import split
from nvt_torchrec.inference.server.drift_metrics import ERROR_RATE, DriftMetrics
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.compiled.compiled_workflow import EncodedRows
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.drift_cells import BUCKETS, population_stability, read_buckets
from tests.inference.conftest import Trained
from tests.inference.serving import serving
from tests.logs import CRITEO
from tests.spec_logs import stream_rows


class Log:
    """A workflow, and the encoded rows of a day."""

    def __init__(self, trained: Trained) -> None:
        self.workflow = compiled.load(trained.workflow)
        (day,) = trained.raw.glob("day_2*")
        self.rows: list[EncodedRows] = [
            self.workflow.transform(rows)
            for _, rows in stream_rows(str(day), self.workflow.spec, block_bytes=1 << 16)
        ]
        self.buckets = read_buckets(inspect(self.workflow.path))


@pytest.fixture(scope="module")
def criteo(trained: Trained) -> Log:
    return Log(trained)


@pytest.fixture(scope="module")
def retail(shop: Trained) -> Log:
    return Log(shop)


class Clock:
    now = 1e6

    def __call__(self) -> float:
        return self.now


def watching(log: Log, clock: Clock | None = None) -> DriftMetrics:
    metrics = DriftMetrics(CollectorRegistry(), 120.0, clock or Clock())
    metrics.watch(log.workflow)
    return metrics


def page_of(metrics: DriftMetrics) -> str:
    metrics.set_gauges()
    return metrics.page(metrics.registry).decode()


def values(page: str, name: str) -> dict[str, float]:
    samples = re.findall(rf'^{name}{{column="(.*?)"}} (\S+)$', page, re.MULTILINE)
    return {column: float(value) for column, value in samples}


def counts(page: str) -> dict[str, list[float]]:
    by_column: dict[str, list[float]] = {}
    pattern = r'^inference_window_values{bucket="(.*?)",column="(.*?)"} (\S+)$'
    for _, column, value in re.findall(pattern, page, re.MULTILINE):
        by_column.setdefault(column, []).append(float(value))
    return by_column


def expected_counts(log: Log, columns: Sequence[str], rows: list[EncodedRows]) -> np.ndarray:
    """Count with NumPy, id by id."""
    names = log.workflow.spec.categorical_names
    buckets = log.buckets[log.workflow.spec.categorical[names.index(columns[0])].vocabulary_name]
    total = np.zeros(BUCKETS + 2, np.int64)
    for name in columns:
        j = names.index(name)
        for encoded in rows:
            ids = getattr(encoded.ids[j], "values", encoded.ids[j])
            places = buckets.of_ids[np.minimum(ids, len(buckets.of_ids) - 1)]
            total += np.bincount(places, minlength=BUCKETS + 2)
    return total[: BUCKETS + 1]


def test_counts_and_index_are_those_of_each_id(criteo: Log):
    metrics = watching(criteo)
    metrics.observe(criteo.rows)
    page = page_of(metrics)
    psi, limits = values(page, "inference_psi"), values(page, "inference_psi_limit")
    assert list(psi) == CRITEO.categorical_names
    for name in CRITEO.categorical_names:
        expected = expected_counts(criteo, [name], criteo.rows)
        assert counts(page)[name] == expected.tolist()
        index, limit = population_stability(criteo.buckets[name].counts, expected, ERROR_RATE)
        assert psi[name] == pytest.approx(index)
        assert limits[name] == pytest.approx(limit)


def test_dense_means_are_near_0_and_those_of_a_shift_are_not(criteo: Log):
    metrics = watching(criteo)
    metrics.observe(criteo.rows)
    dense = np.concatenate([rows.dense for rows in criteo.rows], axis=1).astype(np.float64)
    page = page_of(metrics)
    means = values(page, "inference_dense_mean")
    assert list(means) == CRITEO.dense_names
    assert list(means.values()) == pytest.approx(dense.mean(axis=1).tolist(), abs=1e-5)
    (limit,) = re.findall(r"^inference_dense_mean_limit (\S+)$", page, re.MULTILINE)
    assert float(limit) == pytest.approx(3.8906 / math.sqrt(dense.shape[1]), rel=1e-3)
    assert max(map(abs, means.values())) < 0.5
    far = [
        EncodedRows(rows.label, rows.dense + 1e30, rows.ids, rows.null, rows.oov)
        for rows in criteo.rows
    ]
    metrics.observe(far)
    means = values(page_of(metrics), "inference_dense_mean")
    assert means["int_2"] == pytest.approx((dense[2].mean() + 100) / 2, rel=1e-3)


def test_the_window_slides(criteo: Log):
    clock = Clock()
    metrics = watching(criteo, clock)
    metrics.observe(criteo.rows[:1])
    first = sum(counts(page_of(metrics))["cat_6"])
    clock.now += 60
    metrics.observe(criteo.rows[:1])
    assert sum(counts(page_of(metrics))["cat_6"]) == 2 * first
    clock.now += 65  # the first rows are 125 seconds old, the others 65
    assert sum(counts(page_of(metrics))["cat_6"]) == first
    clock.now += 1e5
    page = page_of(metrics)
    assert sum(counts(page)["cat_6"]) == 0
    assert values(page, "inference_psi")["cat_6"] == 0
    assert values(page, "inference_dense_mean")["int_2"] == 0
    assert values(page, "inference_psi_limit")["cat_6"] == float("inf")


def test_rows_that_wait_to_be_counted_are_of_the_time_when_they_came(retail: Log):
    def rows_of(page: str) -> float:
        return float(re.search(r"^inference_window_rows (\S+)$", page, re.MULTILINE)[1])

    clock = Clock()
    metrics = watching(retail, clock)
    few = split(retail.rows[0], 7)
    metrics.observe(few[:3])
    clock.now += 60
    metrics.observe(few[3:5])
    clock.now += 65  # the first ones leave the window
    assert rows_of(page_of(metrics)) == 14
    metrics.observe(few)
    assert rows_of(page_of(metrics)) == 14 + len(retail.rows[0])
    metrics.watch(retail.workflow)  # another workflow begins a new window
    assert rows_of(page_of(metrics)) == 0


def test_lists_shared_and_hashed_columns(retail: Log):
    metrics = watching(retail)
    metrics.observe(retail.rows)
    page = page_of(metrics)
    spec = retail.workflow.spec
    vocabularies = {
        name: [column.name for column in columns]
        for name, columns in spec.vocabularies.items()
        if not columns[0].hash_buckets
    }
    assert any(len(columns) > 1 for columns in vocabularies.values())
    assert set(values(page, "inference_psi")) == set(vocabularies)
    for name, columns in vocabularies.items():
        assert counts(page)[name] == expected_counts(retail, columns, retail.rows).tolist()


def test_a_damaged_vocabulary_is_logged_and_the_server_goes_on(
    criteo: Log, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    lost = dataclasses.replace(criteo.workflow, path=tmp_path)
    metrics = DriftMetrics(CollectorRegistry(), 120.0)
    metrics.watch(lost)
    metrics.observe(criteo.rows)
    assert "drift is not measured" in caplog.text
    assert "inference_psi{" not in page_of(metrics)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_server_measures_drift(bundle: Path, trained: Trained, tmp_path: Path, workers: str):
    """The counts of several workers are added up."""
    row = dict.fromkeys([*CRITEO.dense_names, *CRITEO.categorical_names])
    row["cat_6"] = trained.days[0][0][CRITEO.columns.index("cat_6")] or "00000001"
    with serving(tmp_path, "--bundle", str(bundle), "--workers", workers) as server:
        # Nothing is counted before the vocabularies' counts are read; then there are no rows yet.
        server.wait_for('inference_psi_limit{column="cat_6"}', math.inf)
        for _ in range(30):
            server.predict(rows=[row] * 10)
        server.wait_for("inference_window_rows", 300)
        page = server.ask("/metrics")[1].decode()
        assert sum(counts(page)["cat_6"]) == 300
        assert sum(counts(page)["cat_7"]) == 0
        assert values(page, "inference_psi")["cat_6"] > values(page, "inference_psi_limit")["cat_6"]
