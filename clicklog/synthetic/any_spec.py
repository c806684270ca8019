"""The planted click model for a log of any feature spec.

Rows are drawn and scored with the distributions and functions of :mod:`clicklog.synthetic.model`;
only the columns come from the spec. Short lists, used in turn, give what a spec does not say: how
many values a category has, how often a column is missing, how large numbers are. A list column has
up to ``LONGEST_LIST`` values, and the mean of their effects acts on the click.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np

from clicklog.spec.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from clicklog.synthetic.model import (
    CALENDAR_DAYS,
    CALIBRATION_BLOCK,
    CALIBRATION_ROWS,
    MISSING_COUNT,
    MISSING_VALUE,
    SHARES,
    SMALL,
    WEIGHT_DECAY,
    SyntheticSettings,
    Term,
    bias_of,
    calibrated,
    draw_counts,
    hashed_effect,
    key_of,
    replace_late,
    sigmoid,
    soft_step,
    split_missing,
    values_of,
    weigh,
    zipf_ranks,
)
from clicklog.synthetic.sources import (
    HUNDREDTHS,
    NUMBER,
    TIME,
    Source,
    categorical_feature,
    day_begin,
    dense_feature,
    size_of,
    sources_of,
    times_of,
)

LONGEST_LIST = 8
#: Sizes of vocabularies without a bound, used in turn, before ``cardinality_scale``.
_CARDINALITIES = (63, 7_122, 590_152, 155, 39_060, 3_067_956, 10, 1_543)
#: How many times more values than its bound a vocabulary has, so that the bound takes effect.
_BEYOND_CAP, _BEYOND_BUCKETS = 2, 20
_LARGEST = 40_000_000
_MEDIANS = (5.0, 32.0, 1.5, 2_800.0)
_MISSING_DENSE = (0.05, 0.0, 0.22, 0.45)
_MISSING_CATEGORICAL = (0.0, 0.034, 0.12, 0.0, 0.44)
_MISSING_LISTS, _MISSING_TIMES = 0.1, 0.05
#: In days, of ages; and the number of values of categories that only crosses read.
_MEDIAN_AGE, _UNNAMED = 15_000.0, 155
_PAIRS = 6


@dataclasses.dataclass(frozen=True)
class ItemLists:
    """A list of values' codes in each row: int64 offsets [n + 1] from 0, int64 codes."""

    offsets: np.ndarray
    codes: np.ndarray


@dataclasses.dataclass(frozen=True)
class SpecRows:
    """Rows of a log, column by column.

    Attributes:
        label: int64 [n], 0 or 1.
        dense: per column int64 [n], for raw type float in hundredths; ``MISSING_COUNT`` where
            missing.
        categorical: per column codes of values, unsigned 32 bit in int64 [n], ``MISSING_VALUE``
            where missing; or :class:`ItemLists`, empty where missing.
        sources: by name, what was drawn for the columns of the file that features are read from.
        further: by name, what was drawn for what only training reads besides the label.
        day: the number of the day.
    """

    label: np.ndarray
    dense: list[np.ndarray]
    categorical: list[np.ndarray | ItemLists]
    sources: dict[str, np.ndarray | ItemLists] = dataclasses.field(default_factory=dict)
    further: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    day: int = 0

    def __len__(self) -> int:
        return len(self.label)


@dataclasses.dataclass(frozen=True)
class _SpecTerm(Term):
    share: str = ""

    @property
    def kind(self) -> str:
        return self.share


