"""The ways to serve a model while days arrive, as the commands that a team runs each morning."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import ROOT, SMALL_MODEL
from benchmarks.process import Run, run
from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.base.files.atomic import read_json
from nvt_torchrec.clicklog.synthetic.model import CALENDAR_DAYS
from nvt_torchrec.formats.etl_output import EtlOutput

log = logging.getLogger("benchmarks")

#: The ways, by the name of their flag, and what the table calls them.
WAYS = {"never": "never updated", "daily": "updated daily", "refit": "refitted daily"}
#: What is done on a morning, in this order.
STAGES = ("etl", "train", "bundle", "publish")
TRAINING = ("--batch_size", "1024", "--adagrad", *SMALL_MODEL)
#: How the daily updates are trained: at the default rates of a continued run.
CONTINUING = ("--days", "new")
#: Far more than what models of one log differ by, also in calibration after a training that ends at
#: a constant learning rate: a refused model would not be measured.
LARGEST_DROP, LARGEST_CALIBRATION_CHANGE = 0.05, 1

Command = list[Any]


class StageFailedError(ClickLogError):
    """A command of the benchmark failed; its own message names the error."""


class Morning(NamedTuple):
    """A morning on which a day of log has arrived.

    Attributes:
        newest: The day that has arrived. Every way holds its labels back: they choose and check
            the model, and are trained on a morning later.
        served: The day after, which the models of this morning score.
    """

    newest: int
    served: int


@dataclasses.dataclass(frozen=True)
class Calendar:
    """The last ``days`` days of the synthetic log, in which its most frequent late values appear.

    Attributes:
        days: The number of days.
        first_days: The number of days that the first model is made of, the held-back one included.
    """

    days: int
    first_days: int

    @property
    def first(self) -> int:
        """The first day of the log that is used."""
        return CALENDAR_DAYS - self.days

    @property
    def initial(self) -> Morning:
        """The morning on which the first model is made."""
        newest = self.first + self.first_days - 1
        return Morning(newest, newest + 1)

    @property
    def mornings(self) -> list[Morning]:
        """The mornings after the initial one."""
        return [Morning(day, day + 1) for day in range(self.initial.served, CALENDAR_DAYS - 1)]


@dataclasses.dataclass(frozen=True)
class Work:
    """What all ways share.

    Attributes:
        output: The directory of the benchmark.
        calendar: Its days.
        update_flags: The trainer's flags when it continues.
    """

    output: Path
    calendar: Calendar
    update_flags: tuple[str, ...]

    @property
    def raw(self) -> Path:
        """The directory of the log."""
        return self.output / "raw"

    def day(self, day: int) -> Path:
        """Return the file of a day."""
        return self.raw / f"day_{day}"

    def served(self, way: str) -> Path:
        """Return the bundle that a way serves."""
        if way == "never":
            return self.output / "first" / "bundle"
        return self.output / way / "served" / "current"


def run_command(name: str, command: Command) -> Run:
    """Run a Python program; return what it took.

    Args:
        name: The name of the stage, for example ``refit/day 14/train``.
        command: A script, or ``-m`` and a module; then the arguments.

    Raises:
        StageFailedError: It ended with another exit status than 0.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = [sys.executable, *map(str, command)]
    done = run(program, env={"PATH": path}, cwd=ROOT, result=dict)
    if done.error:
        raise StageFailedError(f"{name}: {done.error}", f"see: python {' '.join(program[1:])}")
    log.info("%-24s %6.1f s  %6.1f CPU s", name, done.wall_s, done.cpu_s)
    return done


def make_first_model(work: Work) -> None:
    """Fit and train on the first days; publish the model where the daily updates begin."""
    _from_nothing(work, "first", work.output / "daily", work.calendar.initial)


def do_morning(work: Work, way: str, morning: Morning) -> dict[str, Run]:
    """Do what a way does on a morning; return what each stage of it took."""
    if way == "never":
        return {}
    if way == "refit":
        return _from_nothing(work, way, work.output / way, morning)
    return _extend(work, morning)


def score(bundle: Path, day: Path) -> dict[str, Any]:
    """Score the raw rows of a day as ``inference predict`` does; return the metrics.

    Raises:
        ClickLogError: Bundle or log is missing or damaged.
    """
    from nvt_torchrec.dlrm.launch.startup import prepare_torch

    prepare_torch()
    from nvt_torchrec.inference.bulk import evaluate_file, predict_file
    from nvt_torchrec.inference.predictor import Predictor

    predictor = Predictor.load(bundle, check=True)
    with tempfile.TemporaryDirectory() as directory:
        scores = Path(directory) / "scores.parquet"
        predict_file(predictor, str(day), scores, need_label=True)
        return evaluate_file(scores).to_dict()


def oracle(raw: Path, day: int) -> dict[str, Any]:
    """Return the metrics of the probabilities from which the clicks of a day were drawn."""
    files = read_json(raw / "synthetic.json", "the synthetic log's description")["files"]
    return next(file for file in files if file["file"] == f"day_{day}")


def _from_nothing(work: Work, way: str, home: Path, morning: Morning) -> dict[str, Run]:
    """Fit and train on all days up to the newest one."""
    out, checkpoint = home / "out", home / f"checkpoint.{morning.newest}"
    etl = ["-m", "etl", "run", "--input_path", work.raw, "--output_path", out]
    etl += ["--days", f"{work.calendar.first}-{morning.newest}"]
    costs = _do(work, way, home, morning, etl, _training(out, checkpoint))
    if way != "first":
        shutil.rmtree(out)
        shutil.rmtree(checkpoint)
    return costs


def _extend(work: Work, morning: Morning) -> dict[str, Run]:
    """Extend the output by the newest day, and continue from the newest checkpoint."""
    home = work.output / "daily"
    out, before = home / "out", home / f"checkpoint.{morning.newest - 1}"
    etl = ["-m", "etl", "extend", "--output_path", out, "--input_path", work.day(morning.newest)]
    train = _training(out, home / f"checkpoint.{morning.newest}")
    train += ["--continue_from", before, *work.update_flags]
    costs = _do(work, "daily", home, morning, etl, train)
    shutil.rmtree(before)
    return costs


def _do(
    work: Work, way: str, home: Path, morning: Morning, etl: Command, train: Command
) -> dict[str, Run]:
    """Run the ETL and the trainer, then bundle and publish; return what each took."""
    bundle = work.served("never") if way == "first" else home / "bundle"
    shutil.rmtree(bundle, ignore_errors=True)  # that of the day before
    commands = {
        "etl": etl,
        "train": train,
        "bundle": [
            *("-m", "inference", "bundle", "--workflow", EtlOutput(home / "out").workflow),
            *("--checkpoint", home / f"checkpoint.{morning.newest}", "--output", bundle),
        ],
        "publish": [
            *("-m", "inference", "publish", bundle, "--to", home / "served"),
            *("--sample", work.day(morning.newest), "--max_auroc_drop", LARGEST_DROP),
            *("--max_calibration_change", LARGEST_CALIBRATION_CHANGE),
        ],
    }
    return {
        stage: run_command(f"{way}/day {morning.newest}/{stage}", commands[stage])
        for stage in STAGES
    }


def _training(out: Path, checkpoint: Path) -> Command:
    log = checkpoint.with_name(f"log.{checkpoint.name}")
    return [
        *(ROOT / "train_torchrec.py", "--binary_path", f"{EtlOutput(out).splits}/", *TRAINING),
        *("--save_checkpoint_path", checkpoint, "--log_path", log),
    ]
