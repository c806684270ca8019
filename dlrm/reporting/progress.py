"""How training goes: what is counted between two reports, and what a report says."""

from __future__ import annotations

import logging
import math
import os
import time
from pathlib import Path
from typing import Any

import torch

from clicklog.errors import SettingsError
from dlrm.launch.distributed import Group, reduce_sum
from dlrm.model import StepOutput
from dlrm.reporting.metrics_log import MetricsLog, train_line
from dlrm.settings.train_settings import TrainSettings

log = logging.getLogger(__name__)


class Meter:
    """Sums over the steps since the last report; the loss stays on the device until then.

    Attributes:
        start: when the first of them began, ``time.perf_counter``.
        steps, samples: counted; samples of all ranks.
        waited: seconds that this rank waited for its loader.
        loss: sum over the samples, float64 on the device, of this rank's scaled losses.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
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
    """Counts a run's steps, and reports them: a line on rank 0, and a ``train`` event.

    Attributes:
        step, samples: trained, over all epochs; samples of all ranks.
        train_seconds: spent on training steps, evaluation excluded.
        meter: of the steps since the last report.
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
        self._timed_samples, self._timed_seconds = 0, 0.0

    @property
    def samples_per_s(self) -> float | None:
        """Over this process's steps but those that ``benchmark_warmup_steps`` leaves out.

        None if it has trained none: a run that was resumed when it had come to its end.
        """
        return self._timed_samples / self._timed_seconds if self._timed_seconds else None

    def add(self, output: StepOutput) -> None:
        """Count a step."""
        self.step += 1
        self.samples += output.global_size
        self.meter.add(output)

    def is_due(self, epoch_step: int) -> bool:
        """Whether to report after so many steps of an epoch."""
        every = self._settings.throughput_check_freq_within_epoch
        return epoch_step % every == 0 or self.step == self._settings.benchmark_warmup_steps

    def report(self, epoch: int, epoch_step: int, rate: float, overdue: bool) -> bool:
        """Report the steps since the last report (collective).

        Args:
            epoch: from 0.
            epoch_step: steps of it that are trained.
            rate: the learning rate of the last of them.
            overdue: rank 0's word on whether a checkpoint is due by its clock.

        Returns:
            ``overdue`` of rank 0, on every rank.

        Raises:
            SettingsError: the loss is no longer finite.
        """
        meter, group = self.meter, self._group
        loss, waited, due = reduce_sum(group, meter.loss, meter.waited, overdue)
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
            self._say(epoch, epoch_step, rate, loss, seconds, waited / group.world_size / seconds)
        meter.reset()
        return bool(due)

    def _say(
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


def memory_in_use(device: torch.device) -> int:
    """Bytes: on a GPU the most that tensors took so far, on a CPU what the process holds now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:  # no Linux
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
