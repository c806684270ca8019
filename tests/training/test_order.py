"""Whether a run shuffles its training rows, and what it says of the order of those it does not."""

from __future__ import annotations

import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.training.data.order import choose_order, find_order
from nvt_torchrec.training.settings.train_settings import parse_settings
from tests.mutations import flip_bit
from tests.nvt_loader.data import write_split
from tests.plays import DAYS, SHARE, SHARES, TIME, write_plays
from tests.training.runs import train_here


@pytest.mark.parametrize(
    ("split", "shuffled"),
    [
        (SHARE, True),
        (f'by = "column"\ncolumn = "item"\n{SHARES}', True),
        (TIME, False),
        (DAYS, False),
    ],
)
def test_the_split_decides_unless_a_flag_does(tmp_path, split, shuffled):
    data = f"--binary_path={write_plays(tmp_path, split)}"
    assert choose_order(parse_settings([data])).shuffle_training_set is shuffled
    for flag, given in (("--shuffle_training_set", True), ("--no-shuffle_training_set", False)):
        assert choose_order(parse_settings([data, flag])).shuffle_training_set is given
    assert choose_order(parse_settings([data, "--loader=merlin"])).shuffle_training_set is False


def test_a_run_says_by_what_its_rows_are_sorted_and_resumes_as_it_began(tmp_path, caplog):
    data = f"--binary_path={write_plays(tmp_path, SHARE)}"
    caplog.set_level("INFO", "nvt_torchrec")
    begun = [data, "--batch_size=64", f"--checkpoint_dir={tmp_path / 'steps'}"]
    begun += ["--checkpoint_freq=10"]
    train_here(*begun, "--no-shuffle_training_set", "--max_steps=20")
    said = "in the order of column user: --shuffle_training_set reads them in a new order"
    assert said in caplog.text
    end = f"--save_checkpoint_path={tmp_path / 'end'}"
    assert train_here(*begun, "--resume", end).status == "continued"
    assert train_here(*begun, "--resume", end).status == "already done"
    settings = CheckpointRecord.read(tmp_path / "end").training["settings"]
    assert settings["shuffle_training_set"] is False
    caplog.clear()
    train_here(data, "--batch_size=64", f"--log_path={tmp_path / 'log'}")
    assert "in the order of" not in caplog.text


def test_a_damaged_part_is_named(tmp_path):
    write_split(tmp_path, {"train": [3_000]})
    flip_bit(tmp_path / "train" / "part.0.parquet", 1_000)
    with pytest.raises(BadInputError, match=r"part\.0\.parquet: row group 0 cannot be decoded"):
        find_order(parse_settings([f"--binary_path={tmp_path}"]))


@pytest.mark.parametrize(("dense", "column"), [(0, ""), (1, "int_0")])
def test_rows_in_no_order_are_not_taken_for_sorted(tmp_path, dense, column):
    write_split(tmp_path, {"train": [3_000, 0]}, dense=dense)  # the first dense one is a row number
    assert find_order(parse_settings([f"--binary_path={tmp_path}"])) == column
