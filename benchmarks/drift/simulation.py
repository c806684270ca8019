"""Days without a shift, and the share of them that is flagged all the same.

A draw is a log of one distribution: training days, a day that was held out, and a new day. It goes
through the buckets, bins, measures and flags of `etl.drift`; only the reading of files is left out.
Categorical columns have a few values, a heavy tail (of which every day has unseen values), or
values that are all rare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.etl.drift.artifact import Drift
from nvt_torchrec.etl.drift.baseline import Baseline
from nvt_torchrec.etl.drift.bins import DenseBins, count_bins
from nvt_torchrec.etl.drift.compare import compare
from nvt_torchrec.etl.drift.tally import DayTally
from nvt_torchrec.etl.drift.thresholds import ColumnThresholds, Thresholds
from nvt_torchrec.etl.engines.counting import Counts
from nvt_torchrec.formats.spec.columns import CategoricalColumn, DenseColumn
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.frequency_buckets import FrequencyBuckets

#: Shares of the values of each categorical column.
_ZIPF = 1 / np.arange(1, 1001) ** 1.1
SHARES = [
    np.array([0.5, 0.3, 0.15, 0.049, 0.001]),
    _ZIPF / _ZIPF.sum(),
    np.full(1000, 1 / 1000),
    np.linspace(1, 2, 40) / np.linspace(1, 2, 40).sum(),
]
MISSING = (0.0, 0.001, 0.1, 0.5, 0.9)
LABEL_RATE = 0.03
_DENSE = 3
#: Rows that the bins are made of: those of training logs are a sample as well.
SAMPLED_DENSE_ROWS = 5000
_FIRST_ID = 3
#: No threshold: all that is flagged is beyond chance.
CHANCE_ALONE = Thresholds(ColumnThresholds(0.0, 0.0, 0.0), label_rate=0.0, malformed_share=0.0)


def spec_of(columns: int) -> FeatureSpec:
    """Return a spec with dense columns and this number of categorical ones."""
    return FeatureSpec(
        label="label",
        dense=tuple(DenseColumn(f"int_{j}") for j in range(_DENSE)),
        categorical=tuple(CategoricalColumn(f"cat_{j}") for j in range(columns)),
        dense_transform="log",
    )


@dataclasses.dataclass(frozen=True)
class Draw:
    """A log of one distribution: what is stored of its training days, and a new day."""

    baseline: Baseline
    tally: DayTally

    def drift(self, thresholds: Thresholds) -> Drift:
        """Compare the new day with the training days."""
        day = DayFile(1, "day_1", 1, "day_1")
        return compare(day, "day_1", self.tally, self.baseline, thresholds)


def draw(rng: np.random.Generator, train: int, rows: int) -> Draw:
    """Draw a log with this number of training rows, and of rows in the held-out and new day."""
    spec = spec_of(len(SHARES))
    names = spec.feature_names
    rates = dict(zip(names, np.resize(MISSING, len(names)), strict=True))
    missing = {name: (int(rng.binomial(train, rate)), train) for name, rate in rates.items()}
    buckets, unseen, ids = {}, {}, []
    for name, shares in zip(spec.categorical_names, SHARES, strict=True):
        present = rows - int(rng.binomial(rows, rates[name]))
        counted = rng.multinomial(train - missing[name][0], shares)
        held_out = rng.multinomial(present, shares)
        today = rng.multinomial(present, shares)
        known = counted > 0
        of_ids = np.concatenate([np.zeros(_FIRST_ID, np.int64), np.where(known, today, 0)])
        of_ids[1], of_ids[2] = rows - present, today[~known].sum()
        ids.append(of_ids)
        numbers = np.arange(_FIRST_ID, _FIRST_ID + len(counted))
        buckets[name] = FrequencyBuckets.make(numbers, counted, 0)
        unseen[name] = (int(held_out[~known].sum()), present)
    dense = DenseBins.make(_dense_values(rng, min(train, SAMPLED_DENSE_ROWS)))
    values = _dense_values(rng, rows)
    positives = rng.binomial(train // 3, LABEL_RATE, 3)
    tally = DayTally(
        rows=rows,
        malformed=int(rng.binomial(rows, 0.001)),
        positives=int(rng.binomial(rows, LABEL_RATE)),
        missing=np.array(
            [rng.binomial(rows, rates[name]) for name in spec.dense_names]
            + [of_ids[1] for of_ids in ids]
        ),
        bins=count_bins(values, dense.edges),
        sample=values,
        ids=ids,
        new_values=[Counts(np.empty(0, np.uint32), np.empty(0, np.int64)) for _ in ids],
    )
    baseline = Baseline(
        description=WorkflowDescription(spec, {}, {}, {}, "", {}),
        workflow=Path(),
        dense=dense,
        buckets=buckets,
        stored=frozenset(),  # so that no values are looked up in files
        missing=missing,
        unseen=unseen,
        days={day: (int(count), train // 3) for day, count in enumerate(positives)},
        malformed=(int(rng.binomial(train, 0.001)), train),
    )
    return Draw(baseline, tally)


def _dense_values(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Return continuous values, and in the first column small integers, most of them 0."""
    values = rng.random((_DENSE, rows), np.float32)
    values[0] = np.floor(1 / (1 - 0.99 * values[0])) - 1
    return values


def draws(count: int, train: int, rows: int, seed: int) -> Iterator[Draw]:
    """Draw logs one after the other; the same seed gives the same."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield draw(rng, train, rows)
