"""Count and encode blocks of a log on the host, and the engine that does so in threads.

A block is read in pieces that fit the processor's caches. A thread holds one piece in memory and,
while counting, the categories of its block or, while encoding, a row group. Counted rows may stay
in memory until they are encoded (:mod:`.kept_rows`). Every heavy step (reading, parsing, sorting,
encoding, writing parquet) releases the interpreter lock. No worker thread waits for the disk:
another thread syncs finished files, and the operating system reads the next blocks ahead.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import to_arrow
from nvt_torchrec.base.files.atomic import Written, start_reading
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.clicklog.readers.log_format import Block, get_format, read_block_chunks
from nvt_torchrec.etl.engines import kept_rows
from nvt_torchrec.etl.engines.engine import Engine, Job, Report, open_runs
from nvt_torchrec.etl.engines.kept_rows import KeptRows
from nvt_torchrec.etl.engines.runs import SortedRun
from nvt_torchrec.etl.events.event_files import EventFiles
from nvt_torchrec.etl.events.event_values import EventValues
from nvt_torchrec.etl.events.extract import BlockExtractor
from nvt_torchrec.etl.row_additions import NO_ADDITIONS, RowAdditions
from nvt_torchrec.etl.units import counting
from nvt_torchrec.etl.units.counting import (
    Counts,
    compute_moments,
    count,
    has_moments,
    merge,
    merge_moments,
)
from nvt_torchrec.etl.units.unit_plan import Unit, group_by_block
from nvt_torchrec.etl.units.writing import (
    Encoded,
    UnitResult,
    count_missing,
    divide_rows,
    open_recorder,
    write_units,
)
from nvt_torchrec.formats.feature_spec import CategoricalColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.spec_variants import drop_event_keys
from nvt_torchrec.formats.rows import CategoryValues, RawRows, get_flat_values
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.stored_table import StoredTable
from nvt_torchrec.workflows.stored_tables import StoredTables

if TYPE_CHECKING:
    from nvt_torchrec.workflows.compiled import CompiledWorkflow

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


def count_block(
    block: Block,
    spec: FeatureSpec,
    max_bad_rows: int,
    events: EventFiles | None = None,
    additions: RowAdditions = NO_ADDITIONS,
    kept: KeptRows | None = None,
) -> SortedRun:
    """Count the categories of a block, and compute the moments of its dense columns.

    If the block is divided, only its rows for training are counted. The moments of aggregates are
    computed later.

    Args:
        block: The block.
        spec: The feature spec.
        max_bad_rows: How many malformed rows may be left out; 0: one is an error.
        events: The files to write the block's events to; None for a spec without events.
        additions: The data to add to the rows.
        kept: Keeps the rows for :func:`encode_block`; None to read them again.

    Raises:
        BadRowError: A row is malformed.
        BadInputError: The block cannot be read.
        OutputError: The events cannot be written.
    """
    tables = additions.tables
    pieces_of_columns: list[list[CategoryValues]] = [[] for _ in spec.categorical]
    missing = np.zeros(len(spec.categorical), np.int64)
    moments_of_pieces = [np.zeros((len(spec.dense), 4))]
    table_rows: list[np.ndarray] = []
    rows_read = 0
    # Histories store values, so table columns in histories need values as well as table rows.
    categories = spec.history_columns if events else ()
    pieces = _read_rows(block, spec, max_bad_rows, additions, tables, categories)
    extractor = BlockExtractor(block, spec, events, train=True) if events else None
    if extractor:
        pieces = extractor.take(pieces)
    if kept:
        pieces = kept.keep(block, pieces)
    for (rows,) in divide_rows(pieces, block, ["train"]):
        rows_read += len(rows)
        missing += count_missing(rows.categorical_missing, len(spec.categorical))
        if rows.table_rows is not None:
            table_rows.append(rows.table_rows)
        for j, values in enumerate(rows.categorical):
            pieces_of_columns[j].append(values)
        if has_moments(spec):
            moments_of_pieces.append(compute_moments(rows, spec))
    if extractor:
        extractor.write()
    counts: dict[str, Counts] = {}
    nulls: dict[str, int] = {}
    table_names = [rule.name for rule in spec.joined_tables]
    for j, column in enumerate(spec.categorical):
        name = column.vocabulary_name
        if tables and column.table:
            number = table_names.index(column.table)
            rows_of_table = np.concatenate([piece[number] for piece in table_rows])
            counted = count_table_values(tables.by_name[column.table], column, rows_of_table)
        else:
            counted = _count_column(pieces_of_columns[j], column, int(missing[j]))
        counts[name] = merge([counts[name], counted]) if name in counts else counted
        nulls.setdefault(name, 0)
        if not column.multi_hot:
            nulls[name] += int(missing[j])
    return SortedRun(
        rows=rows_read,
        nulls=np.array([nulls[name] for name in spec.vocabularies], np.int64),
        moments=merge_moments(moments_of_pieces)[np.newaxis],
        counts=[counts[name] for name in spec.vocabularies],
    )


def _count_column(pieces: list[CategoryValues], column: CategoricalColumn, missing: int) -> Counts:
    """Count the values of a column of the log, ``missing`` of which are missing."""
    values = list(map(get_flat_values, pieces))
    if column.hash_buckets:  # ids are hashes, so there is nothing to count
        return count([values[0][:0]])
    return count(values, placeholders=0 if column.multi_hot else missing)


def count_table_values(table: StoredTable, column: CategoricalColumn, rows: np.ndarray) -> Counts:
    """Count the values of a column that is joined from a table, by their codes.

    Args:
        table: The table.
        column: The column.
        rows: int64 [n], the table row of each row of the log; -1 if the table has none.
    """
    distinct = table.list_distinct(column.name)
    if column.hash_buckets:  # ids are hashes, so there is nothing to count
        return count([distinct[:0]])
    counts = table.count_values(column.name, rows, len(distinct))
    seen = np.flatnonzero(counts)
    if isinstance(distinct, np.ndarray):
        return Counts(distinct[seen], counts[seen])
    values = distinct.take(to_arrow(seen)).cast(pa.large_string())
    return Counts(values, counts[seen])


def encode_block(
    units: tuple[Unit, ...],
    workflow: CompiledWorkflow,
    work: Path,
    *,
    max_bad_rows: int,
    events: EventValues | None = None,
    additions: RowAdditions = NO_ADDITIONS,
    kept: KeptRows | None = None,
) -> tuple[list[UnitResult], list[Written]]:
    """Read the units of a block, or take the kept rows, encode them and write their parts.

    Args:
        units: Some or all units of the block.
        workflow: The workflow.
        work: The directory of the run's state.
        max_bad_rows: See :func:`count_block`.
        events: The aggregates of all rows; None for a spec without events.
        additions: See :func:`count_block`.
        kept: The kept rows, see :func:`count_block`.

    Returns:
        See :func:`etl.units.writing.write_units`.

    Raises:
        ClickLogError: See :func:`etl.units.writing.write_units` and :func:`count_block`.
    """
    block = units[0].block
    spec = workflow.spec
    if events and not max_bad_rows:
        # Columns that only events need were parsed while counting. They need not be parsed again,
        # unless a malformed value in them decides that a row is left out.
        spec = drop_event_keys(spec)
    kept_pieces = kept.take(block) if kept else None
    if kept_pieces is not None:
        pieces = iter(kept_pieces)
    else:
        pieces = _read_rows(block, spec, max_bad_rows, additions, workflow.tables)
    if events:
        pieces = events.add(pieces, block)
    return write_units(units, pieces, functools.partial(_encode_rows, workflow), work)


def _read_rows(
    block: Block,
    spec: FeatureSpec,
    max_bad_rows: int,
    additions: RowAdditions,
    tables: StoredTables | None,
    categories: Collection[str] = (),
) -> Iterator[RawRows]:
    """Read the rows of a block, with added data and joined table columns.

    Args:
        block: The block.
        spec: The feature spec with the columns to read.
        max_bad_rows: See :func:`count_block`.
        additions: See :func:`count_block`.
        tables: The tables to join; None without any.
        categories: See :meth:`.StoredTables.look_up`.
    """
    pieces = read_block_chunks(
        block, spec, max_bad_rows=max_bad_rows, chunk_bytes=counting.PIECE_BYTES
    )
    pieces = additions.add_rows(pieces, block, spec)
    return tables.look_up_all(pieces, spec, categories) if tables else pieces


def _encode_rows(workflow: CompiledWorkflow, rows: RawRows) -> Encoded:
    encoded = workflow.transform(rows)
    return compiled.to_table(encoded, workflow.schema), encoded.oov


log = logging.getLogger(__name__)


class Threads(Engine):
    """Counts and encodes in threads of this process."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        max_bytes = kept_rows.MAX_BYTES
        if job.spec.events:  # preparing events takes memory, too
            max_bytes //= 2
        self._kept = KeptRows(max_bytes)

    def count(self, blocks: list[Block], report: Report) -> None:
        """See :meth:`Engine.count`; counts become durable while other blocks are counted."""
        job = self.job
        workers = job.workers
        with open_runs(job, blocks, ahead=workers) as runs, _threads(workers) as pool:
            runs.compact()
            report(runs.rows)
            missing = runs.missing
            to_read = [blocks[index] for index in missing]

            def count_one(position: int, index: int) -> int:
                log.debug("begin fit %s:%d", blocks[index].source, blocks[index].begin)
                _read_ahead(to_read, position, workers, job.spec)
                run = count_block(
                    blocks[index],
                    job.spec,
                    job.max_bad_rows,
                    job.event_files,
                    job.additions,
                    self._kept,
                )
                runs.add(index, run)
                return run.rows

            # In the order of the blocks, so that the same one of several errors is always raised.
            for future in [pool.submit(count_one, *item) for item in enumerate(missing)]:
                report(future.result())

    def encode(self, units: list[Unit], workflow: Path) -> Iterator[UnitResult]:
        """See :meth:`Engine.encode`; a thread encodes all units of a block."""
        job = self.job
        loaded = compiled.load(workflow)
        groups = group_by_block(units)
        blocks = [group[0].block for group in groups]

        def encode_one(position: int, group: tuple[Unit, ...]) -> list[UnitResult]:
            log.debug("begin %s", group[0].file)
            _read_ahead(blocks, position, job.workers, loaded.spec)
            results, written = encode_block(
                group,
                loaded,
                job.work,
                max_bad_rows=job.max_bad_rows,
                events=job.events,
                additions=job.additions,
                kept=self._kept,
            )
            syncer.add(written, results)
            return results

        with open_recorder(job.work, job.workers) as syncer, _threads(job.workers) as pool:
            for future in [pool.submit(encode_one, *item) for item in enumerate(groups)]:
                yield from future.result()

    def map_tasks(
        self, work: Callable[[_Task], _Result], tasks: Iterable[_Task]
    ) -> Iterator[_Result]:
        """See :meth:`Engine.map_tasks`."""
        return map_in_order(work, tasks, self.job.workers, "etl")


@contextlib.contextmanager
def _threads(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Start threads; when the context ends or fails, cancel work that has not begun."""
    pool = ThreadPoolExecutor(workers, "etl")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _read_ahead(blocks: list[Block], position: int, workers: int, spec: FeatureSpec) -> None:
    """Ask the operating system to read the next block that no worker has begun.

    Args:
        blocks: All blocks, in the order of the work.
        position: The position of the block that this worker begins. At position 0 the blocks of the
            other workers are requested as well.
        workers: The number of workers.
        spec: The feature spec.
    """
    if not get_format(spec).by_rows:
        first = position + workers if position else 0
        for block in blocks[first : position + workers + 1]:
            start_reading(block.path, block.begin, block.end)
