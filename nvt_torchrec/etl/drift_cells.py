"""Drift: the cells in which values are counted, and by how much chance makes counts differ.

Cells of a dense column are ten bins at the deciles of the training rows, in the values that the
model sees: transformed, missing ones filled. Cells of a categorical column are :class:`Buckets` of
its ids by frequency.

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
import math

import numpy as np
from scipy.special import chdtri, rel_entr

from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.columns import FIRST_OOV_ID

#: A count, and the total that it is out of.
Share = tuple[int, int]
#: Bins of a dense column, and buckets of frequent values. Ten is customary for the PSI.
BINS = BUCKETS = 10
#: The bucket of rare values and those out of vocabulary; that of padding and null, never compared.
REST, ABSENT = BUCKETS, BUCKETS + 1
#: Occurrences, in the half that decides, from which on a value is frequent. The order of rarer
#: values is mostly chance.
LEAST_COUNT = 10
#: The most values in the buckets of frequent values, which bounds the memory.
MOST_VALUES = 1 << 16
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
    limit = float(chdtri(freedom, error_rate / _HEAVIER)) * (1 / m + 1 / n)
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
    if not now[1] or not then[1]:
        return False
    observed = np.array([[count, total - count] for count, total in (now, then)], np.float64)
    expected = np.outer(observed.sum(axis=1), observed.sum(axis=0)) / observed.sum()
    return 2 * float(rel_entr(observed, expected).sum()) > float(chdtri(1, error_rate))


@dataclasses.dataclass(frozen=True)
class Measure:
    """One number of a day beside the same number of the training days.

    Attributes:
        name: "PSI", "missing rate", "unseen share", "label rate", "malformed rows" or "rows".
        column: The column; "" for the day as a whole.
        now: A count and the total that it is out of; of a PSI the rows in each cell; the rows.
        then: The same of the training days, the rows of each of them; empty if nothing is known.
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


def measure_psi(
    column: str, now: np.ndarray, then: np.ndarray, limit: float, chance: float
) -> Measure:
    """Measure the PSI of a column; ``limit`` is what must be exceeded beside chance."""
    index, by_chance = population_stability(then, now, chance)
    limit = max(limit, by_chance)
    cells = now.tolist(), then.tolist()
    return Measure("PSI", column, *cells, index, _finite(limit), index > limit)


def measure_share(
    name: str,
    column: str,
    now: Share,
    days: list[Share],
    limit: float,
    chance: float,
    *,
    relative: bool = False,
    rises: bool = False,
) -> Measure:
    """Measure the change of a share beyond the range that it had in earlier days.

    Shares differ between days, on week-ends for example, by more than chance. So a day is compared
    with the day that had the nearest share, and the change is 0 within their range.

    Args:
        name: The name of the measure.
        column: The column; "" for the day as a whole.
        now: The share.
        days: That of each earlier day, or of all of them; none if nothing is known.
        limit: The largest change that is not flagged.
        chance: The probability of a flag for samples of the same distribution.
        relative: Measure the change as a part of the share of all days.
        rises: Flag only a larger share.
    """
    change, flagged = None, False
    then = [sum(values) for values in zip(*days, strict=True)]
    days = [day for day in days if day[1]]
    unit = then[0] / then[1] if relative and days else 1.0
    if days and now[1] and unit:
        shares = [count / total for count, total in days]
        share = now[0] / now[1]
        nearest = min(max(share, min(shares)), max(shares))
        change = (share - nearest) / unit
        exceeds = (change if rises else abs(change)) > limit
        flagged = exceeds and differ(now, days[shares.index(nearest)], chance)
    return Measure(name, column, list(now), then, change, _finite(limit), flagged)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def compared(spec: FeatureSpec) -> frozenset[str]:
    """Return the columns that are compared: all but those derived from a time.

    A day has one weekday, so these differ from the days before on every day.
    """
    return frozenset(
        column.name
        for column in spec.features
        if (column.derive is None or column.derive.reads != "time")
        and column not in spec.aggregates
    )


