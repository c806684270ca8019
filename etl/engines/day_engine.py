"""Where days are counted and encoded: threads of this process, or the workers of a Dask cluster.

Both run the compiled functions of the cpu engine, and write the same bytes; on workers with GPUs,
their form for a card, which writes the same rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nvt_torchrec.clicklog.readers.raw import Block
from nvt_torchrec.etl.engines.hardware import cores
from nvt_torchrec.etl.output import DASK, FIT, PARTS
from nvt_torchrec.etl.plan import Unit
from nvt_torchrec.etl.results import UnitResult
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec

if TYPE_CHECKING:
    from nvt_torchrec.workflows.extension.workflow import DayCounts


@dataclasses.dataclass(frozen=True)
class DayEngine:
    """The two functions of a started engine.

    Attributes:
        count: Counts the blocks of a day. Its last argument is called with the number of rows done
            since the last call.
        transform: Transforms units with a saved workflow and yields results in their order.
    """

    count: Callable[[int, list[Block], Callable[[float], object]], DayCounts]
    transform: Callable[[list[Unit], Path], Iterable[UnitResult]]


@contextlib.contextmanager
def start(
    engine: str,
    spec: FeatureSpec,
    work: Path,
    *,
    workers: int | None,
    scheduler: str | None,
    reject: bool,
) -> Iterator[DayEngine]:
    """Start an engine.

    Args:
        engine: ``dask``; ``cpu``; or ``auto``, which is dask where there is a scheduler.
        spec: The columns.
        work: The directory of the state of the day's extension.
        workers: The number of threads or processes; None for one per core.
        scheduler: The address of a running Dask cluster; None to start one.
        reject: Whether to leave malformed rows out instead of raising.
    """
    if engine == "dask" or scheduler:
        from nvt_torchrec.etl.engines import device, tasks
        from nvt_torchrec.etl.engines.cluster import cluster

        with cluster(scheduler, workers, work / DASK, work) as (client, gpu):

            def count(day, blocks, report):
                count_day = (
                    device.count_day if gpu and device.takes(spec, blocks) else tasks.count_day
                )
                return count_day(
                    day, blocks, spec, work / FIT, client, reject=reject, report=report
                )

            def transform(units, path):
                on_gpus = gpu and device.takes(spec, [unit.block for unit in units])
                encode = device.transform if on_gpus and device.has_room(path) else tasks.transform
                return encode(units, path, work / PARTS, work, client, reject=reject)

            yield DayEngine(count, transform)
        return
    from nvt_torchrec.etl.engines import (
        cpu,  # compiles its loops on import: only once the input was checked
    )

    threads = workers or cores()

    def count_here(day, blocks, report):
        return cpu.count_day(
            day, blocks, spec, work / FIT, workers=threads, reject=reject, report=report
        )

    def transform_here(units, path):
        return cpu.transform(units, path, work / PARTS, work, workers=threads, reject=reject)

    yield DayEngine(count_here, transform_here)
