"""The numbers behind ``report.html``, from the files of a finished run; the log is not read again.

Memory and time are bounded: vocabularies are streamed, and the distributions of the dense columns
come from a sample of row groups.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import to_numpy
from nvt_torchrec.etl.sample import count_ids, read_sample
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.spec.feature_spec import CategoricalColumn
from nvt_torchrec.formats.spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.formats.workflow_description import Vocabulary, WorkflowDescription

#: Row groups that dense distributions are computed from, and the most rows taken from each.
SAMPLED_ROW_GROUPS, SAMPLED_ROWS = 4, 16 << 10
#: Bins of a histogram.
BINS = 24
#: Values listed per categorical column.
TOP = 5
#: Rows of a vocabulary that are read at once.
_BATCH = 1 << 18
#: Larger values are left out of histograms, as the width of a bin would overflow.
_LARGEST = 1e300


@dataclasses.dataclass(frozen=True)
class Histogram:
    """A histogram of the finite values of the sampled rows, with bins of equal width.

    Attributes:
        shares: Share of the rows in each bin, float64 [bins]; the sum is 1 − below − above.
        low: Lower end of the axis.
        high: Upper end of the axis.
        below: Share of the rows below the axis.
        above: Share of the rows above the axis.
    """

    shares: np.ndarray
    low: float
    high: float
    below: float
    above: float

    @property
    def ends(self) -> list[str]:
        """The ends of the axis with three digits; rounding errors around 0 are shown as 0."""
        least = 1e-3 * (self.high - self.low)
        return [
            "0" if abs(end) < least else f"{end:,.0f}" if abs(end) >= 100 else f"{end:.3g}"
            for end in (self.low, self.high)
        ]


@dataclasses.dataclass(frozen=True)
class Dense:
    """A dense column: its missing share per split, its values before and after the transform."""

    name: str
    missing: dict[str, float]
    before: Histogram
    after: Histogram


@dataclasses.dataclass(frozen=True)
class Categorical:
    """A categorical column.

    Attributes:
        name: The name of the column.
        vocabulary: The name of its vocabulary, which columns may share.
        policy: The policy of its vocabulary, in words.
        values: The number of values in its vocabulary; None for a hashed column.
        table_size: The rows of its embedding table.
        missing: The share of rows without a value, per split.
        oov: The share of ids that are out of vocabulary, per split; None for a hashed column.
        values_for_99: The number of most frequent values that make 99 % of the occurrences of
            all values in the vocabulary; None for a hashed column.
        top: The most frequent values, each with its occurrences in the training days and its
            share of all ids there.
    """

    name: str
    vocabulary: str
    policy: str
    values: int | None
    table_size: int
    missing: dict[str, float]
    oov: dict[str, float] | None
    values_for_99: int | None
    top: list[tuple[str, int, float]]


@dataclasses.dataclass(frozen=True)
class ReportData:
    """What the report shows in addition to the manifest and the timings."""

    dense: list[Dense]
    categorical: list[Categorical]
    sampled_rows: int


def collect(output: Path, manifest: Manifest, description: WorkflowDescription) -> ReportData:
    """Collect the numbers.

    Args:
        output: The directory of the run, with its workflow and all parts.
        manifest: The manifest of the run.
        description: The description of its workflow.
    """
    paths, spec = EtlOutput(output), description.spec
    counted = {
        vocabulary.name: _read_counts(paths.workflow / vocabulary.file, vocabulary)
        for vocabulary in description.vocabularies.values()
    }
    ids = count_ids(paths, manifest, [c.name for c in spec.categorical if c.multi_hot])
    categorical = []
    for column in spec.categorical:
        vocabulary = description.vocabularies[column.name]
        values_for_99, top = counted[vocabulary.name]
        hashed, raw = bool(column.hash_buckets), RAW_TYPES[column.raw]
        categorical.append(
            Categorical(
                name=column.name,
                vocabulary=vocabulary.name,
                policy=describe_policy(column),
                values=None if hashed else vocabulary.values,
                table_size=vocabulary.table_size,
                missing=_shares(manifest, "missing", column.name),
                oov=None
                if hashed
                else _shares(manifest, "out_of_vocabulary", column.name, ids.get(column.name)),
                values_for_99=None if hashed else values_for_99,
                top=[(raw.log_text(value), count, share) for value, count, share in top],
            )
        )
    sample = read_sample(
        paths, manifest, spec.dense_names, row_groups=SAMPLED_ROW_GROUPS, rows=SAMPLED_ROWS
    )
    dense = []
    for name, values in sample.items():
        after = np.sort(
            values.astype(np.float64)
        )  # the transform is monotonic: raw values have the same order
        dense.append(
            Dense(
                name=name,
                missing=_shares(manifest, "missing", name),
                before=_histogram(undo_transform(after, name, description)),
                after=_histogram(after),
            )
        )
    return ReportData(dense, categorical, max(map(len, sample.values()), default=0))


def describe_policy(column: CategoricalColumn) -> str:
    """Describe the vocabulary policy of a column in words."""
    if column.hash_buckets:
        return f"hashed into {column.hash_buckets:,} buckets"
    words = []
    if column.freq_threshold:
        words.append(f"values seen {column.freq_threshold}+ times")
    if column.max_table_size:
        words.append(f"table of up to {column.max_table_size:,} rows")
    if column.num_buckets:
        words.append(f"rest in {column.num_buckets:,} buckets")
    if column.vocabulary:
        words.append(f"vocabulary {column.vocabulary}")
    return ", ".join(words) or "every value"


def _shares(
    manifest: Manifest, key: str, name: str, totals: dict[str, int] | None = None
) -> dict[str, float]:
    """Divide a column's counts under ``key`` by the rows of each split, or by ``totals``."""
    splits = manifest["splits"]
    totals = totals or {split: splits[split]["rows"] for split in SPLITS}
    return {split: splits[split][key][name] / max(1, totals[split]) for split in SPLITS}