@dataclasses.dataclass(frozen=True)
class Bins:
    """Bins of a dense column at the deciles of a sample.

    A value is in bin k if it is greater than k edges. Where values repeat, so do edges, and bins
    between them are empty.

    Attributes:
        edges: float32 [BINS − 1].
        counts: int64 [BINS], the values of the sample in each bin.
    """

    edges: np.ndarray
    counts: np.ndarray

    @classmethod
    def make(cls, sample: np.ndarray) -> Bins:
        """Make the bins of some values, float32 [n]."""
        shares = np.arange(1, BINS) / BINS
        edges = np.quantile(sample, shares, method="inverted_cdf").astype(np.float32)
        return cls(edges, cls(edges, edges).count(sample))

    def count(self, values: np.ndarray) -> np.ndarray:
        """Count values, float32 [n], in each bin: int64 [BINS]."""
        return np.bincount(np.searchsorted(self.edges, values), minlength=BINS)


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The ids of a column in a few buckets by the frequency that they had when counted.

    The most frequent values are in :data:`BUCKETS` buckets of about equal share, and the rest,
    which is rare or out of vocabulary, in one more.

    Values that are chosen for their high counts have high counts by chance, too: on another day
    their share is lower without any shift (regression to the mean; for values seen once see Good,
    The population frequencies of species, Biometrika 40, 1953). So the counts are split: each
    occurrence is put into one of two halves at random. One half decides which values are in which
    bucket, the other one, which is independent of it, how large the share of each bucket is (data
    thinning: Neufeld et al., Journal of Machine Learning Research 25, 2024). The shares are then
    unbiased, even that of the rest, whose values another day may have seen for the first time.

    Attributes:
        of_ids: uint8 [n], the bucket of each id; larger ids are in that of the last one, the rest.
        counts: int64 [BUCKETS + 1], how often the values of each bucket occurred in the half of
            the rows that decides on the shares.
    """

    of_ids: np.ndarray
    counts: np.ndarray

    @classmethod
    def make(cls, counts: np.ndarray, first: int, unseen: int) -> Buckets:
        """Make the buckets of counted ids.

        Args:
            counts: How often each id occurred, int64 [n], in the order of the ids.
            first: The first id.
            unseen: How often values without an id of their own occurred.
        """
        rng = np.random.default_rng(0)  # the same split every time
        frequent = np.flatnonzero(counts >= LEAST_COUNT)  # others cannot be in the head
        rare = unseen + int(counts.sum()) - int(counts[frequent].sum())
        deciding = rng.binomial(counts[frequent], 0.5)
        measuring = counts[frequent] - deciding
        head = np.argsort(-deciding, kind="stable")[:MOST_VALUES]  # of equal counts, smaller ids
        head = head[deciding[head] >= LEAST_COUNT]
        rest = int(measuring.sum()) - int(measuring[head].sum())
        total = int(deciding[head].sum()) + rest + rare // 2  # only buckets of equal share need it
        before = np.cumsum(deciding[head]) - deciding[head]
        buckets = np.minimum(before * BUCKETS // max(1, total), BUCKETS - 1)
        sums = np.zeros(BUCKETS + 1, np.int64)
        np.add.at(sums, buckets, measuring[head])
        sums[REST] = rest + int(rng.binomial(rare, 0.5))
        ids = first + frequent[head]
        of_ids = np.full(max(first, int(ids.max(initial=0)) + 1) + 1, REST, np.uint8)
        of_ids[:FIRST_OOV_ID] = ABSENT
        of_ids[ids] = buckets
        return cls(of_ids, sums)

    def count(self, ids: np.ndarray) -> np.ndarray:
        """Count the ids of a column in each bucket but :data:`ABSENT`: int64 [BUCKETS + 1]."""
        buckets = self.of_ids[np.minimum(ids, len(self.of_ids) - 1)]
        return np.bincount(buckets, minlength=BUCKETS + 2)[:ABSENT]
