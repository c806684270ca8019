"""The engines of the ETL: what counts and encodes the blocks of a log, and where.

``cpu`` and ``dask`` run the same functions and write the same bytes: in threads of this process, or
on the workers of a Dask cluster, on the card of a worker that has one if the log has Criteo's
format. ``nvtabular`` runs NVTabular's own operators over Dask.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nvt_torchrec.clicklog.readers.raw import Block
from nvt_torchrec.etl.engines import fitting
from nvt_torchrec.etl.engines.job import Job, Report
from nvt_torchrec.etl.plan import Unit
from nvt_torchrec.etl.results import UnitResult
from nvt_torchrec.workflows.extension.workflow import DayCounts
from nvt_torchrec.workflows.writer import Fitted


class Engine:
    """What counts and encodes the blocks of a job. Made by :func:`etl.engines.start.start`."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def count(self, blocks: list[Block], report: Report) -> None:
        """Count the categories of blocks and the moments of their dense columns, durably.

        After an interruption, a call with the same blocks does only what is missing.

        Raises:
            BadRowError: A row is malformed; of several such rows, the first in the order of
                ``blocks``.
            BadInputError: A block cannot be read.
            OutputError: The directory of the state cannot be written.
            WorkerLostError: Workers ran out of memory.
        """
        raise NotImplementedError

    def encode(self, units: list[Unit], workflow: Path) -> Iterator[UnitResult]:
        """Encode units with a saved workflow; write their parts and records.

        The workflow is loaded from disk, so training data are made by the same one as inference
        uses.

        Yields:
            The results, those of one block together. After the last one, all units are durable.

        Raises:
            BadRowError: A row is malformed. Of several errors the first is raised, and units that
                have not begun are dropped.
            BadInputError: A block cannot be read.
            OutputError: A part cannot be written.
            WorkerLostError: Workers ran out of memory.
        """
        raise NotImplementedError

    def fit(self, blocks: list[Block], report: Report) -> Fitted:
        """Return the vocabularies and statistics of blocks; raises what :meth:`count` does."""
        self.count(blocks, report)
        return fitting.fit(self.job, blocks)

    def count_day(self, day: int, blocks: list[Block], report: Report) -> DayCounts:
        """Count the blocks of a day, for an extension; raises what :meth:`count` does."""
        self.count(blocks, report)
        return fitting.day_counts(self.job, day, blocks)
