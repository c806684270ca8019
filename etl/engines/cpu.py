"""Fitting and transforming blocks in threads of one process, without NVTabular.

Every heavy step (reading, parsing, sorting, encoding, writing parquet) runs without the
interpreter lock. A block is read in pieces that fit the processor's caches; a thread holds no more
than a piece and, when it fits, the categories of its block, when it transforms, a row group. What
waits for the disk has no part in this: a further thread syncs what is finished, and the system is
asked for the blocks that come next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from clicklog.errors import BadInputError, SettingsError
from clicklog.files.atomic import will_read
from clicklog.readers.raw import Block, read_block_chunks
from clicklog.rows import CategoryValues, Ragged
from clicklog.spec.feature_spec import CategoricalColumn, FeatureSpec
from etl.engines.counting import Counts, count, merge
from etl.engines.cpu_runs import Run, RunFile, Runs
from etl.engines.moments import merge_moments, moments, normalized, statistics
from etl.engines.syncing import Syncer
from etl.plan import Unit
from etl.results import UnitResult, count_bits
from etl.state import Piece, record, write_unit
from workflows import compiled
from workflows.vocabulary import FittedVocabulary, finish
from workflows.writer import Fitted

if TYPE_CHECKING:
    from workflows.compiled import CompiledWorkflow

log = logging.getLogger(__name__)

#: Text that is parsed at once: small enough that it stays in a core's caches with what it becomes,
#: and that freed memory is used again instead of going back to the system.
PIECE_BYTES = 2 << 20
#: Changes when the partial results of another version cannot be used.
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
    """Count the categories and measure the dense columns of some blocks.

    What is counted becomes durable in ``directory`` block by block, while others are counted.
    Called again with the same arguments, after whatever end the first call took, it does what is
    missing. The result depends on the blocks and the spec alone.

    Args:
        blocks: of the training days.
        spec: the columns.
        directory: for partial results: one small file per block, later one of many blocks.
        workers: threads.
        reject: leave bad rows out instead of raising.
        report: called with the rows that were done since the last call.

    Raises:
        BadRowError: a row breaks the spec: of the bad rows, the first in the order of ``blocks``.
        BadInputError: a block cannot be read, or there are no rows.
        OutputError: ``directory`` cannot be written.
    """
    key = _key(blocks, spec)
    with (
        Runs(directory, len(blocks), len(spec.vocabularies), key, ahead=workers) as runs,
        _threads(workers) as pool,
    ):
        runs.compact()
        report(sum(int(run.array("rows")) for run in runs.files))
        missing = runs.missing
        left = [blocks[index] for index in missing]

        def fit_block(turn: int, index: int) -> int:
            log.debug("begin fit %s:%d", blocks[index].source, blocks[index].begin)
            _read_ahead(left, turn, workers, spec)
            run = _count_block(blocks[index], spec, reject)
            runs.add(index, run)
            return run.rows

        # In the order of blocks, so that of several errors it is always the same one that is told.
        for future in [pool.submit(fit_block, *one) for one in enumerate(missing)]:
            report(future.result())
        return _finish(runs.files, spec, pool)


@contextlib.contextmanager
def _threads(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Threads; at the end, whatever it is, work that has not begun is dropped."""
    pool = ThreadPoolExecutor(workers, "etl")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _read_ahead(blocks: list[Block], turn: int, workers: int, spec: FeatureSpec) -> None:
    """Ask for the block that comes after those in work; at first, for these too."""
    if spec.input.format != "parquet":  # of which blocks are rows
        for block in blocks[turn + workers if turn else 0 : turn + workers + 1]:
            will_read(block.path, block.begin, block.end)