@dataclasses.dataclass(frozen=True)
class SpecModel:
    """A planted model of a spec's columns; like :class:`clicklog.synthetic.model.ClickModel`."""

    spec: FeatureSpec
    settings: SyntheticSettings
    terms: tuple[Term, ...]
    bias: float = 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Share of each kind of signal in the variance of the logit."""
        return _shares({term.kind for term in self.terms})

    @functools.cached_property
    def sources(self) -> dict[str, Source]:
        """The columns of the file from which features are read, by name."""
        return {source.name: source for source in sources_of(self.spec)}

    @functools.cached_property
    def cardinalities(self) -> list[int]:
        """The number of values of each categorical column."""
        return _cardinalities(self.spec, self.settings)

    def logits(
        self, dense: list[np.ndarray], categorical: list[np.ndarray | ItemLists]
    ) -> np.ndarray:
        """Log odds of a click, float64 [n], of columns held as in :class:`SpecRows`."""
        rows = len(dense[0]) if dense else _rows_of(categorical[0])
        logits = np.full(rows, self.bias)
        for term in self.terms:
            product = np.full(rows, term.weight)
            for column, centre, scale in zip(term.columns, term.centres, term.scales, strict=True):
                values = self.function(term, column, dense, categorical)
                product *= (values - centre) * scale
            logits += product
        return logits

    def function(
        self, term: Term, name: str, dense: list, categorical: list[np.ndarray | ItemLists]
    ) -> np.ndarray:
        """Evaluate the function of one column in one term, before centring and scaling."""
        if name in self.spec.dense_names:
            index = self.spec.dense_names.index(name)
            return _step(dense[index], self.spec.dense[index], _in_turn(_MEDIANS, index))
        column = categorical[self.spec.categorical_names.index(name)]
        key = key_of(self.settings.seed, *term.columns, name)
        if isinstance(column, np.ndarray):
            return hashed_effect(column, key)
        sums = np.concatenate([[0.0], np.cumsum(hashed_effect(column.codes, key))])
        lengths = np.maximum(np.diff(column.offsets), 1)
        return (sums[column.offsets[1:]] - sums[column.offsets[:-1]]) / lengths

    def draw(self, day: int, block: int, rows: int) -> tuple[SpecRows, np.ndarray]:
        """Draw rows ``[block * BLOCK_ROWS, … + rows)`` of a day, with their log odds of a click."""
        draws, drawn, dense, categorical = self._draw_columns(day, block, rows)
        logits = self.logits(dense, categorical)
        probabilities = sigmoid(logits)
        label = (draws[0] < probabilities).astype(np.int64)
        further = dict(zip(_further(self.spec), draws[1:], strict=True))
        for name in self.spec.labels[1:]:  # of the same probability, but of its own chance
            further[name] = (further[name] < probabilities).astype(np.int64)
        return SpecRows(label, dense, categorical, drawn, further, day), logits

    def _draw_columns(
        self, day: int, block: int, rows: int
    ) -> tuple[list[np.ndarray], dict, list[np.ndarray], list[np.ndarray | ItemLists]]:
        lists = {
            name
            for column in self.spec.categorical
            if column.multi_hot
            for name in column.reading.sources or (column.name,)
        }
        further = len(_further(self.spec))
        fields = 1 + len(self.sources) + LONGEST_LIST * len(lists) + further
        seed = np.random.SeedSequence(self.settings.seed, spawn_key=(day, block))
        # Row by row, so that a shorter block is a prefix of a longer one.
        uniforms = np.random.Generator(np.random.Philox(seed)).random((rows, fields))
        draws = iter(np.ascontiguousarray(uniforms.T))
        clicks = next(draws)
        drawn: dict[str, np.ndarray | ItemLists] = {}
        for name, source in self.sources.items():
            if source.kind == TIME:
                missing, uniform = split_missing(next(draws), _missing(source, _MISSING_TIMES))
                begin = day_begin(self.spec, self.settings.days, day)
                drawn[name] = times_of(source, uniform, begin, missing)
            elif source.kind == NUMBER:
                drawn[name] = _numbers(next(draws), source)
            elif name in lists:
                share = _missing(source, _MISSING_LISTS)
                missing, uniform = split_missing(next(draws), share)
                items = np.stack([next(draws) for _ in range(LONGEST_LIST)], axis=1)
                lengths = 1 + (LONGEST_LIST * uniform * uniform).astype(np.int64)
                lengths[missing] = 0
                kept = np.arange(LONGEST_LIST) < lengths[:, None]
                offsets = np.concatenate([[0], np.cumsum(lengths)])
                drawn[name] = ItemLists(offsets, self._codes(items[kept], source, day))
            else:
                share = _missing(source, _in_turn(_MISSING_CATEGORICAL, max(source.column, 0)))
                missing, uniform = split_missing(next(draws), share)
                codes = self._codes(uniform, source, day)
                codes[missing] = MISSING_VALUE
                drawn[name] = codes
        dense = [dense_feature(column, drawn, self.sources) for column in self.spec.dense]
        categorical = [
            categorical_feature(column, drawn, self.sources) for column in self.spec.categorical
        ]
        return [clicks, *draws], drawn, dense, categorical

    def _codes(self, uniform: np.ndarray, source: Source, day: int) -> np.ndarray:
        """Return codes of a vocabulary's values, which are the same for columns that share it."""
        if source.column < 0:
            cardinality, name = _UNNAMED, source.name
        else:
            cardinality = self.cardinalities[source.column]
            name = self.spec.categorical[source.column].vocabulary_name
        ranks = zipf_ranks(uniform, cardinality)
        if cardinality > SMALL:
            ranks = replace_late(ranks, day)
        return values_of(ranks, self.settings.seed, name)


