"""Count and report the steps of a training run."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import profiler

from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.base.files.atomic import write_json, write_text
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.metrics import ByLabel
from nvt_torchrec.training.data.choices import describe_data
from nvt_torchrec.training.launch.distributed import Group, reduce_sum
from nvt_torchrec.training.reporting import metrics_log
from nvt_torchrec.training.reporting.metrics_log import MetricsLog
from nvt_torchrec.training.reporting.page import REPORT_FILE, list_next_commands, write_report
from nvt_torchrec.training.reporting.verdict import describe_lag
from nvt_torchrec.training.settings.train_settings import TrainSettings
from nvt_torchrec.training.sharding.train_model import StepOutput

log = logging.getLogger(__name__)

SETTINGS_FILE = "settings.json"
TRACE_FILE = "profile.json.gz"
TABLE_FILE = "profile.txt"
#: The shortest time between two updates of the page, in seconds. An update takes some hundredths of
#: a second.
_PAGE_SECONDS = 60.0
#: The number of steps that the profiler observes and discards before it traces.
_WARM_UP_STEPS = 2
#: The number of steps that the profiler traces.
_TRACED_STEPS = 10
#: The number of operators in the profiler's table.
_TABLE_ROWS = 40


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The outcome of a run.

    Attributes:
        status: "done"; "continued" if ``--resume`` continued from a checkpoint; "already done" if
            the same run had already written ``--save_checkpoint_path``.
        checkpoint: ``--save_checkpoint_path``, or without it ``--checkpoint_dir``.
        steps: The trained steps, over all epochs.
        samples: The trained samples, over all epochs and ranks.
        train_seconds: The time spent on training steps, without evaluations.
        metrics: The last metrics of each split, JSON-ready; by label if several are trained. Empty
            on ranks other than 0.
        baselines: The metrics of the baselines, by split and name, in the same form.
    """

    status: str
    checkpoint: str | None
    steps: int
    samples: int
    train_seconds: float
    metrics: dict[str, Any]
    baselines: dict[str, dict[str, Any]]


