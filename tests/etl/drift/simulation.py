"""Days without a shift: what is counted in training days, and in a new day like them.

It goes through the buckets, bins, measures and flags of drift; only the reading of files is left
out. Categorical columns have a few values, a heavy tail (of which every day has unseen values), or
values that are all rare.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nvt_torchrec.etl.day_drift import Counted
from nvt_torchrec.etl.drift_cells import Bins, Buckets

_ZIPF = 1 / np.arange(1, 1001) ** 1.1
#: Shares of the values of each categorical column.
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


def draws(count: int, train: int, rows: int, seed: int) -> Iterator[tuple[Counted, Counted]]:
    """Draw new days and the training days before them; the same seed gives the same."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield _draw(rng, train, rows)


def _draw(rng: np.random.Generator, train: int, rows: int) -> tuple[Counted, Counted]:
    names = [f"int_{j}" for j in range(_DENSE)]
    bins = list(map(Bins.make, _dense_values(rng, min(train, SAMPLED_DENSE_ROWS))))
    values = _dense_values(rng, rows)
    then = {name: of.counts for name, of in zip(names, bins, strict=True)}
    now = {name: of.count(row) for name, of, row in zip(names, bins, values, strict=True)}
    missing_then, missing_now, unseen_then, unseen_now = {}, {}, {}, {}
    for name, rate in zip(names, MISSING, strict=False):
        missing_then[name] = (int(rng.binomial(train, rate)), train)
        missing_now[name] = (int(rng.binomial(rows, rate)), rows)
    for j, shares in enumerate(SHARES):
        name, rate = f"cat_{j}", MISSING[(_DENSE + j) % len(MISSING)]
        missing_then[name] = (int(rng.binomial(train, rate)), train)
        missing_now[name] = (int(rng.binomial(rows, rate)), rows)
        present = rows - missing_now[name][0]
        counted = rng.multinomial(train - missing_then[name][0], shares)
        held_out, today = (rng.multinomial(present, shares) for _ in range(2))
        buckets = Buckets.make(counted, _FIRST_ID, 0)
        ids = np.where(counted > 0, np.arange(len(counted)) + _FIRST_ID, _FIRST_ID - 1)
        then[name] = buckets.counts
        now[name] = buckets.count(np.repeat(ids, today).astype(np.int32))
        unseen_then[name] = (int(held_out[counted == 0].sum()), present)
        unseen_now[name] = (int(today[counted == 0].sum()), present)
    return (
        _counted(rng, now, missing_now, unseen_now, 1, rows, rows),
        _counted(rng, then, missing_then, unseen_then, 3, rows, train),
    )


def _counted(
    rng: np.random.Generator, cells, missing, unseen, days: int, rows_of_day: int, rows: int
) -> Counted:
    """Return what was counted, with days of about so many rows, some of them with label 1."""
    totals = (int(rng.poisson(rows_of_day)) for _ in range(days))
    labels = [(int(rng.binomial(total, LABEL_RATE)), total) for total in totals]
    malformed = int(rng.binomial(rows, 0.001)), rows
    return Counted(cells, missing, unseen, labels, [total for _, total in labels], malformed)


def _dense_values(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Return continuous values, and in the first column small integers, most of them 0."""
    values = rng.random((_DENSE, rows), np.float32)
    values[0] = np.floor(1 / (1 - 0.99 * values[0])) - 1
    return values
