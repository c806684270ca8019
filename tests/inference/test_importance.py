"""Which columns matter, as a run reports it, against raw rows that a Predictor scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from nvt_torchrec.etl.run import EtlSettings, run
from nvt_torchrec.inference.predictor import Predictor
from tests.training.runs import events, train_here

SPEC = """
[input]
format = "csv"
[label]
name = "click"
[[dense]]
names = "age"
raw = "float"
[[categorical]]
names = ["strong", "noise", "weak"]
raw = "string"
[split]
by = "files"
train = "train.csv"
valid = "valid.csv"
test = "test.csv"
"""
ROWS = {"train": 12_000, "valid": 4000, "test": 500}


def make_rows(count: int, effects: np.ndarray, random: np.random.Generator) -> pd.DataFrame:
    """Rows of three columns of ids and a number; ``noise`` has no effect on the label."""
    ids = {name: random.integers(0, 20, count) for name in ("strong", "noise", "weak")}
    age = random.normal(size=count)
    logits = 2 * effects[ids["strong"]] + 0.7 * effects[::-1][ids["weak"]] + 0.5 * age
    click = random.random(count) < 1 / (1 + np.exp(-logits))
    texts = {name: [f"{name}{value}" for value in values] for name, values in ids.items()}
    return pd.DataFrame({"click": click.astype(int), "age": age, **texts})


def test_the_page_says_what_shuffled_raw_columns_say(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    effects = random.normal(size=20)
    log, output = tmp_path / "log", tmp_path / "out"
    log.mkdir()
    rows = {split: make_rows(count, effects, random) for split, count in ROWS.items()}
    for split, frame in rows.items():
        frame.to_csv(log / f"{split}.csv", index=False)
    (tmp_path / "spec.toml").write_text(SPEC)
    run(EtlSettings(str(log), output, str(tmp_path / "spec.toml"), engine="cpu"))
    paths = [
        f"--binary_path={output / 'criteo_binary' / 'split'}",
        f"--log_path={tmp_path / 'log'}",
    ]
    train_here(*paths, f"--save_checkpoint_path={tmp_path / 'model'}", "--batch_size=128")
    (event,) = events(tmp_path / "log", "importance")

    predictor = Predictor.load(output / "workflow", tmp_path / "model")
    raw = rows["valid"].astype({"strong": str, "noise": str, "weak": str})
    labels = raw.pop("click")

    def lost(name: str) -> float:
        shuffled = raw.assign(**{name: random.permutation(raw[name].to_numpy())})
        return whole - roc_auc_score(labels, predictor.predict(shuffled))

    whole = roc_auc_score(labels, predictor.predict(raw))
    expected = {name: np.mean([lost(name) for _ in range(4)]) for name in raw.columns}
    assert expected["strong"] > 0.15
    assert event["columns"] == pytest.approx(expected, abs=0.015)
    assert abs(event["columns"]["noise"]) < 0.01
