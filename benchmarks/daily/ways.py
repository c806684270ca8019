"""The ways to serve a model while days arrive, as the commands that a team runs each morning."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.daily.stages import Cost, Stages
from benchmarks.harness import ROOT, SMALL_MODEL
from clicklog.etl_output import EtlOutput
from clicklog.files.atomic import read_json
from clicklog.synthetic.model import CALENDAR_DAYS

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

    def day(self, day: int) -> Path:
        """Return the file of a day."""
        return self.raw / f"day_{day}"

    def served(self, way: str) -> Path:
        """Return the bundle that a way serves."""
        if way == "never":
            return self.output / "first" / "bundle"
        return self.output / way / "served" / "current"


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


def score(bundle: Path, day: Path) -> dict[str, Any]:
    """Score the raw rows of a day as ``inference predict`` does; return the metrics.

    Raises:
        ClickLogError: Bundle or log is missing or damaged.
    """
    from dlrm.launch.startup import prepare_torch

    prepare_torch()
    from inference.bulk import evaluate_file, predict_file
    from inference.predictor import Predictor

    predictor = Predictor.load(bundle, check=True)
    with tempfile.TemporaryDirectory() as directory:
        scores = Path(directory) / "scores.parquet"
        predict_file(predictor, str(day), scores, need_label=True)
        return evaluate_file(scores).to_dict()


def oracle(raw: Path, day: int) -> dict[str, Any]:
    """Return the metrics of the probabilities from which the clicks of a day were drawn."""
    files = read_json(raw / "synthetic.json", "the synthetic log's description")["files"]
    return next(file for file in files if file["file"] == f"day_{day}")


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
    out, before, checkpoint = (
        home / name
        for name in ("out", f"checkpoint.{morning.newest - 1}", f"checkpoint.{morning.newest}")
    )
    etl = ["-m", "etl", "extend", "--output_path", out]
    # --resume: an interrupted benchmark may have interrupted it
    etl += ["--input_path", work.day(morning.newest), "--resume"]
    train = [*_training(out, checkpoint), "--continue_from", before, *work.update_flags]
    commands = {"etl": etl, "train": train}
    costs = _do(work, "daily", home, morning, commands, {"train": checkpoint})
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
    bundle = work.served("never") if way == "first" else home / "bundle"
    commands["bundle"] = [
        "-m",
        "inference",
        "bundle",
        "--workflow",
        EtlOutput(home / "out").workflow,
    ]
    commands["bundle"] += ["--checkpoint", home / f"checkpoint.{morning.newest}"]
    commands["bundle"] += ["--output", bundle]
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
