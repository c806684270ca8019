"""One rank's part of a training run: its steps, evaluations and checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nvt_torchrec.base.errors import BadInputError, OutputError, SchemaError
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.contract import load_build
from nvt_torchrec.models.metrics import ByLabel, to_results
from nvt_torchrec.training.baselines.baselines import Baselines, compute_baselines
from nvt_torchrec.training.baselines.regression import Start
from nvt_torchrec.training.checkpoint import ancestor as ancestors
from nvt_torchrec.training.checkpoint.directories import list_checkpoints
from nvt_torchrec.training.checkpoint.resume import describe_origin, load_weights, resume_from
from nvt_torchrec.training.checkpoint.saving import Checkpoints, save_checkpoint
from nvt_torchrec.training.data.choices import read_schema
from nvt_torchrec.training.data.loaders import TrainBatch, check_length, make_loaders, pad_batches
from nvt_torchrec.training.data.training_days import choose_days, log_days
from nvt_torchrec.training.launch.distributed import Group, broadcast_object, gather_objects
from nvt_torchrec.training.launch.preemption import EXIT_STATUS, StopRequests
from nvt_torchrec.training.launch.preflight import trace_own_model
from nvt_torchrec.training.loop.averaging import Averaging
from nvt_torchrec.training.loop.evaluate import evaluate
from nvt_torchrec.training.loop.finish import fit_bias, make_samples, measure_importance
from nvt_torchrec.training.loop.stopping import Stopping
from nvt_torchrec.training.loop.train_steps import Steps
from nvt_torchrec.training.optim import learning_rates
from nvt_torchrec.training.optim.combined import set_step
from nvt_torchrec.training.reporting.learning_check import LearningCheck
from nvt_torchrec.training.reporting.metrics_log import MetricsLog, format_table
from nvt_torchrec.training.reporting.progress import Progress, TrainResult, make_profiler
from nvt_torchrec.training.settings.train_settings import TrainSettings
from nvt_torchrec.training.sharding.build import (
    apply_start,
    build,
    make_pipeline,
    regularize_tables,
)
from nvt_torchrec.training.sharding.own_scale import choose_scale

log = logging.getLogger(__name__)


class Trainer:
    """One training run on one rank. All methods are collective.

    Args:
        settings: The settings of the run.
        config: The model's shape.
        group: This rank.
        keeps_log: Whether the run writes its log to a directory; a trial holds it in memory.
    """

    def __init__(
        self, settings: TrainSettings, config: ModelConfig, group: Group, *, keeps_log: bool = True
    ) -> None:
        own = load_build(settings.model)
        if own:
            lists = read_schema(settings).multi_hot
            config = trace_own_model(config, own, settings.seed, group, lists)
            config = choose_scale(config, settings, own, group)
        self.config = config
        self.group = group
        directory = settings.log_directory() if keeps_log and group.rank == 0 else None
        self.events = MetricsLog(
            directory, tensorboard=settings.tensorboard, holds=group.rank == 0 and not keeps_log
        )
        self.ancestor = ancestors.agree_on_ancestor(settings, group)
        days = choose_days(settings, self.ancestor.days if self.ancestor else None)
        self.files = days.files
        self.loaders = make_loaders(settings, config, group, days.files)
        log_days(days, self.loaders["train"].num_rows, group)
        self.epoch_steps = len(self.loaders["train"])
        global_batch = settings.batch_size * group.world_size
        remedy = learning_rates.find_remedies(settings, config, global_batch, self.epoch_steps)
        settings = learning_rates.fill_rates(settings, config, global_batch, self.epoch_steps)
        self.settings = settings
        self.learning = LearningCheck(settings, group, self.events, self.epoch_steps, remedy)
        self.progress = Progress(settings, group, self.events, self.epoch_steps)
        self.samples = make_samples(settings, config, group, days.files)
        samples = {f"sample of {name}": sample for name, sample in self.samples.items()}
        self.run, plan = build(settings, config, group, self.loaders | samples, own)
        self.pipeline = make_pipeline(self.run)
        self.steps = Steps(self.run, self.pipeline, settings, self.progress, self.learning)
        self.averaging = Averaging(self.run, self.epoch_steps, settings)
        self.origin = {
            "days": days.add_earlier(ancestors.list_earlier_days(self.ancestor, settings)),
            "continued_from": dataclasses.asdict(self.ancestor) if self.ancestor else None,
            **describe_origin(settings),
        }
        self.stopping = Stopping(settings, group)
        self.finished: int | None = None  # the last trained step, once the model is finished
        self.resumed = False
        self.taken_over = False  # whether a trial's training was loaded (:class:`.KeptTraining`)
        self.metrics: dict[str, ByLabel] = {}
        self.baselines: dict[tuple[str, str], ByLabel] = {}  # by split and name
        self.checkpoints: Checkpoints | None = None
        if settings.checkpoint_dir:
            self.checkpoints = Checkpoints(settings.checkpoint_dir, settings.keep, self.run)
        self.stop_requests: StopRequests | None = None
        rows = {split: loader.num_rows for split, loader in self.loaders.items()}
        self.progress.report_start(config, plan, rows)
        if group.rank == 0 and settings.mode == "train":
            log.info("%s", learning_rates.describe_sizes(settings, config, rows["train"]))
            log.info("%s", learning_rates.describe_rates(settings))

    def test(self) -> TrainResult:
        """Evaluate the test set."""
        self._start()
        self._evaluate("test")
        if self.group.rank == 0:
            log.info("%s", format_table(self.metrics))
        return self._result()

    def try_out(self, start: Start | None) -> ByLabel | None:
        """Train without writing any file.

        Args:
            start: The start of the training on rank 0; None on other ranks.

        Returns:
            The metrics of valid on rank 0; None on other ranks.
        """
        check_length(self.settings, self.progress.total_steps)
        self._start(self._prepare(start))
        return self._train_and_validate()

    def train(self, baselines: Baselines | None = None) -> TrainResult:
        """Train, evaluate, and write checkpoints.

        Args:
            baselines: The baselines on rank 0, if they are already computed.
        """
        settings = self.settings
        progress = self.progress
        check_length(settings, progress.total_steps)
        profiler: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if settings.profile and self.events.directory:
            profiler = make_profiler(settings, self.events.directory, progress.total_steps)
        start = Start()
        if self.group.rank == 0:
            baselines = baselines or compute_baselines(settings, self.config, self.files)
            start, self.baselines = baselines
        start = self._prepare(start)
        if not (self.taken_over or self._resume()):
            self._start(start)
        # With early stopping, the model in --checkpoint_dir is that of the last step, not the best.
        keeps_model = settings.checkpoint_dir and not settings.early_stopping
        if self.group.rank == 0 and not (keeps_model or settings.save_checkpoint_path):
            log.warning("no --save_checkpoint_path: the trained model will not be kept")
        try:
            with StopRequests(self.group) as self.stop_requests:
                with profiler as self.steps.profiler:
                    self._train_epochs()
                self._save_model()
                self.stop_requests.finish()
                warnings: list[str] = []
                if self.group.rank == 0:
                    results = self.metrics, self.baselines
                    warnings = self.learning.check_final(progress.step, self.config, *results)
                advice = self.learning.suggest_longer_training()
                progress.report_end(self.metrics, self.baselines, advice, warnings)
        except BaseException:
            if self.checkpoints:
                self.checkpoints.abandon()
            raise
        return self._result()

    def _train_epochs(self) -> None:
        """Train the remaining steps, and evaluate the model."""
        if not self.taken_over:
            self._train_and_validate()
        self.progress.total_steps = self.progress.step
        self._evaluate("test")
        importance = measure_importance(self.samples["valid"], self.pipeline, self.run)
        for label, losses in importance.items():
            self.events.write("importance", label=label, columns=losses)
        if self.checkpoints:
            self.checkpoints.wait()

    def _train_and_validate(self) -> ByLabel | None:
        """Train the remaining steps; return the metrics of valid on rank 0, None elsewhere."""
        self._train_all()
        self.progress.total_steps = self.progress.step
        metrics = self._evaluate("valid")
        self.learning.note_evaluation(self.progress.step, metrics)
        return metrics

    def _train_all(self) -> None:
        """Train and evaluate for the remaining steps, and finish the model."""
        self.run.model.train()
        progress = self.progress
        # A checkpoint is written before the evaluation of its step, so a resumed run evaluates
        # first.
        if not self.finished:
            self._validate_if_due()
        while progress.step < progress.total_steps and not self.finished:
            self._train_epoch()
        if not self.finished:
            last = progress.step
            self.averaging.finish()
            self.stopping.finish(progress, self.run)
            fit_bias(self.samples["train"], self.pipeline, self.run)
            self.finished = last

    def _train_epoch(self) -> None:
        """Train the remaining steps of an epoch, up to ``--max_steps``.

        The steps are divided into segments that end before each evaluation, because the pipeline
        fetches batches ahead: it must not evaluate a batch that it fetched for training.
        """
        progress = self.progress
        every = progress.validation_every
        first = progress.step % self.epoch_steps
        last = min(self.epoch_steps, first + progress.total_steps - progress.step)
        batches = self.steps.read_batches(self.loaders["train"], first)
        while first < last and progress.step < progress.total_steps:
            end = min(first - first % every + every, last)
            num_steps = end - first
            # The pipeline restarts its prefetching when it gets a new iterator object.
            self._train_segment(itertools.islice(batches, num_steps), progress.step + num_steps)
            first = end
            self._validate_if_due()
        if first == self.epoch_steps:  # otherwise --max_steps ended the epoch early
            next(batches, None)
            self.loaders["train"].check_epoch()

    def _train_segment(self, batches: Iterator[TrainBatch], end: int) -> None:
        """Train up to step ``end`` of the run; this leaves the pipeline empty."""
        progress = self.progress
        progress.begin()
        set_step(self.run.model, self._optimizer_steps)
        every = self.settings.checkpoint_freq or progress.validation_every
        while progress.step < end:
            self.steps.train(batches)
            self.averaging.note_step(progress.step)
            if progress.is_due or progress.step == end:
                progress.report(self.steps.learning_rate)
            if progress.step % every == 0:
                self.save_state()
            self._stop_if_asked()

    def _validate_if_due(self) -> None:
        """Evaluate valid if an evaluation is due.

        The model before the first step and after the last one is evaluated here only for
        ``--early_stopping``, which may choose it.
        """
        progress = self.progress
        is_due = progress.step % self.epoch_steps % progress.validation_every == 0
        if progress.step in (0, progress.total_steps):
            is_due = bool(self.settings.early_stopping)
        if is_due:
            with self.averaging.applied():
                metrics = self._evaluate("valid")
                self.learning.note_evaluation(progress.step, metrics)
                self.stopping.note_evaluation(metrics, progress, self.run)

    def _evaluate(self, split: str) -> ByLabel | None:
        """Evaluate a split, and save a fully trained model even if the evaluation fails.

        Returns:
            The metrics of the split on rank 0; None on other ranks.
        """
        begin = time.perf_counter()
        loader = self.loaders[split]
        group = self.group
        is_trained = 0 < self.progress.step == self.progress.total_steps
        errors: list[BadInputError] = []
        if is_trained:
            errors = list(filter(None, gather_objects(group, loader.changed_file())))  # type: ignore[union-attr]
        try:
            if errors:
                raise errors[0]
            batches = pad_batches(loader, group)
            gauc_column = self.settings.gauc_column
            metrics = evaluate(self.pipeline, self.run, batches, self._stop_if_asked, gauc_column)
            loader.check_epoch()
        except (BadInputError, SchemaError):
            # Saving is collective: all ranks must reach it. Errors that were gathered above are
            # known to all ranks. Any other error may be this rank's alone, while the others wait
            # for its next step.
            if is_trained and (errors or group.world_size == 1):
                self._save_model()
                path = self.settings.save_checkpoint_path
                if group.rank == 0 and path:
                    log.warning("%s: saved, although the evaluation of %s failed", path, split)
            raise
        if metrics is not None:
            self.metrics[split] = metrics
            self.progress.report_evaluation(split, metrics, time.perf_counter() - begin)
        return metrics

    def _prepare(self, start: Start | None) -> Start:
        """Send rank 0's ``start`` to all ranks, and regularize tables by its lookups."""
        start = broadcast_object(self.group, start) or Start()
        regularize_tables(start, self.run, self.settings)
        return start

    def _start(self, start: Start | None = None) -> None:
        """Set the initial weights of a run that is not resumed, from a checkpoint or ``start``."""
        settings = self.settings
        if settings.load_checkpoint_path:
            load_weights(Path(settings.load_checkpoint_path), self.run)
        if self.ancestor:
            new_rows = ancestors.load_ancestor(self.ancestor, settings, self.run)
            path = self.ancestor.checkpoint
            self.events.write("continue", checkpoint=path, new_rows=new_rows)
        elif not settings.load_checkpoint_path:
            apply_start(start or Start(), self.run)

    @property
    def _optimizer_steps(self) -> int:
        """The trained steps, including those of the runs that this one continues."""
        return self.progress.step + (self.ancestor.optimizer_steps if self.ancestor else 0)

    def _resume(self) -> bool:
        """Continue from the newest usable checkpoint, if any; return True if it did."""
        settings = self.settings
        group = self.group
        progress = self.progress
        if self.checkpoints is None:
            return False
        directory = self.checkpoints.directory
        checkpoints = broadcast_object(group, list_checkpoints(directory))
        if not checkpoints:
            return False
        if not settings.resume:
            raise OutputError(
                f"--checkpoint_dir {directory}: already holds a run, up to {checkpoints[-1].name}",
                "add --resume to continue it, or choose another directory",
            )
        loader: Any = self.loaders["train"]
        path, training, more_tensors = resume_from(checkpoints, self._record(), loader, self.run)
        self.stopping.best = training.get("best")
        self.stopping.state = more_tensors.get("best")
        self.averaging.samples = training.get("averaged") or 0
        self.averaging.state = more_tensors.get("average")
        self.finished = training.get("finished")
        self.resumed = True
        self.checkpoints.saved_step = self.finished or training["steps"]
        self.origin = {name: training.get(name) for name in self.origin}
        progress.step = training["steps"]
        progress.samples = training["samples"]
        progress.train_seconds = training["train_seconds"]
        self.events.write("resume", step=progress.step, checkpoint=str(path))
        if group.rank == 0:
            log.info("resumed from %s", path)
        return True

    def position(self) -> dict[str, Any]:
        """Return the state of the training set's loader after the last trained step."""
        last = self.finished or self.progress.step
        steps = (last - 1) % self.epoch_steps + 1 if last else 0
        return self.loaders["train"].state_dict(steps)  # type: ignore[union-attr]

    def save_state(self, position: dict[str, Any] | None = None) -> None:
        """Write a checkpoint to ``--checkpoint_dir``, if given, in the background.

        Args:
            position: The state of the training set's loader; None for this trainer's own loader. A
                trial's loader read the training set if the trial was taken over.
        """
        if self.checkpoints is None:
            return
        progress = self.progress
        record = {
            **self._record(),
            "loader": position or self.position(),
            "train_seconds": progress.train_seconds,
            "best": self.stopping.best,
            "finished": self.finished,
        }
        state = self.run.tensors()
        if self.averaging.state and not self.finished:
            state["average"] = self.averaging.state
            record["averaged"] = self.averaging.samples
        if self.stopping.state:
            state["best"] = self.stopping.state
        self.checkpoints.save(self.finished or progress.step, state, record, progress.loss)

    def _save_model(self) -> None:
        """Write ``--save_checkpoint_path``, including the metrics so far."""
        path = self.settings.save_checkpoint_path
        keep = self.settings.keep
        if path:
            record = {**self._record(), **to_results(self.metrics, self.baselines)}
            save_checkpoint(path, self.run.tensors(), record, self.run)
            if keep and self.group.rank == 0:
                ancestors.remove_older(Path(path), keep)

    def _stop_if_asked(self) -> None:
        """End the run between two steps, after SIGTERM or when a checkpoint failed on any rank."""
        checkpoints = self.checkpoints
        requests = self.stop_requests
        if not (requests and requests.is_asked(checkpoints is not None and checkpoints.failed)):
            return
        outcome = "without --checkpoint_dir, nothing of it is kept"
        if checkpoints:
            checkpoints.wait()
            self.averaging.restore()
            if checkpoints.saved_step != (self.finished or self.progress.step):
                self.save_state()
                checkpoints.wait()
            outcome = f"--resume continues from its checkpoint in {checkpoints.directory}"
        if self.group.rank == 0:
            log.warning("SIGTERM: the run ends after step %d; %s", self.progress.step, outcome)
        raise SystemExit(EXIT_STATUS)

    def _result(self) -> TrainResult:
        progress = self.progress
        return TrainResult(
            status="continued" if self.resumed else "done",
            checkpoint=self.settings.save_checkpoint_path or self.settings.checkpoint_dir,
            steps=progress.step,
            samples=progress.samples,
            train_seconds=progress.train_seconds,
            **to_results(self.metrics, self.baselines),
        )

    def _record(self) -> dict[str, Any]:
        """Return the training record of a checkpoint."""
        return {
            "settings": self.settings.to_dict(),
            "steps": self.progress.step,
            "learning_rate": self.steps.learning_rate,
            "samples": self.progress.samples,
            "epochs": self.progress.step / max(self.epoch_steps, 1),
            "optimizer_steps": self._optimizer_steps,
            **self.origin,
        }
