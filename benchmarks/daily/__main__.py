"""Update a model daily, and compare it with one that is never updated and one that is refitted.

A synthetic log whose values are born over time: the first days are fitted and trained once. Then,
each morning, a day arrives, and each way does its work with the commands of docs/daily.md: extend,
continue, bundle and publish; or fit and train on all days from nothing; or nothing. What each way
then serves scores the raw rows of the following day. The oracle is the click model that the log was
drawn from. Everything after -- goes to train_torchrec.py when it continues, in place of --days new.

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

from benchmarks.daily import ways
from benchmarks.daily.results import ORACLE, Result, Results
from benchmarks.daily.ways import WAYS, Calendar
from benchmarks.harness import run_benchmark, split_flags
from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import OutputError, SettingsError
from nvt_torchrec.clicklog.synthetic.model import CALENDAR_DAYS

log = logging.getLogger("benchmarks")


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
    arguments, flags = split_flags(sys.argv[1:] if argv is None else argv)
    work = functools.partial(_run, flags=tuple(flags) or ways.CONTINUING)
    return run_benchmark("daily", __doc__, DailySettings, work, arguments)


def _run(settings: DailySettings, flags: tuple[str, ...]) -> int:
    output = settings.output.absolute()
    marker = output / ".daily"
    if output.exists() and any(output.iterdir()) and not marker.exists():
        raise OutputError(f"{output}: not empty, and not made by this benchmark", "choose another")
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    marker.touch()
    results = _measure(settings, ways.Work(output, settings.calendar, flags))
    print(results.text(), flush=True)
    print(f"\nwritten to {results.write()}")
    return 0


def _measure(settings: DailySettings, work: ways.Work) -> Results:
    synthesize = ["-m", "etl", "synthesize", "--output_path", work.raw]
    synthesize += ["--rows_per_day", settings.rows_per_day, "--seed", settings.seed]
    ways.run_command("log", synthesize)
    ways.make_first_model(work)
    results = Results(work.calendar, settings.rows_per_day, work.update_flags, {})
    for morning in work.calendar.mornings:
        models = results.mornings[morning] = {}
        for way in settings.ways:
            costs = ways.do_morning(work, way, morning)
            metrics = ways.score(work.served(way), work.day(morning.served))
            models[way] = Result(metrics, costs)
            log.info("%-24s AUROC %.5f on day %d", way, metrics["auroc"], morning.served)
        models[ORACLE] = Result(ways.oracle(work.raw, morning.served))
    return results


if __name__ == "__main__":
    sys.exit(main())
