"""Days that are added to, or taken back from, the data while a run trains on them."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.formats.etl_output import PREVIOUS
from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.training.loop import train_steps, trainer
from nvt_torchrec.training.loop.trainer import TrainResult
from tests.etl.extended import add, copy_of, make_base, write_days
from tests.training.runs import events, train_here

ROWS = {0: 150, 1: 150, 2: 120, 3: 90, 4: 80}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("log") / "raw"
    write_days(directory, ROWS)
    return directory


@pytest.fixture(scope="module")
def base(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(raw, tmp_path_factory.mktemp("base") / "out")


@pytest.fixture
def output(base: Path, tmp_path: Path) -> Path:
    return copy_of(base, tmp_path)


def _train(output: Path) -> TrainResult:
    final = output.parent / "final"
    flags = [f"--save_checkpoint_path={final}", f"--log_path={output.parent / 'log'}"]
    data = output / "criteo_binary" / "split"
    flags += ["--batch_size=16", "--max_steps=6", "--validation_freq_within_epoch=3"]
    return train_here(f"--binary_path={data}", *flags)


def _meanwhile(
    monkeypatch: pytest.MonkeyPatch, what: str, number: int, work: Callable[[], object]
) -> None:
    """Do something before the run calls a function so many times."""
    module = train_steps if what == "set_learning_rate" else trainer
    calls, original = itertools.count(1), getattr(module, what)

    def call(*arguments, **options):
        if next(calls) == number:
            work()
        return original(*arguments, **options)

    monkeypatch.setattr(module, what, call)


def _baselines(output: Path) -> list[dict]:
    return events(output.parent / "log", "baseline")


@pytest.mark.parametrize("days", [(3,), (3, 4)], ids=str)
def test_the_run_keeps_the_generation_that_it_opened(
    raw, base, output, tmp_path: Path, monkeypatch, days: tuple[int, ...]
) -> None:
    expected = _train(copy_of(base, tmp_path / "undisturbed"))
    _meanwhile(monkeypatch, "evaluate", 1, lambda: add(output, raw, days=days))
    result = _train(output)
    assert (result.status, result.metrics) == ("done", expected.metrics)
    assert _baselines(output) == _baselines(tmp_path / "undisturbed" / "out")
    training = CheckpointRecord.read(tmp_path / "final").training
    assert training["generation"] == 0
    assert training["metrics"]["test"]["samples"] == 60


@pytest.mark.parametrize(("what", "number"), [("set_learning_rate", 6), ("evaluate", 3)])
def test_rows_that_are_gone(
    raw, output, tmp_path: Path, monkeypatch, caplog, what: str, number: int
) -> None:
    """The error names the cause, and what was trained is not lost."""

    def remove() -> None:
        add(output, "", undo=True)
        shutil.rmtree(output / PREVIOUS)  # what was taken back

    add(output, raw / "day_3")
    _meanwhile(monkeypatch, what, number, remove)
    with pytest.raises(BadInputError, match=r"loader was made(.|\n)*restart the training"):
        _train(output)
    assert f"{tmp_path / 'final'}: saved, although the evaluation" in caplog.text
    assert CheckpointRecord.read(tmp_path / "final").training["steps"] == 6
    add(output, raw / "day_3")
    assert _train(output).status == "already done"
