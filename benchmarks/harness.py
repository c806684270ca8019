"""Measure systems side by side: the same data, runs interleaved, medians and ratios.

A benchmark lists :class:`System` entries and :class:`Metric` columns and calls::

    table = Table("etl", "ETL of 2 M rows", metrics, base="polars")
    table.measure(systems, repeats=3)   # each system once, then each again, in turn
    status = table.finish()             # prints it and writes build/bench/etl.json

Each system is a command that prints one JSON object as its last line. The numbers in it are
metrics; ``wall_s``, ``cpu_s`` and ``peak_rss_mb`` of the whole process tree are added and, if there
is ``rows`` but no ``rows_per_s``, the latter over the whole process. Runs are interleaved because
machines are shared: a noisy minute then hits every system, and ratios are taken within a round. A
system that fails stays in the table, marked as failed.
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
    """A program to measure.

    Attributes:
        name: The name of the system.
        case: The workload, for example "B=2048". Ratios are taken within a case.
        command: The program and its arguments. It prints a JSON object as its last line.
        prepare: Called once before any measurement, for example to build an environment or to
            compile. If it raises :class:`ClickLogError`, the system counts as failed.
        before: Called before each run, for example to remove the files of the last run.
        repeats: The most runs, for systems that take minutes.
        timeout: The seconds after which a run is killed.
        result: For programs that print no JSON object: makes it from the files of a run.
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
        key: The key in the JSON object of a run, or a field of :class:`benchmarks.process.Run`,
            such as ``wall_s``.
        heading: The heading, with the unit.
        form: The format of a number.
        ratio: Add a column with the ratio to the base system.
        scale: The factor by which numbers are multiplied when they are shown.
    """

    key: str
    heading: str
    form: str = ",.0f"
    ratio: bool = False
    scale: float = 1.0

    def show(self, value: float | None) -> str:
        """Format a number for the table."""
        return "-" if value is None else format(value * self.scale, self.form)


WALL = Metric("wall_s", "wall s", ".1f")
#: It has a ratio because on a busy machine CPU time tells more than the clock.
CPU = Metric("cpu_s", "CPU s", ".1f", ratio=True)
MEMORY = Metric("peak_rss_mb", "peak MB")


class Table:
    """The systems of a benchmark and their runs.

    Attributes:
        runs: The runs of each (system, case), in the order of their first runs.
        notes: The lines below the table.
    """

    def __init__(self, name: str, title: str, metrics: Sequence[Metric], *, base: str) -> None:
        self.name = name
        self.title = title
        self.metrics = tuple(metrics)
        self.base = base
        self.runs: dict[tuple[str, str], list[Run]] = {}
        self.notes: list[str] = []

    def measure(self, systems: Sequence[System], *, repeats: int = 3) -> None:
        """Run every system ``repeats`` times, in turn, in addition to the runs it already has."""
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
        """Mark a system as failed, for example because its results are wrong."""
        self.runs.setdefault((system, case), []).append(Run(0.0, 0.0, 0.0, {}, error))

    @property
    def failed(self) -> dict[tuple[str, str], str]:
        """The last error of each (system, case) that failed."""
        errors = {}
        for key, runs in self.runs.items():
            for measured in runs:
                if measured.error:
                    errors[key] = measured.error
        return errors

    def values(self, system: str, case: str, key: str) -> list[float]:
        """Return a metric of each run; an empty list if the system failed or lacks the metric."""
        if (system, case) in self.failed:
            return []
        values = [_find_value(run, key) for run in self.runs.get((system, case), [])]
        return [value for value in values if value is not None]

    def median(self, system: str, case: str, key: str) -> float | None:
        """Return the median of a metric over the runs, or None."""
        values = self.values(system, case, key)
        return statistics.median(values) if values else None

    def ratio(self, system: str, case: str, key: str) -> float | None:
        """Return the ratio of a metric to that of the base system in the same case, or None.

        It is the median over the rounds of the ratio within a round: the runs of one round are
        close in time, so that other load on the machine affects both.
        """
        values = self.values(system, case, key)
        base_values = self.values(self.base, case, key)
        ratios = [a / b for a, b in zip(values, base_values, strict=False) if b]
        return statistics.median(ratios) if ratios else None

    def text(self) -> str:
        """Return the table of medians and ratios."""
        header = ["system"]
        if any(case for _, case in self.runs):
            header.append("case")
        num_names = len(header)
        for metric in self.metrics:
            header.append(metric.heading)
            if metric.ratio:
                header.append(f"x {self.base}")
        table = [header]
        for key in self.runs:
            row = list(key[:num_names])
            for metric in self.metrics:
                row.append(metric.show(self.median(*key, metric.key)))
                if metric.ratio:
                    ratio = self.ratio(*key, metric.key)
                    row.append("-" if ratio is None else format(ratio, ".2f"))
            table.append(row)
        counts = [len(runs) for key, runs in self.runs.items() if key not in self.failed] or [0]
        num_runs = str(max(counts))
        if min(counts) < max(counts):
            num_runs = f"{min(counts)}-{max(counts)}"
        lines = [f"{self.title}; medians of {num_runs} interleaved runs", describe_machine(), ""]
        lines += align(table, num_names)
        for key, error in self.failed.items():
            lines.append(f"failed: {' '.join(key).strip()}: {error}")
        return "\n".join([*lines, *self.notes])

    def finish(self) -> int:
        """Print the table, and write it with all runs to ``build/bench/NAME.json``.

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
        """Return a line with the metrics of a run, or with its error."""
        if run.error:
            return f"failed: {run.error}"
        texts = []
        for metric in self.metrics:
            texts.append(f"{metric.heading} {metric.show(_find_value(run, metric.key))}")
        return ", ".join(texts)


def _find_value(run: Run, key: str) -> float | None:
    """Return a metric of a run; None if it was not measured or is not a number."""
    value = run.output.get(key, getattr(run, key, None))
    return float(value) if isinstance(value, int | float) else None


def describe_added(table: Table, case: str, plain: str) -> list[str]:
    """Describe the time that a case adds to each system: the median over the rounds.

    Args:
        table: The table, with its measurements.
        case: The case.
        plain: The case with which it is compared.
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
    """Return the difference in each round that both lists have."""
    return [value - other for value, other in zip(values, others, strict=False)]


def align(rows: list[list[str]], num_names: int) -> list[str]:
    """Format rows as lines; the first ``num_names`` columns are names, aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.ljust(width) if i < num_names else cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def describe_machine() -> str:
    """Describe the machine: processor, cores, memory and Python; and the date."""
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
    """Split a command line at ``--`` into arguments of the benchmark and of the trainer."""
    end = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:end]), list(argv[end + 1 :])


def start_logging() -> None:
    """Log progress to stderr; turn SIGTERM into an exit that also ends the measured process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # force=True replaces handlers that an import may have set up.
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
        description: The description in its help.
        settings_class: A dataclass whose fields are declared with :func:`base.command_line.flag`.
        work: The function that runs the benchmark with the settings and returns the exit status.
        argv: The command line; None for the command line of the process.
    """
    parser = Parser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    start_logging()
    return run_command(lambda: work(parse(parser, argv, settings_class)[0]))