def _key(blocks: list[Block], spec: FeatureSpec) -> str:
    """A digest of everything that partial results depend on.

    Not on whether bad rows are rejected: a block that was counted without rejecting has none.
    """
    described = [_RUNS_VERSION, PIECE_BYTES, spec.to_dict()]
    described += [dataclasses.astuple(block) for block in blocks]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _count_block(block: Block, spec: FeatureSpec, reject: bool) -> Run:
    columns: list[list[CategoryValues]] = [[] for _ in spec.categorical]
    missing = np.zeros(len(columns), np.int64)
    measured = [np.zeros((len(spec.dense), 4))]
    rows_read = 0
    for rows in read_block_chunks(block, spec, reject=reject, chunk_bytes=PIECE_BYTES):
        rows_read += len(rows)
        missing += count_bits(rows.categorical_missing, len(columns))
        for pieces, piece in zip(columns, rows.categorical, strict=True):
            pieces.append(piece)
        if normalized(spec):
            measured.append(moments(rows, spec))
    counts, nulls = {}, {}
    for column, pieces, gone in zip(spec.categorical, columns, missing, strict=True):
        name = column.vocabulary_name
        found = _count_column(pieces, column, int(gone))
        counts[name] = merge([counts[name], found]) if name in counts else found
        nulls[name] = nulls.get(name, 0) + (0 if column.multi_hot else gone)
    return Run(
        rows=rows_read,
        nulls=np.array([nulls[name] for name in spec.vocabularies], np.int64),
        moments=merge_moments(measured)[np.newaxis],
        counts=[counts[name] for name in spec.vocabularies],
    )


def _count_column(pieces: list[CategoryValues], column: CategoricalColumn, missing: int) -> Counts:
    values = [piece.values if isinstance(piece, Ragged) else piece for piece in pieces]
    if column.hash_buckets:  # ids by a formula: nothing to learn
        return count([values[0][:0]])
    return count(values, placeholders=0 if column.multi_hot else missing)


def _finish(files: list[RunFile], spec: FeatureSpec, pool: ThreadPoolExecutor) -> Fitted:
    rows = sum(int(file.array("rows")) for file in files)
    if not rows:
        raise BadInputError("the training days have no well-formed row", "look at their first line")
    files = sorted(files, key=lambda file: file.path.stat().st_size)  # merges small ones first
    nulls = sum(file.array("nulls") for file in files)

    def vocabulary(v: int, columns: tuple[CategoricalColumn, ...]) -> FittedVocabulary:
        counts = merge(file.counts(v) for file in files)
        return finish(_plain(counts, columns[0]), counts.counts, columns[0], int(nulls[v]))

    found = pool.map(vocabulary, range(len(nulls)), spec.vocabularies.values())
    in_order = sorted(files, key=lambda file: file.first_block)
    merged = merge_moments([one for file in in_order for one in file.array("moments")])
    return Fitted(
        statistics=statistics(merged, spec) if normalized(spec) else {},
        vocabularies=dict(zip(spec.vocabularies, found, strict=True)),
    )


def _plain(counts: Counts, column: CategoricalColumn) -> np.ndarray | pa.StringArray:
    """Values as vocabularies hold them: int64, or strings with 32-bit offsets."""
    if not isinstance(counts.values, pa.Array):
        return counts.values.astype(np.int64)
    try:
        return counts.values.cast(pa.string())
    except pa.ArrowInvalid:
        raise SettingsError(
            f"column {column.name}: {len(counts)} different strings, over 2 GiB together",
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
        units: what to do.
        workflow_path: the saved workflow: training data are made by what inference will load.
        parts: directory of the splits' parts.
        work: directory of the run's state; see :func:`etl.state.write_unit`.
        workers: threads; each does whole units.
        reject: leave bad rows out instead of raising.

    Yields:
        Results in the order of ``units``. When there are no more, all units are durable.

    Raises:
        BadRowError, BadInputError, OutputError: of the first unit that fails; units that were not
            begun are left.
    """
    workflow = compiled.load(workflow_path)
    blocks = [unit.block for unit in units]

    def transform_unit(turn: int, unit: Unit) -> UnitResult:
        log.debug("begin %s", unit.file)
        _read_ahead(blocks, turn, workers, workflow.spec)
        result, written = write_unit(unit, _encoded(unit.block, workflow, reject), parts, work)
        syncer.add(written, result)
        return result

    with (
        Syncer(functools.partial(record, work), workers) as syncer,
        _threads(workers) as pool,
    ):
        for future in [pool.submit(transform_unit, *one) for one in enumerate(units)]:
            yield future.result()


def _encoded(block: Block, workflow: CompiledWorkflow, reject: bool) -> Iterator[Piece]:
    for rows in read_block_chunks(block, workflow.spec, reject=reject, chunk_bytes=PIECE_BYTES):
        encoded = workflow.transform(rows)
        yield rows, compiled.to_table(encoded, workflow.schema), encoded.oov
