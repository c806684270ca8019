"""Choose the regularization of a small log's model by complete trainings of a few epochs.

On a log of some ten thousand rows, whose values have few rows each, no other choice matters more:
on Frappe, DLRM reaches an AUROC of 0.984 with L2 regularization and batch normalization, and 0.974
without; on other logs it is worse with them. The best strength depends on the length of the
schedule: a training that is cut short, or evaluated before its end, would prefer weaker ones. So
each trial is a whole schedule.
"""

from __future__ import annotations

import logging
from typing import Any

from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.models.registry import MODELS
from nvt_torchrec.training.launch.distributed import Group
from nvt_torchrec.training.loop.trials import Choice, Trials, format_flags, make_l2_run
from nvt_torchrec.training.settings.train_settings import TrainSettings

log = logging.getLogger(__name__)

#: The first strength of L2 regularization to try.
_FIRST_L2 = 0.015
#: The factor from one strength to the next.
_L2_FACTOR = 3.0
#: The largest number of strengths to try.
_MAX_L2_TRIALS = 4
#: No more strengths are tried once this many are worse than the best trial without L2.
_MAX_WORSE = 2
#: The number of epochs of a trial with L2.
_EPOCHS = 7
#: The number of epochs of one more trial with the best strength.
_LONG_EPOCHS = 15
#: Wider layers above the interaction, which help on logs with many numeric columns.
_WIDE_LAYERS = (256, 128)
#: The batch size of a training with L2, as a multiple of the default: with L2, each step takes time
#: for every weight, so fewer and larger steps are faster.
_BATCHES = 4
#: Flags that decide how to regularize, or how long to train. If the user gives any of them, no
#: trials are run.
_CHOOSING = (
    *("embedding_l2", "batch_norm", "dropout", "optimizer", "learning_rate"),
    *("dense_learning_rate", "epochs", "early_stopping", "max_steps", "dense_decay", "sharding"),
    *("load_checkpoint_path", "continue_from", "first_order", "limit_train_batches"),
    *("stop_at_auroc", "undersampling_rate", "batch_size"),
)


def is_open(given: TrainSettings) -> bool:
    """Return whether the settings that the user gave leave the regularization open."""
    if given.mode != "train" or given.model not in MODELS:
        return False
    if given.adagrad or given.loader == "merlin" or given.table_precision != "fp32":
        return False
    if given.lr_decay_steps or given.size not in ("auto", "tiny"):
        return False
    return all(getattr(given, name) is None for name in _CHOOSING)


def choose_regularization(
    given: TrainSettings, settings: TrainSettings, schema: TableSchema, group: Group
) -> Choice:
    """Try several regularizations, and choose the best one on valid.

    1. Train the default model, and one with batch normalization and wide layers, without L2.
    2. Train with L2, batch normalization and layers of the default width, and raise the strength
       while the log loss of valid falls. Stop early if a trial is worse than logistic regression,
       or if two are worse than the best one without L2.
    3. If the best trial has L2, also try it with more epochs and averaged weights.

    Every trial is a complete training, so the run continues from the end of the best one
    (:class:`.Trials` says which is the best).

    Args:
        given: The settings that the user gave.
        settings: The same settings with defaults, for a run without L2.
        schema: The columns of the data.
        group: This rank.

    Returns:
        The settings of the best trial, its training, and on rank 0 the baselines.
    """
    if group.rank == 0:
        # The first trial ends after seconds, or minutes on a busy machine: say what takes the time.
        log.info("choosing regularization and layers on valid; each trial is a complete training")
    trials = Trials(given, settings, schema, group)
    trials.try_out({"batch_norm": False})
    if trials.best is None:  # valid has no rows
        return Choice(settings, trials.baselines)
    normalized: dict[str, Any] = {"batch_norm": True}
    if given.over_arch_layer_sizes is None:
        normalized["over_arch_layer_sizes"] = (*_WIDE_LAYERS, given.label_count)
    trials.try_out(normalized)
    loss_without_l2 = trials.best_loss
    lowest = trials.regression_loss
    strength = _FIRST_L2
    num_worse = 0
    for _ in range(_MAX_L2_TRIALS):
        batch_size = _BATCHES * settings.batch_size
        loss = trials.try_out(make_l2_run(strength, _EPOCHS, batch_size))
        if loss is None or loss >= lowest:
            break
        if loss >= loss_without_l2:
            num_worse += 1
        if num_worse == _MAX_WORSE:
            break
        lowest = loss
        strength = round(_L2_FACTOR * strength, 6)
    chosen = trials.best
    if "embedding_l2" in chosen:
        longer = {**chosen, "epochs": _LONG_EPOCHS}
        # In a shorter schedule the weights still move too far during the averaged epoch.
        if given.average_weights is None:
            longer["average_weights"] = True
        trials.try_out(longer)
        chosen = trials.best
    if group.rank == 0:
        log.info("chosen on valid: %s", format_flags(chosen))
    return trials.choose_best()
