"""Which engine a run uses, and one interface to both engines."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nvt_torchrec.clicklog.readers.raw import Block
from nvt_torchrec.etl.engines.hardware import cores, gpu_count
from nvt_torchrec.etl.engines.measured import read_measurement
from nvt_torchrec.etl.output import DASK, FIT, PARTS
from nvt_torchrec.etl.plan import Unit
from nvt_torchrec.etl.results import UnitResult
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.formats.etl_output import EtlOutput

if TYPE_CHECKING:
    from nvt_torchrec.workflows.writer import Fitted

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Engine:
    """The two functions of a started engine.

    Attributes:
        fit: Fits a workflow on blocks, which are of the days given, and writes it and its state
            for extensions into ``workflow`` and ``extension`` of an output. Its last argument is
            called with the number of rows done since the last call.
        transform: Transforms units with the saved workflow and yields results as they finish.
    """

    fit: Callable[[list[Block], list[int], EtlOutput, Callable[[float], object]], object]
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
    from nvt_torchrec.etl.engines import cpu

    options = {"workers": settings.workers or cores(), "reject": settings.reject}

    def fit(blocks, days, output, report):
        fitted = cpu.fit(blocks, settings.spec, work / FIT, report=report, **options)
        _write(output, settings, fitted, days, options["workers"])

    def transform(units, path):
        return cpu.transform(units, path, work / PARTS, work, **options)

    yield Engine(fit, transform)


def _write(
    output: EtlOutput, settings: EtlSettings, fitted: Fitted, days: list[int], threads: int
) -> None:
    """Write what was fitted as generation 0: the workflow, and its state for extensions."""
    from nvt_torchrec.workflows.extension.workflow import write_base_state
    from nvt_torchrec.workflows.writer import write_workflow

    description = write_workflow(output.workflow, settings.spec, fitted, threads=threads, days=days)
    write_base_state(output.extension, description, fitted, days)


@contextlib.contextmanager
def _dask(settings: EtlSettings, work: Path) -> Iterator[Engine]:
    # Dask and NVTabular take seconds to import: not for the cpu engine, nor for --help
    from nvt_torchrec.etl.engines import dask, device
    from nvt_torchrec.etl.engines.cluster import cluster

    spec = settings.spec
    with cluster(settings.scheduler, settings.workers, work / DASK, work) as (client, gpu):
        options = {"gpu": gpu, "reject": settings.reject}

        def fit(blocks, days, output, report):
            if gpu and device.takes(spec, blocks):
                fitted = device.fit(
                    blocks, spec, work / FIT, client, reject=settings.reject, report=report
                )
            else:
                fitted = dask.fit(blocks, spec, work, client, report=report, **options)
            _write(output, settings, fitted, days, settings.workers or cores())

        def transform(units, path):
            blocks = [unit.block for unit in units]
            if gpu and device.takes(spec, blocks) and device.has_room(path):
                return device.transform(
                    units, path, work / PARTS, work, client, reject=settings.reject
                )
            return dask.transform(units, path, work / PARTS, work, client, **options)

        yield Engine(fit, transform)
