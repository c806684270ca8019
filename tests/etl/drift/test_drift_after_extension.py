"""Drift of a day after ``python -m etl extend`` has added the day before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.__main__ import main
from nvt_torchrec.etl.commands.drift import as_text
from nvt_torchrec.etl.day_drift import Drift
from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.parts import part_sample as sample
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import ExtendSettings
from nvt_torchrec.formats.manifest import Extension, PartFile
from tests.etl.drift.days import changed, drift_of
from tests.etl.runs import settings


@pytest.fixture(scope="module")
def extended(log: Path) -> Path:
    """Days 0 and 1, extended by day 2."""
    out = log / "extended"
    run(settings(log / "raw", out, days=frozenset({0, 1})))
    extend(ExtendSettings(out, str(log / "raw" / "day_2"), engine="cpu"))
    return out


def test_an_extension_measures_its_day_before_it_is_added(log: Path, extended: Path):
    before = log / "before"
    run(settings(log / "raw", before, days=frozenset({0, 1})))
    written = Drift.read(extended / "drift" / "day_2.json")
    assert written == drift_of(before, log / "raw" / "day_2")
    assert (written.generation, written.baseline_days) == (0, [0, 1])


def test_after_an_extension_unseen_values_are_compared_with_those_of_the_new_day(
    log: Path, extended: Path, day: Path, tmp_path: Path
):
    """In its parquet they have ids already."""
    drift = drift_of(extended, day)
    assert (drift.flags, drift.generation, drift.baseline_days) == ([], 1, [0, 1, 2])
    was = Drift.read(extended / "drift" / "day_2.json").measure("unseen share", "cat_0")
    assert drift.measure("unseen share", "cat_0").then == was.now
    assert was.now[0]
    new = changed(day, tmp_path / "day_3", "cat_6", lambda v, i: v if i % 5 else "feedbeef")
    assert "cat_6 unseen share" in drift_of(extended, new).flags


def test_without_that_result_unseen_values_are_shown_only(
    extended: Path, day: Path, tmp_path: Path
):
    out = tmp_path / "out"
    shutil.copytree(extended, out)
    new = changed(day, tmp_path / "day_3", "cat_6", lambda v, i: v if i % 5 else "feedbeef")
    file = out / "drift" / "day_2.json"
    # of a comparison with another workflow than the one before the extension
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "workflow_digest": "0" * 64}))
    drift = drift_of(out, new)
    unseen = drift.measure("unseen share", "cat_6")
    assert (unseen.then, unseen.flagged) == ([], False)
    assert unseen.now[0] > 0.2 * unseen.now[1]
    assert "? -> " in as_text(drift, all_columns=True)
    file.unlink()
    assert drift_of(out, new) == drift


def test_a_day_that_was_added_is_not_compared_with_itself(
    log: Path, extended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    kept = (extended / "drift" / "day_2.json").read_bytes()
    arguments = ["drift", str(extended), "--input", str(log / "raw" / "day_2")]
    assert main(arguments) == 0
    assert "compared with days 0 to 1" in capsys.readouterr().out  # as when the day was new
    assert (extended / "drift" / "day_2.json").read_bytes() == kept
    assert main([*arguments, "--output", str(tmp_path / "other")]) == 0
    # a day that was added although it was flagged does not hold up a repeated morning
    shutil.copytree(extended, tmp_path / "out")
    file = tmp_path / "out" / "drift" / "day_2.json"
    drift = json.loads(kept)
    drift["flags"] = ["label rate"]
    file.write_text(json.dumps(drift))
    assert main(["drift", str(tmp_path / "out"), *arguments[2:]]) == 0
    assert "drift: 1 of" in capsys.readouterr().out


def test_parts_of_other_statistics_are_not_compared():
    def part(split: str, number: int, generation: int) -> PartFile:
        return PartFile(f"{split}/part.{number}.parquet", 1, 1, 0, generation, "")

    files = [part("train", 0, 0), part("train", 1, 1), part("train", 2, 2), part("valid", 0, 3)]

    def chosen(*settings: dict) -> list[str]:
        extensions = [Extension(i + 1, i, one) for i, one in enumerate(settings)]
        manifest = SimpleNamespace(files=files, extensions=extensions)
        return sample.comparable_parts(manifest)

    frozen = {"statistics": "frozen", "retire_after_days": None}
    assert chosen() == ["train/part.0.parquet", "train/part.1.parquet", "train/part.2.parquet"]
    assert chosen(frozen, frozen) == chosen()
    update = {"statistics": "update"}
    assert chosen(frozen, update, frozen) == ["train/part.2.parquet"]
    assert chosen({"retire_after_days": 3}, frozen) == chosen()[1:]
    assert chosen(frozen, frozen, update) == ["valid/part.0.parquet"]


def test_a_damaged_result_is_an_error_with_a_remedy(extended: Path, day: Path, tmp_path: Path):
    out = tmp_path / "out"
    shutil.copytree(extended, out)
    file = out / "drift" / "day_2.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rows": "many"}))
    with pytest.raises(BadInputError, match=r"day_2.json(.|\n)*etl drift"):
        drift_of(out, day)
