"""Compare a raw day with the days that the workflow of an output was fitted on.

What is counted of a column, and what chance explains, is in :mod:`etl.drift_cells`. Of the days
before, the manifest has exact counts of missing values, labels and malformed rows; the
distributions of columns come from a sample of the training parquet. The new day is read once, in
threads, in bounded memory, and the result does not depend on the number of threads.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nvt_torchrec.base.errors import BadInputError, SchemaError, SettingsError
from nvt_torchrec.base.files.artifact import Format
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.readers.log_format import UnparsedRows, format_of
from nvt_torchrec.etl.drift_cells import (
    Bins,
    Buckets,
    Measure,
    Share,
    compared,
    measure_psi,
    measure_share,
)
from nvt_torchrec.etl.parts.part_sample import count_ids, read_sample, values_of
from nvt_torchrec.etl.settings import Thresholds
from nvt_torchrec.etl.units.writing import count_missing
from nvt_torchrec.formats.day_names import name_of
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.columns import FIRST_OOV_ID
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.compiled.compiled_workflow import CompiledWorkflow
from nvt_torchrec.workflows.description import inspect

FORMAT = Format("nvt-torchrec drift", 2, "a result of `python -m etl drift`")
#: Text that is parsed at once: it stays in a core's caches.
PIECE_BYTES = 2 << 20
#: Row groups that are sampled, and rows taken from each: evenly from all training days, and enough
#: that the PSI of a column is expected to be below 0.0001 by the sample alone.
SAMPLED_ROW_GROUPS, SAMPLED_ROWS = 32, 1 << 13


@dataclasses.dataclass(frozen=True)
class Drift:
    """The comparison of a day with what a workflow was fitted on, ``OUT/drift/day_N.json``.

    Equal inputs give equal files.

    Attributes:
        day: The number of the day.
        name: The name of the file of this result, ``day_24``.
        input: Path of the raw file.
        rows: Well-formed rows that were compared.
        generation: The workflow's.
        workflow_digest: The digest of the workflow.
        baseline_days: The days that were counted.
        thresholds: The :class:`Thresholds`; None for infinity.
        flags: What is flagged, as "cat_3 PSI" or "label rate".
        measures: What was measured: of the day, then of each column.
    """

    day: int
    name: str
    input: str
    rows: int
    generation: int
    workflow_digest: str
    baseline_days: list[int]
    thresholds: dict[str, Any]
    flags: list[str]
    measures: list[Measure]

    def measure(self, name: str, column: str = "") -> Measure | None:
        """Return a measure, for example ``drift.measure("PSI", "cat_3")``; None without it."""
        same = (m for m in self.measures if (m.name, m.column) == (name, column))
        return next(same, None)

    def write(self, directory: Path) -> Path:
        """Write the result as JSON, and return its path. Raises :class:`OutputError`."""
        file = directory / f"{self.name}.json"
        FORMAT.write(file, dataclasses.asdict(self))
        return file

    @classmethod
    def read(cls, file: Path) -> Drift:
        """Read a result.

        Raises:
            BadInputError: The file is missing or damaged.
            SchemaError: Another version of this program wrote it.
        """
        remedy = "delete it, or compare the day again with `python -m etl drift`"
        return FORMAT.read(cls, file, remedy)


@dataclasses.dataclass(frozen=True)
class Counted:
    """What was counted in the training days, or in the day that is compared with them.

    Attributes:
        cells: Rows, or values, in each cell by column.
        missing: Rows without a value, of all, by column.
        unseen: Values out of vocabulary, of all that are present, by categorical column that is
            not hashed; of the training days, in days that the workflow was not fitted on. Columns
            of which nothing is known are left out.
        days: Rows with label 1, and all rows, of each day; nothing for a day without labels.
        rows: The rows of each day, if the days were read to their end.
        malformed: Malformed rows, of all.
    """

    cells: dict[str, np.ndarray]
    missing: dict[str, Share]
    unseen: dict[str, Share]
    labels: list[Share]
    rows: list[int]
    malformed: Share


def measure_drift(
    root: Path,
    day: DayFile,
    *,
    thresholds: Thresholds | None = None,
    workers: int = 1,
    report: Callable[[int], object] = lambda rows: None,
) -> Drift:
    """Compare a day with what the workflow of an output was fitted on; write nothing.

    Args:
        root: The output directory of `etl run` or `etl extend`.
        day: The raw file. It may be compressed, and may lack the label. If the output holds the
            first rows of each day (``--limit_rows``), so many are read, up to a piece of the file.
        thresholds: How much may change before the day is flagged.
        workers: The number of threads.
        report: Called with the rows read since the last call.

    Raises:
        BadInputError: The output is not finished, or a file is missing, damaged, of other columns,
            or without a well-formed row.
        BadRowError: The lines of the day have another number of fields than the spec.
        SchemaError: The workflow is of another version, or not that of the manifest.
        SettingsError: A column that is to be ignored does not exist.
    """
    thresholds = thresholds or Thresholds()
    output = EtlOutput(root)
    manifest, description = Manifest.read(output.manifest), inspect(output.workflow)
    if description.digest != manifest.workflow_digest:
        raise SchemaError(
            f"{output.workflow}: digest {description.digest[:12]}…, not that of the workflow of "
            f"{output.manifest}",
            "copy the whole output directory again, or run the ETL again",
        )
    if unknown := sorted(set(thresholds.ignore) - set(description.spec.feature_names)):
        raise SettingsError(
            f"--ignore {','.join(unknown)}: not among the columns of {description.path}",
            f"known: {', '.join(description.spec.feature_names)}",
        )
    names = [
        name
        for name in description.spec.feature_names
        if name in compared(description.spec) and name not in thresholds.ignore
    ]
    cells = _read_cells(output, manifest, description.spec, names)
    limit_rows = manifest.settings.get("limit_rows")
    now = _count_day(day, description.path, cells, limit_rows, workers, report)
    train, days = manifest.splits["train"], sorted(map(int, manifest.by_day))
    by_day = [manifest.by_day[str(day)] for day in days]
    then = Counted(
        cells={name: known.counts for name, known in cells.items()},
        missing={name: (train["missing"][name], train["rows"]) for name in cells},
        unseen=_unseen(output, manifest, description, names),
        labels=[(counts["positives"], counts["rows"]) for counts in by_day],
        rows=[] if limit_rows else [counts["rows"] for counts in by_day],
        malformed=(manifest.rows["rejected"], manifest.rows["in"]),
    )
    (rows,) = now.rows
    measures = compare(now, then, thresholds)
    return Drift(
        day=day.day,
        name=result_name(day.source),
        input=day.source,
        rows=rows,
        generation=description.generation,
        workflow_digest=description.digest,
        baseline_days=days,
        thresholds=thresholds.to_dict(),
        flags=[measure.title for measure in measures if measure.flagged],
        measures=measures,
    )


def result_name(path: str) -> str:
    """Return the name of the result for a raw file.

    It is ``day_24``, the date of a dated file, the name up to its number, or that of another file.
    """
    day_name = name_of(path)
    if day_name is None or day_name.kind == "day":
        return re.split(r"[/\\]", path)[-1].split(".")[0] or "day"
    return day_name.other(day_name.number)


# ---- the days before


def _read_cells(
    output: EtlOutput, manifest: Manifest, spec: FeatureSpec, names: list[str]
) -> dict[str, Bins | Buckets]:
    """Return the cells of columns, with the counts of the training rows."""
    columns = {column.name: column for column in spec.categorical}
    table = read_sample(output, manifest, names, row_groups=SAMPLED_ROW_GROUPS, rows=SAMPLED_ROWS)
    cells: dict[str, Bins | Buckets] = {}
    for name in names:
        values = values_of(table[name])
        if name not in columns:
            cells[name] = Bins.make(values)
            continue
        counts = np.bincount(values)
        # A hashed column has no vocabulary: its ids are buckets, and each of them is known.
        first = FIRST_OOV_ID if columns[name].hash_buckets else columns[name].reserved_ids
        cells[name] = Buckets.make(counts[first:], first, int(counts[FIRST_OOV_ID:first].sum()))
    return cells


def _unseen(
    output: EtlOutput, manifest: Manifest, description: WorkflowDescription, names: list[str]
) -> dict[str, Share]:
    """Return the unseen values of days that the workflow was not fitted on.

    After `etl run` these are validation and test. An extension counts its day, so in its rows fewer
    values are out of vocabulary than in a new day; but when it was compared with the generation
    before, it was new.
    """
    spec = description.spec
    columns = [c for c in spec.categorical if c.name in names and not c.hash_buckets]
    if manifest.generation:
        newest = max(manifest.inputs, key=lambda file: file.day)
        file = output.drift / f"{result_name(newest.path)}.json"
        before = Drift.read(file) if file.exists() else None
        if before is None or before.workflow_digest != description.parent:
            return {}
        measures = {column.name: before.measure("unseen share", column.name) for column in columns}
        return {name: (m.now[0], m.now[1]) for name, m in measures.items() if m is not None}
    if spec.split.by in ("share", "column"):
        return {}  # held-out rows are of the same days, so they have fewer values that are new
    lists = count_ids(output, manifest, [c.name for c in columns if c.multi_hot])
    result = {}
    for name in (column.name for column in columns):
        unseen = present = 0
        for split in ("valid", "test"):
            counts = manifest.splits[split]
            rows = counts["rows"] - counts["missing"][name]
            present += lists[name][split] if name in lists else rows
            unseen += counts["out_of_vocabulary"][name]
        result[name] = unseen, present
    return result


# ---- the new day


def _count_day(
    day: DayFile,
    workflow_path: Path,
    cells: dict[str, Bins | Buckets],
    limit_rows: int | None,
    workers: int,
    report: Callable[[int], object],
) -> Counted:
    """Read and count a day; malformed rows are left out and counted."""
    workflow = compiled.load(workflow_path)
    pieces = format_of(workflow.spec).stream(day.path, PIECE_BYTES)
    if limit_rows is not None:
        pieces = itertools.takewhile(lambda piece: piece.first < limit_rows, pieces)
    now: Any = Counter()  # arrays by column
    total: Any = Counter()
    first_bad = ""
    for in_cells, counts, bad in map_in_order(
        lambda piece: _count_piece(piece, workflow, cells), pieces, workers, "drift"
    ):
        now.update(in_cells)
        total.update(counts)
        first_bad = first_bad or bad
        report(counts["lines"])
    rows = total["lines"] - total["bad"]
    if not rows:
        raise BadInputError(
            f"{day.source}: no well-formed row{first_bad}",
            "compare a day with the columns that the workflow was fitted on",
        )
    missing = dict(zip(workflow.spec.feature_names, total["missing"].tolist(), strict=True))
    unseen = dict(zip(workflow.spec.categorical_names, total["unseen"].tolist(), strict=True))
    return Counted(
        cells=now,
        missing={name: (missing[name], rows) for name in cells},
        unseen={
            column.name: (unseen[column.name], int(now[column.name].sum()))
            for column in workflow.spec.categorical
            if column.name in cells and not column.hash_buckets
        },
        labels=[(total["positives"], rows)] if "positives" in total else [],
        rows=[rows],
        malformed=(total["bad"], total["lines"]),
    )


def _count_piece(
    piece: UnparsedRows, workflow: CompiledWorkflow, cells: dict[str, Bins | Buckets]
) -> tuple[dict[str, np.ndarray], dict[str, Any], str]:
    """Parse, encode and count a piece, in any thread.

    Returns:
        The values in each cell by column; ``missing`` [columns], ``unseen`` [categorical columns],
        ``lines``, of which ``bad`` ones, and ``positives`` if the rows have a label; and what is
        wrong with the first malformed row.
    """
    rows, spec = piece.parse(reject=True, describe=False), workflow.spec
    encoded = workflow.transform(rows)
    columns = dict(zip(spec.feature_names, [*encoded.dense, *encoded.ids.columns], strict=True))
    in_cells = {name: known.count(columns[name]) for name, known in cells.items()}
    missing = count_missing(rows.dense_missing, len(spec.dense))
    counts: dict[str, Any] = {
        "lines": rows.lines,
        "bad": rows.bad_count,
        "missing": np.concatenate([missing, encoded.null]),
        "unseen": encoded.oov,
    }
    if len(rows.labels):
        counts["positives"] = int(np.count_nonzero(rows.labels[0]))
    bad = f"; row {piece.first + rows.bad[0].line + 1}: {rows.bad[0].what}" if rows.bad else ""
    return in_cells, counts, bad


# ---- what is compared


def compare(now: Counted, then: Counted, thresholds: Thresholds) -> list[Measure]:
    """Compare a day with the training days: the measures of the day, then of each column.

    All measures share the false alarm rate equally (Bonferroni's correction), so a day without
    drift is flagged with at most this probability, however many columns there are.
    """
    tests = len(now.cells) + len(now.missing) + len(now.unseen) + 3
    chance = thresholds.false_alarm_rate / tests
    share = functools.partial(measure_share, chance=chance)
    results = [
        share("label rate", "", label, then.labels, thresholds.label_rate, relative=True)
        for label in now.labels
    ]
    # Of a single day nothing is known of how days differ, and it may be a log of many days.
    if len(then.rows) > 1:
        # Rows come at many moments of a day, at each of them with a small probability.
        moments = 1000 * sum(now.rows + then.rows)
        today, *days = ((rows, moments) for rows in now.rows + then.rows)
        rows = share("rows", "", today, days, thresholds.row_count, relative=True)
        results.append(dataclasses.replace(rows, now=now.rows, then=then.rows))
    malformed, limit = [then.malformed], thresholds.malformed_share
    results.append(share("malformed rows", "", now.malformed, malformed, limit, rises=True))
    for name in then.cells:
        results.append(measure_psi(name, now.cells[name], then.cells[name], thresholds.psi, chance))
        before, limit = [then.missing[name]], thresholds.missing_rate
        results.append(share("missing rate", name, now.missing[name], before, limit))
        if name in now.unseen:
            before = [then.unseen[name]] if name in then.unseen else []
            limit = thresholds.unseen_share
            results.append(share("unseen share", name, now.unseen[name], before, limit, rises=True))
    return results
