"""Choose how strongly a small log's model is regularized, by complete trainings of a few epochs.

On a log of some ten thousand rows, whose values have few rows each, nothing matters more than this
choice: with L2 regularization and batch normalization DLRM has an AUROC of 0.984 on Frappe, without
0.974; on other logs it loses. A strength and the length of the schedule go together: one that is
cut short, or looked at on the way, would prefer weaker ones. So each trial is a whole schedule.
"""

from __future__ import annotations

import logging
from typing import Any

from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.models.registry import MODELS
from nvt_torchrec.training.baselines.baselines import Baselines
from nvt_torchrec.training.launch.distributed import Group
from nvt_torchrec.training.loop.trials import Trials, format_flags, make_l2_run
from nvt_torchrec.training.settings.train_settings import TrainSettings

log = logging.getLogger(__name__)

#: The first strength of L2 that is tried, the factor to the next one, and the most trials of it.
_FIRST_L2, _FACTOR, _MAX_L2_TRIALS = 0.015, 3.0, 4
#: So many trials of L2 that are worse than those without it end them.
_MAX_WORSE = 2
#: The epochs of a trial with L2, and of a longer one with the best strength.
_EPOCHS, _LONG_EPOCHS = 7, 15
#: Layers over the interaction, but for the last one, that rows of many numbers gain by.
_WIDE_LAYERS = (256, 128)
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
    """Return whether a run may choose its regularization: settings are those that a user gave."""
    if given.mode != "train" or given.model not in MODELS:
        return False
    if given.adagrad or given.loader == "merlin" or given.table_precision != "fp32":
        return False
    if given.lr_decay_steps or given.size not in ("auto", "tiny"):
        return False
    return all(getattr(given, name) is None for name in _CHOOSING)


def choose_regularization(
    given: TrainSettings, settings: TrainSettings, schema: TableSchema, group: Group
) -> tuple[TrainSettings, Baselines | None]:
    """Try regularizations on valid; return the settings of the best run, and rank 0's baselines.

    First come the default model, and batch normalization with wide layers, both without L2. Then
    the strength of L2, beside batch normalization and layers of the default width, is raised while
    the log loss of valid falls; one trial that is worse than logistic regression, or two that are
    worse than those without L2, end it. If one of L2 is the best of all, it is tried with more
    epochs as well. Every trial is a complete training, so that the run can repeat the best
    (:class:`.Trials` says which it is).

    Args:
        given: The settings that the user gave.
        settings: The same with what a run without L2 takes.
        schema: The columns of the data.
        group: This rank.
    """
    trials = Trials(given, settings, schema, group)
    trials.try_out({"batch_norm": False})
    if trials.best is None:  # valid has no rows
        return settings, trials.baselines
    normalized: dict[str, Any] = {"batch_norm": True}
    if given.over_arch_layer_sizes is None:
        normalized["over_arch_layer_sizes"] = (*_WIDE_LAYERS, given.label_count)
    trials.try_out(normalized)
    without_l2 = trials.best_loss
    strength, lowest, worse = _FIRST_L2, trials.regression_loss, 0
    for _ in range(_MAX_L2_TRIALS):
        batch_size = _BATCHES * settings.batch_size
        loss = trials.try_out(make_l2_run(strength, _EPOCHS, batch_size))
        if loss is None or loss >= lowest:
            break
        worse += loss >= without_l2
        if worse == _MAX_WORSE:
            break
        lowest = loss
        strength = round(_FACTOR * strength, 6)
    chosen = trials.best
    if "embedding_l2" in chosen:
        trials.try_out({**chosen, "epochs": _LONG_EPOCHS})
        chosen = trials.best
    if group.rank == 0:
        log.info("chosen on valid: %s", format_flags(chosen))
    return trials.fill(chosen), trials.baselines
