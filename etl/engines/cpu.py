"""Fit and transform blocks in threads of one process, without NVTabular.

Every heavy step (reading, parsing, sorting, encoding, writing parquet) releases the interpreter
lock. A block is read in pieces that fit the processor's caches. A thread holds one piece in memory
and, while fitting, the categories of its block, or, while transforming, a row group. No thread
waits for the disk: another one syncs finished files, and the system reads the next blocks ahead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.base.files.atomic import Written, will_read
from nvt_torchrec.clicklog.readers.raw import Block, read_block_chunks
from nvt_torchrec.etl.engines.counting import Counts, count, merge
from nvt_torchrec.etl.engines.cpu_runs import Run, RunFile, Runs
from nvt_torchrec.etl.engines.moments import moments
from nvt_torchrec.etl.engines.syncing import Syncer
from nvt_torchrec.etl.plan import Unit, by_block
from nvt_torchrec.etl.results import NoTrainingRowsError, UnitResult, count_missing
from nvt_torchrec.etl.row_split import training_rows
from nvt_torchrec.etl.state import Piece, record, write_units
from nvt_torchrec.formats.rows import CategoryValues, Jagged, RawRows
from nvt_torchrec.formats.spec.feature_spec import CategoricalColumn, FeatureSpec
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.extension.workflow import DayCounts
from nvt_torchrec.workflows.moments import merge_moments, normalized, statistics
from nvt_torchrec.workflows.vocabulary import FittedVocabulary, PendingValues, Values, apply_policy
from nvt_torchrec.workflows.writer import Fitted

if TYPE_CHECKING:
    from nvt_torchrec.workflows.compiled import CompiledWorkflow

log = logging.getLogger(__name__)

#: Text that is parsed at once. Small enough that it stays in a core's caches together with the
#: parsed columns, and that freed memory is reused instead of returned to the system.
PIECE_BYTES = 2 << 20
#: The version of the partial results; a run does not use those of another version.
_RUNS_VERSION = 2


def fit(
    blocks: list[Block],
    spec: FeatureSpec,
    directory: Path,
    *,
    workers: int,
    reject: bool,
    report: Callable[[float], object] = lambda rows: None,
) -> Fitted:
    """Count the categories and compute the moments of the dense columns.

    The counts of each block are made durable in ``directory`` while others are counted. After an
    interruption, a call with the same arguments does only what is missing. The result depends only
    on the blocks and the spec.

    Args:
        blocks: The blocks of the training days.
        spec: The columns.
        directory: The directory for partial results: a small file per block, which are merged into
            larger ones later.
        workers: The number of threads.
        reject: Whether to leave malformed rows out instead of raising.
        report: A function that is called with the number of rows done since the last call.

    Raises:
        BadRowError: A row is malformed; of several such rows, the first in the order of ``blocks``.
        BadInputError: A block cannot be read, or there are no rows.
        OutputError: ``directory`` cannot be written.
    """
    counting = _counted(blocks, spec, directory, workers=workers, reject=reject, report=report)
    with counting as (files, pool):
        return finish_runs(files, spec, pool)


def count_day(
    day: int,
    blocks: list[Block],
    spec: FeatureSpec,
    directory: Path,
    *,
    workers: int,
    reject: bool,
    report: Callable[[float], object] = lambda rows: None,
) -> DayCounts:
    """Count what a workflow is extended by.

    Takes and raises what :func:`fit` does; ``blocks`` are those of the day.
    """
    counting = _counted(blocks, spec, directory, workers=workers, reject=reject, report=report)
    with counting as (files, pool):
        return day_counts(day, files, spec, pool)


@contextlib.contextmanager
def _counted(
    blocks: list[Block],
    spec: FeatureSpec,
    directory: Path,
    *,
    workers: int,
    reject: bool,
    report: Callable[[float], object],
) -> Iterator[tuple[list[RunFile], ThreadPoolExecutor]]:
    """Count all blocks; yield the files of the counts, and the threads that are free now."""
    with (
        runs_of(blocks, spec, set(spec.vocabularies), directory, ahead=workers) as runs,
        _threads(workers) as pool,
    ):
        runs.compact()
        report(sum(int(run.array("rows")) for run in runs.files))
        missing = runs.missing
        to_read = [blocks[index] for index in missing]

        def fit_block(turn: int, index: int) -> int:
            log.debug("begin fit %s:%d", blocks[index].source, blocks[index].begin)
            _read_ahead(to_read, turn, workers, spec)
            run = count_block(blocks[index], spec, reject)
            runs.add(index, run)
            return run.rows

        # in the order of the blocks, so that of several errors always the same one is raised
        for future in [pool.submit(fit_block, *item) for item in enumerate(missing)]:
            report(future.result())
        yield runs.files, pool


@contextlib.contextmanager
def _threads(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Start threads; when the context ends or fails, drop work that has not begun."""
    pool = ThreadPoolExecutor(workers, "etl")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _read_ahead(blocks: list[Block], turn: int, workers: int, spec: FeatureSpec) -> None:
    """Ask the system to read the block after those in work; in the first turn, those as well."""
    if spec.input.format != "parquet":  # whose blocks are ranges of rows, not of bytes
        for block in blocks[turn + workers if turn else 0 : turn + workers + 1]:
            will_read(block.path, block.begin, block.end)


