"""The planted click model: the distribution of synthetic rows and of their clicks.

Columns are drawn independently of each other. A row's click then follows

    p(click) = sigmoid(bias + sum_f w_f x_f + sum_(a,b) w_ab y_a y_b)

where each ``x_f`` is a function of one column (an effect of the category, a soft step of the count)
and each pair multiplies a function of one column with a function of another. All functions are
centred and scaled to unit variance on a calibration sample, so the variance of the logit is the sum
of the squared weights, and the share of each kind of signal is the one written in ``SHARES``.

The functions of categories are hashes of ``(seed, column, value)``, not tables: they need no memory
at any cardinality, are defined for values that no training day has, and allow scoring rows read
back from a file, given the settings.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import SettingsError

#: Distinct values per categorical column in MLPerf's DLRM benchmark, its cap of 40 M included.
MLPERF_CARDINALITIES = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956),
    *(405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000),
    *(590_152, 12_973, 108, 36),
)
#: Columns of at most this many values are not scaled, and all their values occur from day 0 on.
SMALL = 200

#: Share of missing values per column, rounded from Criteo's Kaggle release.
MISSING_DENSE = (0.45, 0.0, 0.21, 0.22, 0.026, 0.22, 0.043, 0.0005, 0.043, 0.45, 0.043, 0.765, 0.22)
MISSING_CATEGORICAL = (
    *(0.0, 0.0, 0.034, 0.034, 0.0, 0.12, 0.0, 0.0, 0.0, 0.0, 0.0, 0.034, 0.0),
    *(0.0, 0.0, 0.034, 0.0, 0.0, 0.44, 0.44, 0.034, 0.765, 0.0, 0.034, 0.44, 0.44),
)
#: Medians of the counts, and the smallest value of each column (Criteo has counts of -1 and -2).
MEDIANS = (1.5, 5.0, 6.0, 4.0, 2800.0, 32.0, 3.0, 7.0, 38.0, 0.8, 1.5, 0.5, 4.0)
MINIMA = (0, -2, 0, 0, 0, 0, 0, 0, 0, 0, 0, -1, 0)
MAX_COUNT = 999_999

#: Codes of missing values, outside of the columns' ranges.
MISSING_COUNT = np.int64(-(2**31))
MISSING_VALUE = np.int64(2**32)

#: The log's calendar. A late value appears on its first day and on all later days.
CALENDAR_DAYS = 24
LATE_EVERY = 4  # one rank in four is late
FIRST_LATE_DAY = 19  # first day of the most frequent late value

#: Rows drawn from one random stream. Part of the format: changing it changes every log.
BLOCK_ROWS = 8_192
CALIBRATION_BLOCK = 2**31  # beyond the blocks of every day
CALIBRATION_ROWS = 2_048  # for each day of the calendar

#: Standard deviation of the logit, and how its variance is shared among the kinds of signal.
SIGNAL = 1.6
SHARES = {"dense": 0.15, "categorical": 0.55, "interactions": 0.30}
#: The weight of a categorical column falls with this power of its cardinality, because less of the
#: effect of rare values can be learnt.
WEIGHT_DECAY = 0.2

#: Interacting columns. One of each pair has few values, so that the product is learnt within an
#: epoch.
PAIRS = (
    *(("cat_8", "cat_5"), ("cat_24", "cat_12"), ("cat_15", "cat_18")),
    *(("cat_25", "cat_16"), ("cat_17", "cat_12"), ("cat_3", "cat_5")),
)

DENSE = len(MEDIANS)
CATEGORICAL = len(MLPERF_CARDINALITIES)
_FIELDS = DENSE + CATEGORICAL + 1


@dataclasses.dataclass(frozen=True)
class SyntheticSettings(Settings):
    """The settings that determine the bytes of a synthetic log, flags of ``etl synthesize``.

    A log of fewer days, or of fewer rows per day, is a prefix of a longer one.

    Raises:
        SettingsError: A value is out of its range.
    """

    # fmt: off
    days: int = flag(
        f"number of days, 1 to {CALENDAR_DAYS}; the last one becomes valid and test", CALENDAR_DAYS,
        minimum=1, maximum=CALENDAR_DAYS
    )
    rows_per_day: int = flag(
        "rows of each day; a row takes about 240 bytes", 50_000, minimum=1,
        maximum=BLOCK_ROWS * CALIBRATION_BLOCK
    )
    seed: int = flag("seed of the click model and of the rows", 0, minimum=0, maximum=2**63 - 1)
    cardinality_scale: float = flag(
        f"factor on MLPerf's cardinalities above {SMALL}; 1 for the full ones", 0.0005, above=0,
        maximum=1
    )
    base_rate: float = flag(
        "share of clicks; Criteo's Kaggle log has 0.256, its 1 TB log 0.034", 0.256, minimum=0.001,
        maximum=0.999
    )
    events: bool = flag(
        "instead of Criteo's columns: clicks that depend on what the same user did before, as "
        "day_0.csv …, and spec.toml to read them by; the log is made in memory", False,
        excludes=("cardinality_scale", "base_rate")
    )
    tables: bool = flag(
        "instead of Criteo's columns: clicks that depend on the price of an item at the time, its "
        "brand, and the user's segment, which are in items.csv and users.csv beside the log", False,
        excludes=("events", "cardinality_scale", "base_rate")
    )
    vectors: bool = flag(
        "with --tables: many items, and clicks that also depend on their texts, whose embeddings "
        "of 16 numbers are in texts.parquet", False
    )
    late_clicks: bool = flag(
        "with --events or --tables: clicks in files of their own, clicks_0.csv …, up to 6 hours "
        "after the row that they belong to", False
    )
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.late_clicks and not (self.events or self.tables):
            raise SettingsError("--late_clicks without --events or --tables", "add one of them")
        if self.vectors and not self.tables:
            raise SettingsError("--vectors without --tables", "add --tables")

    @property
    def cardinalities(self) -> tuple[int, ...]:
        """The number of values of each categorical column."""
        sizes = []
        for size in MLPERF_CARDINALITIES:
            if size > SMALL:
                size = max(SMALL, round(size * self.cardinality_scale))
            sizes.append(size)
        return tuple(sizes)


@dataclasses.dataclass(frozen=True)
class SyntheticRows:
    """Rows of a log, column by column, as a reader of the files returns them.

    Attributes:
        label: int64 [n], 0 or 1.
        dense: int64 [13, n]; ``MISSING_COUNT`` where missing.
        categorical: int64 [26, n], unsigned 32 bit; ``MISSING_VALUE`` where missing.
    """

    label: np.ndarray
    dense: np.ndarray
    categorical: np.ndarray

    def __len__(self) -> int:
        return len(self.label)


@dataclasses.dataclass(frozen=True)
class Term:
    """``weight`` times the product of one or two planted functions of columns.

    Attributes:
        columns: Names of the columns, ``int_j`` or ``cat_c``.
        weight: Standard deviation of the term over the rows of a log.
        centres: Per column, mean of its raw function over the calibration sample.
        scales: Per column, one over its standard deviation.
    """

    columns: tuple[str, ...]
    weight: float
    centres: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class SyntheticModel:
    """A planted model, which draws rows and scores them. Made by :func:`plant`."""

    settings: SyntheticSettings
    terms: tuple[Term, ...]
    bias: float = 0.0

    def logits(self, dense: np.ndarray, categorical: np.ndarray) -> np.ndarray:
        """Return log odds of a click, float64 [n], for columns as in :class:`SyntheticRows`."""
        logits = np.full(dense.shape[1], self.bias)
        for term in self.terms:
            product = np.full(len(logits), term.weight)
            for column, centre, scale in zip(term.columns, term.centres, term.scales, strict=True):
                values = _evaluate(self.settings.seed, term, column, dense, categorical)
                product *= (values - centre) * scale
            logits += product
        return logits

    def draw(self, day: int, block: int, rows: int) -> tuple[SyntheticRows, np.ndarray]:
        """Draw rows ``[block * BLOCK_ROWS, … + rows)`` of a day, with their log odds of a click.

        The result depends only on the arguments and the settings except ``days`` and
        ``rows_per_day``.
        """
        uniform, dense, categorical = _draw_columns(self.settings, day, block, rows)
        logits = self.logits(dense, categorical)
        label = (uniform < sigmoid(logits)).astype(np.int64)
        return SyntheticRows(label, dense, categorical), logits


def plant(settings: SyntheticSettings) -> SyntheticModel:
    """Plant the model that the settings describe: weights, then centres, scales and the bias."""
    sample = [
        _draw_columns(settings, day, CALIBRATION_BLOCK, CALIBRATION_ROWS)
        for day in range(CALENDAR_DAYS)
    ]
    dense = np.concatenate([block[1] for block in sample], axis=1)
    categorical = np.concatenate([block[2] for block in sample], axis=1)
    terms = []
    for term in _make_terms(settings):
        functions = [_evaluate(settings.seed, term, c, dense, categorical) for c in term.columns]
        centres = tuple(float(values.mean()) for values in functions)
        scales = tuple(float(1 / values.std()) for values in functions)
        terms.append(dataclasses.replace(term, centres=centres, scales=scales))
    model = SyntheticModel(settings, tuple(terms))
    return dataclasses.replace(model, bias=_find_bias(model.logits(dense, categorical), settings))


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of log odds, float64."""
    return 1 / (1 + np.exp(-logits))


