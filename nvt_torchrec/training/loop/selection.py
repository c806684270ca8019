"""Choose how strongly a small log's model is regularized, by complete trainings of a few epochs.

On a log of some ten thousand rows, whose values have few rows each, nothing matters more than this
choice: with L2 regularization and batch normalization DLRM has an AUROC of 0.984 on Frappe, and
0.974 without; on other logs it is worse with them. The best strength depends on the length of the
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

#: The first strength of L2 that is tried.
_FIRST_L2 = 0.015
#: The factor from one strength to the next.
_L2_FACTOR = 3.0
#: The largest number of strengths that are tried.
_MAX_L2_TRIALS = 4
#: The trials of L2 end when so many of them are worse than those without L2.
_MAX_WORSE = 2
#: The epochs of a trial with L2.
_EPOCHS = 7
#: The epochs of one more trial with the best strength.
_LONG_EPOCHS = 15
#: The hidden layers over the interaction, from which rows of many numbers profit.
_WIDE_LAYERS = (256, 128)
#: A batch of a training with L2, in default batches: each step takes time for every weight, so
#: there should be fewer.
_BATCHES = 4
#: Flags that say how to regularize, or how long to train. A user who gives one has chosen.
_CHOOSING = (
    *("embedding_l2", "batch_norm", "dropout", "optimizer", "learning_rate"),
    *("dense_learning_rate", "epochs", "early_stopping", "max_steps", "dense_decay", "sharding"),
    *("load_checkpoint_path", "continue_from", "first_order", "limit_train_batches"),
    *("stop_at_auroc", "undersampling_rate", "batch_size"),
)


def is_open(given: TrainSettings) -> bool:
    """Return whether a run may choose its regularization, by the settings that the user gave."""
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
    """Try regularizations on valid, and choose the best one.

    1. The default model, and one with batch normalization and wide layers, are trained without L2.
    2. With L2, batch normalization and layers of the default width, the strength is raised while
       the log loss of valid falls. A trial that is worse than logistic regression ends this, or two
       that are worse than the best one without L2.
    3. If a trial with L2 is the best of all, it is tried with more epochs, and averaged weights, as
       well.

    Every trial is a complete training, so that the run goes on from the end of the best one
    (:class:`.Trials` defines it).

    Args:
        given: The settings that the user gave.
        settings: The same, filled in for a run without L2.
        schema: The columns of the data.
        group: This rank.

    Returns:
        The settings of the best trial, on rank 0 the baselines, and the training of that trial.
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
    without_l2 = trials.best_loss
    strength, lowest, worse = _FIRST_L2, trials.regression_loss, 0
    for _ in range(_MAX_L2_TRIALS):
        batch_size = _BATCHES * settings.batch_size
        loss = trials.try_out(make_l2_run(strength, _EPOCHS, batch_size))
        if loss is None or loss >= lowest:
            break
        if loss >= without_l2:
            worse += 1
        if worse == _MAX_WORSE:
            break
        lowest = loss
        strength = round(_L2_FACTOR * strength, 6)
    chosen = trials.best
    if "embedding_l2" in chosen:
        longer = {**chosen, "epochs": _LONG_EPOCHS}
        # In a shorter schedule the weights still move far in the epoch that would be averaged.
        if given.average_weights is None:
            longer["average_weights"] = True
        trials.try_out(longer)
        chosen = trials.best
    if group.rank == 0:
        log.info("chosen on valid: %s", format_flags(chosen))
    return trials.choose_best()
