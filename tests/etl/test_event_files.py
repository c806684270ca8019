"""Events of a log whose files are for training, validation and test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.formats.splits import SPLITS
from tests.etl.event_logs import DAY, SPEC, make_rows, parquet, write
from tests.etl.runs import etl_run

BY_FILES = 'by = "files"\ntrain = "train.csv"\nvalid = "valid.csv"\ntest = "test.csv"'
BY_TIME = (
    'by = "time"\ncolumn = "time"\ntime_format = "epoch_s"\n'
    'valid_from = "1970-01-05"\ntest_from = "1970-01-06"'
)


def write_spec(path: Path, split: str) -> str:
    path.write_text(SPEC.format(split=split, events=""))
    return str(path)


def test_files_that_follow_each_other_have_events_as_one_file_cut_by_time(tmp_path: Path) -> None:
    """Rows for validation count those for training as what happened before them."""
    rows = make_rows(600, 6)
    raw, log = tmp_path / "raw", tmp_path / "log.csv"
    raw.mkdir()
    write(log, rows)
    write(raw / "train.csv", [row for row in rows if row.time < 4 * DAY])
    write(raw / "valid.csv", [row for row in rows if row.time // DAY == 4])
    write(raw / "test.csv", [row for row in rows if row.time // DAY == 5])
    for path, split in ((log, BY_TIME), (raw, BY_FILES)):
        spec = write_spec(tmp_path / f"{path.stem}.toml", split)
        assert etl_run(path, tmp_path / f"out_{path.stem}", "--spec", spec) == 0
    for split in SPLITS:
        by_time, by_files = (parquet(tmp_path / f"out_{stem}", split) for stem in ("log", "raw"))
        assert len(by_files["user_count"]) > 40
        for name in by_time:
            if not name.startswith(("recent.", "liked.")):  # numbers of keys, not values
                np.testing.assert_array_equal(by_files[name], by_time[name])


def test_files_whose_times_overlap_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    rows = make_rows(300, 6)
    (tmp_path / "raw").mkdir()
    for number, name in enumerate(SPLITS):
        write(tmp_path / "raw" / f"{name}.csv", rows[number::3])
    spec = write_spec(tmp_path / "spec.toml", BY_FILES)
    assert etl_run(tmp_path / "raw", tmp_path / "out", "--spec", spec) == 2
    error = capsys.readouterr().err
    assert "its rows begin at 1970-01-01" in error
    assert "train.csv, for training, end at 1970-01-06" in error
    assert 'by = "time"' in error


def test_a_share_of_the_training_files_would_be_seen(tmp_path: Path) -> None:
    split = BY_FILES.replace('"valid.csv"', "0.1")
    with pytest.raises(SettingsError, match="split by files with a share for valid, with"):
        load_spec(write_spec(tmp_path / "spec.toml", split))
