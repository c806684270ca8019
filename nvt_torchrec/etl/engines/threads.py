"""Count and encode blocks in threads of this process.

A thread holds one piece in memory and, while counting, the categories of its block, or, while
encoding, a row group. No thread waits for the disk: another one syncs finished files, and the
system reads the next blocks ahead.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nvt_torchrec.base.files.atomic import will_read
from nvt_torchrec.clicklog.readers.log_format import Block, format_of
from nvt_torchrec.etl.division.plan import Unit, by_block
from nvt_torchrec.etl.engines.block import count_block, encode_block
from nvt_torchrec.etl.engines.engine import Engine, Report, open_runs
from nvt_torchrec.etl.units.results import UnitResult
from nvt_torchrec.etl.units.writing import recording
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.workflows import compiled

log = logging.getLogger(__name__)


class Threads(Engine):
    """Counts and encodes in threads of this process."""

    def count(self, blocks: list[Block], report: Report) -> None:
        """See :meth:`Engine.count`; counts become durable while other blocks are counted."""
        job, workers = self.job, self.job.workers
        with open_runs(job, blocks, ahead=workers) as runs, _threads(workers) as pool:
            runs.compact()
            report(runs.rows)
            missing = runs.missing
            to_read = [blocks[index] for index in missing]

            def count_one(turn: int, index: int) -> int:
                log.debug("begin fit %s:%d", blocks[index].source, blocks[index].begin)
                _read_ahead(to_read, turn, workers, job.spec)
                run = count_block(blocks[index], job.spec, job.reject)
                runs.add(index, run)
                return run.rows

            # in the order of the blocks, so that of several errors always the same one is raised
            for future in [pool.submit(count_one, *item) for item in enumerate(missing)]:
                report(future.result())

    def encode(self, units: list[Unit], workflow: Path) -> Iterator[UnitResult]:
        """See :meth:`Engine.encode`; a thread does all units of a block."""
        job, loaded = self.job, compiled.load(workflow)
        groups = by_block(units)
        blocks = [group[0].block for group in groups]

        def encode_one(turn: int, group: tuple[Unit, ...]) -> list[UnitResult]:
            log.debug("begin %s", group[0].file)
            _read_ahead(blocks, turn, job.workers, loaded.spec)
            results, written = encode_block(group, loaded, job.work, reject=job.reject)
            syncer.add(written, results)
            return results

        with recording(job.work, job.workers) as syncer, _threads(job.workers) as pool:
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
    if not format_of(spec).by_rows:
        for block in blocks[turn + workers if turn else 0 : turn + workers + 1]:
            will_read(block.path, block.begin, block.end)
