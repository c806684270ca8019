"""What the benchmark found: by morning and way, as tables and as ``build/bench/daily.json``."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.daily.ways import STAGES, WAYS, Calendar, Morning
from benchmarks.harness import Metric, Table, aligned, describe_machine
from benchmarks.process import Run

ORACLE = "oracle"
_METRICS = (
    Metric("auroc", "AUROC", ".5f"),
    Metric("log_loss", "log loss", ".5f"),
    Metric("calibration", "calibration", ".4f"),
    Metric("wall_s", "wall s", ".1f"),
    Metric("cpu_s", "CPU s", ".1f"),
)


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a morning in one way.

    Attributes:
        metrics: Metrics of the model on the day that it serves.
        costs: What each stage of the morning took; empty where nothing was done.
    """

    metrics: dict[str, Any]
    costs: dict[str, Run] = dataclasses.field(default_factory=dict)

    def together(self, stages: Sequence[str] = STAGES) -> Run:
        """Return what stages took together, with the metrics."""
        runs = [self.costs[stage] for stage in stages if stage in self.costs]
        return Run(
            sum(run.wall_s for run in runs),
            sum(run.cpu_s for run in runs),
            max((run.peak_rss_mb for run in runs), default=0.0),
            self.metrics,
        )


@dataclasses.dataclass
class Results:
    """All that was measured.

    Attributes:
        calendar: The days.
        rows_per_day: Rows of each.
        update_flags: The trainer's flags when it continues.
        mornings: Results by morning and way; ``ORACLE`` is one of the ways.
    """

    calendar: Calendar
    rows_per_day: int
    update_flags: Sequence[str]
    mornings: dict[Morning, dict[str, Result]]

    @property
    def ways(self) -> list[str]:
        """The ways that were measured, in the order of the table, with the oracle."""
        return [way for way in (*WAYS, ORACLE) if way in next(iter(self.mornings.values()))]

    def mean_auroc(self, way: str) -> float:
        """Return the mean AUROC of a way over the mornings."""
        return statistics.mean(r[way].metrics["auroc"] for r in self.mornings.values())

    def text(self) -> str:
        """Return the tables."""
        aurocs = [["AUROC on", *(WAYS.get(way, way) for way in self.ways)]]
        for morning, results in self.mornings.items():
            row = (f"{results[way].metrics['auroc']:.5f}" for way in self.ways)
            aurocs.append([f"day {morning.served}", *row])
        aurocs.append(["mean", *(f"{self.mean_auroc(way):.5f}" for way in self.ways)])
        if "refit" in self.ways:
            refitted = self.mean_auroc("refit")
            differences = (self.mean_auroc(way) - refitted for way in self.ways)
            aurocs.append(["less refitted", *(f"{value:+.5f}" for value in differences)])
        costs = [["work of a morning", "stage", "wall s", "CPU s", "peak MB"]]
        for way in ("daily", "refit"):
            for name, stages in [*((s, (s,)) for s in STAGES), ("all", STAGES)]:
                if way in self.ways:
                    runs = [r[way].together(stages) for r in self.mornings.values()]
                    wall, cpu = (
                        statistics.mean(getattr(run, key) for run in runs)
                        for key in ("wall_s", "cpu_s")
                    )
                    peak = max(run.peak_rss_mb for run in runs)
                    costs.append([WAYS[way], name, f"{wall:.1f}", f"{cpu:.1f}", f"{peak:,.0f}"])
        lines = [self._title(), describe_machine(), "", *aligned(aurocs, 1)]
        return "\n".join([*lines, "", *aligned(costs, 2)])

    def write(self) -> Path:
        """Write ``build/bench/daily.json``, in the form of the other benchmarks."""
        table = Table("daily", self._title(), _METRICS, base=WAYS["refit"])
        for morning, results in self.mornings.items():
            for way, result in results.items():
                table.runs[WAYS.get(way, way), f"day {morning.served}"] = [result.together()]
        return table.write(
            update_flags=list(self.update_flags),
            mean_auroc={way: self.mean_auroc(way) for way in self.ways},
        )

    def _title(self) -> str:
        return (
            f"A log of {self.calendar.days} days of {self.rows_per_day:,} rows; first model on "
            f"{self.calendar.first_days} days, then {len(self.mornings)} mornings"
        )