def runs_of(
    blocks: list[Block], spec: FeatureSpec, counted: set[str], directory: Path, *, ahead: int = 1
) -> Runs:
    """Open the partial results in a directory; those that depend on other things are deleted.

    Whether malformed rows are rejected does not matter: a block that was counted without rejecting
    has no such rows.

    Args:
        blocks: The blocks of the training days.
        spec: The columns.
        counted: The vocabularies whose values are counted.
        directory: Where the partial results are.
        ahead: How many of them may wait for the disk.
    """
    described = [_RUNS_VERSION, PIECE_BYTES, spec.to_dict(), sorted(counted)]
    described += [dataclasses.astuple(block) for block in blocks]
    key = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    return Runs(directory, len(blocks), len(spec.vocabularies), key, ahead=ahead)


def count_block(block: Block, spec: FeatureSpec, reject: bool) -> Run:
    """Count the categories of a block, and compute the moments of its dense columns.

    Of a divided block, only the rows for training are counted.
    """
    pieces = read_block_chunks(block, spec, reject=reject, chunk_bytes=PIECE_BYTES)
    return count_pieces(training_rows(pieces, block), spec, set(spec.vocabularies))


def count_pieces(pieces: Iterable[RawRows], spec: FeatureSpec, counted: set[str]) -> Run:
    """Count the rows of a block.

    Args:
        pieces: The rows, in pieces of :data:`PIECE_BYTES`, on which the last bits of the moments
            depend.
        spec: The columns.
        counted: The vocabularies whose values are counted; of others there will be no values.
    """
    columns: list[list[CategoryValues]] = [[] for _ in spec.categorical]
    missing = np.zeros(len(columns), np.int64)
    of_pieces = [np.zeros((len(spec.dense), 4))]
    rows_read = 0
    for rows in pieces:
        rows_read += len(rows)
        missing += count_missing(rows.categorical_missing, len(columns))
        for of_column, piece in zip(columns, rows.categorical, strict=True):
            of_column.append(piece)
        if normalized(spec):
            of_pieces.append(moments(rows, spec))
    counts, nulls = {}, {}
    for column, of_column, absent in zip(spec.categorical, columns, missing, strict=True):
        name = column.vocabulary_name
        found = _count_column(of_column, column, int(absent), name in counted)
        counts[name] = merge([counts[name], found]) if name in counts else found
        nulls[name] = nulls.get(name, 0) + (0 if column.multi_hot else absent)
    return Run(
        rows=rows_read,
        nulls=np.array([nulls[name] for name in spec.vocabularies], np.int64),
        moments=merge_moments(of_pieces)[np.newaxis],
        counts=[counts[name] for name in spec.vocabularies],
    )


def _count_column(
    pieces: list[CategoryValues], column: CategoricalColumn, missing: int, counted: bool
) -> Counts:
    values = [piece.values if isinstance(piece, Jagged) else piece for piece in pieces]
    if column.hash_buckets or not counted:  # where the id is a hash there is nothing to count
        return count([values[0][:0]])
    return count(values, placeholders=0 if column.multi_hot else missing)


def finish_runs(files: list[RunFile], spec: FeatureSpec, pool: ThreadPoolExecutor) -> Fitted:
    """Return what all partial results give together, whatever they were merged into.

    Raises:
        BadInputError: There are no rows, or a file is damaged.
        SettingsError: A column has strings of more than 2 GiB in all.
    """
    rows = sum(int(file.array("rows")) for file in files)
    if not rows and spec.split.by != "days":
        raise BadInputError(
            f"split by {spec.split.by}: no well-formed row is for training",
            "change the split in the spec, or look at the first line of the files",
        )
    if not rows:
        raise BadInputError("the training days have no well-formed row", "look at their first line")
    files = sorted(
        files, key=lambda file: file.path.stat().st_size
    )  # so that small ones are merged first
    nulls = sum(file.array("nulls") for file in files)

    def vocabulary(
        v: int, columns: tuple[CategoricalColumn, ...]
    ) -> tuple[FittedVocabulary, PendingValues]:
        counts = merge(file.counts(v) for file in files)
        values = _to_vocabulary(counts, columns[0])
        return apply_policy(values, counts.counts, columns[0], int(nulls[v]))

    found = pool.map(vocabulary, range(len(nulls)), spec.vocabularies.values())
    in_order = sorted(files, key=lambda file: file.first_block)
    merged = merge_moments([block for file in in_order for block in file.array("moments")])
    by_name = dict(zip(spec.vocabularies, found, strict=True))
    return Fitted(
        statistics=statistics(merged, spec) if normalized(spec) else {},
        vocabularies={name: fitted for name, (fitted, _) in by_name.items()},
        pending={name: pending for name, (_, pending) in by_name.items()},
        moments=merged if normalized(spec) else None,
    )