def _make_terms(settings: SyntheticSettings) -> list[Term]:
    """Return all terms; relative weights divide the variance within a kind, signs alternate."""
    categorical: dict[tuple[str, ...], float] = {}
    for c, size in enumerate(settings.cardinalities):
        categorical[(f"cat_{c}",)] = size**-WEIGHT_DECAY
    relative: dict[str, dict[tuple[str, ...], float]] = {
        "dense": {(f"int_{j}",): 1.0 for j in range(DENSE)},
        "categorical": categorical,
        "interactions": dict.fromkeys(PAIRS, 1.0),
    }
    terms = []
    for kind, share in SHARES.items():
        weights = relative[kind]
        unit = SIGNAL * math.sqrt(share / sum(weight**2 for weight in weights.values()))
        for i, (columns, weight) in enumerate(weights.items()):
            sign = -1 if i % 2 else 1
            terms.append(Term(columns, sign * weight * unit))
    return terms


def _find_bias(logits: np.ndarray, settings: SyntheticSettings) -> float:
    """Find the bias that gives the calibration sample the base rate, by bisection."""
    low, high = -30.0, 30.0
    for _ in range(50):
        middle = (low + high) / 2
        if sigmoid(logits + middle).mean() < settings.base_rate:
            low = middle
        else:
            high = middle
    return low


