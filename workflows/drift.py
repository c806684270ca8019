"""Drift: how far a day is from those that a workflow was fitted on, and what chance explains.

``python -m etl drift`` compares a day, and the server the rows of the last hour, by the functions
of this module; :mod:`workflows.drift_cells` says what is counted. Neither imports NVTabular, Dask
or pandas.

Population stability index (PSI). For the shares q of a first and p of a second sample over the
same cells, PSI = Σ (p − q) · ln(p / q) (Siddiqi, Credit Risk Scorecards, 2006; it is the symmetric
divergence of Jeffreys, 1946). It is 0 for equal shares; by convention below 0.1 is no shift and
above 0.25 a large one. Two samples of m and n rows of one distribution do not have a PSI of 0:
PSI / (1/m + 1/n) is then approximately chi-squared with (cells − 1) degrees of freedom (Yurdakul,
Naranjo: Statistical properties of the population stability index, Journal of Risk Model Validation
14.4, 2020). The approximation needs some rows in each cell, see :data:`LEAST_EXPECTED`.

Shares. Two counts out of two totals are compared by the likelihood ratio G = 2 Σ observed ·
ln(observed / expected), which is approximately chi-squared with one degree of freedom where the
shares are equal (Wilks, 1938; Sokal, Rohlf: Biometry, on the G-test). For rare events its tail is
closer to the exact one than that of the usual z-test.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.files.artifact import Format
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec

FORMAT = Format("nvt-torchrec drift", 2, "a result of `python -m etl drift`")
#: A count, and the total that it is out of.
Share = tuple[int, int]

# ---- what chance explains

#: Rows that a cell must be expected to have in the smaller sample; others are merged with their
#: neighbours. With 5, the usual bound for Pearson's statistic, limits of small error rates are
#: exceeded far too often: ln(p / q) is steep where p is near 0.
LEAST_EXPECTED = 50
#: By how much the tail of the PSI may be heavier than that of chi-squared. With LEAST_EXPECTED rows
#: in 2 to 10 cells, limits of 0.01 to 0.0001 were exceeded 0.9 to 2.0 times as often as stated
#: (400,000 draws each), and with 20 rows up to 2.6 times.
_HEAVIER = 2.0


def population_stability(
    then: np.ndarray, now: np.ndarray, error_rate: float
) -> tuple[float, float]:
    """Return the PSI of two samples, and what it exceeds by chance with the error rate.

    Args:
        then: Rows of the first sample in each cell, int64 [cells]. Cells with too few rows are
            merged with the cell before them, so neighbours should be alike.
        now: Rows of the second sample, likewise.
        error_rate: The probability with which samples of the same distribution may exceed the
            limit, which is infinity where the rows do not suffice for two cells.
    """
    m, n = int(then.sum()), int(now.sum())
    begins = _merged_cells(then, min(m, n)) if m and n else [0]
    freedom = len(begins) - 1
    if not freedom:
        return 0.0, math.inf
    q = np.add.reduceat(then, begins) / m
    # An empty cell counts as half a row, so that the logarithm is finite.
    p = np.maximum(np.add.reduceat(now, begins), 0.5) / n
    limit = chi_squared_limit(freedom, error_rate / _HEAVIER) * (1 / m + 1 / n)
    return float(((p - q) * np.log(p / q)).sum()), limit


def _merged_cells(then: np.ndarray, rows: int) -> list[int]:
    """Return where merged cells begin: each expects LEAST_EXPECTED of ``rows``, but for one cell.

    A single cell is left if there are too few rows for two.
    """
    needed = LEAST_EXPECTED * int(then.sum()) / rows
    begins, expected = [0], 0
    for cell, count in enumerate(then.tolist()):
        if expected >= needed:
            begins.append(cell)
            expected = 0
        expected += count
    if expected < needed and len(begins) > 1:  # the last one is too small
        begins.pop()
    return begins


def differ(now: Share, then: Share, error_rate: float) -> bool:
    """Return whether two shares differ by more than chance explains.

    Args:
        now: A share.
        then: Another one.
        error_rate: The probability of True for samples of the same distribution.
    """
    from scipy.special import rel_entr  # its import takes a tenth of a second

    if not now[1] or not then[1]:
        return False
    observed = np.array([[count, total - count] for count, total in (now, then)], np.float64)
    expected = np.outer(observed.sum(axis=1), observed.sum(axis=0)) / observed.sum()
    return 2 * float(rel_entr(observed, expected).sum()) > chi_squared_limit(1, error_rate)


@functools.cache
def chi_squared_limit(freedom: int, error_rate: float) -> float:
    """Return the value that a chi-squared variable exceeds with the probability ``error_rate``."""
    from scipy.special import chdtri

    return float(chdtri(freedom, error_rate))


# ---- measures of a day


@dataclasses.dataclass(frozen=True)
class Thresholds(Settings):
    """How much may change before a day is flagged, flags of ``python -m etl drift``.

    Raises:
        SettingsError: A value is out of its range.
    """

    # fmt: off
    psi: float = flag("largest PSI of a column", 0.2, least=0, most=math.inf)
    missing_rate: float = flag(
        "largest change of a column's share of rows without a value, up or down", 0.05, least=0,
        most=math.inf
    )
    unseen_share: float = flag(
        "largest increase of a column's share of values out of vocabulary", 0.05, least=0,
        most=math.inf
    )
    label_rate: float = flag(
        "largest relative change of the label rate, beyond the range of the days before", 0.2,
        least=0, most=math.inf
    )
    row_count: float = flag(
        "largest relative change of the number of rows, beyond the range of the days before", 0.3,
        least=0, most=math.inf
    )
    malformed_share: float = flag(
        "largest increase of the share of malformed rows", 0.01, least=0, most=math.inf
    )
    false_alarm_rate: float = flag(
        "probability that a day without drift is flagged by chance, over all measures", 0.01,
        above=0, most=0.5
    )
    ignore: tuple[str, ...] = flag("columns that are not compared", ())
    # fmt: on

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form, None for infinity."""
        values = dataclasses.asdict(self) | {"ignore": list(self.ignore)}
        return {name: None if value == math.inf else value for name, value in values.items()}


