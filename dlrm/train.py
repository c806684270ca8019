"""The training loop."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torchrec.datasets.utils import Batch
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from clicklog.errors import BadInputError, OutputError, SettingsError
from clicklog.files import read_json
from clicklog.schema import TableSchema
from clicklog.splits import SPLITS
from dlrm.checkpoint import check_destination, save_checkpoint
from dlrm.config import ModelConfig, model_config
from dlrm.distributed import Group, reduce_sum
from dlrm.evaluate import evaluate
from dlrm.metrics import Metrics
from dlrm.model import StepOutput, TrainBatch, TrainModel, build_dlrm
from dlrm.optimizers import combine_optimizers, fuse_table_optimizer, set_learning_rate
from dlrm.report import MetricsLog, metrics_line, metrics_table, train_line
from dlrm.resume import (
    Checkpoints,
    check_resumable,
    finished,
    load_state,
    load_weights,
    training_state,
)
from dlrm.schedule import learning_rate
from dlrm.settings import TrainSettings
from dlrm.sharding import shard_model
from nvt_loader import KJTLoader

log = logging.getLogger(__name__)


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
        OutputError: the checkpoint or the log cannot be written, or would overwrite something.
    """
    settings.check_data()
    if settings.save_checkpoint_path:
        check_destination(settings.save_checkpoint_path)
    config = model_config(settings, TableSchema.read(settings.binary_path))
    run = _Run(settings, config, group)
    return run.test() if settings.mode == "test" else run.train()