def _draw_columns(
    settings: SyntheticSettings, day: int, block: int, rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw uniform numbers for the label, and the dense and categorical columns, of a block."""
    seed = np.random.SeedSequence(settings.seed, spawn_key=(day, block))
    # Drawn row by row, so that a shorter block is a prefix of a longer one.
    uniforms = np.random.Generator(np.random.Philox(seed)).random((rows, _FIELDS))
    uniforms = np.ascontiguousarray(uniforms.T)
    dense = np.empty((DENSE, rows), np.int64)
    categorical = np.empty((CATEGORICAL, rows), np.int64)
    for j, share in enumerate(MISSING_DENSE):
        missing, uniform = _split_missing(uniforms[1 + j], share)
        dense[j] = _draw_counts(uniform, MEDIANS[j], MINIMA[j])
        dense[j, missing] = MISSING_COUNT
    for c, cardinality in enumerate(settings.cardinalities):
        missing, uniform = _split_missing(uniforms[1 + DENSE + c], MISSING_CATEGORICAL[c])
        ranks = _draw_zipf_ranks(uniform, cardinality)
        if MLPERF_CARDINALITIES[c] > SMALL:
            ranks = _replace_late(ranks, day)
        categorical[c] = draw_values(ranks, settings.seed, c)
        categorical[c, missing] = MISSING_VALUE
    return uniforms[0], dense, categorical


def _split_missing(uniform: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Return, from one draw, where a value is missing, and uniforms in [0, 1) for the others."""
    if not share:
        return np.zeros(len(uniform), bool), uniform
    return uniform < share, np.maximum(uniform - share, 0) / (1 - share)


def _draw_counts(uniform: np.ndarray, median: float, minimum: int) -> np.ndarray:
    """Return heavy-tailed counts: a log-logistic distribution of shape 4/3, rounded down.

    The quantile function is ``median * (u / (1 - u)) ** (3 / 4)``, computed with square roots only:
    all machines round them correctly, so that a seed gives the same bytes on every machine.
    """
    root = np.sqrt(uniform / (1 - uniform))
    counts = np.minimum(root * np.sqrt(root) * (median - minimum), MAX_COUNT)
    return counts.astype(np.int64) + minimum


def _draw_zipf_ranks(uniform: np.ndarray, cardinality: int) -> np.ndarray:
    """Return ranks [0, cardinality) with probabilities close to ``(rank + 1) ** -1.5``, int64.

    Inverts the bounded Pareto distribution of that density on [1, cardinality + 1) and rounds down.
    With the exponent 1.5 the inverse is a square: correctly rounded on every machine.
    """
    y = 1 - uniform * (1 - 1 / math.sqrt(cardinality + 1))
    return np.minimum((1 / (y * y)).astype(np.int64) - 1, cardinality - 1)


def _replace_late(ranks: np.ndarray, day: int) -> np.ndarray:
    """Replace late values whose first day is after ``day`` by their neighbour in rank.

    The late values, by rank, first appear on the days from 1 to 23 in turn, beginning with day 19,
    so that the most frequent late values still have training days, and new values are about 0.7 %
    of the last day. Their neighbours occur from day 0 on.
    """
    # Remainders are computed by floor division, which NumPy vectorises for a constant; it does not
    # vectorise %.
    generation = ranks // LATE_EVERY
    late = ranks - generation * LATE_EVERY == LATE_EVERY - 1
    generation += FIRST_LATE_DAY - 1
    first_day = 1 + generation - generation // (CALENDAR_DAYS - 1) * (CALENDAR_DAYS - 1)
    return ranks - (late & (first_day > day))


def draw_values(ranks: np.ndarray, seed: int, column: int | str) -> np.ndarray:
    """Return the values of ranks: a bijection of 32 bits that looks like a hash, int64.

    It is MurmurHash3's finaliser (Appleby, 2011) after an exclusive or with a key.
    """
    from nvt_torchrec.base.hashing import finish_murmur3  # imports Numba

    keyed = ranks.astype(np.uint32) ^ np.uint32(derive_key(seed, "value", column) >> 32)
    return finish_murmur3.py_func(keyed, 0).astype(np.int64)


def _evaluate(
    seed: int, term: Term, column: str, dense: np.ndarray, categorical: np.ndarray
) -> np.ndarray:
    """Evaluate the function of one column in one term, before centring and scaling."""
    index = int(column[4:])
    if column.startswith("cat"):
        return _hash_effect(categorical[index], derive_key(seed, *term.columns, column))
    return _compute_soft_step(dense[index], MEDIANS[index])


def _compute_soft_step(counts: np.ndarray, median: float) -> np.ndarray:
    """Return a bounded, smooth step of the log count, around the column's median.

    Missing values are 0 and nothing lies below -2, as after the ETL's default transform, so that a
    model sees all that determines the click.
    """
    t = np.log(np.where(counts == MISSING_COUNT, 0, counts) + 3.0) - math.log(median + 3)
    return t / (1 + np.abs(t))


def _hash_effect(values: np.ndarray, key: int) -> np.ndarray:
    """Return a uniform number in [-0.5, 0.5) for each value."""
    from nvt_torchrec.base.hashing import splitmix64  # imports Numba

    mixed = splitmix64.py_func(values.view(np.uint64) + np.uint64(key))
    return (mixed >> np.uint64(11)) * 2.0**-53 - 0.5


@functools.cache
def derive_key(seed: int, *names: str | int) -> int:
    """Return 64 bits that depend on the seed and the names."""
    text = "/".join(map(str, names)).encode()
    words = np.random.SeedSequence([seed, *text]).generate_state(1, np.uint64)
    return int(words[0])
