"""Compare what was counted in a day with a baseline: from counts to flags.

A measure is flagged if it exceeds its threshold *and* what chance explains. All measures of a day
share the false alarm rate equally (Bonferroni's correction): each of ``tests`` measures has the
error rate ``false_alarm_rate / tests``, so a day without drift is flagged with at most the
probability ``false_alarm_rate``, however many columns there are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pyarrow.parquet as pq

from nvt_torchrec.base.stability import differ, population_stability
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.etl.drift.artifact import (
    ColumnDrift,
    Drift,
    Mover,
    PsiDrift,
    Quantile,
    ShareDrift,
)
from nvt_torchrec.etl.drift.baseline import Baseline, Share
from nvt_torchrec.etl.drift.bins import QUANTILES, quantiles
from nvt_torchrec.etl.drift.tally import DayTally
from nvt_torchrec.etl.drift.thresholds import ColumnThresholds, Thresholds
from nvt_torchrec.etl.report.data import undo_transform
from nvt_torchrec.formats.spec.feature_spec import FIRST_OOV_ID, CategoricalColumn, FeatureSpec
from nvt_torchrec.formats.spec.raw_types import as_log_text
from nvt_torchrec.workflows.frequency_buckets import read_counts

#: Values listed for each column.
TOP = 5
#: Rows of a vocabulary that are read at once to look up values.
_BATCH = 1 << 16


def compare(
    day: DayFile,
    name: str,
    tally: DayTally,
    baseline: Baseline,
    thresholds: Thresholds,
    limit_rows: int | None = None,
) -> Drift:
    """Compare a day with what the workflow was fitted on.

    Args:
        day: The file that was counted.
        name: The name of the result.
        tally: What was counted.
        baseline: What it is compared with.
        thresholds: What may change.
        limit_rows: How many rows were asked for; None for all.

    Raises:
        BadInputError: A vocabulary is damaged.
    """
    description, spec = baseline.description, baseline.description.spec
    tests = count_tests(spec)
    measures = _Measures(thresholds.false_alarm_rate / tests)
    columns = [
        _dense_drift(j, tally, baseline, measures, thresholds) for j in range(len(spec.dense))
    ]
    columns += [
        _categorical_drift(j, tally, baseline, measures, thresholds)
        for j in range(len(spec.categorical))
    ]
    label = None
    if tally.positives is not None:
        label = measures.label_rate(
            (tally.positives, tally.rows), baseline.days, thresholds.label_rate
        )
    malformed = measures.increase(
        (tally.malformed, tally.rows + tally.malformed),
        baseline.malformed,
        thresholds.malformed_share,
    )
    whole = {"label rate": label, "malformed rows": malformed}
    flags = [name for name, measure in whole.items() if measure and measure.flagged]
    return Drift(
        day=day.day,
        name=name,
        input=day.source,
        rows=tally.rows,
        limit_rows=limit_rows,
        generation=description.generation,
        workflow_digest=description.digest,
        baseline_days=list(baseline.days),
        tests=tests,
        thresholds=thresholds.to_dict(),
        label_rate=label,
        malformed=malformed,
        columns=columns,
        flags=flags + [f"{column.name} {flag}" for column in columns for flag in column.flags],
    )


def count_tests(spec: FeatureSpec) -> int:
    """Return the number of measures of a day: PSI and missing rate of each column, and others."""
    unseen = sum(not column.hash_buckets for column in spec.categorical)
    return 2 * (len(spec.dense) + len(spec.categorical)) + unseen + 2


@dataclasses.dataclass(frozen=True)
class _Measures:
    """Makes measures; each is flagged by chance with the probability ``error_rate``."""

    error_rate: float

    def psi(self, then: np.ndarray, now: np.ndarray, threshold: float) -> PsiDrift:
        found = population_stability(then, now, self.error_rate)
        return PsiDrift(
            psi=found.psi,
            expected=found.expected,
            limit=_finite(found.limit),
            threshold=_finite(threshold),
            then=then.tolist(),
            now=now.tolist(),
            flagged=found.psi > max(threshold, found.limit),
        )

    def change(self, now: Share, then: Share, threshold: float) -> ShareDrift:
        """Measure a change of a share, up or down."""
        return self._share(now, then, threshold, abs)

    def increase(self, now: Share, then: Share | None, threshold: float) -> ShareDrift:
        """Measure the increase of a share; without a baseline nothing is flagged."""
        return self._share(now, then, threshold, lambda change: change)

    def _share(
        self,
        now: Share,
        then: Share | None,
        threshold: float,
        size_of: Callable[[float], float],
    ) -> ShareDrift:
        if then is None or not then[1] or not now[1]:
            count, total = (None, None) if then is None else then
            return ShareDrift(*now, count, total, None, _finite(threshold), True, False)
        change = now[0] / now[1] - then[0] / then[1]
        by_chance = not differ(now, then, self.error_rate)
        flagged = size_of(change) > threshold and not by_chance
        return ShareDrift(*now, *then, change, _finite(threshold), by_chance, flagged)

    def label_rate(self, now: Share, days: dict[int, Share], threshold: float) -> ShareDrift:
        """Measure the change of the label rate, beyond the range of the days that were counted.

        Label rates differ between days, on week-ends for example, by more than chance. So a day is
        compared with the day that had the nearest rate, and the change is 0 within their range.
        """
        then = (sum(count for count, _ in days.values()), sum(rows for _, rows in days.values()))
        rates = sorted((count / rows, (count, rows)) for count, rows in days.values() if rows)
        if not rates or not then[0] or not now[1]:
            return ShareDrift(*now, *then, None, _finite(threshold), True, False)
        rate = now[0] / now[1]
        nearest, day = rates[0] if rate < rates[0][0] else rates[-1]
        inside = rates[0][0] <= rate <= rates[-1][0]
        change = 0.0 if inside else (rate - nearest) / (then[0] / then[1])
        by_chance = inside or not differ(now, day, self.error_rate)
        flagged = abs(change) > threshold and not by_chance
        return ShareDrift(*now, *then, change, _finite(threshold), by_chance, flagged)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _dense_drift(
    j: int, tally: DayTally, baseline: Baseline, measures: _Measures, thresholds: Thresholds
) -> ColumnDrift:
    name = baseline.description.spec.dense_names[j]
    own = thresholds.of(name)
    now, then = quantiles(tally.sample[j : j + 1])[0], baseline.dense.quantiles[j]
    with np.errstate(over="ignore"):
        raw_now, raw_then = (undo_transform(one, name, baseline.description) for one in (now, then))
    return ColumnDrift(
        name=name,
        kind="dense",
        sampled=True,
        psi=measures.psi(baseline.dense.counts[j], tally.bins[j], own.psi),
        missing=_missing(name, j, tally, baseline, measures, own),
        quantiles=[
            Quantile(share, _finite(float(a) + 0.0), _finite(float(b) + 0.0))  # no -0
            for share, a, b in zip(QUANTILES, raw_then, raw_now, strict=True)
        ],
    )


def _missing(
    name: str,
    index: int,
    tally: DayTally,
    baseline: Baseline,
    measures: _Measures,
    own: ColumnThresholds,
) -> ShareDrift:
    now = (int(tally.missing[index]), tally.rows)
    return measures.change(now, baseline.missing[name], own.missing_rate)


def _categorical_drift(
    j: int, tally: DayTally, baseline: Baseline, measures: _Measures, thresholds: Thresholds
) -> ColumnDrift:
    spec = baseline.description.spec
    column = spec.categorical[j]
    own = thresholds.of(column.name)
    buckets, ids = baseline.buckets[column.name], tally.ids[j]
    psi = measures.psi(buckets.counts, buckets.sum(ids), own.psi)
    missing = _missing(column.name, len(spec.dense) + j, tally, baseline, measures, own)
    if column.hash_buckets:
        return ColumnDrift(column.name, "hashed", True, psi, missing)
    present = int(ids[FIRST_OOV_ID:].sum(dtype=np.int64))
    unseen = int(ids[FIRST_OOV_ID : column.reserved_ids].sum(dtype=np.int64))
    then = baseline.unseen.get(column.name)
    return ColumnDrift(
        name=column.name,
        kind="categorical",
        sampled=column.name not in baseline.stored,
        psi=psi,
        missing=missing,
        unseen=measures.increase((unseen, present), then, own.unseen_share),
        movers=_movers(column, ids, present, baseline),
        new_values=_new_values(column, j, tally, present),
    )


def _movers(
    column: CategoricalColumn, ids: np.ndarray, present: int, baseline: Baseline
) -> list[Mover]:
    """Return the values whose share of the present ones changed most, by falling change.

    Of a column that shares its vocabulary only the counts over all columns are stored, which are
    no share of this column: it has none.
    """
    if column.name not in baseline.stored:
        return []
    observed = baseline.description.vocabularies[column.name].observed
    total = max(1, observed["unique"] + observed["oov"])
    now_of_all = ids[column.reserved_ids :]
    rows, then, now = (np.empty(0, kind) for kind in (np.int64, np.float64, np.float64))
    for first, counts in read_counts(baseline.workflow, baseline.description, column.name):
        of_batch = now_of_all[first : first + len(counts)] / max(1, present)
        rows = np.concatenate([rows, np.arange(first, first + len(counts))])
        then = np.concatenate([then, counts / total])
        now = np.concatenate([now, of_batch])
        keep = np.sort(np.argsort(-np.abs(now - then), kind="stable")[:TOP])
        rows, then, now = rows[keep], then[keep], now[keep]
    values = _values_of(baseline, column, rows)
    order = np.argsort(-np.abs(now - then), kind="stable")
    return [
        Mover(values[int(rows[k])], float(then[k]), float(now[k]))
        for k in order.tolist()
        if then[k] != now[k]
    ]


def _values_of(baseline: Baseline, column: CategoricalColumn, rows: np.ndarray) -> dict[int, str]:
    """Read the values in some rows of a vocabulary, as in a log."""
    vocabulary = baseline.description.vocabularies[column.name]
    found: dict[int, str] = {}
    first = 0
    with pq.ParquetFile(baseline.workflow / vocabulary.file) as file:
        for batch in file.iter_batches(_BATCH, columns=[vocabulary.name]):
            for row in rows[(rows >= first) & (rows < first + len(batch))].tolist():
                found[row] = as_log_text(batch.column(0)[row - first].as_py(), column.raw)
            first += len(batch)
    return found


def _new_values(column: CategoricalColumn, j: int, tally: DayTally, present: int) -> list[Mover]:
    counts = tally.new_values[j]
    top = np.argsort(-counts.counts, kind="stable")[:TOP]
    return [
        Mover(_text_of(counts.values[row], column.raw), None, int(counts.counts[row]) / present)
        for row in top.tolist()
    ]


def _text_of(value: object, raw: str) -> str:
    return as_log_text(value.as_py() if hasattr(value, "as_py") else int(value), raw)  # type: ignore
