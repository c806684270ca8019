"""Runs that divide rows by a rule, and do not finish at once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from nvt_torchrec.base.errors import BadRowError, OutputError
from nvt_torchrec.base.files.atomic import write_json
from nvt_torchrec.etl.run import run
from tests.etl.killed_split import SPLITS, spec_of, write_log
from tests.etl.runs import settings, tree
from tests.forks import seen_by

BY_TIME = SPLITS[0]


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Resumed, they are byte-identical, and no times that were counted are counted again."""
    seen = seen_by("tests.etl.killed_split", tmp_path, 40)
    assert {by: found["wrong"] for by, found in seen.items()} == {split.by: [] for split in SPLITS}
    assert seen["time"]["blocks"] > 5
    assert {"times", "cut", "fit", "transform", "describe"} <= seen["time"]["kills"].keys()
    for by in ("share", "column"):
        assert {"fit", "transform", "describe"} <= seen[by]["kills"].keys()


@pytest.fixture
def counted(tmp_path: Path) -> tuple[Path, Path]:
    """A log, and an output that has the times of all files but the last, which has a bad row."""
    raw, output = tmp_path / "raw", tmp_path / "out"
    write_log(raw)
    with open(raw / "part-2.csv", "a") as file:
        file.write("1,1,i1,u1,yesterday\n")
    with pytest.raises(BadRowError, match="yesterday"):
        run(settings(raw, output, spec_of(BY_TIME), workers=1))
    assert [path.name for path in sorted(output.glob(".work/*/times/*"))] == ["0.npy", "1.npy"]
    return raw, output


@pytest.mark.parametrize("change", ["size", "modified"])
def test_times_of_another_file_are_not_taken(counted: tuple[Path, Path], change: str) -> None:
    raw, output = counted
    first = raw / "part-0.csv"
    if change == "size":
        with open(first, "a") as file:
            file.write("0,5,i1,u1,7\n")
    else:
        os.utime(first, (1, 1))
    before = tree(output)
    with pytest.raises(OutputError, match=rf"part-0\.csv {change}: .* before.*\n.*--restart"):
        run(settings(raw, output, spec_of(BY_TIME)))
    assert tree(output) == before
    last = raw / "part-2.csv"
    last.write_text(last.read_text().replace("yesterday", "77"))
    run(settings(raw, output, spec_of(BY_TIME), restart=True))
    restarted = tree(output)
    shutil.rmtree(output)
    run(settings(raw, output, spec_of(BY_TIME)))
    assert tree(output) == restarted


def test_a_file_that_changes_after_its_times_were_counted(
    counted: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same process: the cuts were of other rows than those that were written."""
    raw, output = counted
    save, first = np.save, raw / "part-0.csv"

    def changing(*args, **options) -> None:
        save(*args, **options)
        first.write_text(first.read_text().replace(",i1,", ",i2,"))
        os.utime(first, (1, 1))

    options = {"on_bad_rows": "quarantine", "max_bad_fraction": 0.5, "workers": 1}
    monkeypatch.setattr(np, "save", changing)
    with pytest.raises(OutputError, match="changed during the run"):
        run(settings(raw, output, spec_of(BY_TIME), restart=True, **options))
    assert not (output / "manifest.json").exists()


def test_damaged_times_are_counted_again(counted: tuple[Path, Path]) -> None:
    raw, output = counted
    first, second = sorted(output.glob(".work/*/times/*"))
    first.write_bytes(b"")
    second.write_bytes(second.read_bytes()[:-9])
    write_json(first.with_name("cuts.json"), [1])
    with pytest.raises(BadRowError, match="yesterday"):
        run(settings(raw, output, spec_of(BY_TIME)))
    assert [len(np.load(file)) for file in (first, second)] == [2, 2]
