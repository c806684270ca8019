"""What ``python -m etl drift`` cannot compare is an error with a remedy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.etl.__main__ import main
from tests.etl.drift.days import changed, drift_of
from tests.etl.runs import change_json


def test_no_such_day(log: Path):
    with pytest.raises(BadInputError, match=r"day_9: no such"):
        drift_of(log / "out", log / "raw" / "day_9")
    with pytest.raises(BadInputError, match=r"4 days(.|\n)*day_3"):
        drift_of(log / "out", log / "raw")


def test_a_day_of_other_columns(log: Path, tmp_path: Path):
    (tmp_path / "day_3").write_text("1\t2\t3\n" * 10)
    with pytest.raises(BadInputError, match="day_3, line 1: 3 tab-separated fields"):
        drift_of(log / "out", tmp_path / "day_3")


def test_a_day_without_a_well_formed_row(log: Path, day: Path, tmp_path: Path):
    bad = changed(day, tmp_path / "day_3", "cat_0", lambda v, i: "not hex")
    with pytest.raises(BadInputError, match="no well-formed row; row 1: column cat_0"):
        drift_of(log / "out", bad)


def test_an_output_that_is_not_finished(log: Path, day: Path, tmp_path: Path):
    with pytest.raises(BadInputError, match=r"manifest.json: no such file(.|\n)*ETL's manifest"):
        drift_of(tmp_path, day)


def test_a_damaged_record_of_an_interrupted_switch(log: Path, day: Path, tmp_path: Path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".switching.json").write_text("{}")
    assert main(["drift", str(out), "--input", str(day)]) == 2
    assert "not the record of a switch" in capsys.readouterr().err


def _copy(log: Path, to: Path) -> Path:
    shutil.copytree(log / "out", to)
    return to


def test_another_workflow_than_that_of_the_manifest(log: Path, day: Path, tmp_path: Path):
    out = _copy(log, tmp_path / "out")
    change_json(out / "manifest.json", lambda value: value.update(workflow_digest="0" * 64))
    with pytest.raises(SchemaError, match="not that of the workflow of"):
        drift_of(out, day)