@dataclasses.dataclass(frozen=True)
class Counted:
    """What was counted in the training days, or in the day that is compared with them.

    Attributes:
        cells: Rows, or values, in each cell by column.
        missing: Rows without a value, of all, by column.
        unseen: Values out of vocabulary, of all that are present, by categorical column that is
            not hashed; of the training days, in days that the workflow was not fitted on. Columns
            of which nothing is known are left out.
        days: Rows with label 1, and all rows, of each day; (None, rows) of days without labels.
        malformed: Malformed rows, of all.
        whole: Whether the days were read to their end, so that their rows can be compared.
    """

    cells: dict[str, np.ndarray]
    missing: dict[str, Share]
    unseen: dict[str, Share]
    days: list[tuple[int | None, int]]
    malformed: Share
    whole: bool = True


@dataclasses.dataclass(frozen=True)
class Measure:
    """One number of a day beside the same number of the training days.

    Attributes:
        name: "PSI", "missing rate", "unseen share", "label rate", "malformed rows" or "rows"; or
            "repeated day", if the file is a copy of one of the training days.
        column: The column; "" for the day as a whole.
        now: A count and the total that it is out of; of a PSI the rows in each cell; the rows.
        then: The same of the training days, the rows of each of them, the number of the repeated
            one; empty if nothing is known.
        change: The PSI; the difference of the shares; of label rate and rows the relative change
            beyond the range of the training days. None where nothing is known of them.
        limit: The largest change that is not flagged: the threshold, or what chance explains of a
            PSI if that is more. None for any change.
        flagged: Whether the change is above the limit and more than chance explains.
    """

    name: str
    column: str
    now: list[int]
    then: list[int]
    change: float | None
    limit: float | None
    flagged: bool

    @property
    def title(self) -> str:
        """The column, if it is of one, and the name."""
        return f"{self.column} {self.name}".lstrip()


@dataclasses.dataclass(frozen=True)
class Drift:
    """The comparison of a day with what a workflow was fitted on, ``OUT/drift/day_N.json``.

    Equal inputs give equal files.

    Attributes:
        day: The number of the day.
        name: The name of the file of this result, ``day_24``.
        input: Path of the raw file.
        rows: Well-formed rows that were compared.
        generation: The workflow's; None for a workflow without generations.
        workflow_digest: The digest of the workflow.
        baseline_days: The days that were counted.
        thresholds: The :class:`Thresholds`; None for infinity.
        flags: What is flagged, as "cat_3 PSI" or "label rate".
        measures: What was measured: of the day, then of each column.
    """

    day: int
    name: str
    input: str
    rows: int
    generation: int | None
    workflow_digest: str
    baseline_days: list[int]
    thresholds: dict[str, Any]
    flags: list[str]
    measures: list[Measure]

    def measure(self, name: str, column: str = "") -> Measure | None:
        """Return a measure, for example ``drift.measure("PSI", "cat_3")``; None without it."""
        same = (m for m in self.measures if (m.name, m.column) == (name, column))
        return next(same, None)

    def write(self, directory: Path) -> Path:
        """Write the result as JSON, and return its path. Raises :class:`OutputError`."""
        file = directory / f"{self.name}.json"
        FORMAT.write(file, dataclasses.asdict(self))
        return file

    @classmethod
    def read(cls, file: Path) -> Drift:
        """Read a result.

        Raises:
            BadInputError: The file is missing or damaged.
            SchemaError: Another version of this program wrote it.
        """
        remedy = "delete it, or compare the day again with `python -m etl drift`"
        return FORMAT.read(cls, file, remedy)


