"""``report.html``: a self-contained page that describes the data and the run.

Its numbers come from the files of a finished run; the log is not read again. The time is bounded:
distributions, AUROCs and click rates are computed on a sample of row groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import to_arrow
from nvt_torchrec.base.auroc import TOO_GOOD, bin_numbers, column_auroc
from nvt_torchrec.base.files.atomic import read_json, write_text
from nvt_torchrec.base.pages import render
from nvt_torchrec.base.pages.charts import size
from nvt_torchrec.etl.finish.make_manifest import one_label_remedy, one_label_splits
from nvt_torchrec.etl.finish.part_sample import count_ids, read_sample, to_ids_and_rows, to_values
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.feature_spec import CategoricalColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.formats.vectors import IN_WORKFLOW, VectorStore
from nvt_torchrec.formats.vocabularies import Vocabulary
from nvt_torchrec.formats.workflow_description import WorkflowDescription

#: Maximum number of row groups to sample.
SAMPLED_ROW_GROUPS = 4
#: Maximum number of rows to sample from a row group.
SAMPLED_ROWS = 16 << 10
#: Maximum number of rows for the AUROC of a column.
_AUROC_ROWS = 16 << 10
#: Number of bins of a histogram.
BINS = 24
#: Keys of a categorical column that limit its vocabulary.
_LIMITS = ("hash_buckets", "freq_threshold", "max_table_size", "num_buckets", "vocabulary")
#: Number of frequent values to list for a categorical column.
TOP = 5
#: Larger values are left out of histograms, because the width of a bin would overflow.
_LARGEST = 1e300
#: Row in a vocabulary → a frequent value, how often it occurs, and its share of all ids.
_Frequent = dict[int, tuple[Any, int, float]]


@dataclasses.dataclass(frozen=True)
class Histogram:
    """A histogram of the finite values of the sampled rows, with bins of equal width.

    Attributes:
        shares: Share of the rows in each bin, float64 [bins].
        low: Lower end of the axis.
        high: Upper end of the axis.
    """

    shares: np.ndarray
    low: float
    high: float

    @property
    def ends(self) -> list[str]:
        """The ends of the axis as text with three digits; rounding errors around 0 become 0."""
        max_error = 1e-3 * (self.high - self.low)
        ends = []
        for end in (self.low, self.high):
            if abs(end) < max_error:
                ends.append("0")
            elif abs(end) >= 100:
                ends.append(f"{end:,.0f}")
            else:
                ends.append(f"{end:.3g}")
        return ends


@dataclasses.dataclass(frozen=True)
class Dense:
    """A dense column.

    Attributes:
        name: The name of the column.
        missing: The share of rows without a value, per split.
        auroc: The AUROC of this column alone, see :func:`base.auroc.column_auroc`.
        before: The values before the transform.
        after: The values after the transform.
    """

    name: str
    missing: dict[str, float]
    auroc: float | None
    before: Histogram
    after: Histogram


@dataclasses.dataclass(frozen=True)
class Categorical:
    """A categorical column.

    Attributes:
        name: The name of the column.
        vocabulary: The name of its vocabulary, which columns may share.
        policy: The keys of the spec that limit its vocabulary.
        table_size: The rows of its embedding table.
        missing: The share of rows without a value, per split.
        auroc: The AUROC of this column alone, see :func:`base.auroc.column_auroc`.
        values: The number of values in its vocabulary; None for a hashed column.
        oov: The share of ids that are out of vocabulary, per split; None for a hashed column.
        values_for_99: The number of most frequent values that make up 99 % of the occurrences of
            all values in the vocabulary; None for a hashed column.
        top: The most frequent values of the vocabulary, each with its number of occurrences in the
            training days, its share of all ids there, and the click rate of the sampled rows with
            it (None if there are no such rows).
    """

    name: str
    vocabulary: str
    policy: str
    table_size: int
    missing: dict[str, float]
    auroc: float | None
    values: int | None = None
    oov: dict[str, float] | None = None
    values_for_99: int | None = None
    top: list[tuple[str, int, float, float | None]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Vector:
    """A vector column.

    Attributes:
        name: The name of the column.
        table: The table that has the column.
        form: The length and the dtype of a vector.
        count: The number of stored vectors.
        size: The size of all stored vectors in bytes.
        missing: The share of rows without a vector, per split.
    """

    name: str
    table: str
    form: str
    count: int
    size: int
    missing: dict[str, float]


@dataclasses.dataclass(frozen=True)
class ReportData:
    """The numbers that the report shows in addition to the manifest and the timings."""

    dense: list[Dense]
    categorical: list[Categorical]
    sampled_rows: int
    vectors: list[Vector] = dataclasses.field(default_factory=list)


def collect(output: Path, manifest: Manifest, description: WorkflowDescription) -> ReportData:
    """Collect the numbers of the report.

    Args:
        output: The directory of the run, with its workflow and all parts.
        manifest: The manifest of the run.
        description: The description of its workflow.
    """
    paths = EtlOutput(output)
    spec = description.spec
    names = [spec.label, *spec.dense_names, *spec.categorical_names]
    sample = read_sample(paths, manifest, names, row_groups=SAMPLED_ROW_GROUPS, rows=SAMPLED_ROWS)
    aurocs = _column_aurocs(sample, spec)
    values_for_99 = {}
    top = {}
    for name, columns in spec.vocabularies.items():
        vocabulary = description.vocabularies[columns[0].name]
        values_for_99[name], frequent = _read_top(paths.workflow, vocabulary)
        top[name] = _add_click_rates(frequent, sample, spec, columns)
    num_ids = count_ids(paths, manifest, [c.name for c in spec.categorical if c.multi_hot])
    categorical = []
    for column in spec.categorical:
        name = column.name
        vocabulary = description.vocabularies[name]
        described = Categorical(
            name=name,
            vocabulary=vocabulary.name,
            policy=_describe_policy(column),
            table_size=vocabulary.table_size,
            missing=_shares(manifest, "missing", name),
            auroc=aurocs[name],
        )
        if not column.hash_buckets:
            to_text = RAW_TYPES[column.raw].to_log_text
            top_values = []
            for value, count, share, rate in top[vocabulary.name]:
                top_values.append((to_text(value), count, share, rate))
            described = dataclasses.replace(
                described,
                values=vocabulary.values,
                oov=_shares(manifest, "out_of_vocabulary", name, num_ids.get(name)),
                values_for_99=values_for_99[vocabulary.name],
                top=top_values,
            )
        categorical.append(described)
    dense = []
    for name in spec.dense_names:
        after = to_values(sample[name]).astype(np.float64)
        before = undo_transform(after, name, description)
        missing = _shares(manifest, "missing", name)
        dense.append(Dense(name, missing, aurocs[name], _histogram(before), _histogram(after)))
    vectors = []
    for vector in spec.vectors:
        count = VectorStore(paths.workflow / IN_WORKFLOW, vector.stored).count
        form = f"{vector.width} x {vector.dtype}"
        missing = _shares(manifest, "missing", vector.name)
        size_in_bytes = count * vector.stored.row_bytes
        vectors.append(Vector(vector.name, vector.table, form, count, size_in_bytes, missing))
    return ReportData(dense, categorical, len(sample), vectors)


def _describe_policy(column: CategoricalColumn) -> str:
    """Return the keys of the spec that limit a column's vocabulary, as text."""
    limits = []
    for key in _LIMITS:
        value = getattr(column, key)
        if value:
            limits.append(f"{key} = {value}")
    return ", ".join(limits) or "every value"


