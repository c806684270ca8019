"""``--days``: which files of the training set a run reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.formats.etl_output import SWITCH_FILE, EtlOutput
from nvt_torchrec.formats.feature_spec.split import Split
from nvt_torchrec.inference.__main__ import main
from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.training.data.training_days import TrainingDays, choose_days
from nvt_torchrec.training.loop.trainer import TrainResult
from nvt_torchrec.training.settings.train_settings import parse_settings
from nvt_torchrec.workflows.description import inspect
from tests.etl.extended import SMALL, add, make_base, write_days
from tests.etl.split_logs import SPLITS_OF_ROWS, spec_with, write
from tests.training.generations import PARTS, write_output
from tests.training.runs import train_here
from tests.training.test_checkpoint import change_model_file

#: Rows by training day.
ROWS = {day: sum(rows) for day, rows in PARTS["train"].items()}


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    return write_output(tmp_path_factory.mktemp("days"), 2)


def choose(data: Path, *flags: str, trained: list[int] | None = None) -> TrainingDays:
    new = ["--continue_from=CKPT"] if "--days=new" in flags else []
    return choose_days(parse_settings([f"--binary_path={data}", *flags, *new]), trained)


def files(chosen: TrainingDays) -> list[int]:
    return [int(path.name.split(".")[1]) for path in chosen.files]


def test_all_days(output):
    for flags in ([], ["--days=all"]):
        chosen = choose(output, *flags)
        assert (chosen.days, chosen.files) == ((0, 1, 2), None)


@pytest.mark.parametrize(
    ("listed", "days", "parts"),
    [("1", (1,), [2]), ("0-1", (0, 1), [0, 1, 2]), ("2,0", (0, 2), [0, 1, 3, 4])],
)
def test_listed_days(output, listed, days, parts):
    chosen = choose(output, f"--days={listed}")
    assert chosen.days == days
    assert files(chosen) == parts


@pytest.mark.parametrize(
    ("trained", "days", "parts"),
    [([0, 1], (2,), [3, 4]), ([], (0, 1, 2), [0, 1, 2, 3, 4]), ([0, 2, 9], (1,), [2])],
)
def test_new_days(output, trained, days, parts):
    chosen = choose(output, "--days=new", trained=trained)
    assert chosen.days == days
    assert files(chosen) == parts
    assert chosen.add_earlier(trained) == sorted({*trained, *days})


def train(data: Path, checkpoint: Path, *flags: str) -> tuple[TrainResult, list[int]]:
    """Train and save a checkpoint; return the run's result and the days that the checkpoint names.

    Days that are new are new to the checkpoint ``before`` in the same directory.
    """
    if "--days=new" in flags:
        flags = (*flags, f"--continue_from={checkpoint.parent / 'before'}")
    result = train_here(f"--binary_path={data}", f"--save_checkpoint_path={checkpoint}", *flags)
    return result, CheckpointRecord.read(checkpoint).training["days"]


def test_the_rows_that_a_run_trains(output, tmp_path):
    result, days = train(output, tmp_path / "before", "--days=0,1")
    assert (result.samples, days) == (ROWS[0] + ROWS[1], [0, 1])
    result, days = train(output, tmp_path / "new", "--days=new")
    assert (result.samples, days) == (ROWS[2], [0, 1, 2])
    result, days = train(output, tmp_path / "listed", "--days=1-2")
    assert (result.samples, days) == (ROWS[1] + ROWS[2], [1, 2])
    assert result.metrics["test"]["samples"] == 201, "evaluations read all rows"


def test_no_new_day(output, tmp_path):
    with pytest.raises(SettingsError) as caught:
        choose(output, "--days=new", trained=[0, 1, 2])
    text = str(caught.value)
    assert "CKPT has been trained on days 0-2, and the training set has no other day" in text
    assert "python -m etl extend" in text


def test_rows_split_by_share(tmp_path):
    """A new day has training rows on its first morning."""
    write_days(tmp_path / "raw", {0: 90, 1: 80, 2: 70, 3: 60})
    spec = dataclasses.replace(SMALL, split=Split("share", valid=0.2, test=0.2))
    output = make_base(tmp_path / "raw", tmp_path / "out", spec)
    data = EtlOutput(output).splits
    assert train(data, tmp_path / "before")[1] == [0, 1, 2]
    with pytest.raises(SettingsError, match=r"training set has no other day\n.*etl extend`$"):
        choose(data, "--days=new", trained=[0, 1, 2])
    manifest = add(output, tmp_path / "raw")
    result, days = train(data, tmp_path / "next", "--days=new")
    assert days == [0, 1, 2, 3]
    assert result.samples == manifest["by_day_and_split"]["3"]["train"]["rows"]
    assert result.metrics["test"]["samples"] == manifest["splits"]["test"]["rows"]


def test_a_day_of_which_no_row_is_for_training(tmp_path: Path) -> None:
    """Tables and ids are as they were, so the checkpoint is bundled with the extended workflow."""
    spec = spec_with(SPLITS_OF_ROWS["time"])
    write(tmp_path / "raw", {0: 90, 1: 70, 2: 60})
    output = make_base(tmp_path / "raw", tmp_path / "out", spec)
    data, checkpoint = EtlOutput(output).splits, tmp_path / "before"
    trained = train(data, checkpoint)[1]
    assert trained == [0, 1, 2]
    write(tmp_path / "raw", {3: 30}, later=1000)
    assert add(output, tmp_path / "raw" / "day_3.csv")["generation"] == 1
    flags = parse_settings([f"--binary_path={data}", "--days=new", f"--continue_from={checkpoint}"])
    with pytest.raises(SettingsError, match="no row of day 3 is training data") as caught:
        choose_days(flags, trained)
    command = f"bundle --workflow {output / 'workflow'} --checkpoint {checkpoint} --output BUNDLE"
    assert command in caught.value.remedy
    words = command.replace("BUNDLE", str(tmp_path / "bundle")).split()
    assert main(words) == 0
    assert inspect(tmp_path / "bundle" / "workflow").generation == 1


def test_days_that_there_are_not(output):
    with pytest.raises(SettingsError, match=r"has no days 3, 5\n.*it has days 0-2"):
        choose(output, "--days=2-3,5")
    with pytest.raises(SettingsError, match=r"ends before it begins"):
        choose(output, "--days=2-1")


def test_a_checkpoint_that_does_not_say_its_days(output, tmp_path):
    before = tmp_path / "before"
    train(output, before, "--max_steps=1")
    record = CheckpointRecord.read(before).training
    change_model_file(before, training={**record, "days": None})
    with pytest.raises(SettingsError, match=r"does not say which days .*\n.*--days 2"):
        train(output, tmp_path / "after", "--days=new")
    flags = ["--days=2", "--max_steps=1", f"--continue_from={before}"]
    assert train(output, tmp_path / "after", *flags)[1] is None


def test_the_rest_of_an_unfinished_epoch_is_mentioned(output, tmp_path, caplog):
    train(output, tmp_path / "before", "--days=0-1", "--max_steps=2")
    train(output, tmp_path / "after", "--days=new", "--max_steps=1")
    assert "was written after 11 % of the first epoch" in caplog.text


def test_weights_only(output, tmp_path):
    """--load_checkpoint_path: the days that the weights have seen count."""
    first, second = tmp_path / "first", tmp_path / "second"
    train(output, first, "--days=0", "--max_steps=1")
    flags = ["--days=2", "--max_steps=1", f"--load_checkpoint_path={first}"]
    assert train(output, second, *flags)[1] == [0, 2]
    assert CheckpointRecord.read(second).training["optimizer_steps"] == 1


def test_data_of_another_program_do_not_say_their_days(tmp_path):
    data = write_output(tmp_path, 2)
    (tmp_path / "manifest.json").unlink()
    assert choose(data).add_earlier([]) is None
    with pytest.raises(BadInputError, match=r"manifest\.json: no such file"):
        choose(data, "--days=1")


def test_an_output_between_two_generations(tmp_path):
    data = write_output(tmp_path, 2)
    (tmp_path / SWITCH_FILE).write_text("{}")
    with pytest.raises(BadInputError, match=r"switch to a new generation.*\n.*--resume"):
        train_here(f"--binary_path={data}")
