"""A trace of some training steps, by torch.profiler."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import profiler

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.files.atomic import write_text
from nvt_torchrec.dlrm.settings.train_settings import TrainSettings

log = logging.getLogger(__name__)

TRACE_FILE, TABLE_FILE = "profile.json.gz", "profile.txt"
#: The steps that the profiler runs and discards before those it keeps.
_WARM_UP = 2
#: The steps that are traced.
_STEPS = 10
#: The operators in the table.
_ROWS = 40


class StepProfiler:
    """Profile ten steps after the first ``benchmark_warmup_steps``, on this rank.

    It writes ``profile.json.gz``, for Perfetto or chrome://tracing, and ``profile.txt``, the
    operators by the time they took.

    Args:
        settings: The settings of the run.
        directory: The directory of the files.
        total_steps: The steps of the run.
        device: The device of the rank.

    Raises:
        SettingsError: The run is too short.
    """

    def __init__(
        self, settings: TrainSettings, directory: Path, total_steps: int, device: torch.device
    ) -> None:
        first = settings.benchmark_warmup_steps + _WARM_UP
        if total_steps < first + _STEPS:
            raise SettingsError(
                f"--profile: {total_steps} steps are too few to profile {_STEPS} "
                f"after the first {first}",
                "train longer, or lower --benchmark_warmup_steps",
            )
        self._directory = directory
        self._order = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
        kinds = [profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            kinds.append(profiler.ProfilerActivity.CUDA)
        self._profiler = profiler.profile(
            activities=kinds,
            schedule=profiler.schedule(
                wait=settings.benchmark_warmup_steps,
                warmup=_WARM_UP,
                active=_STEPS,
                repeat=1,
            ),
            on_trace_ready=self._write,
        )
        self._profiler.start()

    def step(self) -> None:
        """End a training step."""
        self._profiler.step()

    def stop(self) -> None:
        """End profiling, after the last step."""
        self._profiler.stop()

    def _write(self, finished: profiler.profile) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(self._directory / TRACE_FILE))
        table = finished.key_averages().table(sort_by=self._order, row_limit=_ROWS)
        write_text(self._directory / TABLE_FILE, table + "\n")
        log.info("profile: %s and %s in %s", TRACE_FILE, TABLE_FILE, self._directory)