def _read_counts(path: Path, vocabulary: Vocabulary) -> tuple[int, list[tuple[Any, int, float]]]:
    """Return how many values make 99 % of the occurrences, and the first values with their counts.

    Later generations of a vocabulary are not sorted by count. There are far fewer different counts
    than values, so memory is bounded by the number of values of each count.
    """
    frequent: list[tuple[int, int]] = []  # count and row of the values that occurred most often
    values_of: Counter[int] = Counter()
    rows = 0
    with pq.ParquetFile(path) as file:
        name = vocabulary.name
        for batch in file.iter_batches(batch_size=_BATCH, columns=[f"{name}_size"]):
            counts = to_numpy(batch.column(0))
            different, number = np.unique(counts, return_counts=True)
            values_of.update(dict(zip(different.tolist(), number.tolist(), strict=True)))
            first = np.argsort(-counts, kind="stable")[:TOP]
            frequent += [(int(counts[i]), rows + int(i)) for i in first]
            frequent = sorted(frequent, key=lambda pair: (-pair[0], pair[1]))[:TOP]
            rows += len(counts)
        values = _read_rows(file, name, [row for _, row in frequent])
    total = max(1, sum(vocabulary.observed.values()))
    top = [(values[row], count, count / total) for count, row in frequent]
    return _values_for(values_of, 0.99 * vocabulary.observed["unique"]), top


def _values_for(values_of: Counter[int], occurrences: float) -> int:
    """Return how many of the most frequent values make so many occurrences."""
    needed = 0
    for count, values in sorted(values_of.items(), reverse=True):
        if count * values >= occurrences:
            whole = int(occurrences // max(1, count))
            return needed + whole + (whole * count < occurrences)
        needed += values
        occurrences -= count * values
    return needed


def _read_rows(file: pq.ParquetFile, name: str, rows: list[int]) -> dict[int, Any]:
    """Return values of a column by their row, reading no other row groups than theirs."""
    found: dict[int, Any] = {}
    begin = 0
    for group in range(file.num_row_groups):
        end = begin + file.metadata.row_group(group).num_rows
        inside = [row for row in rows if begin <= row < end]
        if inside:
            column = file.read_row_group(group, columns=[name]).column(0)
            found |= {row: column[row - begin].as_py() for row in inside}
        begin = end
    return found


def undo_transform(values: np.ndarray, name: str, description: WorkflowDescription) -> np.ndarray:
    """Compute raw values from transformed ones; missing ones become what they were filled with."""
    spec = description.spec
    if name in description.statistics:
        fitted = description.statistics[name]
        values = values * fitted["std"] + fitted["mean"]
    column = spec.dense[spec.dense_names.index(name)]
    values = spec.transform_of(column).x(values, np)
    return np.rint(values) if RAW_TYPES[column.raw].is_whole else values


def _histogram(values: np.ndarray) -> Histogram:
    """Make a histogram of ascending values from the 0.5th to the 99th percentile.

    A wider axis would show outliers only. Values that are not finite are left out.
    """
    values = values[np.abs(values) < _LARGEST]
    total = len(values)
    if not total:
        return Histogram(np.zeros(BINS), 0.0, 1.0, 0.0, 0.0)
    low, high = (float(values[round((total - 1) * share)]) for share in (0.005, 0.99))
    if high <= low:
        high = low + 1
    edges = np.linspace(low, high, BINS + 1)
    places = np.searchsorted(values, edges)
    places[-1] = np.searchsorted(values, high, "right")  # the last bin has both its ends
    shares = np.diff(places) / total
    return Histogram(shares, low, high, places[0] / total, 1 - places[-1] / total)
