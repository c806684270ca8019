"""Measure systems side by side: the same data, runs interleaved, medians and ratios.

A benchmark lists :class:`System` entries and :class:`Metric` columns and calls::

    table = Table("etl", "ETL of 2 M rows", metrics, base="polars")
    table.measure(systems, repeats=3)   # each system once, then each again, in turn
    status = table.finish()             # prints it and writes build/bench/etl.json

Each system is a command that prints one JSON object as its last line; its numbers are metrics, to
which ``wall_s``, ``cpu_s`` and ``peak_rss_mb`` of its whole process tree are added, and, if it
says how many ``rows`` it did and not how fast, ``rows_per_s`` over the whole process. Runs are
interleaved because machines are shared: a noisy minute then hits every system, and ratios are
taken within a round. A system that fails stays in the table, as failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import logging
import os
import platform
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.process import BUILD, Run, run
from nvt_torchrec.base.command_line import Parser, parse
from nvt_torchrec.base.errors import ClickLogError, run_command
from nvt_torchrec.base.files.atomic import write_json
from nvt_torchrec.base.threads import count_cores

log = logging.getLogger("benchmarks")


@dataclasses.dataclass(frozen=True)
class System:
    """One way to do the work.

    Attributes:
        name: The name of the system.
        case: What it is measured on, for example "B=2048". Ratios are within a case.
        command: Program and arguments; see :mod:`benchmarks.process` for what it prints.
        prepare: Is called once, before anything is measured: builds an environment, compiles. A
            :class:`ClickLogError` makes the system a failed one.
        before: Is called before each run: removes what the last one wrote, for example.
        repeats: The largest number of runs, for systems that take minutes.
        timeout: Seconds after which a run is killed.
        result: Reads a run's JSON object from the files it wrote, for programs that print none.
    """

    name: str
    case: str
    command: Sequence[str | os.PathLike]
    prepare: Callable[[], object] = lambda: None
    before: Callable[[], object] = lambda: None
    repeats: int | None = None
    timeout: float = 1800
    result: Callable[[], dict[str, Any]] | None = None


@dataclasses.dataclass(frozen=True)
class Metric:
    """A column of the table.

    Attributes:
        key: The key in the JSON object of a run, or ``wall_s``, ``cpu_s``, ``peak_rss_mb``.
        heading: The heading with its unit.
        form: The format of a number.
        ratio: Whether to show it as a multiple of the base's, too.
        scale: What a number is multiplied by when it is shown.
    """

    key: str
    heading: str
    form: str = ",.0f"
    ratio: bool = False
    scale: float = 1.0

    def show(self, value: float | None) -> str:
        """Return the number as the table has it."""
        return "-" if value is None else format(value * self.scale, self.form)


WALL = Metric("wall_s", "wall s", ".1f")
#: With a ratio: on a busy machine it tells more than the clock.
CPU = Metric("cpu_s", "CPU s", ".1f", ratio=True)
MEMORY = Metric("peak_rss_mb", "peak MB")


class Table:
    """The systems of a benchmark and their runs.

    Attributes:
        runs: The runs of each (system, case), in the order they were measured first.
        notes: Lines below the table.
    """

    def __init__(self, name: str, title: str, metrics: Sequence[Metric], *, base: str) -> None:
        self.name = name
        self.title = title
        self.metrics = tuple(metrics)
        self.base = base
        self.runs: dict[tuple[str, str], list[Run]] = {}
        self.notes: list[str] = []

    def measure(self, systems: Sequence[System], *, repeats: int = 3) -> None:
        """Run every system ``repeats`` times, in turn; more runs if it has some already."""
        working = {}  # the systems that have not failed
        for system in systems:
            self.runs.setdefault((system.name, system.case), [])
            try:
                system.prepare()
                working[system.name, system.case] = system
            except ClickLogError as error:
                log.warning("%s: %s", system.name, error)
                self.fail(system.name, system.case, error.what)
        for repeat in range(repeats):
            for key, system in list(working.items()):
                if repeat >= (system.repeats or repeats):
                    continue
                system.before()
                measured = run(system.command, timeout=system.timeout, result=system.result)
                rows = measured.output.get("rows")
                if rows:
                    measured.output.setdefault("rows_per_s", rows / measured.wall_s)
                self.runs[key].append(measured)
                name = " ".join(key).strip()
                log.info("run %d of %s: %s", repeat + 1, name, self._describe(measured))
                if measured.error:
                    del working[key]

    def fail(self, system: str, case: str, error: str) -> None:
        """Count a system as failed, for a reason that shows only when results are compared."""
        self.runs.setdefault((system, case), []).append(Run(0.0, 0.0, 0.0, {}, error))

    @property
    def failed(self) -> dict[tuple[str, str], str]:
        """The error of each (system, case) that failed, the last one."""
        errors = {}
        for key, runs in self.runs.items():
            for measured in runs:
                if measured.error:
                    errors[key] = measured.error
        return errors

    def values(self, system: str, case: str, key: str) -> list[float]:
        """Return a metric of each run; nothing if the system failed or does not measure it."""
        if (system, case) in self.failed:
            return []
        values = [_find_value(run, key) for run in self.runs.get((system, case), [])]
        return [value for value in values if value is not None]

    def median(self, system: str, case: str, key: str) -> float | None:
        """Return the median of a metric over the runs, or None."""
        values = self.values(system, case, key)
        return statistics.median(values) if values else None

    def ratio(self, system: str, case: str, key: str) -> float | None:
        """Return a metric as a multiple of the base's in the same case, or None.

        The median over the rounds of the ratio within a round: runs of one round are neighbours in
        time, so that what else the machine does hits both.
        """
        values = self.values(system, case, key)
        base_values = self.values(self.base, case, key)
        ratios = [a / b for a, b in zip(values, base_values, strict=False) if b]
        return statistics.median(ratios) if ratios else None

    def text(self) -> str:
        """Return the table of medians and ratios."""
        named = ["system", "case"] if any(case for _, case in self.runs) else ["system"]
        table = [list(named)]
        for metric in self.metrics:
            table[0] += [metric.heading, f"x {self.base}"] if metric.ratio else [metric.heading]
        for key in self.runs:
            row = list(key[: len(named)])
            for metric in self.metrics:
                row.append(metric.show(self.median(*key, metric.key)))
                if metric.ratio:
                    ratio = self.ratio(*key, metric.key)
                    row.append("-" if ratio is None else format(ratio, ".2f"))
            table.append(row)
        counts = [len(runs) for key, runs in self.runs.items() if key not in self.failed] or [0]
        listed = str(max(counts))
        if min(counts) < max(counts):
            listed = f"{min(counts)}-{max(counts)}"
        lines = [f"{self.title}; medians of {listed} interleaved runs", describe_machine(), ""]
        lines += align(table, len(named))
        for key, error in self.failed.items():
            lines.append(f"failed: {' '.join(key).strip()}: {error}")
        return "\n".join([*lines, *self.notes])

    def finish(self) -> int:
        """Print the table; write it with every run, ``build/bench/NAME.json``; return the status.

        Returns:
            The exit status: 1 if a system failed.
        """
        print(self.text())
        results = []
        for (system, case), runs in self.runs.items():
            for measured in runs:
                results.append({"system": system, "case": case, **dataclasses.asdict(measured)})
        path = BUILD / f"{self.name}.json"
        write_json(path, {"table": self.text().splitlines(), "results": results})
        print(f"written to {path}")
        return 1 if self.failed else 0

    def _describe(self, run: Run) -> str:
        """Return the metrics of a run in a line, or its error."""
        if run.error:
            return f"failed: {run.error}"
        texts = []
        for metric in self.metrics:
            texts.append(f"{metric.heading} {metric.show(_find_value(run, metric.key))}")
        return ", ".join(texts)


def _find_value(run: Run, key: str) -> float | None:
    """Return a metric of a run; None if it is not measured, or no number."""
    value = run.output.get(key, getattr(run, key, None))
    return float(value) if isinstance(value, int | float) else None


def describe_added(table: Table, case: str, plain: str) -> list[str]:
    """Return lines on the time that a case adds to each system, the median over the rounds.

    Args:
        table: The table, with its measurements.
        case: The case.
        plain: The case without what is added.
    """
    lines = ["", f"added by {case}:"]
    for name in dict.fromkeys(system for system, _ in table.runs):
        wall = _subtract(table.values(name, case, "wall_s"), table.values(name, plain, "wall_s"))
        cpu = _subtract(table.values(name, case, "cpu_s"), table.values(name, plain, "cpu_s"))
        if wall:
            wall_s = statistics.median(wall)
            cpu_s = statistics.median(cpu)
            lines.append(f"  {name:6} {wall_s:5.2f} s, {cpu_s:5.2f} CPU s")
    return lines


def _subtract(values: list[float], others: list[float]) -> list[float]:
    """Return the difference in each round that both have."""
    return [value - other for value, other in zip(values, others, strict=False)]


def align(rows: list[list[str]], named: int) -> list[str]:
    """Return rows as lines; the first ``named`` columns are text, aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.ljust(width) if i < named else cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def describe_machine() -> str:
    """Return what the numbers depend on: processor, cores, memory and Python; and the date."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.machine()
    return (
        f"{processor}, {count_cores()} cores, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB, "
        f"Python {platform.python_version()}; {datetime.date.today().isoformat()}"
    )


def run_etl(*arguments: Any) -> None:
    """Run ``python -m etl`` with these arguments. Raises :class:`ClickLogError`."""
    done = run([sys.executable, "-m", "etl", *map(str, arguments)], result=dict)
    if done.error:
        raise ClickLogError(f"etl {arguments[0]} failed: {done.error}", "see `python -m etl`")


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a benchmark's arguments, and those after ``--``, which go to the trainer."""
    at = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


def start_logging() -> None:
    """Say on stderr what is being run; on SIGTERM, also end the run that is measured."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # force replaces handlers that an import has set up
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)


def run_benchmark(
    name: str,
    description: str | None,
    settings_class: type,
    work: Callable[[Any], int | None],
    argv: Sequence[str] | None,
) -> int:
    """Run the command line of a benchmark; return the exit status.

    Args:
        name: The benchmark's module below ``benchmarks``.
        description: The help.
        settings_class: A dataclass whose fields :func:`base.command_line.flag` declares.
        work: Runs the benchmark with the settings, and returns the exit status.
        argv: The command line; None: that of the process.
    """
    parser = Parser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    start_logging()
    return run_command(lambda: work(parse(parser, argv, settings_class)[0]))
