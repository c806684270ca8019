"""What the commands say to somebody who has a log of their own."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.etl.runs import etl_run
from tests.shell import ROOT, run


@pytest.mark.parametrize("name", ["clicks.csv", "clicks.parquet"])
def test_without_a_spec_guess_is_named(tmp_path: Path, capsys, name: str) -> None:
    path = tmp_path / name
    if name == "clicks.csv":
        path.write_text("click,user\n1,a\n0,b\n")
    else:
        pq.write_table(pa.table({"click": pa.array([1, 0])}), path)
    assert etl_run(path, tmp_path / "out") == 2
    assert f"`python -m etl guess {path} --output spec.toml`" in capsys.readouterr().err


def test_the_next_command_is_printed(raw: Path, tmp_path: Path, caplog) -> None:
    with caplog.at_level(logging.INFO):
        assert etl_run(raw, tmp_path / "out", "--engine", "cpu") == 0
    splits = tmp_path / "out" / "criteo_binary" / "split"
    command = f"python train_torchrec.py --binary_path {splits} --save_checkpoint_path CKPT"
    assert caplog.messages[-1] == command


def test_the_readme_makes_a_model_of_a_log(tmp_path: Path) -> None:
    """The commands that the README begins with, for a log of the columns that it shows."""
    readme = (ROOT / "README.md").read_text()
    section = readme.partition("## Your own log")[2].partition("\n## ")[0]
    header, _, *commands = re.findall(r"^    (.*)", section, re.MULTILINE)
    assert len(commands) == 4
    random = np.random.default_rng(0)
    count = 6000
    items = random.integers(0, 30, count)
    clicked = random.random(count) < 0.1 + 0.02 * items
    times = pd.Timestamp("2026-10-01") + pd.to_timedelta(np.arange(count), unit="min")
    columns = [times, [f"u{user}" for user in random.integers(0, 200, count)]]
    columns += [[f"i{item}" for item in items], [f"c{item % 5}" for item in items]]
    columns += [random.lognormal(3, 1, count).round(2), random.choice(["phone", "desktop"], count)]
    columns += [clicked.astype(int)]
    log = pd.DataFrame(dict(zip(header.split(","), columns, strict=True)))
    log.to_csv(tmp_path / "clicks.csv", index=False)
    script = "\n".join(commands).replace("CKPT\n", "CKPT --log_path log\n")
    status, printed = run(tmp_path, f"set -e\n{script}")
    assert status == 0, printed
    scores = pq.read_table(tmp_path / "scores.parquet")["probability"].to_numpy()
    assert len(scores) == count
    assert scores[clicked].mean() > scores[~clicked].mean() + 0.05
    assert (tmp_path / "OUT" / "report.html").exists()
    assert (tmp_path / "log" / "training.html").exists()
