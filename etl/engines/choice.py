"""Which engine a run gets, and the two engines behind one pair of functions."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clicklog.errors import SettingsError
from clicklog.readers.raw import Block
from etl.output import CATEGORIES, DASK, FIT, PARTS
from etl.plan import Unit
from etl.results import UnitResult

if TYPE_CHECKING:
    from etl.settings import EtlSettings

ENGINES = ("auto", "cpu", "dask")
#: Blocks that a Dask worker takes at once, with and without a GPU. What a GPU does with many rows
#: takes it little longer than with few, and a processor's thread for each block reads and writes.
BLOCKS_AT_ONCE = {True: 8, False: 1}


@dataclasses.dataclass(frozen=True)
class Engine:
    """What an engine does.

    Attributes:
        fit: fit a workflow on blocks and save it at a path; the third argument is called with
            the rows done since the last call.
        transform: transform units with the saved workflow, yielding results as they finish.
    """

    fit: Callable[[list[Block], Path, Callable[[float], object]], object]
    transform: Callable[[list[Unit], Path], Iterable[UnitResult]]


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def gpu_count() -> int:
    """GPUs that cuDF can use here; 0 without cuDF.

    ``CUDA_VISIBLE_DEVICES`` counts, and instances of a card that it lists (``MIG-…``) are GPUs.
    """
    if find_spec("cudf") is None or find_spec("dask_cuda") is None:
        return 0
    from numba import cuda

    if not cuda.is_available():
        return 0
    # of several instances CUDA shows a process the first
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return max(len(cuda.gpus), sum(one.startswith("MIG-") for one in visible))


def gpu_memory() -> int:
    """Bytes of the first GPU that CUDA shows this process: of the instance, if that is one.

    All that a run uses are taken to be as large.

    Raises:
        OSError: the driver refuses.
    """
    from cuda.bindings import driver

    def ask(function: Callable, *arguments: Any) -> Any:
        status, *value = function(*arguments)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise OSError(f"{function.__name__}: {status.name}")
        return value[0] if value else None

    ask(driver.cuInit, 0)
    return ask(driver.cuDeviceTotalMem, ask(driver.cuDeviceGet, 0))


def choose(engine: str, scheduler: str | None) -> str:
    """``cpu`` or ``dask``: what ``auto`` means here.

    Raises:
        SettingsError: a scheduler for the engine that has none.
    """
    if engine == "auto":
        return "dask" if scheduler or gpu_count() else "cpu"
    if engine == "cpu" and scheduler:
        raise SettingsError(
            f"--engine cpu and --scheduler {scheduler} are both set",
            "the cpu engine runs on this machine; use --engine dask for a Dask cluster",
        )
    return engine


@contextlib.contextmanager
def started(settings: EtlSettings, work: Path) -> Iterator[Engine]:
    """The engine, ready to work; ``work`` is the directory of the run's state."""
    with (_dask if settings.engine == "dask" else _cpu)(settings, work) as ready:
        yield ready


@contextlib.contextmanager
def _cpu(settings: EtlSettings, work: Path) -> Iterator[Engine]:
    from etl.engines import cpu as engine_cpu  # compiles: after the input was checked
    from workflows.writer import write_workflow

    options = {"workers": settings.workers or cores(), "reject": settings.reject}

    def fit(blocks, path, report):
        fitted = engine_cpu.fit(blocks, settings.spec, work / FIT, report=report, **options)
        write_workflow(path, settings.spec, fitted, threads=options["workers"])

    def transform(units, path):
        return engine_cpu.transform(units, path, work / PARTS, work, **options)

    yield Engine(fit, transform)


@contextlib.contextmanager
def _dask(settings: EtlSettings, work: Path) -> Iterator[Engine]:
    from etl.engines import dask as engine_dask  # takes seconds to import
    from etl.engines.cluster import cluster
    from workflows import save

    with cluster(settings.scheduler, settings.workers, work / DASK, work) as (client, gpu):
        options = {"gpu": gpu, "reject": settings.reject}

        def fit(blocks, path, report):
            workflow = engine_dask.fit(
                blocks, settings.spec, work / CATEGORIES, client, report=report, **options
            )
            save(workflow, settings.spec, path)

        def transform(units, path):
            return engine_dask.transform(units, path, work / PARTS, work, client, **options)

        yield Engine(fit, transform)