class Progress:
    """Count a run's steps, and report steps and evaluations in the log and as events.

    Attributes:
        step: The number of trained steps, over all epochs.
        samples: The number of trained samples, over all epochs and ranks.
        train_seconds: The time spent on training steps, without evaluations.
        epoch_steps: The number of steps of an epoch.
        total_steps: The number of steps of the whole run.
        validation_every: The number of steps between two evaluations of valid within an epoch.
        waited: The time that this rank has waited for its loader since the last report, in seconds.
        loss: The sum of this rank's scaled losses over the samples since the last report, float64
            on the device.
    """

    def __init__(
        self, settings: TrainSettings, group: Group, events: MetricsLog, epoch_steps: int
    ) -> None:
        self.step = 0
        self.samples = 0
        self.train_seconds = 0.0
        self.epoch_steps = epoch_steps
        self.total_steps = epoch_steps * settings.epochs
        if settings.max_steps is not None:
            self.total_steps = min(self.total_steps, settings.max_steps)
        self._settings = settings
        self._group = group
        self._events = events
        twentieth = max(1, math.ceil(min(epoch_steps, self.total_steps) / 20))
        self._report_every = settings.throughput_check_freq_within_epoch or min(twentieth, 1000)
        self.validation_every = settings.validation_freq_within_epoch or min(5 * twentieth, 10000)
        # The samples and seconds of all reports after the warm-up, for the final throughput.
        self._timed_samples = 0
        self._timed_seconds = 0.0
        self._page_time = time.monotonic()
        self.begin()

    def begin(self) -> None:
        """Begin the interval that the next report covers."""
        self._begin = time.perf_counter()
        self._first_step = self.step
        self._first_samples = self.samples
        self.waited = 0.0
        self.loss = torch.zeros((), dtype=torch.float64, device=self._group.device)

    def take_over(self, trial: Progress) -> None:
        """Take over the counts of a trial, which was a complete training."""
        self.step = trial.step
        self.samples = trial.samples
        self.train_seconds = trial.train_seconds
        self._timed_samples = trial._timed_samples
        self._timed_seconds = trial._timed_seconds

    @property
    def epoch_step(self) -> int:
        """The number of trained steps of the current epoch."""
        return (self.step - 1) % self.epoch_steps + 1

    @property
    def is_due(self) -> bool:
        """Whether to report after the last step."""
        # The throughput is measured from the end of the warm-up, so an interval must end there.
        ends_warm_up = self.step == self._settings.benchmark_warmup_steps
        return self.epoch_step % self._report_every == 0 or ends_warm_up

    def add(self, output: StepOutput) -> None:
        """Add a step to the counts."""
        self.step += 1
        self.samples += output.global_size
        self.loss.add_(output.loss, alpha=output.global_size)

    def report_start(self, config: ModelConfig, plan: dict[str, Any], rows: dict[str, int]) -> None:
        """Report the model, the plan of its tables, and the number of rows by split."""
        settings = self._settings
        directory = self._events.directory
        if directory is None:
            return
        self._events.write(
            "start",
            settings=settings.to_dict(),
            model=config.to_dict(),
            plan=plan,
            data=describe_data(settings),
            world_size=self._group.world_size,
            device=str(self._group.device),
            epoch_steps=self.epoch_steps,
            total_steps=self.total_steps,
            rows=rows,
        )
        write_json(directory / SETTINGS_FILE, settings.to_dict())

    def report(self, rate: float) -> None:
        """Report the steps since the last report (collective).

        Args:
            rate: The learning rate of the last step.

        Raises:
            SettingsError: The loss is no longer finite.
        """
        ranks = self._group.world_size
        loss, waited = reduce_sum(self._group, self.loss, self.waited)
        seconds = time.perf_counter() - self._begin
        steps = self.step - self._first_step
        samples = self.samples - self._first_samples
        loss /= ranks * samples
        if not math.isfinite(loss):
            raise SettingsError(
                f"the loss is {loss} between steps {self.step - steps} and {self.step}: "
                "training diverged",
                f"lower --learning_rate (now {rate:g})",
            )
        self.train_seconds += seconds
        if self.step > self._settings.benchmark_warmup_steps:
            self._timed_samples += samples
            self._timed_seconds += seconds
        if self._group.rank == 0:
            values: dict[str, Any] = {
                "step": self.step,
                "epoch": self.step / self.epoch_steps,
                "samples": self.samples,
                "loss": loss,
                "lr": rate,
                "samples_per_s": samples / seconds,
                "samples_per_s_per_rank": samples / seconds / ranks,
                "data_wait": waited / ranks / seconds,
                "memory_bytes": measure_memory(self._group.device),
                "eta_s": (self.total_steps - self.step) * seconds / steps,
                "train_seconds": self.train_seconds,
            }
            self._events.write("train", **values)
            epoch = math.ceil(self.step / self.epoch_steps)
            share = self.epoch_step / self.epoch_steps
            text = f"{epoch}/{self._settings.epochs} {100 * share:.0f} %"
            log.info("%s", metrics_log.format_interval(values, self.total_steps, text))
        self.begin()

    def report_evaluation(self, split: str, metrics: ByLabel, seconds: float) -> None:
        """Report the metrics of a split after the last step, on rank 0."""
        for label, values in metrics.items():
            label_key = self._make_label_key(label)
            self._events.write(
                "evaluation",
                step=self.step,
                epoch=self.step / max(self.epoch_steps, 1),
                split=split,
                **label_key,
                **values.to_dict(),
                calibration_curve=values.calibration_curve,
                seconds=seconds,
            )
            name = metrics_log.name_evaluation(split, **label_key)
            log.info("%s", metrics_log.format_evaluation(name, values))
        directory = self._events.directory
        if directory and time.monotonic() - self._page_time > _PAGE_SECONDS:
            self._page_time = time.monotonic()
            # Before it was resumed, another version may have written the run's events.
            with contextlib.suppress(BadInputError):
                write_report(directory)

    def _make_label_key(self, label: str) -> dict[str, str]:
        """Return an event's ``label`` key; empty if a single label is trained."""
        return {"label": label} if self._settings.label_count > 1 else {}

    def report_end(
        self,
        metrics: dict[str, ByLabel],
        baselines: Mapping[tuple[str, str], ByLabel],
        advice: str,
        warnings: Sequence[str],
    ) -> None:
        """Report the whole run and write its page, on rank 0.

        Args:
            metrics: The final metrics by split.
            baselines: The metrics of the baselines, by split and name.
            advice: How the model might become better; "" for no advice.
            warnings: The warnings about the model, which end the log.
        """
        directory = self._events.directory
        if directory is None:
            return
        for (split, name), by_label in baselines.items():
            for label, values in by_label.items():
                label_key = self._make_label_key(label)
                self._events.write(
                    "baseline", split=split, **label_key, name=name, **values.to_dict()
                )
        speed = None  # a finished run that is resumed trains no step
        if self._timed_seconds:
            speed = self._timed_samples / self._timed_seconds
        path = self._settings.save_checkpoint_path
        self._events.write(
            "end",
            step=self.step,
            samples=self.samples,
            train_seconds=self.train_seconds,
            samples_per_s=speed,
            checkpoint=path,
            advice=advice,
        )
        trained = f"trained for {self.train_seconds:.1f} s"
        if speed is not None:
            trained += f": {speed:,.0f} samples/s"
        results = dict(metrics)
        for (split, name), by_label in baselines.items():
            results[f"{split}, {name}"] = by_label
        log.info("%s\n%s", trained, metrics_log.format_table(results))
        log.info("checkpoint: %s", self._describe_checkpoint())
        write_report(directory)
        log.info("report: %s", directory / REPORT_FILE)
        for command in list_next_commands(vars(self._settings), path):
            log.info("next: %s", command)
        if advice:
            log.info("%s", advice)
        for warning in warnings:
            log.warning("%s", warning)
        for line in self._describe_lags(metrics, baselines):
            log.warning("%s", line)

    def _describe_checkpoint(self) -> str:
        """Return where the model is kept, or how to keep it."""
        settings = self._settings
        if settings.save_checkpoint_path:
            return settings.save_checkpoint_path
        kept = "none"
        if settings.checkpoint_dir:
            kept = f"only those in {settings.checkpoint_dir}, to resume from"
        return f"{kept}; --save_checkpoint_path keeps the model"

    def _describe_lags(
        self,
        metrics: Mapping[str, ByLabel],
        baselines: Mapping[tuple[str, str], ByLabel],
    ) -> list[str]:
        """Return a line for each label whose model is worse than a baseline, on test or valid."""
        split = "test" if "test" in metrics else "valid"
        lines = []
        for label, result in metrics.get(split, {}).items():
            baselines_of_label = {}
            for (baseline_split, baseline), by_label in baselines.items():
                if baseline_split == split and label in by_label:
                    baselines_of_label[baseline] = by_label[label].to_dict()
            name = metrics_log.name_evaluation(split, **self._make_label_key(label))
            lag = describe_lag(self._settings.model, name, result.to_dict(), baselines_of_label)
            if lag:
                lines.append(lag)
        return lines


