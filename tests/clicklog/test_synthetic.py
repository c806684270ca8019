"""The synthetic log: its bytes, its shape, its oracle, and what it does to a directory."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from nvt_torchrec.clicklog.synthetic import model as synthetic_model
from nvt_torchrec.clicklog.synthetic.log import SUMMARY_FILE, OracleScore, format_rows, synthesize
from nvt_torchrec.clicklog.synthetic.model import (
    BLOCK_ROWS,
    MEDIANS,
    MISSING_COUNT,
    MISSING_VALUE,
    SHARES,
    SIGNAL,
    Rows,
    SyntheticSettings,
    plant,
    sigmoid,
)
from nvt_torchrec.formats.splits import cut_last_day
from tests.clicklog.directories import contents

SETTINGS = SyntheticSettings(days=3, rows_per_day=BLOCK_ROWS + 1_001, seed=5)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("synthetic") / "raw"
    synthesize(directory, SETTINGS, workers=2)
    return directory


@pytest.fixture(scope="module")
def summary(log: Path) -> dict:
    return json.loads((log / SUMMARY_FILE).read_text())


@pytest.fixture(scope="module")
def rows(log: Path) -> Rows:
    return parse(b"".join((log / f"day_{day}").read_bytes() for day in range(SETTINGS.days)))


def parse(text: bytes) -> Rows:
    """A slow reader that shares nothing with the writer."""
    fields = [line.split("\t") for line in text.decode("ascii").splitlines()]
    assert {len(line) for line in fields} == {40}
    columns = list(zip(*fields, strict=True))
    return Rows(
        np.array([int(field) for field in columns[0]]),
        np.array([[int(f) if f else MISSING_COUNT for f in c] for c in columns[1:14]]),
        np.array([[int(f, 16) if f else MISSING_VALUE for f in c] for c in columns[14:]]),
    )


# ---- bytes


def test_same_settings_same_bytes_whatever_the_workers(log: Path, tmp_path: Path) -> None:
    synthesize(tmp_path, SETTINGS, workers=1)
    assert contents(tmp_path) == contents(log)


def test_a_smaller_log_is_a_prefix_of_a_larger_one(log: Path, tmp_path: Path) -> None:
    synthesize(tmp_path, dataclasses.replace(SETTINGS, days=2, rows_per_day=BLOCK_ROWS + 5))
    for day in range(2):
        lines = (tmp_path / f"day_{day}").read_bytes().splitlines()
        assert len(lines) == BLOCK_ROWS + 5
        assert lines == (log / f"day_{day}").read_bytes().splitlines()[: len(lines)]


def test_the_text_says_what_was_drawn() -> None:
    """Extremes included: every number of digits, both signs, leading zeros, missing values."""
    counts = [MISSING_COUNT, 0, 9, 10, 99, 100, 9_999, 10_000, 10_001, 99_999, 100_000, 999_999]
    counts += [-1, -2, -10, -9_999, -10_000, -99_999]
    values = [MISSING_VALUE, 0, 1, 0xF, 0x10, 0xFFFF, 0x10000, 0xABCDEF, 0xFFFF0000, 0xFFFFFFFF]
    n = len(counts)
    drawn = Rows(
        np.arange(n) % 2,
        np.stack([np.roll(counts, j) for j in range(13)]),
        np.stack([np.resize(np.roll(values, c), n) for c in range(26)]),
    )
    read = parse(format_rows(drawn))
    np.testing.assert_array_equal(read.label, drawn.label)
    np.testing.assert_array_equal(read.dense, drawn.dense)
    np.testing.assert_array_equal(read.categorical, drawn.categorical)


# ---- shape


def test_categories_follow_zipf(rows: Rows) -> None:
    """Frequencies are those of a bounded Pareto density x ** -1.5 between integers.

    A late value's share is its neighbour's until its first day, so ranks are compared in
    fours, which both belong to.
    """
    column = 1
    cardinality = SETTINGS.cardinalities[column]
    present = rows.categorical[column][rows.categorical[column] != MISSING_VALUE]
    ranks = np.arange(cardinality)
    values = synthetic_model.values_of(ranks, SETTINGS.seed, column)
    order = np.argsort(values)
    actual = ranks[order][np.searchsorted(values[order], present)]
    assert (values[actual] == present).all()
    edges = np.append(np.arange(1, cardinality + 1, 4), cardinality + 1) ** -0.5
    expected = len(present) * -np.diff(edges) / (edges[0] - edges[-1])
    counts = np.bincount(actual // 4, minlength=len(expected))
    assert (np.abs(counts - expected) <= 5 * np.sqrt(expected) + 1).all()


# ---- the planted model and its oracle


def test_summary_describes_the_log(summary: dict, rows: Rows, log: Path) -> None:
    assert SyntheticSettings(**summary["settings"]) == SETTINGS
    assert summary["rows"] == len(rows) == 3 * SETTINGS.rows_per_day
    assert summary["positives"] == rows.label.sum()
    by_day = rows.label.reshape(3, -1).sum(axis=1)
    assert [file["positives"] for file in summary["files"]] == by_day.tolist()
    assert [file["rows"] for file in summary["files"]] == [SETTINGS.rows_per_day] * 3
    assert {file["file"] for file in summary["files"]} | {SUMMARY_FILE} == set(os.listdir(log))


def test_oracle_can_be_recomputed_from_the_files(summary: dict, rows: Rows) -> None:
    logits = plant(SyntheticSettings(**summary["settings"])).logits(rows.dense, rows.categorical)
    first = 2 * SETTINGS.rows_per_day
    cut = cut_last_day(SETTINGS.rows_per_day)
    splits = {name: slice(first + begin, first + end) for name, (begin, end) in cut.items()}
    splits["train"] = slice(0, first)
    assert set(summary["oracle"]) == set(splits)
    scores = [(part, summary["oracle"][name]) for name, part in splits.items()]
    size = SETTINGS.rows_per_day
    scores += [(slice(size * i, size * i + size), file) for i, file in enumerate(summary["files"])]
    for part, oracle in scores:
        label = rows.label[part]
        assert oracle["rows"] == len(label)
        assert oracle["positives"] == label.sum()
        assert oracle["auroc"] == pytest.approx(roc_auc_score(label, logits[part]), abs=1e-5)
        loss = log_loss(label, sigmoid(logits[part]))
        assert oracle["log_loss"] == pytest.approx(loss, rel=1e-8)
        entropy = log_loss(label, np.full(len(label), label.mean()))
        assert oracle["normalized_entropy"] == pytest.approx(loss / entropy, rel=1e-8)


def test_logits_follow_the_formula_of_the_model(rows: Rows) -> None:
    """The click model once more, in plain Python on single values."""
    mask = 2**64 - 1

    def function(columns: tuple[str, ...], column: str, row: int) -> float:
        index = int(column[4:])
        if column.startswith("int"):
            count = int(rows.dense[index, row])
            t = np.log((0 if count == MISSING_COUNT else count) + 3) - np.log(MEDIANS[index] + 3)
            return t / (1 + abs(t))
        x = int(rows.categorical[index, row]) + synthetic_model.key_of(
            SETTINGS.seed, *columns, column
        )
        x &= mask
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return ((x ^ x >> 31) >> 11) / 2**53 - 0.5

    planted = plant(SETTINGS)
    logits = planted.logits(rows.dense[:, :40], rows.categorical[:, :40])
    for row in range(40):
        expected = planted.bias
        for term in planted.terms:
            product = term.weight
            for column, centre, scale in zip(term.columns, term.centres, term.scales, strict=True):
                product *= (function(term.columns, column, row) - centre) * scale
            expected += product
        assert logits[row] == pytest.approx(expected, abs=1e-6)


def test_the_signal_is_shared_out_as_planned() -> None:
    model = plant(SyntheticSettings(seed=1))
    drawn, logits = zip(*(model.draw(day, 0, BLOCK_ROWS) for day in (0, 12, 23)), strict=True)
    dense, categorical, label = (
        np.concatenate([getattr(rows, name) for rows in drawn], axis=-1)
        for name in ("dense", "categorical", "label")
    )
    for kind, share in SHARES.items():
        terms = tuple(term for term in model.terms if term.kind == kind)
        part = dataclasses.replace(model, terms=terms).logits(dense, categorical)
        assert part.std() == pytest.approx(SIGNAL * share**0.5, rel=0.06)
    assert label.mean() == pytest.approx(0.256, rel=0.1)
    auroc = roc_auc_score(label, np.concatenate(logits))
    assert 0.80 < auroc < 0.84
    additive = tuple(term for term in model.terms if term.kind != "interactions")
    main_effects = dataclasses.replace(model, terms=additive).logits(dense, categorical)
    assert roc_auc_score(label, main_effects) < auroc - 0.03


def test_oracle_score_equals_the_exact_metrics_in_any_order() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(-1, 2, 20_000)
    labels = (rng.random(20_000) < sigmoid(logits)).astype(np.int64)
    whole, left, right = OracleScore(), OracleScore(), OracleScore()
    whole.add(logits, labels)
    left.add(logits[:7], labels[:7])
    right.add(logits[7:], labels[7:])
    right.merge(left)
    assert (whole.counts == right.counts).all()
    assert whole.summary()["auroc"] == pytest.approx(roc_auc_score(labels, logits), abs=1e-5)
    assert right.summary()["log_loss"] == pytest.approx(log_loss(labels, sigmoid(logits)))


def test_oracle_score_of_one_class_is_undefined_but_written(tmp_path: Path) -> None:
    summary = synthesize(tmp_path, SyntheticSettings(days=2, rows_per_day=1))
    assert summary["oracle"]["valid"]["rows"] == 1
    assert summary["oracle"]["test"] == {
        **{"rows": 0, "positives": 0},
        **{"auroc": None, "log_loss": None, "normalized_entropy": None},
    }
    assert json.loads((tmp_path / SUMMARY_FILE).read_text()) == summary
