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
from nvt_torchrec.formats.feature_spec import FeatureSpec

if TYPE_CHECKING:
    from nvt_torchrec.etl.engines.engine import Engine

log = logging.getLogger(__name__)

# Measured on an H200 with 16 cores (docs/gpu.md).
#: Bytes that one GPU fits and transforms per second.
_GPU_BYTES_PER_SECOND = 0.80e9
#: Bytes that one core of the host fits and transforms per second.
_CORE_BYTES_PER_SECOND = 0.03e9
#: Seconds until the GPU workers have started, imported cuDF and compiled.
_GPU_START_SECONDS = 30


def choose_engine(settings: EtlSettings, days: Sequence[DayFile]) -> EtlSettings:
    """Replace the engine ``auto`` by a specific one, and log which one and why.

    GPUs are chosen if they are estimated to encode the log faster than the CPU's cores.

    Args:
        settings: The settings of the run.
        days: The files that it reads.
    """
    if settings.engine == "nvtabular":
        _check_operators(settings.spec)
    if settings.engine != "auto":
        return settings
    gpus = 0 if settings.scheduler else gpu_count()
    if settings.scheduler:
        engine = "dask"
        reason = "--scheduler is set"
    elif gpus and supports(settings.spec):
        num_bytes = sum(day.size for day in days)
        on_gpus = _GPU_START_SECONDS + num_bytes / (gpus * _GPU_BYTES_PER_SECOND)
        on_cores = num_bytes / (count_cores() * _CORE_BYTES_PER_SECOND)
        engine = "dask" if on_gpus < on_cores else "cpu"
        log_size = f"{num_bytes / 1e9:.1f} GB"
        reason = (
            f"{log_size} take about {on_gpus:.0f} s on {gpus} GPU(s), {on_cores:.0f} s on the CPU"
        )
    elif gpus:
        engine = "cpu"
        reason = "GPUs only encode logs in Criteo's format"
    else:
        engine = "cpu"
        reason = "there is no GPU that cuDF can use"
    log.info("engine %s: %s", engine, reason)
    return dataclasses.replace(settings, engine=engine)


def _check_operators(spec: FeatureSpec) -> None:
    """Raise :class:`SettingsError` if the spec needs an operator that NVTabular does not have."""
    block = ""
    if spec.events is not None:
        block = "[events]"
    elif spec.joined_tables:
        block = "[[table]]"
    elif spec.negatives is not None:
        block = "[negatives]"
    elif spec.label_files:
        block = "a [label] from another file"
    if block:
        raise SettingsError(
            f"{block} with --engine nvtabular, which has no operator for it", "leave --engine out"
        )


@contextlib.contextmanager
def start_engine(settings: EtlSettings, work: Path, max_bad_rows: int) -> Iterator[Engine]:
    """Start the engine that the settings name.

    Args:
        settings: The settings of the run.
        work: The directory of its state.
        max_bad_rows: How many malformed rows of a block may be left out; 0: one is an error.
    """
    # Importing this compiles kernels, which may take half a minute: do it only now that the input
    # has been checked.
    from nvt_torchrec.etl.engines.engine import Job

    job = Job(settings.spec, work, max_bad_rows, settings.threads, settings.strict_gpu)
    if settings.engine == "cpu":
        from nvt_torchrec.etl.engines.host import Threads

        yield Threads(job)
        return
    # Dask takes seconds to import, which the cpu engine and --help must not pay.
    from nvt_torchrec.etl.engines.cluster import cluster

    frames = settings.engine == "nvtabular"
    with cluster(settings.scheduler, settings.workers, work, frames) as (client, gpu):
        if frames:
            from nvt_torchrec.etl.engines.nvtabular import NVTabular

            yield NVTabular(job, client, gpu)
        else:
            from nvt_torchrec.etl.engines.workers import Workers

            yield Workers(job, client, gpu)
