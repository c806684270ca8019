"""The engines of the ETL: what counts and encodes the blocks of a log, and where.

``cpu`` and ``dask`` run the same functions and write the same bytes: in threads of this process, or
on the workers of a Dask cluster, on the card of a worker that has one if the log has Criteo's
format. ``nvtabular`` runs NVTabular's own operators over Dask.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from nvt_torchrec.clicklog.readers.raw import Block
from nvt_torchrec.etl.engines.device import supports
from nvt_torchrec.etl.engines.hardware import cores, gpu_count
from nvt_torchrec.etl.output import DASK, FIT, PARTS
from nvt_torchrec.etl.plan import Unit
from nvt_torchrec.etl.results import UnitResult
from nvt_torchrec.etl.settings import EtlSettings

if TYPE_CHECKING:
    from nvt_torchrec.workflows.extension.workflow import DayCounts
    from nvt_torchrec.workflows.writer import Fitted

log = logging.getLogger(__name__)

#: Is called with the number of rows done since the last call.
Report: TypeAlias = Callable[[float], object]
_Count: TypeAlias = Callable[[list[Block], Report], None]
_Encode: TypeAlias = Callable[[list[Unit], Path], Iterable[UnitResult]]


@dataclasses.dataclass(frozen=True)
class Engine:
    """The functions of a started engine.

    Attributes:
        fit: Returns the vocabularies and statistics of blocks.
        count_day: Counts the blocks of the day with a number, for an extension. None for
            ``nvtabular``, whose outputs cannot be extended.
        encode: Encodes units with a saved workflow, writes their parts and yields results as they
            finish.
    """

    fit: Callable[[list[Block], Report], Fitted]
    count_day: Callable[[int, list[Block], Report], DayCounts] | None
    encode: _Encode


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
    engines = {"cpu": _threads, "dask": _workers, "nvtabular": _nvtabular}
    with engines[settings.engine](settings, work, reject) as engine:
        yield engine


@contextlib.contextmanager
def _threads(settings: EtlSettings, work: Path, reject: bool | int) -> Iterator[Engine]:
    # compiles its loops on import, which may take half a minute: only once the input was checked
    from nvt_torchrec.etl.engines import threads

    spec, number = settings.spec, settings.workers or cores()

    def count(blocks: list[Block], report: Report) -> None:
        threads.count(blocks, spec, work / FIT, workers=number, reject=reject, report=report)

    def encode(units: list[Unit], workflow: Path) -> Iterator[UnitResult]:
        return threads.encode(units, workflow, work / PARTS, work, workers=number, reject=reject)

    yield _of_counts(settings, work, count, encode)


@contextlib.contextmanager
def _workers(settings: EtlSettings, work: Path, reject: bool | int) -> Iterator[Engine]:
    # Dask takes seconds to import: not for the cpu engine, nor for --help
    from nvt_torchrec.etl.engines import workers
    from nvt_torchrec.etl.engines.cluster import cluster
    from nvt_torchrec.etl.engines.device import comparison
    from nvt_torchrec.etl.engines.device import workers as device

    spec = settings.spec
    options: dict[str, Any] = {"reject": reject, "strict": settings.strict_gpu}
    with cluster(settings.scheduler, settings.workers, work / DASK, work) as (client, gpu):

        def count(blocks: list[Block], report: Report) -> None:
            on_cards = gpu and device.takes(spec, blocks)
            agrees = on_cards and comparison.counts_agree(client, blocks[0], spec, **options)
            place = device if agrees else workers
            place.count(blocks, spec, work / FIT, client, reject=reject, report=report)

        def encode(units: list[Unit], workflow: Path) -> Iterator[UnitResult]:
            on_cards = gpu and device.takes(spec, [unit.block for unit in units])
            agrees = (
                on_cards
                and device.has_room(workflow)
                and comparison.codes_agree(client, units[0], workflow, work, **options)
            )
            place = device if agrees else workers
            return place.encode(units, workflow, work / PARTS, work, client, reject=reject)

        yield _of_counts(settings, work, count, encode)


def _of_counts(settings: EtlSettings, work: Path, count: _Count, encode: _Encode) -> Engine:
    """Return the engine whose blocks are counted by a function into the directory of the run."""
    from nvt_torchrec.etl.engines import fitting

    def fit(blocks: list[Block], report: Report) -> Fitted:
        count(blocks, report)
        return fitting.fit(blocks, settings.spec, work / FIT)

    def count_day(day: int, blocks: list[Block], report: Report) -> DayCounts:
        count(blocks, report)
        return fitting.day_counts(day, blocks, settings.spec, work / FIT)

    return Engine(fit, count_day, encode)


@contextlib.contextmanager
def _nvtabular(settings: EtlSettings, work: Path, reject: bool | int) -> Iterator[Engine]:
    from nvt_torchrec.etl.engines import nvtabular
    from nvt_torchrec.etl.engines.cluster import cluster

    with cluster(settings.scheduler, settings.workers, work / DASK, work) as (client, gpu):
        options: dict[str, Any] = {"gpu": gpu, "reject": reject}

        def fit(blocks: list[Block], report: Report) -> Fitted:
            return nvtabular.fit(blocks, settings.spec, work, client, report=report, **options)

        def encode(units: list[Unit], workflow: Path) -> Iterator[UnitResult]:
            return nvtabular.encode(units, workflow, work / PARTS, work, client, **options)

        yield Engine(fit, None, encode)