def _shares(
    manifest: Manifest, key: str, name: str, totals: dict[str, int] | None = None
) -> dict[str, float]:
    """Divide a column's counts under ``key`` by the rows of each split, or by ``totals``."""
    splits = manifest["splits"]
    totals = totals or {split: splits[split]["rows"] for split in SPLITS}
    return {split: splits[split][key][name] / max(1, totals[split]) for split in SPLITS}


def _column_aurocs(sample: pa.Table, spec: FeatureSpec) -> dict[str, float | None]:
    """Compute the AUROC of each column alone; dense columns are binned first."""
    step = -(-len(sample) // _AUROC_ROWS)
    sample = sample.take(to_arrow(np.arange(0, len(sample), step)))
    labels = to_values(sample[spec.label])
    aurocs = {}
    for name in spec.dense_names:
        bins = bin_numbers(to_values(sample[name]))
        aurocs[name] = column_auroc(to_arrow(bins), labels)
    for name in spec.categorical_names:
        ids, rows = to_ids_and_rows(sample[name])
        aurocs[name] = column_auroc(to_arrow(ids), labels, rows)
    return aurocs


def _add_click_rates(
    frequent: _Frequent, sample: pa.Table, spec: FeatureSpec, columns: Sequence[CategoricalColumn]
) -> list[tuple[Any, int, float, float | None]]:
    """Return frequent values of a vocabulary, each with its count, share and click rate.

    Args:
        frequent: The frequent values.
        sample: Sampled training rows.
        spec: The feature spec.
        columns: The columns that share the vocabulary.
    """
    labels = to_values(sample[spec.label])
    ids_of_columns = []
    labels_of_columns = []
    for column in columns:
        ids_of_column, rows = to_ids_and_rows(sample[column.name])
        ids_of_columns.append(ids_of_column)
        labels_of_columns.append(labels if rows is None else labels[rows])
    ids = np.concatenate(ids_of_columns)
    labels_of_ids = np.concatenate(labels_of_columns)
    with_rates: list[tuple[Any, int, float, float | None]] = []
    for row, (value, count, share) in frequent.items():
        clicks = labels_of_ids[ids == columns[0].reserved_ids + row]
        rate = float(clicks.mean()) if len(clicks) else None
        with_rates.append((value, count, share, rate))
    return with_rates


def _read_top(workflow: Path, vocabulary: Vocabulary) -> tuple[int, _Frequent]:
    """Return how many values make up 99 % of the occurrences, and the most frequent values.

    All counts are sorted here, as later generations of a vocabulary are not sorted by count.
    """
    counts = vocabulary.read_counts(workflow)
    if not len(counts):
        return 0, {}
    descending = np.sort(counts)[::-1]
    needed = np.searchsorted(np.cumsum(descending), 0.99 * vocabulary.observed["unique"]) + 1
    frequent = np.flatnonzero(counts >= descending[:TOP][-1])
    rows = frequent[np.argsort(-counts[frequent], kind="stable")][:TOP].tolist()
    values = _read_rows(workflow / vocabulary.file, vocabulary.name, rows)
    total = max(1, sum(vocabulary.observed.values()))
    frequent_values = {row: (values[row], int(counts[row]), counts[row] / total) for row in rows}
    return int(needed), frequent_values


def _read_rows(path: Path, name: str, rows: list[int]) -> dict[int, Any]:
    """Return values of a column by their row; read only the row groups that hold them."""
    values: dict[int, Any] = {}
    begin = 0
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            end = begin + file.metadata.row_group(group).num_rows
            rows_of_group = [row for row in rows if begin <= row < end]
            if rows_of_group:
                column = file.read_row_group(group, columns=[name]).column(0)
                for row in rows_of_group:
                    values[row] = column[row - begin].as_py()
            begin = end
    return values


def undo_transform(values: np.ndarray, name: str, description: WorkflowDescription) -> np.ndarray:
    """Compute raw values from transformed ones; missing values become their fill value."""
    spec = description.spec
    if name in description.statistics:
        fitted = description.statistics[name]
        values = values * fitted["std"] + fitted["mean"]
    column = spec.dense[spec.dense_names.index(name)]
    values = spec.get_transform(column).invert(values, np)
    return np.rint(values) if RAW_TYPES[column.raw].is_whole else values


def _histogram(values: np.ndarray) -> Histogram:
    """Make a histogram from the 0.5th to the 99th percentile of the finite values.

    A wider axis would only show outliers.
    """
    values = values[np.abs(values) < _LARGEST]
    if not len(values):
        return Histogram(np.zeros(BINS), 0.0, 1.0)
    low, high = np.percentile(values, (0.5, 99), method="nearest").tolist()
    if high <= low:
        high = low + 1
    counts, _ = np.histogram(values, BINS, (low, high))
    return Histogram(counts / len(values), low, high)


#: Embedding dimensions of the trainer's ``--size``, for which the page shows the size of the tables
#: in float32, without the optimizer's state.
DIMENSIONS = (16, 32, 128)
#: With more columns than this, the page folds the details of each column.
_FOLDED_ABOVE = 64


def write_report(path: Path, manifest: Manifest, description: WorkflowDescription) -> None:
    """Write the report of a run.

    Args:
        path: The path of the report, in the directory of the run, which holds ``workflow``,
            ``criteo_binary`` and ``timings.json``.
        manifest: The manifest of the run.
        description: The description of its workflow.

    Raises:
        OutputError: The report cannot be written.
        BadInputError: ``timings.json`` does not exist.
    """
    data = collect(path.parent, manifest, description)
    timings = read_json(EtlOutput(path.parent).timings, "the time that a run took")
    days = sorted(map(int, manifest["by_day"]))
    by_day = [manifest["by_day"][str(day)] for day in days]
    columns: list[Dense | Categorical] = [*data.dense, *data.categorical]
    ranked = sorted(columns, key=lambda column: column.auroc or 0, reverse=True)
    # Bars are drawn relative to the largest of these; the default of 1 avoids a division by 0.
    top_rates = []
    for column in data.categorical:
        top_rates += [rate for *_, rate in column.top if rate]
    oov_shares = [column.oov["valid"] for column in data.categorical if column.oov]
    page = render(
        Path(__file__).with_name("report.html"),
        manifest=manifest,
        data=data,
        timings=timings,
        description=description,
        ranked=ranked,
        splits=SPLITS,
        dimensions=DIMENSIONS,
        size_titles=[f"dimension {dimension}" for dimension in DIMENSIONS],
        sizes=lambda rows: [size(4 * rows * dimension) for dimension in DIMENSIONS],
        one_label=one_label_splits(manifest["splits"]),
        remedy=one_label_remedy(manifest["splits"], manifest.split),
        too_good=[column for column in ranked if (column.auroc or 0) > TOO_GOOD],
        days=[manifest.day_titles[day] for day in days],
        by_day=by_day,
        click_rate=_click_rate,
        click_rates=list(map(_click_rate, by_day)),
        missing=[column for column in columns if any(column.missing.values())],
        complete=[column for column in columns if not any(column.missing.values())],
        highest_rate=max(top_rates, default=1),
        highest_oov=max(oov_shares, default=0) or 1,
        vocabularies={v.name: v.values for v in description.vocabularies.values()},
        folded_above=_FOLDED_ABOVE,
        by_vocabulary=_group_columns(data.categorical, "vocabulary"),
        by_policy=_group_columns(data.categorical, "policy"),
        transforms={c.name: description.spec.get_transform(c) for c in description.spec.dense},
    )
    write_text(path, page)


def _click_rate(counts: dict[str, int]) -> float:
    return counts["positives"] / max(1, counts["rows"])


def _group_columns(columns: list[Categorical], attribute: str) -> list[list[Categorical]]:
    """Group columns by an attribute, in the order of the first column of each group."""
    groups: dict[str, list[Categorical]] = {}
    for column in columns:
        groups.setdefault(getattr(column, attribute), []).append(column)
    return list(groups.values())