def compare(now: Counted, then: Counted, thresholds: Thresholds) -> list[Measure]:
    """Compare a day with the training days: the measures of the day, then of each column.

    All measures share the false alarm rate equally (Bonferroni's correction), so a day without
    drift is flagged with at most this probability, however many columns there are.
    """
    tests = len(now.cells) + len(now.missing) + len(now.unseen) + 3
    chance = thresholds.false_alarm_rate / tests
    ((positives, rows),) = now.days
    results = []
    if positives is not None:
        days = [(count, total) for count, total in then.days if count is not None and total]
        counts = [positives, rows], [sum(values) for values in zip(*days, strict=True)]
        limit = thresholds.label_rate
        results.append(_rate("label rate", counts, (positives, rows), days, limit, chance))
    # Of a single day nothing is known of how days differ, and it may be a log of many days.
    if now.whole and then.whole and len(then.days) > 1:
        before = [total for _, total in then.days]
        # Rows come at many moments of a day, at each of them with a small probability.
        moments = 1000 * (rows + sum(before))
        days, counts = [(total, moments) for total in before], ([rows], before)
        results.append(_rate("rows", counts, (rows, moments), days, thresholds.row_count, chance))
    limit = thresholds.malformed_share
    results.append(_share("malformed rows", "", now.malformed, then.malformed, limit, chance))
    for name in then.cells:
        if name in thresholds.ignore:
            continue
        results.append(_psi(name, now.cells[name], then.cells[name], thresholds.psi, chance))
        missing = now.missing[name], then.missing[name]
        limit = thresholds.missing_rate
        results.append(_share("missing rate", name, *missing, limit, chance, size=abs))
        if name in now.unseen:
            unseen = now.unseen[name], then.unseen.get(name)
            limit = thresholds.unseen_share
            results.append(_share("unseen share", name, *unseen, limit, chance))
    return results


def _psi(column: str, now: np.ndarray, then: np.ndarray, limit: float, chance: float) -> Measure:
    index, by_chance = population_stability(then, now, chance)
    limit = max(limit, by_chance)
    counts = now.tolist(), then.tolist()
    return Measure("PSI", column, *counts, index, _finite(limit), index > limit)


def _share(
    name: str,
    column: str,
    now: Share,
    then: Share | None,
    limit: float,
    chance: float,
    size: Callable[[float], float] = float,
) -> Measure:
    change, flagged = None, False
    if then is not None and then[1] and now[1]:
        change = now[0] / now[1] - then[0] / then[1]
        flagged = size(change) > limit and differ(now, then, chance)
    return Measure(name, column, list(now), list(then or ()), change, _finite(limit), flagged)


def _rate(
    name: str,
    counts: tuple[list[int], list[int]],
    now: Share,
    days: Sequence[Share],
    limit: float,
    chance: float,
) -> Measure:
    """Measure the relative change of a rate beyond the range that it had in earlier days.

    Rates differ between days, on week-ends for example, by more than chance. So a day is compared
    with the day that had the nearest rate, and the change is 0 within their range.
    """
    change, flagged = None, False
    mean = sum(count for count, _ in days) / max(1, sum(total for _, total in days))
    if mean and now[1]:
        rate = now[0] / now[1]
        nearest = min(days, key=lambda day: abs(rate - day[0] / day[1]))
        rates = [count / total for count, total in days]
        beyond = not min(rates) <= rate <= max(rates)
        change = (rate - nearest[0] / nearest[1]) / mean if beyond else 0.0
        flagged = abs(change) > limit and differ(now, nearest, chance)
    return Measure(name, "", *counts, change, _finite(limit), flagged)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def compared(spec: FeatureSpec) -> frozenset[str]:
    """Return the columns that are compared: all but those derived from a time.

    A day has one weekday, so these differ from the days before on every day.
    """
    columns = [*spec.dense, *spec.categorical]
    return frozenset(c.name for c in columns if c.derive is None or c.derive.reads != "time")
