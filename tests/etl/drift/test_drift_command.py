"""``python -m etl drift``: its files, its exit status and its page."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from nvt_torchrec.etl.__main__ import main
from nvt_torchrec.etl.drift.artifact import FORMAT, read_drift
from nvt_torchrec.etl.drift.page import page
from nvt_torchrec.etl.drift.thresholds import Thresholds
from nvt_torchrec.etl.run import run
from tests.etl.drift.days import drift_of, make_log, with_larger_int_2
from tests.etl.runs import settings
from tests.etl.test_report import Page
from tests.logs import CRITEO


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_log(tmp_path_factory.mktemp("drift"))


@pytest.fixture(scope="module")
def day(log: Path) -> Path:
    return log / "raw" / "day_3"


def test_files_and_exit_status(
    log: Path, day: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["drift", str(log / "out"), "--input", str(day)]) == 0
    assert "no drift" in capsys.readouterr().out
    written = read_drift(log / "out" / "drift" / "day_3.json")
    assert written == drift_of(log / "out", day)
    text = (log / "out" / "drift" / "day_3.html").read_text()
    Page(text)
    assert "://" not in text

    other = with_larger_int_2(day, tmp_path / "day_3")
    results = tmp_path / "results"
    arguments = ["drift", str(log / "out"), "--input", str(other), "--output", str(results)]
    assert main(arguments) == 3
    out = capsys.readouterr().out
    assert re.search(r"int_2 .*<< PSI", out)
    assert "1 of 106 measures exceed" in out
    content = json.loads((results / "day_3.json").read_text())
    assert content["flags"] == ["int_2 PSI"]
    assert (content["format"], content["format_version"]) == (FORMAT.name, FORMAT.version)
    assert "<b>PSI</b>" in (results / "day_3.html").read_text()


def test_thresholds_of_a_file_decide(log: Path, day: Path, tmp_path: Path, capsys):
    other = with_larger_int_2(day, tmp_path / "day_3")
    arguments = ["drift", str(log / "out"), "--input", str(other), "--output", str(tmp_path / "r")]
    thresholds = tmp_path / "thresholds.toml"
    thresholds.write_text("[columns.int_2]\npsi = inf\n")
    assert main([*arguments, "--thresholds", str(thresholds)]) == 0
    thresholds.write_text("[columns.int_3]\npsi = inf\n")
    assert main([*arguments, "--thresholds", str(thresholds)]) == 3
    thresholds.write_text("[columns.int_99]\npsi = inf\n")
    assert main([*arguments, "--thresholds", str(thresholds)]) == 2
    assert "int_99" in capsys.readouterr().err


def test_a_file_of_another_name(log: Path, day: Path, tmp_path: Path):
    copy = tmp_path / "yesterday.tsv"
    copy.write_bytes(day.read_bytes())
    assert drift_of(log / "out", copy).name == "yesterday"


def test_values_of_the_log_are_escaped_on_the_page(tmp_path: Path):
    spec = dataclasses.replace(
        CRITEO,
        categorical=tuple(dataclasses.replace(c, raw="string") for c in CRITEO.categorical[:2]),
    )
    (tmp_path / "raw").mkdir()
    rng = np.random.default_rng(0)
    for d in range(3):
        rows = [
            [str(i % 2), *["1"] * 13, "<b>x</b>" if d == 2 else "y", str(rng.integers(4))]
            for i in range(500)
        ]
        (tmp_path / "raw" / f"day_{d}").write_text("".join("\t".join(row) + "\n" for row in rows))
    run(settings(tmp_path / "raw", tmp_path / "out", spec, days=frozenset({0, 1})))
    drift = drift_of(tmp_path / "out", tmp_path / "raw" / "day_2")
    assert drift.column("cat_0").new_values[0].value == "<b>x</b>"
    assert "<b>x" not in page(drift)


def test_thresholds_are_in_the_result(log: Path, day: Path):
    thresholds = Thresholds(label_rate=float("inf"))
    assert drift_of(log / "out", day, thresholds=thresholds).thresholds["label_rate"] is None
