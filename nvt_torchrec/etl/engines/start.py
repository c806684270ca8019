"""Choose an engine, and start it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nvt_torchrec.etl.engines.device import gpu_count, supports
from nvt_torchrec.etl.settings import EtlSettings

if TYPE_CHECKING:
    from nvt_torchrec.etl.engines.engine import Engine

log = logging.getLogger(__name__)


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
    # compiles loops on import, which may take half a minute: only once the input was checked
    from nvt_torchrec.etl.engines.engine import Job

    job = Job(settings.spec, work, reject, settings.threads, settings.strict_gpu)
    if settings.engine == "cpu":
        from nvt_torchrec.etl.engines.threads import Threads

        yield Threads(job)
        return
    # Dask takes seconds to import: not for the cpu engine, nor for --help
    from nvt_torchrec.etl.engines.cluster import cluster

    with cluster(settings.scheduler, settings.workers, work) as (client, gpu):
        if settings.engine == "nvtabular":
            from nvt_torchrec.etl.engines.nvtabular import NVTabular

            yield NVTabular(job, client, gpu)
        else:
            from nvt_torchrec.etl.engines.workers import Workers

            yield Workers(job, client, gpu)
