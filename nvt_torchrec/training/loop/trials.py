"""Trials of a run: complete trainings that differ in some settings, compared on valid."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from nvt_torchrec.base.command_line import as_text
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.models.metrics import count_effective_rows, sum_log_losses
from nvt_torchrec.training.baselines.baselines import (
    REGRESSION,
    Baselines,
    compute_baselines,
)
from nvt_torchrec.training.data import choices
from nvt_torchrec.training.launch.distributed import Group, from_rank_0
from nvt_torchrec.training.loop.stopping import NATS
from nvt_torchrec.training.loop.trainer import Trainer
from nvt_torchrec.training.settings.train_settings import TrainSettings
from nvt_torchrec.training.sharding.model_config import model_config
from nvt_torchrec.training.sharding.planning import choose_sharding

log = logging.getLogger(__name__)

#: What keeps a trial from writing to the run's directories.
_KEPT_NOWHERE: dict[str, Any] = {
    **dict.fromkeys(("checkpoint_dir", "checkpoint_freq", "save_checkpoint_path", "keep")),
    **dict.fromkeys(("resume", "profile", "tensorboard"), False),
}
#: More steps than an epoch of a small log has: valid is evaluated after an epoch alone.
_NEVER = 1 << 30


class Trials:
    """The trials of a run, and the best of them.

    A trial is better than an earlier one, which is simpler, if its log loss of valid is lower by
    ``NATS``, summed over the rows, as in :mod:`.stopping`. With the standard error of the rows'
    differences instead, wide layers, which gain on numbers, were not chosen on 3,700 rows of valid.

    Attributes:
        best: What the best trial was given; None before the first.
        best_loss: The log loss of valid in it, summed over the labels.
        baselines: On rank 0, those of all trials.
        regression_loss: The log loss of valid of logistic regression; infinity without one.

    Args:
        given: The settings that the user gave.
        settings: The same with what a run takes that is given no more.
        schema: The columns of the data.
        group: This rank.
    """

    def __init__(
        self, given: TrainSettings, settings: TrainSettings, schema: TableSchema, group: Group
    ) -> None:
        self._given, self._schema, self._group = given, schema, group
        self.best: dict[str, Any] | None = None
        self.best_loss = math.inf
        self.baselines: Baselines | None = None
        if group.rank == 0:
            files = choices.choose_days(settings, None).files
            self.baselines = compute_baselines(settings, model_config(settings, schema), files)
        metrics = self.baselines[1].get(("valid", REGRESSION)) if self.baselines else None
        self.regression_loss = from_rank_0(group, sum_log_losses(metrics) or math.inf)

    def fill(self, chosen: dict[str, Any]) -> TrainSettings:
        """Return the settings of a run that is given ``chosen`` as well."""
        settings = dataclasses.replace(self._given, **chosen)
        settings = choices.choose_sizes(settings, self._schema, self._group.world_size)
        return choices.choose_order(settings)

    def try_out(self, chosen: Mapping[str, Any]) -> float | None:
        """Train with ``chosen``; return the log loss of valid (collective).

        It is None without rows of valid, and if the training diverges.
        """
        begin = time.perf_counter()
        more = dict(_KEPT_NOWHERE)
        if "epochs" in chosen:
            more["validation_freq_within_epoch"] = _NEVER
        settings = self.fill({**chosen, **more})
        config = model_config(settings, self._schema)
        settings = choose_sharding(settings, config, self._group.device.type)
        metrics = None
        with _silence_messages():
            trainer = Trainer(settings, config, self._group, keeps_log=False)
            start = self.baselines[0] if self.baselines else None
            with contextlib.suppress(SettingsError):  # a loss that is not finite, on all ranks
                metrics = trainer.try_out(start)
        measured = sum_log_losses(metrics), count_effective_rows(metrics)
        loss, rows = from_rank_0(self._group, measured)
        if loss is not None and loss < self.best_loss - NATS / rows:
            self.best, self.best_loss = dict(chosen), loss
        if self._group.rank == 0:
            seconds = time.perf_counter() - begin
            found = "no log loss of valid" if loss is None else f"log loss of valid {loss:.5f}"
            log.info("trial %s: %s, %.0f s", format_flags(chosen), found, seconds)
        return loss


def make_l2_run(strength: float, epochs: int, batch_size: int) -> dict[str, Any]:
    """Return what a run with L2 regularization of its tables is given.

    Batch normalization scales up the vectors that L2 keeps small: neither is of use alone.
    """
    return {
        "embedding_l2": strength,
        "optimizer": "adam",
        "batch_norm": True,
        "epochs": epochs,
        "batch_size": batch_size,
    }


def format_flags(chosen: Mapping[str, Any]) -> str:
    """Return settings as flags of a command line."""
    return " ".join(_format_flag(name, value) for name, value in chosen.items())


def _format_flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {as_text(value)}"


@contextlib.contextmanager
def _silence_messages() -> Iterator[None]:
    """Leave the messages of a trial out of the log."""
    logger = logging.getLogger("nvt_torchrec.training")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
