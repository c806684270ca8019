"""The numbers behind ``report.html``, from what a run wrote: nothing of the log is read again.

Bounded, however large the log: vocabularies are streamed, and the distributions of the dense
columns are those of a sample of row groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from clicklog.arrays import to_numpy
from clicklog.spec.feature_spec import CategoricalColumn
from clicklog.spec.raw_types import as_log_text
from clicklog.splits import SPLITS
from workflows.dense import DENSE_SHIFT
from workflows.description import Vocabulary, WorkflowDescription

#: Row groups that dense distributions are taken from, rows of each at most, bins of a histogram.
SAMPLED_ROW_GROUPS, SAMPLED_ROWS, BINS = 4, 16 << 10, 24
#: Values listed per categorical column.
TOP = 5
_BATCH = 1 << 18
_HUGE = 1e300


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Shares of the sampled rows with finite values, in equal bins between ``low`` and ``high``.

    Attributes:
        shares: float64 [bins]; they add up to 1 − ``below`` − ``above``.
        low, high: ends of the axis.
        below, above: shares outside of it.
    """

    shares: np.ndarray
    low: float
    high: float
    below: float
    above: float


@dataclasses.dataclass(frozen=True)
class Dense:
    """A dense column: its missing rate per split, its values before and after the transform."""

    name: str
    missing: dict[str, float]
    before: Histogram
    after: Histogram


@dataclasses.dataclass(frozen=True)
class Categorical:
    """A categorical column.

    Attributes:
        name: of the column.
        vocabulary: name of its vocabulary, which columns may share.
        policy: of its vocabulary, in words.
        values: in its vocabulary; None if it is hashed.
        table_size: rows of its embedding table.
        missing: share of rows per split.
        unseen: share of ids per split that are out of vocabulary; None if it is hashed.
        most: how many of the most frequent values make 99 % of the occurrences of all in the
            vocabulary; None if it is hashed.
        top: value, occurrences in the training days, share of all ids there.
    """

    name: str
    vocabulary: str
    policy: str
    values: int | None
    table_size: int
    missing: dict[str, float]
    unseen: dict[str, float] | None
    most: int | None
    top: list[tuple[str, int, float]]


@dataclasses.dataclass(frozen=True)
class ReportData:
    """All that the report shows beside the manifest and the timings."""

    dense: list[Dense]
    categorical: list[Categorical]
    sampled_rows: int


def collect(output: Path, manifest: dict[str, Any], description: WorkflowDescription) -> ReportData:
    """Gather the numbers.

    Args:
        output: the directory of the run, with its workflow and all parts.
        manifest: of the run.
        description: of its workflow.
    """
    split_root = output / "criteo_binary" / "split"
    spec = description.spec
    counted = {
        vocabulary.name: _count(output / "workflow" / vocabulary.file, vocabulary)
        for vocabulary in description.vocabularies.values()
    }
    ids = _list_ids(split_root, manifest, [c.name for c in spec.categorical if c.multi_hot])
    categorical = []
    for column in spec.categorical:
        vocabulary = description.vocabularies[column.name]
        most, top = counted[vocabulary.name]
        hashed = bool(column.hash_buckets)
        categorical.append(
            Categorical(
                name=column.name,
                vocabulary=vocabulary.name,
                policy=describe_policy(column),
                values=None if hashed else vocabulary.values,
                table_size=vocabulary.table_size,
                missing=_shares(manifest, "missing", column.name),
                unseen=None
                if hashed
                else _shares(manifest, "out_of_vocabulary", column.name, ids.get(column.name)),
                most=None if hashed else most,
                top=[(as_log_text(value, column.raw), count, share) for value, count, share in top],
            )
        )
    sample = _sample(split_root, manifest)
    dense = []
    for name, values in _read(sample, spec.dense_names).items():
        after = np.sort(values)  # what it was before the transform is in the same order
        dense.append(
            Dense(
                name=name,
                missing=_shares(manifest, "missing", name),
                before=_histogram(before(after, name, description)),
                after=_histogram(after),
            )
        )
    return ReportData(dense, categorical, sum(rows for *_, rows in sample))


