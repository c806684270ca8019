"""Trials of a run: complete trainings with different settings, compared on valid."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from nvt_torchrec.base.command_line import format_value
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.models.metrics import count_effective_rows, sum_log_losses
from nvt_torchrec.training.baselines.baselines import (
    REGRESSION,
    Baselines,
    compute_baselines,
)
from nvt_torchrec.training.data import choices
from nvt_torchrec.training.data.training_days import choose_days
from nvt_torchrec.training.launch.distributed import Group, broadcast_object
from nvt_torchrec.training.loop.kept_training import KeptTraining
from nvt_torchrec.training.loop.stopping import NATS
from nvt_torchrec.training.loop.trainer import Trainer
from nvt_torchrec.training.settings.train_settings import TrainSettings, choose_test_batch
from nvt_torchrec.training.sharding.model_config import model_config
from nvt_torchrec.training.sharding.planning import choose_sharding

log = logging.getLogger(__name__)

#: Settings that keep a trial from writing to the run's directories.
_NO_FILES: dict[str, Any] = {
    "checkpoint_dir": None,
    "checkpoint_freq": None,
    "save_checkpoint_path": None,
    "keep": None,
    "resume": False,
    "profile": False,
    "tensorboard": False,
}
#: More steps than an epoch of a small log has, so that valid is only evaluated after each epoch.
_NEVER = 1 << 30


class Choice(NamedTuple):
    """The outcome of a run's trials, from which the run continues.

    Attributes:
        settings: The settings of the run.
        baselines: The baselines on rank 0, if they are already computed.
        training: The training of the best trial; None if it must be trained again.
    """

    settings: TrainSettings
    baselines: Baselines | None = None
    training: KeptTraining | None = None


class Trials:
    """The trials of a run, and the training of the best one, which is kept in main memory.

    Earlier trials are simpler. So a later trial is only better if its log loss of valid, summed
    over the rows, is lower by ``NATS``, as in :mod:`.stopping`. Comparing with the standard error
    of the rows' differences instead would miss wide layers, which help on logs of numeric columns,
    with 3,700 rows of valid.

    Attributes:
        best: The settings of the best trial; None before the first.
        best_loss: Its log loss of valid, summed over the labels.
        baselines: The baselines on rank 0; they are the same for all trials.
        regression_loss: The log loss of logistic regression on valid; infinity without a
            regression.

    Args:
        given: The settings that the user gave.
        settings: The same settings with defaults filled in.
        schema: The columns of the data.
        group: This rank.
    """

    def __init__(
        self, given: TrainSettings, settings: TrainSettings, schema: TableSchema, group: Group
    ) -> None:
        self._given = given
        self._schema = schema
        self._group = group
        self.best: dict[str, Any] | None = None
        self.best_loss = math.inf
        self.baselines: Baselines | None = None
        self._kept: KeptTraining | None = None
        if group.rank == 0:
            files = choose_days(settings, None).files
            self.baselines = compute_baselines(settings, model_config(settings, schema), files)
        metrics = None
        if self.baselines:
            _, baseline_metrics = self.baselines
            metrics = baseline_metrics.get(("valid", REGRESSION))
        self.regression_loss = broadcast_object(group, sum_log_losses(metrics) or math.inf)

    def fill(self, chosen: dict[str, Any]) -> TrainSettings:
        """Return complete settings: ``chosen``, what the user gave, and defaults."""
        if "batch_size" in chosen and self._given.test_batch_size is None:
            # Evaluations default to the user's --batch_size; a trial's batch size must not count
            # as one.
            chosen = {**chosen, "test_batch_size": choose_test_batch(chosen["batch_size"])}
        settings = dataclasses.replace(self._given, **chosen)
        settings = choices.choose_sizes(settings, self._schema, self._group.world_size)
        return choices.choose_order(settings)

    def choose_best(self) -> Choice:
        """Return the settings of the best trial, with its training."""
        return Choice(self.fill(self.best or {}), self.baselines, self._kept)

    def try_out(self, chosen: Mapping[str, Any]) -> float | None:
        """Train with the settings ``chosen``, and return the log loss of valid (collective).

        The result is None if valid has no rows, or if the training diverges.
        """
        begin = time.perf_counter()
        trial_settings = {**chosen, **_NO_FILES}
        if "epochs" in chosen:
            trial_settings["validation_freq_within_epoch"] = _NEVER
        settings = self.fill(trial_settings)
        config = model_config(settings, self._schema)
        settings = choose_sharding(settings, config, self._group.device.type)
        metrics = None
        with _silence_messages():
            trainer = Trainer(settings, config, self._group, keeps_log=False)
            start = self.baselines[0] if self.baselines else None
            # A diverged training raises SettingsError on all ranks.
            with contextlib.suppress(SettingsError):
                metrics = trainer.try_out(start)
        measured = sum_log_losses(metrics), count_effective_rows(metrics)
        loss, rows = broadcast_object(self._group, measured)
        if loss is not None and loss < self.best_loss - NATS / rows:
            self.best = dict(chosen)
            self.best_loss = loss
            self._kept = None  # freed first, so that memory never holds two trainings
            if not self._given.profile:
                self._kept = KeptTraining.keep(trainer)
        if self._group.rank == 0:
            seconds = time.perf_counter() - begin
            found = "no log loss of valid" if loss is None else f"log loss of valid {loss:.5f}"
            log.info("trial %s: %s, %.0f s", format_flags(chosen), found, seconds)
        return loss


def make_l2_run(strength: float, epochs: int, batch_size: int) -> dict[str, Any]:
    """Return the settings of a run with L2 regularization of its tables.

    L2 keeps the vectors small, and batch normalization scales the layers' outputs up again: neither
    helps without the other.
    """
    return {
        "embedding_l2": strength,
        "optimizer": "adam",
        "batch_norm": True,
        "epochs": epochs,
        "batch_size": batch_size,
    }


def format_flags(chosen: Mapping[str, Any]) -> str:
    """Return settings as command-line flags."""
    return " ".join(_format_flag(name, value) for name, value in chosen.items())


def _format_flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {format_value(value)}"


@contextlib.contextmanager
def _silence_messages() -> Iterator[None]:
    """Keep a trial's messages out of the log."""
    logger = logging.getLogger("nvt_torchrec.training")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