class _Run:
    """The state of one training run on one rank."""

    def __init__(self, settings: TrainSettings, config: ModelConfig, group: Group) -> None:
        self.settings = settings
        self.config = config
        self.group = group
        self.events = MetricsLog(settings.log_path if group.rank == 0 else None)
        self.loaders = {split: _loader(settings, config, split, group) for split in SPLITS}
        self.epoch_steps = len(self.loaders["train"])
        self.total_steps = self.epoch_steps * settings.epochs
        self.step = self.samples = 0
        self.train_seconds = 0.0
        self.model, self.optimizer = _build(settings, config, group)
        if settings.load_checkpoint_path:
            load_weights(Path(settings.load_checkpoint_path), self.model, config, group)
        self.pipeline = TrainPipelineSparseDist(self.model, self.optimizer, group.device)
        self.meter = _Meter(group.device)
        self.checkpoints: Checkpoints | None = None
        self.events.write("start", settings=settings.to_dict(), model=config.to_dict())

    def test(self) -> TrainResult:
        """Evaluate the test set."""
        metrics = {"test": self._evaluate("test")}
        if self.group.rank == 0:
            log.info("%s", metrics_table(metrics))
        return TrainResult(0, 0, 0.0, {split: m for split, m in metrics.items() if m is not None})

    def train(self) -> TrainResult:
        """Train, evaluate, and write the checkpoints."""
        if not self.total_steps:
            path = self.settings.split_path("train")
            raise BadInputError(f"{path}: no rows to train on")
        kept = self.settings.save_checkpoint_path or self.settings.checkpoint_dir
        if self.group.rank == 0 and not kept:
            log.warning("no --save_checkpoint_path: the trained model will not be kept")
        if self.settings.checkpoint_dir:
            self._resume(self.settings.checkpoint_dir)
        try:
            return self._finish(self._train_epochs())
        except BaseException:
            if self.checkpoints:
                self.checkpoints.abandon()
            raise

    def _train_epochs(self) -> dict[str, Metrics]:
        """Train what is left of all epochs; the last metrics by split, on rank 0."""
        metrics = {}
        self.model.train()
        every = self.settings.validation_freq_within_epoch
        for epoch in range(self.step // self.epoch_steps, self.settings.epochs):
            batches = iter(self.loaders["train"])
            first = self.step % self.epoch_steps
            while first < self.epoch_steps:
                end = min(first - first % every + every, self.epoch_steps)
                self._train_segment(batches, epoch, first, end - first)
                metrics["valid"] = self._evaluate("valid")
                first = end
            if next(batches, None) is not None:
                raise RuntimeError(f"the loader has more than the {self.epoch_steps} steps it said")
            self.loaders["train"].check_epoch()
        metrics["test"] = self._evaluate("test")
        if self.checkpoints:
            self.checkpoints.wait()
        return {split: m for split, m in metrics.items() if m is not None}

    def _resume(self, directory: str) -> None:
        """Go on from the newest checkpoint, if there is one and that was asked for."""
        settings, group = self.settings, self.group
        self.checkpoints = Checkpoints(directory, settings.keep_checkpoints, self.config, group)
        found = finished(directory)
        if not found:
            return
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
        if not (settings.resume or restarted):
            raise OutputError(
                f"--checkpoint_dir {directory}: holds a run, up to {found[-1].name}",
                "add --resume to go on from there, or choose another directory",
            )
        path = found[-1]
        training = check_resumable(path, self._record(), self.config)
        self.loaders["train"].load_state_dict(training["loader"])
        load_state(path, self.model, self.optimizer, group)
        self.step, self.samples = training["steps"], training["samples"]
        self.train_seconds = training["train_seconds"]
        self.events.write("resume", step=self.step, checkpoint=str(path))
        if group.rank == 0:
            log.info("resumed from %s", path)

    def _checkpoint(self, epoch_step: int) -> None:
        """Write a checkpoint after step ``epoch_step`` of an epoch, in the background."""
        record = {
            **self._record(),
            "loader": self.loaders["train"].state_dict(epoch_step),
            "train_seconds": self.train_seconds,
        }
        state = training_state(self.model, self.optimizer, self.group)
        self.checkpoints.save(self.step, state, record)

    def _train_segment(self, batches: Iterator[Batch], epoch: int, first: int, length: int) -> None:
        """Train steps ``first`` … ``first + length - 1`` of an epoch; the pipeline is empty after.

        The segment ends where an evaluation follows: the pipeline never fetches a training batch
        that it cannot train before it.
        """
        self.meter.reset()
        # a new iterator object: the pipeline takes it as a new run of batches
        segment = self._segment(batches, first, length)
        frequency = self.settings.throughput_check_freq_within_epoch
        for i in range(first, first + length):
            rate = learning_rate(self.settings, self.step, self.total_steps)
            set_learning_rate(self.optimizer, rate)
            output = self.pipeline.progress(segment)
            self.step += 1
            self.samples += output.global_size
            self.meter.add(output)
            due = self.step % (self.settings.checkpoint_freq or self.total_steps) == 0
            if (i + 1) % frequency == 0 or i + 1 == first + length:
                due |= self._report(epoch, i + 1, rate)
            if due and self.checkpoints:
                self._checkpoint(i + 1)

    def _segment(self, batches: Iterator[Batch], first: int, length: int) -> Iterator[TrainBatch]:
        for i in range(first, first + length):
            begin = time.perf_counter()
            batch = next(batches, None)
            self.meter.waited += time.perf_counter() - begin
            if batch is None:
                raise RuntimeError(f"the loader ended after {i} of {self.epoch_steps} steps")
            yield self._step_batch(batch, i)

    def _step_batch(self, batch: Batch, i: int) -> TrainBatch:
        """The batch of an epoch's step ``i``, of as many rows as the other ranks' batches."""
        ranks = self.group.world_size
        global_size = self.settings.batch_size * ranks
        if i == self.epoch_steps - 1:  # the rest of the data, however the ranks share it
            global_size = min(global_size, self.loaders["train"].num_rows - i * global_size)
        size = -(-global_size // ranks)
        rows = len(batch.labels)
        if rows > size or (rows < size and i < self.epoch_steps - 1):
            raise RuntimeError(f"step {i}: a batch of {rows} instead of {size} rows")
        return TrainBatch.of(batch, size, global_size)

    def _report(self, epoch: int, epoch_step: int, rate: float) -> bool:
        """Report the steps since the last report; whether rank 0's clock wants a checkpoint."""
        meter, group = self.meter, self.group
        loss, waited, due = reduce_sum(group, meter.loss, meter.waited, self._overdue())
        seconds = time.perf_counter() - meter.start
        loss /= group.world_size * meter.samples
        if not math.isfinite(loss):
            raise SettingsError(
                f"the loss is {loss} between steps {self.step - meter.steps} and {self.step}: "
                "training diverged",
                f"lower --learning_rate (now {rate:g})",
            )
        self.train_seconds += seconds
        values = {
            "step": self.step,
            "epoch": epoch + epoch_step / self.epoch_steps,
            "samples": self.samples,
            "loss": loss,
            "lr": rate,
            "samples_per_s": meter.samples / seconds,
            "data_wait": waited / group.world_size / seconds,
        }
        self.events.write("train", **values)
        if group.rank == 0:
            values["total_steps"] = self.total_steps
            percent = 100 * epoch_step / self.epoch_steps
            values["epoch_text"] = f"{epoch + 1}/{self.settings.epochs} {percent:.0f} %"
            values["samples_per_s_per_rank"] = values["samples_per_s"] / group.world_size
            values["eta_s"] = (self.total_steps - self.step) * seconds / meter.steps
            log.info("%s", train_line(values))
        meter.reset()
        return bool(due)

    def _overdue(self) -> bool:
        minutes = self.settings.checkpoint_minutes
        if not (minutes and self.checkpoints and self.group.rank == 0):
            return False
        return time.monotonic() - self.checkpoints.saved_at > 60 * minutes

    def _evaluate(self, split: str) -> Metrics | None:
        begin = time.perf_counter()
        loader, size = self.loaders[split], self.settings.batch_size
        metrics = evaluate(self.pipeline, self.model, loader, size, self.group)
        loader.check_epoch()
        if metrics is not None:
            seconds = time.perf_counter() - begin
            epoch = self.step / self.epoch_steps
            self.events.write(
                "evaluation",
                step=self.step,
                epoch=epoch,
                split=split,
                **metrics.to_dict(),
                seconds=seconds,
            )
            log.info("%s", metrics_line(split, metrics))
        return metrics

    def _finish(self, metrics: dict[str, Metrics]) -> TrainResult:
        result = TrainResult(self.step, self.samples, self.train_seconds, metrics)
        path = self.settings.save_checkpoint_path
        if path:
            record = self._record() | {
                "metrics": {split: m.to_dict() for split, m in metrics.items()}
            }
            state = training_state(self.model, self.optimizer, self.group)
            save_checkpoint(path, state, self.config, record, self.group)
        self.events.write(
            "end",
            step=self.step,
            samples=self.samples,
            train_seconds=self.train_seconds,
            samples_per_s=self.samples / self.train_seconds,
            checkpoint=path,
        )
        if self.group.rank == 0:
            log.info(
                "trained %s samples in %.1f s: %s samples/s\n%s",
                f"{self.samples:,}",
                self.train_seconds,
                f"{self.samples / self.train_seconds:,.0f}",
                metrics_table(metrics),
            )
            log.info("checkpoint: %s", path or "none (--save_checkpoint_path)")
        return result

    def _record(self) -> dict[str, Any]:
        return {
            "settings": self.settings.to_dict(),
            "steps": self.step,
            "samples": self.samples,
            "workflow_digest": _workflow_digest(self.settings.binary_path),
        }


class _Meter:
    """Sums over the steps since the last report; the loss stays on the device until then."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.reset()

    def reset(self) -> None:
        self.start = time.perf_counter()
        self.steps = self.samples = 0
        self.waited = 0.0
        self.loss = torch.zeros((), dtype=torch.float64, device=self._device)

    def add(self, output: StepOutput) -> None:
        self.steps += 1
        self.samples += output.global_size
        self.loss += output.loss.double() * output.global_size


def _loader(settings: TrainSettings, config: ModelConfig, split: str, group: Group) -> KJTLoader:
    training = split == "train"
    limits = {
        "train": settings.limit_train_batches,
        "valid": settings.limit_val_batches,
        "test": settings.limit_test_batches,
    }
    memory = settings.loader_memory
    return KJTLoader(
        settings.split_path(split),
        settings.batch_size,
        rank=group.rank,
        world_size=group.world_size,
        shuffle=settings.shuffle_training_set and training,
        seed=settings.seed,
        drop_last=settings.drop_last_training_batch and training,
        device=group.device,
        table_sizes=config.num_embeddings,
        hash_indices=settings.hash_indices,
        undersampling_rate=settings.undersampling_rate if training else None,
        limit_batches=limits[split],
        **({} if memory is None else {"loader_memory": memory << 20}),
    )


def _build(
    settings: TrainSettings, config: ModelConfig, group: Group
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    dlrm = build_dlrm(config, seed=settings.seed, device=group.device)
    model = TrainModel(dlrm, group.world_size)
    fuse_table_optimizer(model, settings, group.device)
    sharded = shard_model(model, config, settings, group)
    return sharded, combine_optimizers(sharded, settings)


def _workflow_digest(binary_path: str) -> str | None:
    """The digest of the workflow that made the data, if it lies where the ETL puts it."""
    path = Path(binary_path).absolute().parent.parent / "workflow" / "metadata.json"
    if not path.is_file():
        return None
    value = read_json(path, "a saved workflow")
    return value.get("digest") if isinstance(value, dict) else None