def plant_spec(spec: FeatureSpec, settings: SyntheticSettings) -> SpecModel:
    """Plant a model in the columns of a spec: weights, then centres, scales and the bias."""
    cardinalities = dict(zip(spec.categorical_names, _cardinalities(spec, settings), strict=True))
    single = [column.name for column in spec.categorical if not column.multi_hot]
    single.sort(key=lambda name: cardinalities[name])  # few values are learnt within an epoch
    relative = {
        "dense": {(name,): 1.0 for name in spec.dense_names},
        "categorical": {(name,): size**-WEIGHT_DECAY for name, size in cardinalities.items()},
        "interactions": dict.fromkeys(list(itertools.pairwise(single))[:_PAIRS], 1.0),
    }
    weights = weigh(relative, _shares({kind for kind, terms in relative.items() if terms}))
    terms = [_SpecTerm(columns, weight, share=kind) for kind, columns, weight in weights]
    model = SpecModel(spec, settings, tuple(terms))
    sample = [
        model._draw_columns(day, CALIBRATION_BLOCK, CALIBRATION_ROWS)
        for day in range(CALENDAR_DAYS)
    ]
    dense = [np.concatenate(parts) for parts in zip(*(block[2] for block in sample), strict=True)]
    categorical = [_joined(parts) for parts in zip(*(block[3] for block in sample), strict=True)]
    planted = tuple(
        calibrated(term, [model.function(term, name, dense, categorical) for name in term.columns])
        for term in terms
    )
    model = dataclasses.replace(model, terms=planted)
    return dataclasses.replace(model, bias=bias_of(model.logits(dense, categorical), settings))


def _shares(kinds: set[str]) -> dict[str, float]:
    """Return ``SHARES`` of the kinds that a spec has, scaled to a sum of 1."""
    present = {kind: share for kind, share in SHARES.items() if kind in kinds}
    return {kind: share / sum(present.values()) for kind, share in present.items()}


def _cardinalities(spec: FeatureSpec, settings: SyntheticSettings) -> list[int]:
    sizes, direct = {}, {}
    for index, (name, columns) in enumerate(spec.vocabularies.items()):
        size = _bounded(columns[0]) or _in_turn(_CARDINALITIES, index)
        if size > SMALL:
            size = max(SMALL, round(min(size, _LARGEST) * settings.cardinality_scale))
        sizes[name] = size
        for column in columns:
            if column.derive is None:
                direct[(column.reading.sources or (column.name,))[0]] = size
    return [
        min(size_of(column, direct), _LARGEST) if column.derive else sizes[column.vocabulary_name]
        for column in spec.categorical
    ]


def _further(spec: FeatureSpec) -> list[str]:
    """Return what only training reads, besides the first label: labels, weight, the split's key."""
    plan = spec.read_plan(label=True)
    features = {read.source for read in spec.read_plan(label=False).reads}
    key = [] if plan.key is None else [plan.reads[plan.key].source]
    weight = [spec.weight] if spec.weight else []
    return [*spec.labels[1:], *dict.fromkeys(n for n in (*weight, *key) if n not in features)]


def _bounded(column: CategoricalColumn) -> int:
    return _BEYOND_BUCKETS * column.hash_buckets or _BEYOND_CAP * column.max_table_size


def _missing(source: Source, share: float) -> float:
    return 0.0 if source.required else share


def _numbers(uniform: np.ndarray, source: Source) -> np.ndarray:
    share = _missing(source, _in_turn(_MISSING_DENSE, source.column))
    missing, uniform = split_missing(uniform, share)
    factor = HUNDREDTHS if source.hundredths else 1
    numbers = draw_counts(uniform, factor * _in_turn(_MEDIANS, source.column), 0)
    for text in {text for read in source.reads for text in read.nulls}:
        if text.strip().isdecimal():
            missing = missing | (numbers == factor * int(text))
    numbers[missing] = MISSING_COUNT
    return numbers


def _step(numbers: np.ndarray, column: DenseColumn, median: float) -> np.ndarray:
    factor = HUNDREDTHS if column.raw == "float" else 1
    values = np.where(numbers == MISSING_COUNT, column.fill, numbers / factor)
    return soft_step(np.maximum(values, -2.0), _MEDIAN_AGE if column.derive else median)


def _in_turn(values: tuple, index: int):
    return values[index % len(values)]


def _rows_of(column: np.ndarray | ItemLists) -> int:
    return len(column) if isinstance(column, np.ndarray) else len(column.offsets) - 1


def _joined(parts: tuple) -> np.ndarray | ItemLists:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    codes = np.concatenate([part.codes for part in parts])
    return ItemLists(np.concatenate([[0], np.cumsum(lengths)]), codes)
