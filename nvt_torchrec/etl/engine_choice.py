"""Choose the engine of a run, and start it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.threads import count_cores
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.etl.engines.device import gpu_count, supports
from nvt_torchrec.etl.settings import EtlSettings

if TYPE_CHECKING:
    from nvt_torchrec.etl.engines.engine import Engine

log = logging.getLogger(__name__)

#: What a GPU and a core of the host fit and transform in a second, and how long the GPUs' workers
#: need to start, to import cuDF and to compile, as measured on an H200 with 16 cores (docs/gpu.md).
_BYTES_A_GPU_SECOND, _BYTES_A_CORE_SECOND = 0.80e9, 0.03e9
_GPU_START_SECONDS = 30


def choose_engine(settings: EtlSettings, days: Sequence[DayFile]) -> EtlSettings:
    """Replace the engine ``auto`` by one of the engines, and log which one and why.

    GPUs are taken for logs that they encode in less time than the CPU's cores.

    Args:
        settings: The settings of the run.
        days: The files that it reads.
    """
    for block, is_given in (
        ("[events]", settings.spec.events is not None),
        ("[[table]]", bool(settings.spec.joined_tables)),
        ("[negatives]", settings.spec.negatives is not None),
        ("a [label] from another file", bool(settings.spec.label_files)),
    ):
        if settings.engine == "nvtabular" and is_given:
            what = f"{block} with --engine nvtabular, which has no operator for them"
            raise SettingsError(what, "leave --engine out")
    if settings.engine != "auto":
        return settings
    gpus = 0 if settings.scheduler else gpu_count()
    if settings.scheduler:
        engine, reason = "dask", "there is a --scheduler"
    elif gpus and supports(settings.spec):
        num_bytes = sum(day.size for day in days)
        on_gpus = _GPU_START_SECONDS + num_bytes / (gpus * _BYTES_A_GPU_SECOND)
        on_cores = num_bytes / (count_cores() * _BYTES_A_CORE_SECOND)
        engine = "dask" if on_gpus < on_cores else "cpu"
        log_size = f"{num_bytes / 1e9:.1f} GB"
        reason = f"{log_size} take about {on_gpus:.0f} s on GPUs ({gpus}), {on_cores:.0f} s without"
    elif gpus:
        engine, reason = "cpu", "GPUs encode logs in Criteo's format only"
    else:
        engine, reason = "cpu", "there is no GPU that cuDF can use"
    log.info("engine %s: %s", engine, reason)
    return dataclasses.replace(settings, engine=engine)


@contextlib.contextmanager
def start_engine(settings: EtlSettings, work: Path, max_bad_rows: int) -> Iterator[Engine]:
    """Start the engine that the settings name.

    Args:
        settings: The settings of the run.
        work: The directory of its state.
        max_bad_rows: How many malformed rows of a block may be left out; 0: one is an error.
    """
    # compiles loops on import, which may take half a minute: only once the input was checked
    from nvt_torchrec.etl.engines.engine import Job

    job = Job(settings.spec, work, max_bad_rows, settings.threads, settings.strict_gpu)
    if settings.engine == "cpu":
        from nvt_torchrec.etl.engines.host import Threads

        yield Threads(job)
        return
    # Dask takes seconds to import: not for the cpu engine, nor for --help
    from nvt_torchrec.etl.engines.cluster import cluster

    frames = settings.engine == "nvtabular"
    with cluster(settings.scheduler, settings.workers, work, frames) as (client, gpu):
        if frames:
            from nvt_torchrec.etl.engines.nvtabular import NVTabular

            yield NVTabular(job, client, gpu)
        else:
            from nvt_torchrec.etl.engines.workers import Workers

            yield Workers(job, client, gpu)
