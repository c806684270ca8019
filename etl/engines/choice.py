"""Which engine a run uses, and one interface to both engines."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from clicklog.readers.raw import Block
from etl.engines.hardware import cores, gpu_count
from etl.engines.measured import read_measurement
from etl.output import CATEGORIES, DASK, FIT, PARTS
from etl.plan import Unit
from etl.results import UnitResult
from etl.settings import EtlSettings

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Engine:
    """The two functions of a started engine.

    Attributes:
        fit: Fits a workflow on blocks and saves it at a path. Its third argument is called with
            the number of rows done since the last call.
        transform: Transforms units with the saved workflow and yields results as they finish.
    """

    fit: Callable[[list[Block], Path, Callable[[float], object]], object]
    transform: Callable[[list[Unit], Path], Iterable[UnitResult]]


def resolve(settings: EtlSettings) -> EtlSettings:
    """Replace the engine ``auto`` by one of the engines, and log which one and why."""
    if settings.engine != "auto":
        return settings
    engine, reason = _choose(settings.scheduler)
    log.info("engine %s: %s", engine, reason)
    return dataclasses.replace(settings, engine=engine)


def _choose(scheduler: str | None) -> tuple[str, str]:
    """Return an engine and the reason."""
    if scheduler:
        return "dask", "there is a --scheduler"
    if measurement := read_measurement():
        return measurement.winner, str(measurement)
    gpus = gpu_count()
    if not gpus:
        return "cpu", "there is no GPU that cuDF can use"
    return "dask", (
        f"there {'is a GPU' if gpus == 1 else f'are {gpus} GPUs'}; `python -m etl doctor "
        "--measure` finds out which engine is faster here"
    )


@contextlib.contextmanager
def start(settings: EtlSettings, work: Path) -> Iterator[Engine]:
    """Start the engine that ``settings`` name; ``work`` is the directory of the run's state."""
    with (_dask if settings.engine == "dask" else _cpu)(settings, work) as engine:
        yield engine


@contextlib.contextmanager
def _cpu(settings: EtlSettings, work: Path) -> Iterator[Engine]:
    # compiles its loops on import, which may take half a minute: only once the input was checked
    from etl.engines import cpu
    from workflows.writer import write_workflow

    options = {"workers": settings.workers or cores(), "reject": settings.reject}

    def fit(blocks, path, report):
        fitted = cpu.fit(blocks, settings.spec, work / FIT, report=report, **options)
        write_workflow(path, settings.spec, fitted, threads=options["workers"])

    def transform(units, path):
        return cpu.transform(units, path, work / PARTS, work, **options)

    yield Engine(fit, transform)


@contextlib.contextmanager
def _dask(settings: EtlSettings, work: Path) -> Iterator[Engine]:
    # Dask and NVTabular take seconds to import: not for the cpu engine, nor for --help
    from etl.engines import dask
    from etl.engines.cluster import cluster
    from workflows import save

    with cluster(settings.scheduler, settings.workers, work / DASK, work) as (client, gpu):
        options = {"gpu": gpu, "reject": settings.reject}

        def fit(blocks, path, report):
            categories = work / CATEGORIES
            workflow = dask.fit(blocks, settings.spec, categories, client, report=report, **options)
            save(workflow, settings.spec, path)

        def transform(units, path):
            return dask.transform(units, path, work / PARTS, work, client, **options)

        yield Engine(fit, transform)
