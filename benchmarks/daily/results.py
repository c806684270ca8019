"""What the benchmark found: by morning and way, as a table and as ``build/bench/daily.json``."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.daily.ways import STAGES, WAYS, Calendar, Cost, Morning
from benchmarks.harness import Metric, Table, aligned, describe_machine
from benchmarks.process import Run

ORACLE = "oracle"
#: How far daily updating may be below refitting.
TARGET = 0.002
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
    costs: dict[str, Cost] = dataclasses.field(default_factory=dict)

    @property
    def cost(self) -> Cost:
        """What the morning took."""
        return sum(self.costs.values(), Cost())


@dataclasses.dataclass
class Results:
    """All that was measured.

    Attributes:
        calendar: The days.
        rows_per_day: Rows of each.
        update_flags: The trainer's flags when it continues.
        mornings: Results by morning and way; ``ORACLE`` is one of the ways.
        notes: Lines below the table.
    """

    calendar: Calendar
    rows_per_day: int
    update_flags: Sequence[str]
    mornings: dict[Morning, dict[str, Result]]
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def ways(self) -> list[str]:
        """The ways that were measured, in the order of the table."""
        return [way for way in WAYS if way in next(iter(self.mornings.values()))]

    def aurocs(self, way: str) -> list[float]:
        """Return the AUROC of a way, morning by morning."""
        return [results[way].metrics["auroc"] for results in self.mornings.values()]

    def mean_auroc(self, way: str) -> float:
        """Return the mean AUROC of a way."""
        return statistics.mean(self.aurocs(way))

    def difference(self, way: str) -> float | None:
        """Return the mean AUROC of a way minus that of refitting, if both were measured."""
        if not {way, "refit"} <= {*self.ways, ORACLE}:
            return None
        return self.mean_auroc(way) - self.mean_auroc("refit")

    def mean_cost(self, way: str, stage: str | None = None) -> Cost:
        """Return the mean of what a morning or a stage of it takes, and the largest memory."""
        costs = [
            results[way].costs.get(stage, Cost()) if stage else results[way].cost
            for results in self.mornings.values()
        ]
        whole = sum(costs, Cost())
        return Cost(whole.wall_s / len(costs), whole.cpu_s / len(costs), whole.peak_rss_mb)

    def text(self) -> str:
        """Return the tables."""
        calendar = self.calendar
        head = (
            f"A log of {calendar.days} days of {self.rows_per_day:,} rows; first model on "
            f"{calendar.first_days} days, then {len(self.mornings)} mornings"
        )
        lines = [head, describe_machine(), "", *self._knowledge(), ""]
        lines += [*aligned(self._auroc_rows(), 1), ""]
        if len(self.ways) > 1:
            lines += [*aligned(self._cost_rows(), 2), ""]
        return "\n".join([*lines, *self.verdict(), *self.notes])

    def _knowledge(self) -> list[str]:
        """Return what each way knew, on the first of the mornings."""
        morning, initial = next(iter(self.mornings)), self.calendar.initial
        held_back = f"its clicks are held back until day {morning.served} has arrived"
        known = {
            "never": f"{self._days(initial.newest - 1)}, on all mornings",
            "daily": f"{self._days(morning.newest - 1)}; the values of day {morning.newest} have "
            f"ids, {held_back}",
            "refit": f"{self._days(morning.newest - 1)}; day {morning.newest} is read, {held_back}",
        }
        head = (
            f"What is served after day {morning.newest} has arrived scores day {morning.served}, "
            "and so on. It knows the clicks of:"
        )
        return [head, *(f"  {WAYS[way]:15} {known[way]}" for way in self.ways)]

    def _days(self, last: int) -> str:
        first = self.calendar.first
        return f"days {first}-{last}" if last > first else f"day {first}"

    def _auroc_rows(self) -> list[list[str]]:
        columns = [*self.ways, ORACLE]
        rows = [["AUROC on", *(WAYS.get(way, way) for way in columns)]]
        for morning, results in self.mornings.items():
            aurocs = (results[way].metrics["auroc"] for way in columns)
            rows.append([f"day {morning.served}", *(f"{auroc:.5f}" for auroc in aurocs)])
        rows.append(["mean", *(f"{self.mean_auroc(way):.5f}" for way in columns)])
        if "refit" in self.ways:
            differences = (self.mean_auroc(way) - self.mean_auroc("refit") for way in columns)
            rows.append(["less refitted", *(f"{value:+.5f}" for value in differences)])
        return rows

    def _cost_rows(self) -> list[list[str]]:
        rows = [["work of a morning", "stage", "wall s", "CPU s", "peak MB"]]
        for way in self.ways:
            stages: list[str | None] = [*STAGES] if way != "never" else []
            for stage in [*stages, None]:
                cost = self.mean_cost(way, stage)
                figures = f"{cost.wall_s:.1f}", f"{cost.cpu_s:.1f}", f"{cost.peak_rss_mb:,.0f}"
                rows.append([WAYS[way], stage or "all", *figures])
        return rows

    def verdict(self) -> list[str]:
        """Return whether daily updating reaches its target, and its share of the work."""
        difference = self.difference("daily")
        if difference is None:
            return []
        reached = "reached" if difference >= -TARGET else "NOT reached"
        cost, other = self.mean_cost("daily"), self.mean_cost("refit")
        last = self.mornings[max(self.mornings)]
        alone = _ratio(*(self._fitting(self.mornings.values(), way) for way in ("daily", "refit")))
        at_last = _ratio(*(self._fitting([last], way) for way in ("daily", "refit")))
        return [
            f"updated daily: AUROC {difference:+.5f} against refitting: {reached} (>= -{TARGET}), "
            f"for {_ratio(cost.wall_s, other.wall_s)} of its time and "
            f"{_ratio(cost.cpu_s, other.cpu_s)} of its CPU seconds; etl and train alone "
            f"{alone}, on the last morning {at_last}"
        ]

    @staticmethod
    def _fitting(mornings: Iterable[dict[str, Result]], way: str) -> float:
        """Return the CPU seconds of the stages that grow with the days: bundling does not."""
        return sum(
            results[way].costs.get(stage, Cost()).cpu_s
            for results in mornings
            for stage in ("etl", "train")
        )

    def write(self) -> Path:
        """Write ``build/bench/daily.json``, in the form of the other benchmarks."""
        base = WAYS["refit"] if "refit" in self.ways else ""
        table = Table("daily", self.text().splitlines()[0], _METRICS, base=base)
        for morning, results in self.mornings.items():
            for way, result in results.items():
                cost = result.cost
                table.runs[WAYS.get(way, way), f"day {morning.served}"] = [
                    Run(cost.wall_s, cost.cpu_s, cost.peak_rss_mb, result.metrics)
                ]
        table.notes = [*self.verdict(), *self.notes]
        ways = [*self.ways, ORACLE]
        return table.write(
            first_days=self.calendar.first_days,
            rows_per_day=self.rows_per_day,
            update_flags=list(self.update_flags),
            mean_auroc={way: self.mean_auroc(way) for way in ways},
            mean_difference={way: self.difference(way) for way in ways},
            stages={
                WAYS[way]: {
                    stage: dataclasses.asdict(self.mean_cost(way, stage)) for stage in STAGES
                }
                for way in self.ways
                if way != "never"
            },
        )


def _ratio(value: float, other: float) -> str:
    return f"{value / other:.2f}" if other else "-"
