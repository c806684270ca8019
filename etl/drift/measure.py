"""Count a day, and compare it with what a workflow was fitted on.

The day is read once, in threads, in bounded memory, and the result does not depend on the number
of threads. What is compared, and when it is flagged, is in :mod:`workflows.drift`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.base.threads import in_order
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.readers.stream import UnparsedRows, stream_unparsed
from nvt_torchrec.etl.drift.baseline import Baseline, read_baseline, result_name
from nvt_torchrec.etl.results import count_missing
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.compiled.workflow import CompiledWorkflow
from nvt_torchrec.workflows.drift import Counted, Drift, Thresholds, compare, compared
from nvt_torchrec.workflows.drift_cells import BUCKETS, count_bins

#: Text that is parsed at once: it stays in a core's caches.
PIECE_BYTES = 2 << 20


def measure_drift(
    output: Path,
    day: DayFile,
    *,
    thresholds: Thresholds | None = None,
    workers: int = 1,
    limit_rows: int | None = None,
    report: Callable[[int, int | None], object] = lambda rows, total: None,
) -> Drift:
    """Compare a day with what the workflow of an output was fitted on; write nothing.

    Args:
        output: The output directory of `etl run` or `etl extend`.
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
    baseline = read_baseline(output)
    if unknown := sorted(set(thresholds.ignore) - set(baseline.description.spec.feature_names)):
        raise SettingsError(
            f"--ignore {','.join(unknown)}: not among the columns of {baseline.workflow}",
            f"known: {', '.join(baseline.description.spec.feature_names)}",
        )
    now = _count_day(day, baseline, workers, limit_rows, report)
    measures = compare(now, baseline.counted, thresholds)
    return Drift(
        day=day.day,
        name=result_name(day.source),
        input=day.source,
        rows=now.days[0][1],
        generation=baseline.description.generation,
        workflow_digest=baseline.description.digest,
        baseline_days=baseline.days,
        thresholds={
            name: _as_json(value) for name, value in dataclasses.asdict(thresholds).items()
        },
        flags=[f"{m.column} {m.name}".lstrip() for m in measures if m.flagged],
        measures=measures,
    )


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return None if value == math.inf else value


@dataclasses.dataclass
class _Piece:
    """What was counted in some rows of a day; pieces can be added.

    Attributes:
        lines: All rows.
        bad: Malformed ones.
        positives: Rows with label 1; None without labels.
        missing: int64 [dense columns + categorical columns], rows without a value.
        bins: int64 [dense columns, BINS], rows in each bin.
        buckets: int64 [categorical columns, BUCKETS + 2], values in each bucket.
        oov: int64 [categorical columns], values out of vocabulary.
        first_bad: What is wrong with the first malformed row.
        text_bytes: The bytes of text that were read.
    """

    lines: int
    bad: int
    positives: int | None
    missing: np.ndarray
    bins: np.ndarray
    buckets: np.ndarray
    oov: np.ndarray
    first_bad: str
    text_bytes: int

    def add(self, other: _Piece) -> None:
        """Add the rows that follow."""
        positives = None
        if self.positives is not None and other.positives is not None:
            positives = self.positives + other.positives
        self.lines += other.lines
        self.bad += other.bad
        self.positives = positives
        self.missing += other.missing
        self.bins += other.bins
        self.buckets += other.buckets
        self.oov += other.oov
        self.first_bad = self.first_bad or other.first_bad
        self.text_bytes += other.text_bytes


def _count_day(
    day: DayFile,
    baseline: Baseline,
    workers: int,
    limit_rows: int | None,
    report: Callable[[int, int | None], object],
) -> Counted:
    """Read and count a day; malformed rows are left out and counted."""
    workflow, spec = compiled.load(baseline.workflow), baseline.description.spec
    pieces = stream_unparsed(day.path, spec, block_bytes=PIECE_BYTES)
    if limit_rows is not None:
        pieces = itertools.takewhile(lambda piece: piece.first < limit_rows, pieces)
    whole = None
    for piece in in_order(
        lambda piece: _count_piece(piece, workflow, baseline), pieces, workers, "drift"
    ):
        if whole is None:
            whole = piece
        else:
            whole.add(piece)
        total = None
        if not day.compressed and whole.text_bytes:
            total = round(whole.lines * day.size / whole.text_bytes)
        report(piece.lines, total)
    if whole is None or whole.lines == whole.bad:
        raise BadInputError(
            f"{day.source}: no well-formed row{whole.first_bad if whole else ''}",
            "compare a day with the columns that the workflow was fitted on",
        )
    rows, names = whole.lines - whole.bad, compared(spec)
    cells = dict(zip(spec.dense_names, whole.bins, strict=True))
    cells |= zip(spec.categorical_names, whole.buckets[:, : BUCKETS + 1], strict=True)
    missing = dict(zip(spec.feature_names, whole.missing.tolist(), strict=True))
    return Counted(
        cells={name: counts for name, counts in cells.items() if name in names},
        missing={name: (missing[name], rows) for name in names},
        unseen={
            column.name: (int(oov), int(cells[column.name].sum()))
            for column, oov in zip(spec.categorical, whole.oov, strict=True)
            if column.name in names and not column.hash_buckets
        },
        days=[(whole.positives, rows)],
        malformed=(whole.bad, whole.lines),
        whole=limit_rows is None,
    )


def _count_piece(piece: UnparsedRows, workflow: CompiledWorkflow, baseline: Baseline) -> _Piece:
    """Parse, encode and count a piece, in any thread."""
    rows = piece.parse(reject=True)
    encoded = workflow.transform(rows)
    spec = workflow.spec
    buckets = np.zeros((len(spec.categorical), BUCKETS + 2), np.int64)
    for name, ids, counts in zip(spec.categorical_names, encoded.ids, buckets, strict=True):
        baseline.buckets[name].count(ids, counts)
    missing = (
        count_missing(rows.dense_missing, len(spec.dense)),
        count_missing(rows.categorical_missing, len(spec.categorical)),
    )
    bad = rows.bad[0] if rows.bad else None
    return _Piece(
        lines=rows.lines,
        bad=rows.bad_count,
        positives=None if rows.label is None else int(np.count_nonzero(rows.label)),
        missing=np.concatenate(missing),
        bins=count_bins(encoded.dense, baseline.edges),
        buckets=buckets,
        oov=encoded.oov.copy(),
        first_bad=f"; row {piece.first + bad.line + 1}: {bad.what}" if bad else "",
        text_bytes=len(piece.text) if piece.text is not None else 0,
    )
