"""The numbers behind ``report.html``, from the files of a finished run; the log is not read again.

Memory and time are bounded: vocabularies are streamed, and the distributions of the dense columns
come from a sample of row groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from clicklog.arrays import to_numpy
from clicklog.etl_output import EtlOutput
from clicklog.spec.feature_spec import CategoricalColumn
from clicklog.spec.raw_types import as_log_text
from clicklog.splits import SPLITS
from workflows.dense import DENSE_SHIFT
from workflows.description import Vocabulary, WorkflowDescription

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


def collect(output: Path, manifest: dict[str, Any], description: WorkflowDescription) -> ReportData:
    """Collect the numbers.

    Args:
        output: The directory of the run, with its workflow and all parts.
        manifest: The manifest of the run.
        description: The description of its workflow.
    """
    split_root = EtlOutput(output).splits
    spec = description.spec
    counted = {
        vocabulary.name: _read_counts(EtlOutput(output).workflow / vocabulary.file, vocabulary)
        for vocabulary in description.vocabularies.values()
    }
    ids = _count_ids(split_root, manifest, [c.name for c in spec.categorical if c.multi_hot])
    categorical = []
    for column in spec.categorical:
        vocabulary = description.vocabularies[column.name]
        values_for_99, top = counted[vocabulary.name]
        hashed = bool(column.hash_buckets)
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
                top=[(as_log_text(value, column.raw), count, share) for value, count, share in top],
            )
        )
    sample = _sample(split_root, manifest)
    dense = []
    for name, values in _read(sample, spec.dense_names).items():
        after = np.sort(values)  # the transform is monotonic: raw values have the same order
        dense.append(
            Dense(
                name=name,
                missing=_shares(manifest, "missing", name),
                before=_histogram(undo_transform(after, name, description)),
                after=_histogram(after),
            )
        )
    return ReportData(dense, categorical, sum(rows for *_, rows in sample))


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
    manifest: dict[str, Any], key: str, name: str, totals: dict[str, int] | None = None
) -> dict[str, float]:
    """Divide a column's counts under ``key`` by the rows of each split, or by ``totals``."""
    splits = manifest["splits"]
    totals = totals or {split: splits[split]["rows"] for split in SPLITS}
    return {split: splits[split][key][name] / max(1, totals[split]) for split in SPLITS}


def _count_ids(
    split_root: Path, manifest: dict[str, Any], names: list[str]
) -> dict[str, dict[str, int]]:
    """Count the ids in each split, for columns of lists; footers count an empty list as a value."""
    if not names:
        return {}
    totals = {
        name: {split: -manifest["splits"][split]["missing"][name] for split in SPLITS}
        for name in names
    }
    for part in manifest["files"]:
        footer = pq.read_metadata(split_root / part["file"])
        for group in map(footer.row_group, range(footer.num_row_groups)):
            for chunk in map(group.column, range(group.num_columns)):
                name = chunk.path_in_schema.split(".")[0]
                if name in totals:
                    totals[name][part["file"].split("/")[0]] += chunk.num_values
    return totals


def _read_counts(path: Path, vocabulary: Vocabulary) -> tuple[int, list[tuple[Any, int, float]]]:
    """Return how many values make 99 % of the occurrences, and the first values with their counts.

    Values are sorted by falling count, so one pass in batches is enough.
    """
    observed = vocabulary.observed
    total = max(1, sum(observed.values()))
    wanted, seen, needed = 0.99 * observed["unique"], 0, 0
    top: list[tuple[Any, int, float]] = []
    with pq.ParquetFile(path) as file:
        names = [vocabulary.name, f"{vocabulary.name}_size"]
        for batch in file.iter_batches(batch_size=TOP, columns=names):
            values, counts = batch.column(0).to_pylist(), batch.column(1).to_pylist()
            top = [(v, n, n / total) for v, n in zip(values, counts, strict=True)]
            break
        for batch in file.iter_batches(batch_size=_BATCH, columns=names[1:]):
            running = seen + np.cumsum(to_numpy(batch.column(0)))
            inside = int(np.searchsorted(running, wanted)) + 1
            needed += min(inside, len(running))
            if inside <= len(running):
                break
            seen = int(running[-1])
    return needed, top


def _sample(split_root: Path, manifest: dict[str, Any]) -> list[tuple[Path, int]]:
    """Choose training parts at equal distances, and how many rows to take from each."""
    train = [part for part in manifest["files"] if part["file"].startswith("train/")]
    files = [part["file"] for part in train if part["rows"]]  # all rows of a part may be rejected
    count = min(SAMPLED_ROW_GROUPS, len(files))
    paths = [split_root / files[i * len(files) // count] for i in range(count)]
    rows = [pq.read_metadata(path).row_group(0).num_rows for path in paths]
    return [(path, -(-n // _step(n))) for path, n in zip(paths, rows, strict=True)]


def _step(rows: int) -> int:
    """Return n where every n-th row is taken."""
    return -(-rows // SAMPLED_ROWS)


def _read(sample: list[tuple[Path, int]], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read the dense columns of the sampled row groups as float64."""
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for path, _ in sample:
        with pq.ParquetFile(path) as file:
            group = file.read_row_group(0, columns=list(names), use_threads=False)
        for name in names:
            values = np.concatenate(list(map(to_numpy, group[name].chunks)))
            parts[name].append(values[:: _step(len(values))])
    return {name: np.concatenate(own).astype(np.float64) for name, own in parts.items()}


def undo_transform(values: np.ndarray, name: str, description: WorkflowDescription) -> np.ndarray:
    """Compute raw values from transformed ones; missing ones become what they were filled with."""
    spec = description.spec
    if name in description.statistics:
        fitted = description.statistics[name]
        values = values * fitted["std"] + fitted["mean"]
    if spec.dense_transform != "normalize":
        values = np.exp(values) - DENSE_SHIFT
    column = next(column for column in spec.dense if column.name == name)
    return np.rint(values) if column.raw == "int32" else values


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
