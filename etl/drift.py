"""Compare a raw day with the days that the workflow of an output was fitted on.

What is compared, and when it is flagged, is in :mod:`workflows.drift`. Of the days before, exact
counts are taken where they are stored: of values in the vocabularies, of missing values, labels and
malformed rows in the manifest. Distributions of dense columns are not stored, nor those of hashed
columns and of single columns that share a vocabulary: they come from a sample of the training
parquet. The new day is read once, in threads, in bounded memory, and the result does not depend on
the number of threads.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nvt_torchrec.base.errors import BadInputError, SchemaError, SettingsError
from nvt_torchrec.base.threads import in_order
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.readers.stream import UnparsedRows, stream_unparsed
from nvt_torchrec.etl.results import count_missing
from nvt_torchrec.etl.sample import count_ids, read_sample
from nvt_torchrec.etl.state import content_digest
from nvt_torchrec.formats.day_names import name_of
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.spec.columns import FIRST_OOV_ID
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.compiled.workflow import CompiledWorkflow
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.drift import (
    Counted,
    Drift,
    Measure,
    Share,
    Thresholds,
    compare,
    compared,
)
from nvt_torchrec.workflows.drift_cells import Bins, Buckets, read_buckets

#: Text that is parsed at once: it stays in a core's caches.
PIECE_BYTES = 2 << 20
#: Row groups that are sampled, and rows taken from each: evenly from all training days, and enough
#: that the PSI of a column is expected to be below 0.0001 by the sample alone.
SAMPLED_ROW_GROUPS, SAMPLED_ROWS = 32, 1 << 13


@dataclasses.dataclass(frozen=True)
class Baseline:
    """What a new day is compared with.

    Attributes:
        manifest: The manifest of the output.
        description: The workflow.
        cells: The cells of each column that is compared.
        days: The days that were counted.
        counted: What was counted in them.
    """

    manifest: Manifest
    description: WorkflowDescription
    cells: dict[str, Bins | Buckets]
    days: list[int]
    counted: Counted


def measure_drift(
    root: Path,
    day: DayFile,
    *,
    thresholds: Thresholds | None = None,
    workers: int = 1,
    limit_rows: int | None = None,
    report: Callable[[int, int | None], object] = lambda rows, total: None,
) -> Drift:
    """Compare a day with what the workflow of an output was fitted on; write nothing.

    Args:
        root: The output directory of `etl run` or `etl extend`.
        day: The raw file. It may be compressed, and may lack the label.
        thresholds: How much may change before the day is flagged.
        workers: The number of threads.
        limit_rows: The rows after which reading stops, up to a piece of the file later; None: all.
        report: Called with the rows read since the last call, and an estimate of all rows, or None
            if the file is compressed.

    Raises:
        BadInputError: The output is not finished, or a file is missing, damaged, of other columns,
            or without a well-formed row.
        BadRowError: The lines of the day have another number of fields than the spec.
        SchemaError: The workflow is of another version, or not that of the manifest.
        SettingsError: A column that is to be ignored does not exist.
    """
    thresholds = Thresholds() if thresholds is None else thresholds
    baseline = read_baseline(root)
    description = baseline.description
    if unknown := sorted(set(thresholds.ignore) - set(description.spec.feature_names)):
        raise SettingsError(
            f"--ignore {','.join(unknown)}: not among the columns of {description.path}",
            f"known: {', '.join(description.spec.feature_names)}",
        )
    now = _count_day(day, baseline, workers, limit_rows, report)
    measures = _repeated(baseline.manifest, day, now.days[0][1])
    measures += compare(now, baseline.counted, thresholds)
    return Drift(
        day=day.day,
        name=result_name(day.source),
        input=day.source,
        rows=now.days[0][1],
        generation=description.generation,
        workflow_digest=description.digest,
        baseline_days=baseline.days,
        thresholds=thresholds.to_dict(),
        flags=[measure.title for measure in measures if measure.flagged],
        measures=measures,
    )


def result_name(path: str) -> str:
    """Return the name of the result for a raw file.

    It is ``day_24``, the date of a dated file, the name up to its number, or that of another file.
    """
    name = re.split(r"[/\\]", path)[-1].split(".")[0] or "day"
    day_name = name_of(path)
    if day_name is None or day_name.kind == "day":
        return name
    return day_name.other(day_name.number)


def _repeated(manifest: Manifest, day: DayFile, rows: int) -> list[Measure]:
    """Return a flagged measure if the file is a copy of that of an earlier day."""
    digest = content_digest(day)
    return [
        Measure("repeated day", "", [rows], [file.day], None, None, flagged=True)
        for file in manifest.inputs
        if file.digest == digest and file.day != day.day
    ]


# ---- the days before


def read_manifest(output: EtlOutput) -> Manifest:
    """Read the manifest of a finished output. Raises what :meth:`Manifest.read` does."""
    if not output.manifest.is_file():
        raise BadInputError(
            f"{output.root}: no {output.manifest.name}, so it is not the output of a finished run",
            "pass the --output_path of `python -m etl run`; the same command finishes a run",
        )
    return Manifest.read(output.manifest)


def read_baseline(root: Path) -> Baseline:
    """Read the baseline of a finished output.

    Raises:
        BadInputError: There is no finished output with a workflow, or a file is damaged.
        SchemaError: The workflow is another one than that of the manifest, or of another version.
    """
    output = EtlOutput(root)
    manifest = read_manifest(output)
    if manifest.workflow_digest is None:
        raise BadInputError(
            f"{root}: imported without a workflow, so new raw rows cannot be compared with it",
            "fit a workflow with `python -m etl run`",
        )
    description = inspect(output.workflow)
    if description.digest != manifest.workflow_digest:
        raise SchemaError(
            f"{output.workflow}: not the workflow of {output.manifest} (digest "
            f"{description.digest[:12]}… instead of {manifest.workflow_digest[:12]}…)",
            "copy the whole output directory again, or run the ETL again",
        )
    cells = _read_cells(output, manifest, description)
    train, days = manifest.splits["train"], sorted(map(int, manifest.by_day))
    by_day = [manifest.by_day[str(day)] for day in days]
    return Baseline(
        manifest,
        description,
        cells,
        days,
        Counted(
            cells={name: of.counts for name, of in cells.items()},
            missing={name: (train["missing"][name], train["rows"]) for name in cells},
            unseen=_unseen(output, manifest, description),
            days=[(counts["positives"], counts["rows"]) for counts in by_day],
            malformed=(manifest.rows["rejected"], manifest.rows["in"]),
            whole=manifest.settings.get("limit_rows") is None,
        ),
    )


def _read_cells(
    output: EtlOutput, manifest: Manifest, description: WorkflowDescription
) -> dict[str, Bins | Buckets]:
    """Return the cells of the columns that are compared, with the counts of the training rows."""
    spec, vocabularies = description.spec, read_buckets(output.workflow, description)
    columns = [column for column in spec.categorical if column.name in compared(spec)]
    cells: dict[str, Bins | Buckets] = {
        column.name: vocabularies[column.vocabulary_name]
        for column in columns
        if not column.hash_buckets and len(spec.vocabularies[column.vocabulary_name]) == 1
    }
    sampled = [name for name in spec.feature_names if name in compared(spec) - cells.keys()]
    sample = read_sample(
        output, manifest, sampled, row_groups=SAMPLED_ROW_GROUPS, rows=SAMPLED_ROWS
    )
    for column in columns:
        if column.name in sample:
            size = description.vocabularies[column.name].table_size
            counts = np.bincount(sample.pop(column.name), minlength=size)
            # A hashed column has no vocabulary: its ids are buckets, and each of them is known.
            first = FIRST_OOV_ID if column.hash_buckets else column.reserved_ids
            unseen = int(counts[FIRST_OOV_ID:first].sum())
            cells[column.name] = Buckets.make(counts[first:], first, unseen)
    cells |= {name: Bins.make(values) for name, values in sample.items()}
    return {name: cells[name] for name in spec.feature_names if name in cells}


def _unseen(
    output: EtlOutput, manifest: Manifest, description: WorkflowDescription
) -> dict[str, Share]:
    """Return the unseen values of days that the workflow was not fitted on.

    After `etl run` these are validation and test. An extension counts its day, so in its rows fewer
    values are out of vocabulary than in a new day; but when it was compared with the generation
    before, it was new.
    """
    spec = description.spec
    columns = [c for c in spec.categorical if not c.hash_buckets and c.name in compared(spec)]
    if manifest.generation:
        newest = max(map(int, manifest.by_day))
        (path,) = (file.path for file in manifest.inputs if file.day == newest)
        file = output.drift / f"{result_name(path)}.json"
        try:
            before = Drift.read(file) if file.exists() else None
        except SchemaError:  # of an earlier version of this program
            return {}
        if before is None or before.workflow_digest != description.parent:
            return {}
        measures = {column.name: before.measure("unseen share", column.name) for column in columns}
        return {name: (m.now[0], m.now[1]) for name, m in measures.items() if m is not None}
    if spec.split.by in ("share", "column"):
        return {}  # held-out rows are of the same days, so they have fewer values that are new
    held_out = ("valid", "test")
    lists = count_ids(output, manifest, [c.name for c in columns if c.multi_hot])
    result = {}
    for name in (column.name for column in columns):
        counts = [manifest.splits[split] for split in held_out]
        present = [of["rows"] - of["missing"][name] for of in counts]
        if name in lists:
            present = [lists[name][split] for split in held_out]
        result[name] = sum(of["out_of_vocabulary"][name] for of in counts), sum(present)
    return result


# ---- the new day


def _count_day(
    day: DayFile,
    baseline: Baseline,
    workers: int,
    limit_rows: int | None,
    report: Callable[[int, int | None], object],
) -> Counted:
    """Read and count a day; malformed rows are left out and counted."""
    workflow, spec = compiled.load(baseline.description.path), baseline.description.spec
    pieces = stream_unparsed(day.path, spec, block_bytes=PIECE_BYTES)
    if limit_rows is not None:
        pieces = itertools.takewhile(lambda piece: piece.first < limit_rows, pieces)
    total: dict[str, Any] = {"lines": 0, "bad": 0}
    first_bad = ""
    for counts, bad in in_order(
        lambda piece: _count_piece(piece, workflow, baseline), pieces, workers, "drift"
    ):
        total = {name: total.get(name, 0) + count for name, count in counts.items()}
        first_bad = first_bad or bad
        is_text = total["text_bytes"] and not day.compressed
        estimate = round(total["lines"] * day.size / total["text_bytes"]) if is_text else None
        report(counts["lines"], estimate)
    rows = total["lines"] - total["bad"]
    if not rows:
        raise BadInputError(
            f"{day.source}: no well-formed row{first_bad}",
            "compare a day with the columns that the workflow was fitted on",
        )
    ends = np.cumsum([len(cells.counts) for cells in baseline.cells.values()])
    cells = dict(zip(baseline.cells, np.split(total["cells"], ends[:-1]), strict=False))
    missing = dict(zip(spec.feature_names, total["missing"].tolist(), strict=True))
    oov = dict(zip(spec.categorical_names, total["oov"].tolist(), strict=True))
    return Counted(
        cells=cells,
        missing={name: (missing[name], rows) for name in cells},
        unseen={
            column.name: (oov[column.name], int(cells[column.name].sum()))
            for column in spec.categorical
            if column.name in cells and not column.hash_buckets
        },
        days=[(total["positives"] if total["labels"] else None, rows)],
        malformed=(total["bad"], total["lines"]),
        whole=limit_rows is None,
    )


def _count_piece(
    piece: UnparsedRows, workflow: CompiledWorkflow, baseline: Baseline
) -> tuple[dict[str, Any], str]:
    """Parse, encode and count a piece, in any thread.

    Returns:
        Counts, which can be added: ``cells`` of all columns, one after the other; ``lines``, of
        which ``bad`` ones; ``labels`` and ``positives``; ``missing`` int64 [columns]; ``oov``
        [categorical columns]; ``text_bytes``. And what is wrong with the first malformed row.
    """
    rows, spec = piece.parse(reject=True, describe=False), workflow.spec
    encoded = workflow.transform(rows)
    columns = dict(zip(spec.feature_names, [*encoded.dense, *encoded.ids], strict=True))
    counts = [cells.count(columns[name]) for name, cells in baseline.cells.items()]
    missing = (
        count_missing(rows.dense_missing, len(spec.dense)),
        count_missing(rows.categorical_missing, len(spec.categorical)),
    )
    bad = rows.bad[0] if rows.bad else None
    return {
        "cells": np.concatenate([np.empty(0, np.int64), *counts]),
        "lines": rows.lines,
        "bad": rows.bad_count,
        "labels": 0 if rows.label is None else len(rows.label),
        "positives": 0 if rows.label is None else int(np.count_nonzero(rows.label)),
        "missing": np.concatenate(missing),
        "oov": encoded.oov.copy(),
        "text_bytes": len(piece.text) if piece.text is not None else 0,
    }, f"; row {piece.first + bad.line + 1}: {bad.what}" if bad else ""
