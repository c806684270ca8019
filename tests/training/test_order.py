"""Whether a run shuffles its training rows."""

from __future__ import annotations

import pytest

from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.training.data.choices import choose_order
from nvt_torchrec.training.settings.train_settings import parse_settings
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


def test_a_run_resumes_as_it_began(tmp_path):
    data = f"--binary_path={write_plays(tmp_path, SHARE)}"
    begun = [data, "--batch_size=64", f"--checkpoint_dir={tmp_path / 'steps'}"]
    begun += ["--checkpoint_freq=10"]
    train_here(*begun, "--no-shuffle_training_set", "--max_steps=20")
    end = f"--save_checkpoint_path={tmp_path / 'end'}"
    assert train_here(*begun, "--resume", end).status == "continued"
    assert train_here(*begun, "--resume", end).status == "already done"
    settings = CheckpointRecord.read(tmp_path / "end").training["settings"]
    assert settings["shuffle_training_set"] is False
