"""The training loop."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchrec.datasets.utils import Batch

from clicklog.errors import BadInputError, OutputError, SettingsError
from clicklog.files.atomic import write_json
from clicklog.splits import SPLITS
from dlrm.build import build
from dlrm.checkpoint.claims import claimed
from dlrm.checkpoint.origin import origin_of
from dlrm.checkpoint.resume import load_weights, resume_from, training_state
from dlrm.checkpoint.store import check_destination, save_checkpoint
from dlrm.checkpoint.writer import Checkpoints, checkpoints_in
from dlrm.config import ModelConfig, model_config
from dlrm.data import TrainingBatches, make_loader, read_oracle, read_schema
from dlrm.evaluate import evaluate
from dlrm.launch.distributed import Group, from_rank_0, reduce_sum, was_restarted
from dlrm.launch.preemption import EXIT_STATUS, StopRequests
from dlrm.metrics import Metrics
from dlrm.model import TrainBatch
from dlrm.optim.default_rates import rates_line, remedies, with_default_rates
from dlrm.optim.optimizers import set_learning_rate, set_step
from dlrm.optim.schedule import learning_rates
from dlrm.pipeline import make_pipeline
from dlrm.reporting.learning_check import LearningCheck
from dlrm.reporting.metrics_log import MetricsLog, metrics_line, metrics_table
from dlrm.reporting.page import REPORT_FILE, write_report
from dlrm.reporting.profiling import StepProfiler
from dlrm.reporting.progress import Progress
from dlrm.settings.train_settings import TrainSettings

log = logging.getLogger(__name__)

SETTINGS_FILE = "settings.json"


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a run did.

    Attributes:
        steps, samples: trained, over all epochs; samples of all ranks.
        train_seconds: spent on training steps, evaluation excluded.
        metrics: the final metrics by split (empty but on rank 0).
    """

    steps: int
    samples: int
    train_seconds: float
    metrics: dict[str, Metrics]


def train(settings: TrainSettings, group: Group) -> TrainResult:
    """Train as ``settings`` say, evaluate, and write the checkpoint (collective).

    Raises:
        SettingsError: the settings do not fit the data, the tables do not fit into memory, or the
            loss is no longer finite.
        BadInputError, SchemaError: the data cannot be read, or is not what its schema says.
        OutputError: the checkpoint or the log cannot be written, or would overwrite something, or
            another run is writing there.
        SystemExit: SIGTERM asked the run to stop; a checkpoint of the last step is written.
    """
    schema = read_schema(settings)
    if settings.save_checkpoint_path:
        check_destination(settings.save_checkpoint_path)
    with claimed(_locks(settings), group):
        run = _Run(settings, model_config(settings, schema), group)
        return run.test() if settings.mode == "test" else run.train()


def _locks(settings: TrainSettings) -> list[Path]:
    """Of the directories that only one run may write checkpoints to."""
    locks = []
    if settings.checkpoint_dir:
        locks.append(Path(settings.checkpoint_dir) / ".lock")
    if settings.save_checkpoint_path:
        path = Path(settings.save_checkpoint_path).absolute()
        locks.append(path.with_name(f".{path.name}.lock"))
    return locks


