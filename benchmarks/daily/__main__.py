"""Update a model daily, and compare it with one that is never updated and one that is refitted.

A synthetic log whose values are born over time: the first days are fitted and trained once. Then,
each morning, a day arrives, and each way does its work with the commands of docs/daily.md: extend,
continue, bundle and publish; or fit and train on all days from nothing; or nothing. What each way
then serves scores the raw rows of the following day. The oracle is the click model that the log was
drawn from. An interrupted benchmark goes on where it was. Everything after -- goes to
train_torchrec.py when it continues, in place of --days new.

    python -m benchmarks.daily --ways daily,refit -- --days new --replay 0.2
"""

from __future__ import annotations

import nvt_torchrec.base.interrupts  # noqa: F401  # before all that takes time: Ctrl-C is one line now

# isort: split
import dataclasses
import functools
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.daily.calendar import Calendar
from benchmarks.daily.ways import CONTINUING, STAGES, WAYS
from benchmarks.harness import run_benchmark
from benchmarks.training_runs import refuse, split_flags
from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import OutputError, SettingsError
from nvt_torchrec.base.files.atomic import locked
from nvt_torchrec.clicklog.synthetic.model import CALENDAR_DAYS

log = logging.getLogger("benchmarks")

#: Flags of the trainer that the benchmark sets itself.
_OWN = (
    *("--binary_path", "--continue_from", "--save_checkpoint_path", "--log_path"),
    *("--checkpoint_dir", "--load_checkpoint_path", "--resume", "--mode"),
)
#: The record of a benchmark that was finished, and the file that its process locks.
_END, _LOCK = "end", "lock"


@dataclasses.dataclass(frozen=True)
class DailySettings(Settings):
    """The settings of the benchmark."""

    # fmt: off
    output: Path = flag("directory to write to", Path("build/daily"), metavar="DIR")
    days: int = flag(
        f"days of the log; the last ones of its {CALENDAR_DAYS}", 21, least=4, most=CALENDAR_DAYS
    )
    first_days: int = flag("days of the first model, the last one held back", 10, least=2)
    rows_per_day: int = flag("rows of each day", 100_000, least=10)
    seed: int = flag("seed of the synthetic log", 0, least=0)
    ways: tuple[str, ...] = flag("what to compare", tuple(WAYS), choices=tuple(WAYS))
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ways:
            raise SettingsError("--ways names none", f"give some of {', '.join(WAYS)}")
        if self.first_days > self.days - 2:
            raise SettingsError(
                f"--first_days {self.first_days} of --days {self.days}: no day is left to arrive "
                "and to be served",
                f"give at most {self.days - 2}",
            )

    @property
    def calendar(self) -> Calendar:
        """The days."""
        return Calendar(self.days, self.first_days)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    own, flags = split_flags(sys.argv[1:] if argv is None else argv)
    work = functools.partial(_run, flags=tuple(flags) or CONTINUING)
    return run_benchmark("daily", __doc__, DailySettings, work, own)


def _run(settings: DailySettings, flags: tuple[str, ...]) -> int:
    refuse(list(flags), _OWN)
    settings = dataclasses.replace(settings, output=settings.output.absolute())
    output = settings.output
    others = {path.name for path in output.iterdir()} - {_LOCK} if output.exists() else set()
    if others and not _journal(output).begun:
        raise OutputError(f"{output}: not empty, and not made by this benchmark", "choose another")
    output.mkdir(parents=True, exist_ok=True)
    with locked(output / _LOCK, output):
        _begin(settings, flags)
        results = _measure(settings, flags)
    from benchmarks.daily.page import write_page

    page = output / "daily.html"
    write_page(page, results)
    print(results.text(), flush=True)
    print(f"\nwritten to {results.write()} and {page}")
    _journal(output).add({_END: {}})
    return 0


def _journal(output: Path) -> Any:
    from nvt_torchrec.base.files.journal import Journal

    return Journal(output / "journal")


def _begin(settings: DailySettings, flags: tuple[str, ...]) -> None:
    """Keep what an interrupted benchmark of the same settings has done; else delete all."""
    journal, output = _journal(settings.output), settings.output
    values = dataclasses.asdict(settings) | {"ways": list(settings.ways), "flags": list(flags)}
    del values["output"]
    plan = {"settings": values}
    finished = journal.finished(dict[str, Any])
    if journal.plan(dict[str, Any], f"delete {output}") == plan and _END not in finished:
        return
    # the journal last: without it, the rest would look like somebody else's
    for path in sorted(output.iterdir(), key=lambda path: path == journal.directory):
        if path.name != _LOCK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    journal.begin(plan)


def _measure(settings: DailySettings, flags: tuple[str, ...]) -> Any:
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    from benchmarks.daily.records import Stages
    from benchmarks.daily.results import ORACLE, Result, Results
    from benchmarks.daily.scores import oracle, score
    from benchmarks.daily.ways import Work, do_morning, make_first_model

    calendar = settings.calendar
    per_morning = sum(1 + len(STAGES) * (way != "never") for way in settings.ways)
    total = 1 + len(STAGES) + per_morning * len(calendar.mornings)
    with tqdm(total=total, unit="stage", disable=None) as bar, logging_redirect_tqdm():
        stages = Stages(_journal(settings.output), bar)
        work = Work(settings.output, calendar, stages, flags)
        stages.command(
            "log",
            [
                *("-m", "etl", "synthesize", "--output_path", work.raw),
                *("--rows_per_day", settings.rows_per_day, "--seed", settings.seed),
            ],
            before=lambda: shutil.rmtree(work.raw, ignore_errors=True),
        )
        first = make_first_model(work)
        results = Results(calendar, settings.rows_per_day, flags, {}, first)
        if stages.continued:
            results.notes.append(
                "The benchmark was interrupted; of the command that was interrupted, only the last "
                "run is counted."
            )
        for morning in calendar.mornings:
            found = results.mornings[morning] = {}
            for way in settings.ways:
                costs = do_morning(work, way, morning)
                metrics = stages.call(
                    f"{way}/day {morning.newest}/score",
                    functools.partial(score, work.served(way), work.day(morning.served)),
                )
                found[way] = Result(metrics, costs)
                log.info("%-24s AUROC %.5f on day %d", way, metrics["auroc"], morning.served)
            found[ORACLE] = Result(oracle(work.raw, morning.served))
    return results


if __name__ == "__main__":
    sys.exit(main())