def day_counts(
    day: int, files: list[RunFile], spec: FeatureSpec, pool: ThreadPoolExecutor
) -> DayCounts:
    """Merge the counts of a day's blocks; of divided ones, those of the rows for training.

    Raises:
        NoTrainingRowsError: None of its rows is for training, and none of a later day will be.
        BadInputError: The day has no well-formed row.
        SettingsError: A column has too many different strings.
    """
    rows = sum(int(file.array("rows")) for file in files)
    if not rows and spec.split.by == "days":
        raise BadInputError(f"day {day} has no well-formed row", "look at its first line")
    if not rows and spec.split.by == "time":
        raise NoTrainingRowsError(
            f"day {day}: no row is before {spec.split.valid_from}, so none is for training: the "
            "cuts of a split by time stay where they are",
            "run the ETL again over all files with later valid_from and test_from in the spec's "
            '[split]; or, to train on each day when the next one is there, with by = "days"; or '
            "score the day with `python -m inference predict --evaluate`",
        )
    nulls = sum(file.array("nulls") for file in files)
    small_first = sorted(files, key=lambda file: file.path.stat().st_size)

    def vocabulary(v: int, columns: tuple[CategoricalColumn, ...]) -> tuple[Values, np.ndarray]:
        counts = merge(file.counts(v) for file in small_first)
        return _to_vocabulary(counts, columns[0]), counts.counts

    found = pool.map(vocabulary, range(len(nulls)), spec.vocabularies.values())
    in_order = sorted(files, key=lambda file: file.first_block)
    merged = merge_moments([block for file in in_order for block in file.array("moments")])
    return DayCounts(
        day=day,
        values=dict(zip(spec.vocabularies, found, strict=True)),
        nulls={name: int(n) for name, n in zip(spec.vocabularies, nulls, strict=True)},
        moments=merged if normalized(spec) else None,
    )


def _to_vocabulary(counts: Counts, column: CategoricalColumn) -> np.ndarray | pa.StringArray:
    """Convert values to the types of vocabularies: int64, or strings with 32-bit offsets."""
    if not isinstance(counts.values, pa.Array):
        return counts.values.astype(np.int64)
    try:
        return counts.values.cast(pa.string())
    except pa.ArrowInvalid:
        raise SettingsError(
            f"column {column.name}: {len(counts)} different strings of more than 2 GiB in all",
            "set hash_buckets for this column in the spec",
        ) from None


def transform(
    units: list[Unit],
    workflow_path: Path,
    parts: Path,
    work: Path,
    *,
    workers: int,
    reject: bool,
) -> Iterator[UnitResult]:
    """Transform units with a saved workflow; write their parts and records.

    Args:
        units: The units of work.
        workflow_path: The path of the saved workflow, which inference loads as well.
        parts: The directory of the splits' parts.
        work: The directory of the run's state; see :func:`etl.state.write_unit`.
        workers: The number of threads; each does all units of a block.
        reject: Whether to leave malformed rows out instead of raising.

    Yields:
        The results in the order of ``units``, those of one block together. After the last one, all
        units are durable.

    Raises:
        BadRowError: A row is malformed. Of several errors the first is raised, and units that have
            not begun are dropped.
        BadInputError: A block cannot be read.
        OutputError: A part cannot be written.
    """
    workflow = compiled.load(workflow_path)
    groups = by_block(units)
    blocks = [own[0].block for own in groups]

    def transform_block(turn: int, own: tuple[Unit, ...]) -> list[UnitResult]:
        log.debug("begin %s", own[0].file)
        _read_ahead(blocks, turn, workers, workflow.spec)
        results, written = write_block(own, workflow, parts, work, reject=reject)
        syncer.add(written, results)
        return results

    def note(durable: list[list[UnitResult]]) -> None:
        record(work, [result for results in durable for result in results])

    with Syncer(note, workers) as syncer, _threads(workers) as pool:
        for future in [pool.submit(transform_block, *item) for item in enumerate(groups)]:
            yield from future.result()


def write_block(
    units: tuple[Unit, ...], workflow: CompiledWorkflow, parts: Path, work: Path, *, reject: bool
) -> tuple[list[UnitResult], list[Written]]:
    """Read and encode the units of a block in pieces; see :func:`etl.state.write_units`."""
    block = units[0].block
    pieces = read_block_chunks(block, workflow.spec, reject=reject, chunk_bytes=PIECE_BYTES)
    return write_units(units, pieces, functools.partial(_encode_rows, workflow), parts, work)


def _encode_rows(workflow: CompiledWorkflow, rows: RawRows) -> Piece:
    encoded = workflow.transform(rows)
    return rows, compiled.to_table(encoded, workflow.schema), encoded.oov