def describe_policy(column: CategoricalColumn) -> str:
    """The vocabulary policy of a column, in words."""
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
    """Per split, how many there are of ``key`` in a column, over rows or over ``totals``."""
    splits = manifest["splits"]
    totals = totals or {split: splits[split]["rows"] for split in SPLITS}
    return {split: splits[split][key][name] / max(1, totals[split]) for split in SPLITS}


def _list_ids(
    split_root: Path, manifest: dict[str, Any], names: list[str]
) -> dict[str, dict[str, int]]:
    """Ids in each split, for columns of lists. The footers count an empty list as a value."""
    if not names:
        return {}
    totals = {
        name: {split: -manifest["splits"][split]["missing"][name] for split in SPLITS}
        for name in names
    }
    for one in manifest["files"]:
        footer = pq.read_metadata(split_root / one["file"])
        for group in map(footer.row_group, range(footer.num_row_groups)):
            for chunk in map(group.column, range(group.num_columns)):
                name = chunk.path_in_schema.split(".")[0]
                if name in totals:
                    totals[name][one["file"].split("/")[0]] += chunk.num_values
    return totals


def _count(path: Path, vocabulary: Vocabulary) -> tuple[int, list[tuple[Any, int, float]]]:
    """How many values make 99 % of the occurrences, and the first values with their counts.

    Counts fall, so one pass over them is enough, in batches.
    """
    observed = vocabulary.observed
    total = max(1, sum(observed.values()))
    wanted, seen, most = 0.99 * observed["unique"], 0, 0
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
            most += min(inside, len(running))
            if inside <= len(running):
                break
            seen = int(running[-1])
    return most, top


def _sample(split_root: Path, manifest: dict[str, Any]) -> list[tuple[Path, int]]:
    """Training parts at equal distances, and how many rows of a row group of each are taken."""
    train = [one for one in manifest["files"] if one["file"].startswith("train/")]
    files = [one["file"] for one in train if one["rows"]]  # all rows of a part may be rejected
    count = min(SAMPLED_ROW_GROUPS, len(files))
    paths = [split_root / files[i * len(files) // count] for i in range(count)]
    rows = [pq.read_metadata(path).row_group(0).num_rows for path in paths]
    return [(path, -(-n // _step(n))) for path, n in zip(paths, rows, strict=True)]


def _step(rows: int) -> int:
    """One row in so many is taken."""
    return -(-rows // SAMPLED_ROWS)


def _read(sample: list[tuple[Path, int]], names: Sequence[str]) -> dict[str, np.ndarray]:
    """The dense columns of the sampled row groups, each float64."""
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for path, _ in sample:
        with pq.ParquetFile(path) as file:
            group = file.read_row_group(0, columns=list(names), use_threads=False)
        for name in names:
            values = np.concatenate(list(map(to_numpy, group[name].chunks)))
            parts[name].append(values[:: _step(len(values))])
    return {name: np.concatenate(own).astype(np.float64) for name, own in parts.items()}


def before(values: np.ndarray, name: str, description: WorkflowDescription) -> np.ndarray:
    """What transformed values were, by the inverse of the transform (missing ones filled)."""
    spec = description.spec
    if name in description.statistics:
        known = description.statistics[name]
        values = values * known["std"] + known["mean"]
    if spec.dense_transform != "normalize":
        values = np.exp(values) - DENSE_SHIFT
    column = next(column for column in spec.dense if column.name == name)
    return np.rint(values) if column.raw == "int32" else values


def _histogram(values: np.ndarray) -> Histogram:
    """Of ascending values, between the 0.5th and the 99th percentile: outliers would hide the rest.

    What is not finite (NaN is last) or would overflow below is left out.
    """
    values = values[np.abs(values) < _HUGE]
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
