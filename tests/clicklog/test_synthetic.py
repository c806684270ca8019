"""The synthetic log: its bytes, its shape, its oracle, and what it does to a directory."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from nvt_torchrec.base.errors import OutputError, SettingsError
from nvt_torchrec.clicklog.synthetic.click_model import (
    BLOCK_ROWS,
    MISSING_COUNT,
    MISSING_VALUE,
    SyntheticRows,
    SyntheticSettings,
    plant,
)
from nvt_torchrec.clicklog.synthetic.event_log import draw_events
from nvt_torchrec.clicklog.synthetic.log import SUMMARY_FILE, synthesize
from nvt_torchrec.clicklog.synthetic.table_log import draw_tables
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.formats.splits import cut_last_day

SETTINGS = SyntheticSettings(days=3, rows_per_day=BLOCK_ROWS + 1_001, seed=5)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("synthetic") / "raw"
    synthesize(directory, SETTINGS, workers=2)
    return directory


@pytest.fixture(scope="module")
def summary(log: Path) -> dict:
    return json.loads((log / SUMMARY_FILE).read_text())


@pytest.fixture(scope="module")
def rows(log: Path) -> SyntheticRows:
    return parse(b"".join((log / f"day_{day}").read_bytes() for day in range(SETTINGS.days)))


def parse(text: bytes) -> SyntheticRows:
    """A slow reader that shares nothing with the writer."""
    fields = [line.split("\t") for line in text.decode("ascii").splitlines()]
    assert {len(line) for line in fields} == {40}
    columns = list(zip(*fields, strict=True))
    return SyntheticRows(
        np.array([int(field) for field in columns[0]]),
        np.array([[int(f) if f else MISSING_COUNT for f in c] for c in columns[1:14]]),
        np.array([[int(f, 16) if f else MISSING_VALUE for f in c] for c in columns[14:]]),
    )


# ---- bytes


def test_same_settings_same_bytes_whatever_the_workers(log: Path, tmp_path: Path) -> None:
    synthesize(tmp_path, SETTINGS, workers=1)
    assert contents(tmp_path) == contents(log)


# ---- shape


# ---- the planted model and its oracle


def test_summary_describes_the_log(summary: dict, rows: SyntheticRows, log: Path) -> None:
    assert SyntheticSettings(**summary["settings"]) == SETTINGS
    assert summary["rows"] == len(rows) == 3 * SETTINGS.rows_per_day
    assert summary["positives"] == rows.label.sum()
    assert {"day_0", "day_1", "day_2", SUMMARY_FILE} == set(os.listdir(log))


def test_oracle_can_be_recomputed_from_the_files(summary: dict, rows: SyntheticRows) -> None:
    logits = plant(SyntheticSettings(**summary["settings"])).logits(rows.dense, rows.categorical)
    first = 2 * SETTINGS.rows_per_day
    cut = cut_last_day(SETTINGS.rows_per_day)
    splits = {name: slice(first + begin, first + end) for name, (begin, end) in cut.items()}
    splits["train"] = slice(0, first)
    assert set(summary["oracle"]) == set(splits)
    for name, part in splits.items():
        label, oracle = rows.label[part], summary["oracle"][name]
        assert oracle["rows"] == len(label)
        assert oracle["positives"] == label.sum()
        assert oracle["auroc"] == pytest.approx(roc_auc_score(label, logits[part]), abs=1e-5)


def check_log_with_spec(directory: Path, settings: SyntheticSettings) -> None:
    """Its spec divides it as the oracle does; the same settings give the same bytes."""
    summary = synthesize(directory / "raw", settings)
    assert synthesize(directory / "again", settings) == summary
    assert contents(directory / "raw") == contents(directory / "again")
    spec = load_spec(directory / "raw" / "spec.toml")
    manifest = run(EtlSettings(str(directory / "raw"), directory / "out", spec, engine="cpu"))
    for split, score in summary["oracle"].items():
        assert manifest.splits[split]["rows"] == score["rows"] > 900


def test_a_log_of_events(tmp_path: Path) -> None:
    settings = SyntheticSettings(days=3, rows_per_day=2000, events=True)
    check_log_with_spec(tmp_path, settings)
    table = draw_events(6000, 3, 0)[2].to_pydict()
    parts = [pd.read_csv(tmp_path / "raw" / f"day_{day}.csv") for day in range(3)]
    assert pd.concat(parts).to_dict("list") == table
    assert [part["time"].max()[8:10] for part in parts] == ["21", "22", "23"]
    with pytest.raises(SettingsError, match="--events and --base_rate are both set"):
        SyntheticSettings(events=True, base_rate=0.1)


def test_a_log_with_tables(tmp_path: Path) -> None:
    """Its clicks follow the price of the time; joined, they are what the oracle knew."""
    settings = SyntheticSettings(days=3, rows_per_day=2000, tables=True)
    check_log_with_spec(tmp_path, settings)
    parts = [pd.read_csv(tmp_path / "raw" / f"day_{day}.csv") for day in range(3)]
    log = pd.concat(parts).astype({"time": "datetime64[s]"})
    items = pd.read_csv(tmp_path / "raw" / "items.csv").astype({"changed": "datetime64[s]"})
    joined = pd.merge_asof(
        log,
        items.sort_values("changed"),
        left_on="time",
        right_on="changed",
        by="item",
        allow_exact_matches=False,
    )
    assert joined["price"].notna().all()
    assert roc_auc_score(joined["click"], -joined["price"]) > 0.65
    with pytest.raises(SettingsError, match="--tables and --events are both set"):
        SyntheticSettings(events=True, tables=True)


def test_a_log_with_vectors(tmp_path: Path) -> None:
    """Its clicks follow the texts of items, also of those that no earlier day has."""
    settings = SyntheticSettings(days=3, rows_per_day=2000, tables=True, vectors=True)
    check_log_with_spec(tmp_path, settings)
    texts = pd.read_parquet(tmp_path / "raw" / "texts.parquet").set_index("item")["embedding"]
    assert len(texts) == 600
    assert 10 < texts.isna().sum() < 60
    assert {len(text) for text in texts.dropna()} == {16}
    with pytest.raises(SettingsError, match="--vectors without --tables"):
        SyntheticSettings(vectors=True)

    _, seconds, log, tables = draw_tables(60_000, 3, 0, vectors=True)
    items, clicks = log["item"].to_numpy(), log["click"].to_numpy()
    vectors = np.zeros((6000, 16))  # 0 where there is none
    embeddings = tables["texts"]["embedding"].combine_chunks()
    vectors[embeddings.is_valid().to_numpy(zero_copy_only=False)] = np.stack(
        embeddings.drop_null().to_numpy(zero_copy_only=False)
    )
    assert {*np.linalg.norm(vectors, axis=1).round(6).tolist()} == {0.0, 1.0}
    last_day = seconds >= 2 * 86_400
    is_new = last_day & ~np.isin(items, items[~last_day])
    inputs = np.column_stack([vectors[items], np.ones(len(items))])
    weights = np.linalg.lstsq(inputs[~last_day], clicks[~last_day], rcond=None)[0]
    assert is_new.sum() > 1500
    assert roc_auc_score(clicks[is_new], inputs[is_new] @ weights) > 0.6


@pytest.mark.parametrize("kind", ["events", "tables"])
def test_a_log_whose_clicks_come_later(tmp_path: Path, kind: str) -> None:
    """Joined by the ETL, they are those of the log that has them; the newest rows wait."""
    settings = SyntheticSettings(days=3, rows_per_day=2000, **{kind: True})
    synthesize(tmp_path / "raw", settings)
    summary = synthesize(tmp_path / "late", dataclasses.replace(settings, late_clicks=True))
    frames = {}
    for name in ("raw", "late"):
        spec = load_spec(tmp_path / name / "spec.toml")
        manifest = run(EtlSettings(str(tmp_path / name), tmp_path / f"{name}_out", spec))
        parts = sorted((tmp_path / f"{name}_out/criteo_binary/split/train").glob("part.*"))
        frames[name] = pd.concat([pd.read_parquet(part) for part in parts])["click"]
    assert frames["raw"].equals(frames["late"])
    assert manifest.splits["valid"]["rows"] == summary["oracle"]["valid"]["rows"]
    assert 300 < manifest.rows["waiting"] < 700
    with pytest.raises(SettingsError, match="--late_clicks without --events or --tables"):
        SyntheticSettings(late_clicks=True)


# ---- directories and processes


def test_a_log_is_not_overwritten(log: Path) -> None:
    before = contents(log)
    with pytest.raises(OutputError, match="raw exists"):
        synthesize(log, SETTINGS)
    assert contents(log) == before


def test_command_line(tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd) -> None:
    from nvt_torchrec.etl.__main__ import main

    line = (
        f"synthesize --output_path {tmp_path}/raw --days 2 --rows_per_day 40 --seed 9 "
        "--cardinality_scale 0.01 --base_rate 0.3 --workers 1"
    )
    with caplog.at_level(logging.INFO):
        assert main(line.split()) == 0
    synthesize(tmp_path / "again", SyntheticSettings(2, 40, 9, 0.01, 0.3))
    assert contents(tmp_path / "raw") == contents(tmp_path / "again")
    assert "2 days, 80 rows" in caplog.text
    assert "oracle AUROC test" in caplog.text
    assert "\r" not in capfd.readouterr().err  # no progress bar in a log
