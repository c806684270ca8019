"""The engines of the ETL: what counts and encodes the blocks of a log, and where.

``cpu`` and ``dask`` run the same functions and write the same bytes: in threads of this process, or
on the workers of a Dask cluster, on the card of a worker that has one if the log has Criteo's
format. ``nvtabular`` runs NVTabular's own operators over Dask.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from nvt_torchrec.clicklog.readers.raw import Block
from nvt_torchrec.etl.engines.device import supports
from nvt_torchrec.etl.engines.hardware import cores, gpu_count
from nvt_torchrec.etl.output import DASK
from nvt_torchrec.etl.plan import Unit
from nvt_torchrec.etl.results import UnitResult
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec

if TYPE_CHECKING:
    from nvt_torchrec.workflows.extension.workflow import DayCounts
    from nvt_torchrec.workflows.writer import Fitted

log = logging.getLogger(__name__)

#: Is called with the number of rows done since the last call.
Report: TypeAlias = Callable[[float], object]


@dataclasses.dataclass(frozen=True)
class Job:
    """What an engine works for: a run, or the extension by a day.

    Attributes:
        spec: The columns.
        work: The directory of its state, for counts, parts and records; all workers see it.
        reject: Whether malformed rows are left out, or how many of a block at most.
        workers: The number of threads, for the engine that uses threads.
        strict_gpu: Whether it is an error that a card does not do what the host does.
    """

    spec: FeatureSpec
    work: Path
    reject: bool | int = False
    workers: int = 1
    strict_gpu: bool = False


class Engine:
    """What counts and encodes the blocks of a job. Made by :func:`start`."""

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
        from nvt_torchrec.etl.engines import fitting

        self.count(blocks, report)
        return fitting.fit(self.job, blocks)

    def count_day(self, day: int, blocks: list[Block], report: Report) -> DayCounts:
        """Count the blocks of a day, for an extension; raises what :meth:`count` does."""
        from nvt_torchrec.etl.engines import fitting

        self.count(blocks, report)
        return fitting.day_counts(self.job, day, blocks)


def resolve(settings: EtlSettings) -> EtlSettings:
    """Replace the engine ``auto`` by one of the engines, and log which one and why."""
    if settings.engine != "auto":
        return settings
    gpus = 0 if settings.scheduler else gpu_count()
    if settings.scheduler:
        engine, reason = "dask", "there is a --scheduler"
    elif gpus and supports(settings.spec):
        engine, reason = "dask", "there is a GPU" if gpus == 1 else f"there are {gpus} GPUs"
    elif gpus:
        engine, reason = "cpu", "GPUs encode logs in Criteo's format only"
    else:
        engine, reason = "cpu", "there is no GPU that cuDF can use"
    log.info("engine %s: %s", engine, reason)
    return dataclasses.replace(settings, engine=engine)


@contextlib.contextmanager
def start(settings: EtlSettings, work: Path, reject: bool | int) -> Iterator[Engine]:
    """Start the engine that the settings name.

    Args:
        settings: The settings of the run.
        work: The directory of its state.
        reject: Whether malformed rows are left out, or how many of a block at most.
    """
    job = Job(settings.spec, work, reject, settings.workers or cores(), settings.strict_gpu)
    if settings.engine == "cpu":
        # compiles loops on import, which may take half a minute: only once the input was checked
        from nvt_torchrec.etl.engines.threads import Threads

        yield Threads(job)
        return
    # Dask takes seconds to import: not for the cpu engine, nor for --help
    from nvt_torchrec.etl.engines.cluster import cluster

    with cluster(settings.scheduler, settings.workers, work / DASK, work) as (client, gpu):
        if settings.engine == "nvtabular":
            from nvt_torchrec.etl.engines.nvtabular import NVTabular

            yield NVTabular(job, client, gpu)
        else:
            from nvt_torchrec.etl.engines.workers import Workers

            yield Workers(job, client, gpu)
