"""The ways to serve a model while days arrive, as the commands that a team runs each morning."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

from benchmarks.daily.calendar import Calendar, Morning
from benchmarks.daily.records import Cost, Stages
from benchmarks.harness import ROOT
from benchmarks.training_runs import SMALL_MODEL
from nvt_torchrec.formats.etl_output import EtlOutput

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


@dataclasses.dataclass(frozen=True)
class Work:
    """What all ways share.

    Attributes:
        output: The directory of the benchmark.
        calendar: Its days.
        stages: Runs and measures the commands.
        update_flags: The trainer's flags when it continues.
    """

    output: Path
    calendar: Calendar
    stages: Stages
    update_flags: tuple[str, ...]

    @property
    def raw(self) -> Path:
        """The directory of the log."""
        return self.output / "raw"

    @property
    def first_bundle(self) -> Path:
        """The bundle of the first model, which every way begins with."""
        return self.output / "first" / "bundle"

    def day(self, day: int) -> Path:
        """The file of a day."""
        return self.raw / f"day_{day}"

    def served(self, way: str) -> Path:
        """The bundle that a way serves."""
        return self.first_bundle if way == "never" else self.output / way / "served" / "current"


def make_first_model(work: Work) -> dict[str, Cost]:
    """Fit and train on the first days; publish the model where the daily updates begin."""
    return _from_nothing(work, "first", work.output / "daily", work.calendar.initial)


def do_morning(work: Work, way: str, morning: Morning) -> dict[str, Cost]:
    """Do what a way does on a morning; return what each stage of it took."""
    if way == "never":
        return {}
    if way == "refit":
        return _from_nothing(work, way, work.output / way, morning)
    return _extend(work, morning)


def _from_nothing(work: Work, way: str, home: Path, morning: Morning) -> dict[str, Cost]:
    """Fit and train on all days up to the newest one."""
    out, checkpoint = home / "out", home / f"checkpoint.{morning.newest}"
    etl = ["-m", "etl", "run", "--input_path", work.raw, "--output_path", out]
    etl += ["--days", f"{work.calendar.first}-{morning.newest}"]
    train = _training(out, checkpoint)
    replaced = {"etl": out, "train": checkpoint}
    costs = _do(work, way, home, morning, {"etl": etl, "train": train}, replaced)
    if way != "first":
        _remove(out)
        _remove(checkpoint)
    return costs


def _extend(work: Work, morning: Morning) -> dict[str, Cost]:
    """Extend the output by the newest day, and continue from the newest checkpoint."""
    home = work.output / "daily"
    before, checkpoint = (
        home / f"checkpoint.{day}" for day in (morning.newest - 1, morning.newest)
    )
    out = home / "out"
    extend = ["-m", "etl", "extend", "--output_path", out]
    # --resume: an interrupted benchmark may have interrupted it
    extend += ["--input_path", work.day(morning.newest), "--resume"]
    train = [*_training(out, checkpoint), "--continue_from", before, *work.update_flags]
    costs = _do(
        work, "daily", home, morning, {"etl": extend, "train": train}, {"train": checkpoint}
    )
    _remove(before)
    return costs


def _do(
    work: Work,
    way: str,
    home: Path,
    morning: Morning,
    commands: dict[str, Command],
    replaced: dict[str, Path],
) -> dict[str, Cost]:
    """Run the ETL and the trainer, then bundle and publish; return what each took.

    Args:
        work: What all ways share.
        way: The name of the way in the records.
        home: The directory of the way.
        morning: The morning.
        commands: The commands of the ETL and the trainer.
        replaced: What they write, by stage: an interrupted run of them may have left it.
    """
    bundle = work.first_bundle if way == "first" else home / "bundle"
    workflow = EtlOutput(home / "out").workflow
    checkpoint = home / f"checkpoint.{morning.newest}"
    commands["bundle"] = ["-m", "inference", "bundle", "--workflow", workflow]
    commands["bundle"] += ["--checkpoint", checkpoint, "--output", bundle]
    commands["publish"] = ["-m", "inference", "publish", bundle, "--to", home / "served"]
    commands["publish"] += ["--sample", work.day(morning.newest)]
    commands["publish"] += ["--max_auroc_drop", LARGEST_DROP]
    commands["publish"] += ["--max_calibration_change", LARGEST_CALIBRATION_CHANGE]
    replaced["bundle"] = bundle
    return {
        stage: work.stages.command(
            f"{way}/day {morning.newest}/{stage}",
            commands[stage],
            before=functools.partial(_remove, replaced.get(stage)),
        )
        for stage in STAGES
    }


def _training(out: Path, checkpoint: Path) -> Command:
    log = checkpoint.with_name(f"log.{checkpoint.name}")
    return [
        *(ROOT / "train_torchrec.py", "--binary_path", f"{EtlOutput(out).splits}/", *TRAINING),
        *("--save_checkpoint_path", checkpoint, "--log_path", log),
    ]


def _remove(path: Path | None) -> None:
    if path is not None:
        shutil.rmtree(path, ignore_errors=True)
