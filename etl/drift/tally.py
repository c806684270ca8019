"""Count a day in pieces, in threads, so that it can be compared with a baseline.

Memory is bounded: 4 bytes for each row of the embedding tables (how often each id occurred), a
sample of the dense values, and the most frequent values out of vocabulary. The result does not
depend on the number of threads: counts add up in any order, and what depends on the order of the
rows is merged in their order.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
from numba import types

from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.base.threads import in_order
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.readers.stream import UnparsedRows, stream_unparsed
from nvt_torchrec.etl.drift.baseline import Baseline
from nvt_torchrec.etl.drift.bins import count_bins
from nvt_torchrec.etl.engines.counting import Counts, count, merge
from nvt_torchrec.etl.results import count_missing
from nvt_torchrec.formats.rows import CategoryValues, Jagged, RawRows
from nvt_torchrec.formats.spec.feature_spec import FIRST_OOV_ID
from nvt_torchrec.workflows import compiled as compiled_workflows
from nvt_torchrec.workflows.compiled.workflow import CompiledWorkflow, Ids

#: Text that is parsed at once: it stays in a core's caches.
PIECE_BYTES = 2 << 20
#: Rows of the sample of dense values, at least, where a day has as many; at most twice as many.
SAMPLE_ROWS = 1 << 16
#: Values out of vocabulary whose counts are kept for each column. Rarer ones are dropped.
NEW_VALUES = 1 << 14
#: Values out of vocabulary that wait to be counted.
_WAITING = 1 << 18
_LARGEST_COUNT = 2**32 - 1


@dataclasses.dataclass
class DayTally:
    """What was counted in a day.

    Attributes:
        rows: Well-formed rows.
        malformed: Malformed rows.
        positives: Rows with label 1; None for a log without labels.
        missing: int64 [dense columns + categorical columns], rows without a value.
        bins: int64 [dense columns, BINS], rows in each bin.
        sample: float32 [dense columns, n], transformed values of evenly chosen rows.
        ids: By categorical column, how often each id occurred, uint32 [table size].
        new_values: By categorical column, the most frequent values out of vocabulary. Counts are
            lower bounds where a column has more than :data:`NEW_VALUES` such values.
    """

    rows: int
    malformed: int
    positives: int | None
    missing: np.ndarray
    bins: np.ndarray
    sample: np.ndarray
    ids: list[np.ndarray]
    new_values: list[Counts]


@dataclasses.dataclass
class _Piece:
    """What a thread counted in a piece, but for the ids."""

    rows: int
    malformed: int
    positives: int
    missing: np.ndarray
    bins: np.ndarray
    sampled: np.ndarray  # numbers of the rows in the sample
    sample: np.ndarray
    new_values: list[CategoryValues]
    first_bad: str


def tally_day(
    day: DayFile,
    baseline: Baseline,
    *,
    workers: int,
    limit_rows: int | None = None,
    report: Callable[[int, int | None], object] = lambda rows, total: None,
) -> DayTally:
    """Read and count a day; malformed rows are left out and counted.

    Args:
        day: The file; it may be compressed, and may lack the label.
        baseline: What it will be compared with.
        workers: The number of threads.
        limit_rows: How many rows to read, from the first one on; None for all.
        report: Called with the rows read since the last call, and an estimate of all rows (None if
            the file is compressed).

    Raises:
        BadInputError: The file is missing, damaged or of other columns, or has no well-formed row.
        BadRowError: Its lines have another number of fields than the spec.
    """
    tally = _Tally(baseline)
    pieces = stream_unparsed(day.path, baseline.description.spec, block_bytes=PIECE_BYTES)
    total: int | None = None
    size = 0
    for piece, rows_read, piece_bytes in in_order(
        lambda piece: tally.count_piece(piece, limit_rows),
        _first_pieces(pieces, limit_rows),
        workers,
        "drift",
    ):
        tally.add(piece)
        size += piece_bytes
        if not day.compressed and size:
            total = round((tally.rows + tally.malformed) * day.size / size)
            total = total if limit_rows is None else min(total, limit_rows)
        report(rows_read, total)
    return tally.finish(day)


def _first_pieces(pieces: Iterator[UnparsedRows], limit_rows: int | None) -> Iterator[UnparsedRows]:
    for piece in pieces:
        if limit_rows is not None and piece.first >= limit_rows:
            return
        yield piece


class _Tally:
    """The counts of a day so far. Methods but ``count_piece`` are called by one thread."""

    def __init__(self, baseline: Baseline) -> None:
        self._baseline = baseline
        self._workflow: CompiledWorkflow = compiled_workflows.load(baseline.workflow)
        spec = self._workflow.spec
        self.rows = self.malformed = 0
        self._positives: int | None = 0
        self._missing = np.zeros(len(spec.feature_names), np.int64)
        self._bins = np.zeros_like(baseline.dense.counts)
        self._sampled: list[np.ndarray] = []
        self._samples: list[np.ndarray] = []
        self._stride = 1
        self._ids = [np.zeros(size, np.uint32) for size in self._workflow.schema.table_sizes]
        self._occurred = np.zeros(len(self._ids), np.int64)
        self._locks = [threading.Lock() for _ in self._ids]
        self._waiting: list[list[CategoryValues]] = [[] for _ in self._ids]
        self._new_values: list[Counts | None] = [None] * len(self._ids)
        self._first_bad = ""

    def count_piece(self, piece: UnparsedRows, limit_rows: int | None) -> tuple[_Piece, int, int]:
        """Parse, encode and count a piece, in any thread; ids are added to the tally at once."""
        rows = piece.parse(reject=True)
        if limit_rows is not None and piece.first + rows.lines > limit_rows:
            rows = _first_rows(rows, limit_rows - piece.first)
        encoded = self._workflow.transform(rows)
        numbers = piece.first + rows.line
        chosen = np.flatnonzero(numbers % self._stride == 0)  # perhaps more than are needed by now
        new_values = []
        for j, values in enumerate(rows.categorical):
            ids = encoded.ids[j]
            self._count_ids(j, ids)
            new_values.append(_unseen_values(values, ids, self._workflow, j))
        spec = self._workflow.spec
        counted = _Piece(
            rows=len(rows),
            malformed=rows.bad_count,
            positives=-1 if rows.label is None else int(np.count_nonzero(rows.label)),
            missing=np.concatenate(
                [
                    count_missing(rows.dense_missing, len(spec.dense)),
                    count_missing(rows.categorical_missing, len(spec.categorical)),
                ]
            ),
            bins=count_bins(encoded.dense, self._baseline.dense.edges),
            sampled=numbers[chosen],
            sample=encoded.dense[:, chosen],
            new_values=new_values,
            first_bad=_describe_first_bad(piece, rows),
        )
        text_bytes = len(piece.text) if piece.text is not None else 0
        return counted, rows.lines, text_bytes

    def _count_ids(self, j: int, ids: Ids) -> None:
        values = ids.values if isinstance(ids, Jagged) else ids
        with self._locks[j]:
            self._occurred[j] += len(values)
            if self._occurred[j] > _LARGEST_COUNT:
                raise SettingsError(
                    f"column {self._workflow.spec.categorical_names[j]}: more than "
                    f"{_LARGEST_COUNT:,} values",
                    "compare fewer rows with --rows",
                )
            _add_ids(values, self._ids[j])

    def add(self, piece: _Piece) -> None:
        """Add what was counted in the next piece."""
        self.rows += piece.rows
        self.malformed += piece.malformed
        if piece.positives < 0 or self._positives is None:
            self._positives = None
        else:
            self._positives += piece.positives
        self._missing += piece.missing
        self._bins += piece.bins
        self._sampled.append(piece.sampled)
        self._samples.append(piece.sample)
        if sum(map(len, self._sampled)) >= 2 * SAMPLE_ROWS:
            self._thin_sample()
        for j, values in enumerate(piece.new_values):
            if len(values):
                self._waiting[j].append(values)
                if sum(map(len, self._waiting[j])) >= _WAITING:
                    self._count_new_values(j)
        self._first_bad = self._first_bad or piece.first_bad

    def _thin_sample(self) -> None:
        """Keep every second row of the sample, until it is small enough."""
        numbers, sample = np.concatenate(self._sampled), np.concatenate(self._samples, axis=1)
        while True:
            keep = numbers % self._stride == 0
            if np.count_nonzero(keep) < 2 * SAMPLE_ROWS:
                break
            self._stride *= 2
        self._sampled, self._samples = [numbers[keep]], [sample[:, keep]]

    def _count_new_values(self, j: int) -> None:
        if self._waiting[j]:
            counted = count(self._waiting[j])
            known = self._new_values[j]
            merged = counted if known is None else merge([known, counted])
            self._new_values[j] = _most_frequent(merged, NEW_VALUES)
            self._waiting[j] = []

    def finish(self, day: DayFile) -> DayTally:
        """Return the counts of the whole day."""
        if not self.rows:
            raise BadInputError(
                f"{day.source}: no well-formed row{self._first_bad}",
                "compare a day with the columns that the workflow was fitted on",
            )
        self._thin_sample()
        for j in range(len(self._ids)):
            self._count_new_values(j)
        empty = Counts(np.empty(0, np.uint32), np.empty(0, np.int64))
        return DayTally(
            rows=self.rows,
            malformed=self.malformed,
            positives=self._positives,
            missing=self._missing,
            bins=self._bins,
            sample=self._samples[0],
            ids=self._ids,
            new_values=[empty if counts is None else counts for counts in self._new_values],
        )


def _first_rows(rows: RawRows, lines: int) -> RawRows:
    """Return the rows, and the malformed ones, among the first lines."""
    n = int(np.searchsorted(rows.line, lines))
    bad = [row for row in rows.bad if row.line < lines]
    return RawRows(
        label=None if rows.label is None else rows.label[:n],
        dense=rows.dense[:, :n],
        dense_missing=rows.dense_missing[:, :n],
        categorical=rows.categorical[:, :n]
        if isinstance(rows.categorical, np.ndarray)
        else [_first_values(values, n) for values in rows.categorical],
        categorical_missing=rows.categorical_missing[:, :n],
        line=rows.line[:n],
        bad=bad,
        bad_count=lines - n,
        lines=lines,
        more_labels=None if rows.more_labels is None else rows.more_labels[:, :n],
        weight=None if rows.weight is None else rows.weight[:n],
    )


def _first_values(values: CategoryValues, n: int) -> CategoryValues:
    if isinstance(values, Jagged):
        return Jagged(values.offsets[: n + 1], values.values[: values.offsets[n]])
    return values[:n]


def _unseen_values(
    values: CategoryValues, ids: Ids, workflow: CompiledWorkflow, j: int
) -> CategoryValues:
    """Return the raw values that are out of vocabulary; none of a hashed column."""
    if isinstance(values, Jagged):
        values = values.values
    if isinstance(ids, Jagged):
        ids = ids.values
    column = workflow.spec.categorical[j]
    if column.hash_buckets:
        return values[:0]
    unseen = np.flatnonzero((ids >= FIRST_OOV_ID) & (ids < column.reserved_ids))
    return values.take(pa.array(unseen)) if isinstance(values, pa.Array) else values[unseen]


def _describe_first_bad(piece: UnparsedRows, rows: RawRows) -> str:
    if not rows.bad:
        return ""
    return f"; row {piece.first + rows.bad[0].line + 1}: {rows.bad[0].what}"


def _most_frequent(counts: Counts, most: int) -> Counts:
    """Keep the most frequent values, in the order of ``counts``; of ties, those before."""
    if len(counts) <= most:
        return counts
    keep = np.sort(np.argsort(-counts.counts, kind="stable")[:most])
    values = counts.values
    kept = values.take(pa.array(keep)) if isinstance(values, pa.Array) else values[keep]
    return Counts(kept, counts.counts[keep])


@compiled(
    types.void(types.Array(types.int32, 1, "A", readonly=True), types.Array(types.uint32, 1, "C"))
)
def _add_ids(ids, counts):
    for i in range(len(ids)):
        counts[ids[i]] += np.uint32(1)
