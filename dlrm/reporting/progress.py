"""Count the steps of a training run, and report them."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.dlrm.launch.distributed import Group, reduce_sum
from nvt_torchrec.dlrm.metrics import Metrics
from nvt_torchrec.dlrm.model import StepOutput
from nvt_torchrec.dlrm.reporting.metrics_log import (
    MetricsLog,
    metrics_line,
    metrics_table,
    train_line,
)
from nvt_torchrec.dlrm.reporting.page import REPORT_FILE, write_report
from nvt_torchrec.dlrm.settings.train_settings import TrainSettings

log = logging.getLogger(__name__)


class Meter:
    """Sums over the steps since the last report; the loss stays on the device until then.

    Attributes:
        start: The ``time.perf_counter`` at which the first of them began.
        steps: The number of steps.
        samples: The samples of these steps, of all ranks.
        waited: The seconds that this rank waited for its loader.
        loss: The sum of this rank's scaled losses over the samples, float64 on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Start to count from zero."""
        self.start = time.perf_counter()
        self.steps = self.samples = 0
        self.waited = 0.0
        self.loss = torch.zeros((), dtype=torch.float64, device=self._device)

    def add(self, output: StepOutput) -> None:
        """Count a step."""
        self.steps += 1
        self.samples += output.global_size
        self.loss.add_(output.loss, alpha=output.global_size)


class Progress:
    """Count a run's steps, and report them and its evaluations, in the log and as events.

    Attributes:
        step: The trained steps, over all epochs.
        samples: The trained samples, over all epochs and ranks.
        train_seconds: The time spent on training steps, without evaluations.
        total_steps: The steps of the whole run.
        validation_every: The steps of an epoch between two evaluations of valid.
        meter: The sums since the last report.
    """

    def __init__(
        self, settings: TrainSettings, group: Group, events: MetricsLog, epoch_steps: int
    ) -> None:
        self.step = self.samples = 0
        self.train_seconds = 0.0
        self.meter = Meter(group.device)
        self.epoch_steps = epoch_steps
        self.total_steps = epoch_steps * settings.epochs
        if settings.max_steps is not None:
            self.total_steps = min(self.total_steps, settings.max_steps)
        self._settings, self._group, self._events = settings, group, events
        twentieth = max(1, -(-min(epoch_steps, self.total_steps) // 20))
        self._every = settings.throughput_check_freq_within_epoch or min(twentieth, 1000)
        self.validation_every = settings.validation_freq_within_epoch or min(5 * twentieth, 10000)
        self._timed_samples, self._timed_seconds = 0, 0.0

    @property
    def samples_per_s(self) -> float | None:
        """The throughput of this process's steps after ``benchmark_warmup_steps``.

        None if there are none, as when a finished run is resumed.
        """
        return self._timed_samples / self._timed_seconds if self._timed_seconds else None

    def add(self, output: StepOutput) -> None:
        """Count a step."""
        self.step += 1
        self.samples += output.global_size
        self.meter.add(output)

    def is_due(self, epoch_step: int) -> bool:
        """Return whether to report after so many steps of an epoch."""
        return epoch_step % self._every == 0 or self.step == self._settings.benchmark_warmup_steps

    def report(self, epoch: int, epoch_step: int, rate: float) -> None:
        """Report the steps since the last report (collective).

        Args:
            epoch: The epoch, from 0.
            epoch_step: The trained steps of the epoch.
            rate: The learning rate of the last step.

        Raises:
            SettingsError: The loss is no longer finite.
        """
        meter, group = self.meter, self._group
        loss, waited = reduce_sum(group, meter.loss, meter.waited)
        seconds = time.perf_counter() - meter.start
        loss /= group.world_size * meter.samples
        if not math.isfinite(loss):
            raise SettingsError(
                f"the loss is {loss} between steps {self.step - meter.steps} and {self.step}: "
                "training diverged",
                f"lower --learning_rate (now {rate:g})",
            )
        self.train_seconds += seconds
        if self.step > self._settings.benchmark_warmup_steps:
            self._timed_samples += meter.samples
            self._timed_seconds += seconds
        if group.rank == 0:
            self._report_steps(
                epoch, epoch_step, rate, loss, seconds, waited / group.world_size / seconds
            )
        meter.reset()

    def _report_steps(
        self, epoch: int, epoch_step: int, rate: float, loss: float, seconds: float, waited: float
    ) -> None:
        speed = self.meter.samples / seconds
        values: dict[str, Any] = {
            "step": self.step,
            "epoch": epoch + epoch_step / self.epoch_steps,
            "samples": self.samples,
            "loss": loss,
            "lr": rate,
            "samples_per_s": speed,
            "samples_per_s_per_rank": speed / self._group.world_size,
            "data_wait": waited,
            "memory_bytes": memory_in_use(self._group.device),
            "eta_s": (self.total_steps - self.step) * seconds / self.meter.steps,
            "train_seconds": self.train_seconds,
        }
        self._events.write("train", **values)
        percent = 100 * epoch_step / self.epoch_steps
        text = f"{epoch + 1}/{self._settings.epochs} {percent:.0f} %"
        log.info("%s", train_line(values, self.total_steps, text))

    def report_evaluation(self, split: str, metrics: Metrics, seconds: float) -> None:
        """Report the metrics of a split after the last step, on rank 0."""
        self._events.write(
            "evaluation",
            step=self.step,
            epoch=self.step / max(self.epoch_steps, 1),
            split=split,
            **metrics.to_dict(),
            seconds=seconds,
        )
        log.info("%s", metrics_line(split, metrics))

    def report_end(
        self,
        metrics: dict[str, Metrics],
        baselines: Mapping[tuple[str, str], Metrics],
        directory: Path | None,
    ) -> None:
        """Report the whole run and write its page.

        Args:
            metrics: The final metrics by split.
            baselines: Those of the baselines, by split and name.
            directory: Where the page goes; None on ranks other than 0.
        """
        for (split, name), values in baselines.items():
            self._events.write("baseline", split=split, name=name, **values.to_dict())
        speed, path = self.samples_per_s, self._settings.save_checkpoint_path
        self._events.write(
            "end",
            step=self.step,
            samples=self.samples,
            train_seconds=self.train_seconds,
            samples_per_s=speed,
            checkpoint=path,
        )
        if directory is None:
            return
        log.info(
            "trained %s samples in %.1f s%s\n%s",
            f"{self.samples:,}",
            self.train_seconds,
            "" if speed is None else f": {speed:,.0f} samples/s",
            metrics_table(metrics | {f"{s}, {name}": m for (s, name), m in baselines.items()}),
        )
        kept = path or self._settings.checkpoint_dir or "none (--save_checkpoint_path)"
        log.info("checkpoint: %s", kept)
        write_report(directory)
        log.info("report: %s", directory / REPORT_FILE)


def memory_in_use(device: torch.device) -> int:
    """Return bytes: the most that tensors took on a GPU so far, or the process's memory now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:  # no Linux
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
