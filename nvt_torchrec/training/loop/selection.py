"""Choose how strongly a small log's model is regularized, by complete trainings of a few epochs.

On a log of some ten thousand rows, whose values have few rows each, nothing matters more than this
choice: with L2 regularization and batch normalization DLRM has an AUROC of 0.984 on Frappe, without
0.974; on other logs it loses. A strength and the length of the schedule go together: one that is
cut short, or looked at on the way, would prefer weaker ones. So each trial is a whole schedule.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Iterator
from typing import Any

from nvt_torchrec.base.command_line import as_text
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.models.metrics import ByLabel
from nvt_torchrec.models.registry import MODELS
from nvt_torchrec.training.baselines.baselines import Baselines, compute_baselines
from nvt_torchrec.training.checkpoint.directories import checkpoints_in
from nvt_torchrec.training.data import choices
from nvt_torchrec.training.launch.distributed import Group, from_rank_0
from nvt_torchrec.training.loop.stopping import NATS
from nvt_torchrec.training.loop.trainer import Trainer
from nvt_torchrec.training.settings.train_settings import TrainSettings
from nvt_torchrec.training.sharding.model_config import model_config
from nvt_torchrec.training.sharding.planning import choose_sharding

log = logging.getLogger(__name__)

#: The first strength of L2 that is tried, the factor to the next one, and the most trials of it.
_FIRST_L2, _FACTOR, _MOST_L2_TRIALS = 0.015, 3.0, 4
#: So many trials of L2 that are worse than those without it end them.
_MOST_WORSE = 2
#: The epochs of a trial with L2 and of the training after it; and how a trial without L2 ends.
_TRIAL_EPOCHS, _EPOCHS = 7, 15
_EARLY_STOPPED = {"epochs": 3, "early_stopping": 8}
#: What the log shows of what was chosen.
_REGULARIZATION = ("embedding_l2", "batch_norm")
#: What keeps a trial from writing to the run's directories.
_KEPT_NOWHERE: dict[str, Any] = {
    **dict.fromkeys(("checkpoint_dir", "checkpoint_freq", "save_checkpoint_path", "keep")),
    **dict.fromkeys(("resume", "profile", "tensorboard"), False),
}
#: More steps than an epoch of a small log has: valid is evaluated after an epoch alone.
_NEVER = 1 << 30
#: How many default batches one of a training with L2 has: each step takes time for every weight.
_BATCHES = 4
#: Flags that say how to regularize, or how long to train: who gives one has chosen.
_CHOOSING = (
    *("embedding_l2", "batch_norm", "dropout", "optimizer", "learning_rate"),
    *("dense_learning_rate", "epochs", "early_stopping", "max_steps", "dense_decay", "sharding"),
    *("load_checkpoint_path", "continue_from", "first_order", "limit_train_batches"),
    *("stop_at_auroc", "undersampling_rate", "batch_size"),
)


def is_open(given: TrainSettings) -> bool:
    """Return whether a run may choose its regularization: settings are those that a user gave.

    A run that resumes has chosen before.
    """
    if given.mode != "train" or given.model not in MODELS:
        return False
    if given.adagrad or given.loader == "merlin" or given.table_precision != "fp32":
        return False
    if given.lr_decay_steps or given.size not in ("auto", "tiny"):
        return False
    if given.checkpoint_dir and checkpoints_in(given.checkpoint_dir):
        return False
    return all(getattr(given, name) is None for name in _CHOOSING)


def choose_regularization(
    given: TrainSettings, settings: TrainSettings, schema: TableSchema, group: Group
) -> tuple[TrainSettings, Baselines | None]:
    """Try regularizations on valid; return the settings of the best run, and rank 0's baselines.

    First come the default model and batch normalization, both without L2. Then the strength of L2
    is raised while the log loss of valid falls; two trials that are worse than those without L2
    end it. A trial is better if its log loss is lower by ``NATS`` in all, as in
    :mod:`.stopping`: a smaller gain on a few thousand rows is chance.

    Args:
        given: The settings that the user gave.
        settings: The same with what a run without L2 takes.
        schema: The columns of the data.
        group: This rank.
    """
    search = _Search(given, schema, group)
    search.compute_baselines(settings)
    for batch_norm in (False, True):
        search.try_out({"batch_norm": batch_norm, **_EARLY_STOPPED})
    if search.best is None:  # valid has no rows
        return settings, search.baselines
    without_l2 = search.best[0]
    strength, lowest, worse = _FIRST_L2, math.inf, 0
    for _ in range(_MOST_L2_TRIALS):
        loss = search.try_out(_make_l2_run(strength, settings))
        if loss is None or loss >= lowest:
            break
        worse += loss >= without_l2
        if worse == _MOST_WORSE:
            break
        lowest = loss
        strength = round(_FACTOR * strength, 6)
    _, chosen = search.best
    if group.rank == 0:
        flags = " ".join(
            _format_flag(name, chosen[name]) for name in _REGULARIZATION if name in chosen
        )
        log.info("chosen on valid: %s", flags)
    if "embedding_l2" in chosen:
        return search.fill({**chosen, "epochs": _EPOCHS}), search.baselines
    return search.fill({"batch_norm": chosen["batch_norm"]}), search.baselines


def _format_flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {as_text(value)}"


def _make_l2_run(strength: float, settings: TrainSettings) -> dict[str, Any]:
    """Return what a run with L2 regularization is given."""
    return {
        "embedding_l2": strength,
        "optimizer": "adam",
        "batch_norm": True,
        "epochs": _TRIAL_EPOCHS,
        "early_stopping": 0,
        "batch_size": _BATCHES * settings.batch_size,
    }


class _Search:
    """What the trials of a run share.

    Attributes:
        best: The log loss of valid of the best trial, and what it was given; None before the first.
        baselines: On rank 0, once they are computed.
    """

    def __init__(self, given: TrainSettings, schema: TableSchema, group: Group) -> None:
        self._given, self._schema, self._group = given, schema, group
        self.best: tuple[float, dict[str, Any]] | None = None
        self.baselines: Baselines | None = None

    def fill(self, chosen: dict[str, Any]) -> TrainSettings:
        """Return the settings of a run that is given ``chosen`` as well."""
        settings = dataclasses.replace(self._given, **chosen)
        settings = choices.choose_sizes(settings, self._schema, self._group.world_size)
        return choices.choose_order(settings)

    def compute_baselines(self, settings: TrainSettings) -> None:
        """Compute the baselines of all runs, on rank 0."""
        if self._group.rank == 0:
            files = choices.choose_days(settings, None).files
            config = model_config(settings, self._schema)
            self.baselines = compute_baselines(settings, config, files)

    def try_out(self, chosen: dict[str, Any]) -> float | None:
        """Train with ``chosen``; return the log loss of valid, or None without one (collective)."""
        begin = time.perf_counter()
        more = dict(_KEPT_NOWHERE)
        if not chosen["early_stopping"]:
            more["validation_freq_within_epoch"] = _NEVER
        settings = self.fill({**chosen, **more})
        config = model_config(settings, self._schema)
        settings = choose_sharding(settings, config, self._group.device.type)
        with _silence_messages():
            trainer = Trainer(settings, config, self._group, keeps_log=False)
            start = self.baselines[0] if self.baselines else None
            metrics = trainer.try_out(start)
        loss, rows = from_rank_0(self._group, _sum_losses(metrics))
        if loss is None:
            return None
        if self.best is None or loss < self.best[0] - NATS / rows:
            self.best = loss, chosen
        if self._group.rank == 0:
            flags = [_format_flag(name, chosen[name]) for name in _REGULARIZATION if name in chosen]
            seconds = time.perf_counter() - begin
            log.info("trial %s: log loss of valid %.5f, %.0f s", " ".join(flags), loss, seconds)
        return loss


def _sum_losses(metrics: ByLabel | None) -> tuple[float | None, float]:
    """Return the log loss, summed over the labels, and the rows; None if there is none."""
    values = list((metrics or {}).values())
    rows = sum(values[0].effective_counts) if values else 0.0
    return sum(of_label.log_loss or 0.0 for of_label in values) or None, rows


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