class _Run:
    """The state of one training run on one rank."""

    def __init__(self, settings: TrainSettings, config: ModelConfig, group: Group) -> None:
        self.config = config
        self.group = group
        self.directory = settings.log_directory() if group.rank == 0 else None
        self.events = MetricsLog(self.directory, tensorboard=settings.tensorboard)
        self.loaders = {split: make_loader(settings, config, split, group) for split in SPLITS}
        self.batches = TrainingBatches(settings, self.loaders["train"], group)
        self.epoch_steps = len(self.loaders["train"])
        global_batch = settings.batch_size * group.world_size
        epoch = config, global_batch, self.epoch_steps
        too_high, at_chance = remedies(settings, *epoch)
        settings = self.settings = with_default_rates(settings, *epoch)
        self.learning = LearningCheck(
            group,
            self.events,
            epoch_steps=self.epoch_steps,
            warmup_steps=settings.lr_warmup_steps,
            global_batch=global_batch,
            remedy=too_high,
            remedy_at_chance=at_chance,
            learnable=settings.dataset_type == "parquet",
        )
        self.progress = Progress(settings, group, self.events, self.epoch_steps)
        self.model, self.optimizer, plan = build(settings, config, group)
        if settings.load_checkpoint_path:
            load_weights(Path(settings.load_checkpoint_path), self.model, config, group)
        self.pipeline = make_pipeline(self.model, self.optimizer, group)
        self.checkpoints: Checkpoints | None = None
        self.profiler: StepProfiler | None = None
        self.origin = origin_of(settings)
        self.rate = settings.learning_rate
        self.epoch_step = 0
        self.stop_requests: StopRequests | None = None
        self._start(plan)

    def _start(self, plan: dict[str, Any]) -> None:
        self.events.write(
            "start",
            settings=self.settings.to_dict(),
            model=self.config.to_dict(),
            plan=plan,
            world_size=self.group.world_size,
            device=str(self.group.device),
            epoch_steps=self.epoch_steps,
            total_steps=self.progress.total_steps,
            rows={split: loader.num_rows for split, loader in self.loaders.items()},
            oracle=read_oracle(self.settings) if self.group.rank == 0 else None,
        )
        if self.directory:
            write_json(self.directory / SETTINGS_FILE, self.settings.to_dict())
            if self.settings.mode == "train":
                log.info("%s", rates_line(self.settings))

    def test(self) -> TrainResult:
        """Evaluate the test set."""
        metrics = {"test": self._evaluate("test")}
        if self.group.rank == 0:
            log.info("%s", metrics_table(metrics))
        return TrainResult(0, 0, 0.0, {split: m for split, m in metrics.items() if m is not None})

    def train(self) -> TrainResult:
        """Train, evaluate, and write the checkpoints."""
        settings, total = self.settings, self.progress.total_steps
        if not total:
            path = settings.split_path("train")
            raise BadInputError(f"{path}: no rows to train on")
        if settings.benchmark_warmup_steps >= total:
            raise SettingsError(
                f"--benchmark_warmup_steps {settings.benchmark_warmup_steps} of {total} steps",
                "leave some to measure",
            )
        if settings.profile and self.directory:
            self.profiler = StepProfiler(settings, self.directory, total, self.group.device)
        if self.group.rank == 0 and not (settings.save_checkpoint_path or settings.checkpoint_dir):
            log.warning("no --save_checkpoint_path: the trained model will not be kept")
        if settings.checkpoint_dir:
            self._resume(settings.checkpoint_dir)
        try:
            with StopRequests(self.group) as self.stop_requests:
                metrics = self._train_epochs()
            return self._finish(metrics)
        except BaseException:
            if self.checkpoints:
                self.checkpoints.abandon()
            raise

    def _train_epochs(self) -> dict[str, Metrics]:
        """Train what is left of all epochs; the last metrics by split, on rank 0."""
        metrics: dict[str, Metrics | None] = {}
        self.model.train()
        progress, every = self.progress, self.settings.validation_freq_within_epoch
        stop = False
        if progress.step and self._ends_segment():  # a checkpoint is written before the evaluation
            metrics["valid"] = self._evaluate("valid")
            stop = self._is_good_enough(metrics["valid"])
        for epoch in range(progress.step // self.epoch_steps, self.settings.epochs):
            loader = self.loaders["train"]
            batches = iter(loader)
            first = progress.step % self.epoch_steps
            last = min(self.epoch_steps, progress.total_steps - epoch * self.epoch_steps)
            while first < last and not stop:
                end = min(first - first % every + every, last)
                self._train_segment(batches, epoch, first, end - first)
                first = end
                untested = progress.step < self.settings.test_after * self.epoch_steps
                if not untested or progress.step == progress.total_steps:
                    metrics["valid"] = self._evaluate("valid")
                    self.learning.evaluated(progress.step, metrics["valid"])
                    stop = self._is_good_enough(metrics["valid"])
            if stop or first < self.epoch_steps:
                break  # the rest of the epoch is not read
            if next(batches, None) is not None:
                raise RuntimeError(f"the loader has more than the {self.epoch_steps} steps it said")
            loader.check_epoch()
        metrics["test"] = self._evaluate("test")
        if self.checkpoints:
            self.checkpoints.wait()
        return {split: m for split, m in metrics.items() if m is not None}

    def _ends_segment(self) -> bool:
        """Whether an evaluation of valid follows the last step."""
        progress, done = self.progress, self.progress.step % self.epoch_steps
        if progress.step == progress.total_steps:
            return True
        tested = progress.step >= self.settings.test_after * self.epoch_steps
        return tested and done % self.settings.validation_freq_within_epoch == 0

    def _is_good_enough(self, valid: Metrics | None) -> bool:
        """Whether ``auc_threshold`` is reached, on every rank (collective)."""
        threshold = self.settings.auc_threshold
        if threshold is None:
            return False
        reached = valid is not None and (valid.auroc or 0.0) >= threshold
        (reached,) = reduce_sum(self.group, reached)
        if reached and self.group.rank == 0:
            log.info("AUROC %.5f of valid: --auc_threshold %g is reached", valid.auroc, threshold)
        return bool(reached)

    def _resume(self, directory: str) -> None:
        """Go on from the newest usable checkpoint, if there is one and that was asked for."""
        settings, group, progress = self.settings, self.group, self.progress
        self.checkpoints = Checkpoints(directory, settings.keep_checkpoints, self.config, group)
        found = from_rank_0(group, checkpoints_in(directory))
        if not found:
            return
        if not (was_restarted(group) or settings.resume):
            raise OutputError(
                f"--checkpoint_dir {directory}: holds a run, up to {found[-1].name}",
                "add --resume to go on from there, or choose another directory",
            )
        path, training = resume_from(
            found,
            self._record(),
            self.config,
            self.loaders["train"],
            self.model,
            self.optimizer,
            group,
        )
        self.checkpoints.saved_step = training["steps"]
        self.origin = {name: training[name] for name in self.origin}
        progress.step, progress.samples = training["steps"], training["samples"]
        progress.train_seconds = training["train_seconds"]
        self.events.write("resume", step=progress.step, checkpoint=str(path))
        if group.rank == 0:
            log.info("resumed from %s", path)

    def _checkpoint(self) -> None:
        """Write a checkpoint after the last step, in the background."""
        record = {
            **self._record(),
            "loader": self.loaders["train"].state_dict(self.epoch_step),
            "train_seconds": self.progress.train_seconds,
        }
        state = training_state(self.model, self.optimizer, self.group)
        self.checkpoints.save(self.progress.step, state, record, self.progress.meter.loss)

    def _stop_if_asked(self) -> None:
        """End the run between two steps, if SIGTERM or a failed checkpoint says so (collective)."""
        checkpoints, requests = self.checkpoints, self.stop_requests
        if not (requests and requests.asked(checkpoints is not None and checkpoints.failed)):
            return
        kept = "nothing is kept of it without --checkpoint_dir"
        if checkpoints:
            checkpoints.wait()
            if checkpoints.saved_step != self.progress.step:
                self._checkpoint()
                checkpoints.wait()
            kept = f"--resume goes on from the checkpoint of this step in {checkpoints.directory}"
        if self.group.rank == 0:
            log.warning("SIGTERM: the run ends after step %d; %s", self.progress.step, kept)
        raise SystemExit(EXIT_STATUS)

    def _train_segment(self, batches: Iterator[Batch], epoch: int, first: int, length: int) -> None:
        """Train steps ``first`` … ``first + length - 1`` of an epoch; the pipeline is empty after.

        The segment ends where an evaluation follows: the pipeline never fetches a training batch
        that it cannot train before it.
        """
        settings, progress = self.settings, self.progress
        progress.meter.reset()
        set_step(self.model, self.optimizer, progress.step)
        # a new iterator object: the pipeline takes it as a new run of batches
        segment = self._segment(batches, epoch, first, length)
        for done in range(first + 1, first + length + 1):
            rates = learning_rates(settings, progress.step, progress.total_steps)
            self.rate = rates.tables
            set_learning_rate(self.optimizer, rates)
            output = self.pipeline.progress(segment)
            progress.add(output)
            self.learning.add(progress.step, output)
            if self.profiler:
                self.profiler.step()
            if settings.print_lr and self.group.rank == 0:
                dense = "" if rates.dense == rates.tables else f", dense layers {rates.dense:g}"
                log.info("step %d: lr %g%s", progress.step, rates.tables, dense)
            due = progress.step % (settings.checkpoint_freq or progress.total_steps) == 0
            if progress.is_due(done) or done == first + length:
                due |= progress.report(epoch, done, rates.tables, self._overdue())
            self.epoch_step = done
            if due and self.checkpoints:
                self._checkpoint()
            self._stop_if_asked()

    def _segment(
        self, batches: Iterator[Batch], epoch: int, first: int, length: int
    ) -> Iterator[TrainBatch]:
        for i in range(first, first + length):
            begin = time.perf_counter()
            batch = next(batches, None)
            self.progress.meter.waited += time.perf_counter() - begin
            if batch is None:
                raise RuntimeError(f"the loader ended after {i} of {self.epoch_steps} steps")
            yield self.batches.step(batch, epoch, i)

    def _overdue(self) -> bool:
        minutes = self.settings.checkpoint_minutes
        if not (minutes and self.checkpoints and self.group.rank == 0):
            return False
        return time.monotonic() - self.checkpoints.saved_at > 60 * minutes

    def _evaluate(self, split: str) -> Metrics | None:
        begin = time.perf_counter()
        loader, size = self.loaders[split], self.settings.batch_size_of(split)
        metrics = evaluate(self.pipeline, self.model, loader, size, self.group, self._stop_if_asked)
        loader.check_epoch()
        if metrics is not None:
            seconds = time.perf_counter() - begin
            epoch = self.progress.step / max(self.epoch_steps, 1)
            self.events.write(
                "evaluation",
                step=self.progress.step,
                epoch=epoch,
                split=split,
                **metrics.to_dict(),
                seconds=seconds,
            )
            log.info("%s", metrics_line(split, metrics))
        return metrics

    def _finish(self, metrics: dict[str, Metrics]) -> TrainResult:
        progress, path = self.progress, self.settings.save_checkpoint_path
        if self.profiler:
            self.profiler.stop()
        if path:
            record = self._record() | {
                "metrics": {split: m.to_dict() for split, m in metrics.items()}
            }
            state = training_state(self.model, self.optimizer, self.group)
            save_checkpoint(path, state, self.config, record, self.group)
        self.events.write(
            "end",
            step=progress.step,
            samples=progress.samples,
            train_seconds=progress.train_seconds,
            samples_per_s=progress.samples_per_s,
            checkpoint=path,
        )
        if self.directory:
            speed = progress.samples_per_s
            log.info(
                "trained %s samples in %.1f s%s\n%s",
                f"{progress.samples:,}",
                progress.train_seconds,
                "" if speed is None else f": {speed:,.0f} samples/s",
                metrics_table(metrics),
            )
            kept = path or self.settings.checkpoint_dir or "none (--save_checkpoint_path)"
            log.info("checkpoint: %s", kept)
            write_report(self.directory)
            log.info("report: %s", self.directory / REPORT_FILE)
        return TrainResult(progress.step, progress.samples, progress.train_seconds, metrics)

    def _record(self) -> dict[str, Any]:
        return {
            "settings": self.settings.to_dict(),
            "steps": self.progress.step,
            "learning_rate": self.rate,
            "samples": self.progress.samples,
            **self.origin,
        }