def measure_memory(device: torch.device) -> int:
    """Return the peak memory of tensors on a GPU, or the current memory of the process on a CPU.

    Both are in bytes.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def make_profiler(settings: TrainSettings, directory: Path, total_steps: int) -> profiler.profile:
    """Return a profiler of ten steps of this rank, after the first ``benchmark_warmup_steps``.

    The profiler writes ``profile.json.gz``, for Perfetto or chrome://tracing, and ``profile.txt``,
    the operators sorted by time, to ``directory``.

    Raises:
        SettingsError: The run has too few steps.
    """
    first = settings.benchmark_warmup_steps + _WARM_UP_STEPS
    if total_steps < first + _TRACED_STEPS:
        raise SettingsError(
            f"--profile: {total_steps} steps are too few to profile {_TRACED_STEPS} "
            f"after the first {first}",
            "train longer, or lower --benchmark_warmup_steps",
        )
    order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"

    def write(finished: profiler.profile) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(directory / TRACE_FILE))
        table = finished.key_averages().table(order, row_limit=_TABLE_ROWS)
        write_text(directory / TABLE_FILE, f"{table}\n")
        log.info("profile: %s and %s in %s", TRACE_FILE, TABLE_FILE, directory)

    wait = settings.benchmark_warmup_steps
    schedule = profiler.schedule(wait=wait, warmup=_WARM_UP_STEPS, active=_TRACED_STEPS, repeat=1)
    return profiler.profile(schedule=schedule, on_trace_ready=write)
