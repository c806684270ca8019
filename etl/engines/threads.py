"""Count and encode blocks in threads of this process.

A thread holds one piece in memory and, while counting, the categories of its block, or, while
encoding, a row group. No thread waits for the disk: another one syncs finished files, and the
system reads the next blocks ahead.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nvt_torchrec.base.files.atomic import will_read
from nvt_torchrec.clicklog.readers.raw import Block
from nvt_torchrec.etl.engines.block import count_block, encode_block
from nvt_torchrec.etl.engines.fitting import open_runs
from nvt_torchrec.etl.engines.syncing import Syncer
from nvt_torchrec.etl.plan import Unit, by_block
from nvt_torchrec.etl.results import UnitResult
from nvt_torchrec.etl.state import record
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.workflows import compiled

log = logging.getLogger(__name__)


def count(
    blocks: list[Block],
    spec: FeatureSpec,
    directory: Path,
    *,
    workers: int,
    reject: bool | int,
    report: Callable[[float], object] = lambda rows: None,
) -> None:
    """Count the categories and the moments of the dense columns, of all blocks.

    The counts of each block are made durable while others are counted. After an interruption, a
    call with the same arguments does only what is missing.

    Args:
        blocks: The blocks.
        spec: The columns.
        directory: The directory for the counts: a small file per block, which are merged into
            larger ones later (:mod:`etl.engines.runs`).
        workers: The number of threads.
        reject: Whether to leave malformed rows out instead of raising.
        report: A function that is called with the number of rows done since the last call.

    Raises:
        BadRowError: A row is malformed; of several such rows, the first in the order of ``blocks``.
        BadInputError: A block cannot be read.
        OutputError: ``directory`` cannot be written.
    """
    with open_runs(blocks, spec, directory, ahead=workers) as runs, _threads(workers) as pool:
        runs.compact()
        report(sum(int(run.array("rows")) for run in runs.files))
        missing = runs.missing
        to_read = [blocks[index] for index in missing]

        def count_one(turn: int, index: int) -> int:
            log.debug("begin fit %s:%d", blocks[index].source, blocks[index].begin)
            _read_ahead(to_read, turn, workers, spec)
            run = count_block(blocks[index], spec, reject)
            runs.add(index, run)
            return run.rows

        # in the order of the blocks, so that of several errors always the same one is raised
        for future in [pool.submit(count_one, *item) for item in enumerate(missing)]:
            report(future.result())


def encode(
    units: list[Unit],
    workflow_path: Path,
    parts: Path,
    work: Path,
    *,
    workers: int,
    reject: bool | int,
) -> Iterator[UnitResult]:
    """Encode units with a saved workflow; write their parts and records.

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
    blocks = [group[0].block for group in groups]

    def encode_one(turn: int, group: tuple[Unit, ...]) -> list[UnitResult]:
        log.debug("begin %s", group[0].file)
        _read_ahead(blocks, turn, workers, workflow.spec)
        results, written = encode_block(group, workflow, parts, work, reject=reject)
        syncer.add(written, results)
        return results

    def note(durable: list[list[UnitResult]]) -> None:
        record(work, [result for results in durable for result in results])

    with Syncer(note, workers) as syncer, _threads(workers) as pool:
        for future in [pool.submit(encode_one, *item) for item in enumerate(groups)]:
            yield from future.result()


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
