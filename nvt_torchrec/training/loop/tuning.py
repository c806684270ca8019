"""Search settings on valid for a given time, with Optuna's tree-structured Parzen estimator.

Each trial is a complete training, as in :mod:`.selection`, whose candidates are the first trials.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.versions import make_missing_error
from nvt_torchrec.formats.feature_spec.events import parse_duration
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.models.registry import DEFAULT_MODEL, MODEL_FLAGS, MODELS
from nvt_torchrec.training.launch.distributed import Group, broadcast_object
from nvt_torchrec.training.loop.trials import Choice, Trials, format_flags, make_l2_run
from nvt_torchrec.training.optim.learning_rates import choose_rates
from nvt_torchrec.training.settings.train_settings import TrainSettings
from nvt_torchrec.training.sharding.model_config import model_config
from nvt_torchrec.training.sharding.planning import choose_sharding

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)

#: The hidden layers above the interaction, as strings, because Optuna stores no tuples.
_LAYERS = ("64", "256,128", "400,400,400")
_EMBEDDING_DIMS = (8, 16, 32)
_DROPOUTS = (0.0, 0.1, 0.2, 0.3)
#: Bounds of the L2 strength.
_MIN_L2 = 0.001
_MAX_L2 = 1.0
#: The numbers of epochs of a training with L2.
_EPOCHS = (7, 15, 25)
#: Its batch size, as a multiple of the default: with L2, each step takes time for every weight.
_BATCHES = (1, 2, 4)
#: Bounds of the factor of the default learning rates.
_MIN_RATE_FACTOR = 1 / 3
_MAX_RATE_FACTOR = 3.0
#: If the user gives any of these flags, the regularization is not searched.
_REGULARIZING = ("embedding_l2", "batch_norm", "optimizer", "epochs", "batch_size")
#: If the user gives any of these flags, the learning rates are not searched.
_RATES = ("learning_rate", "dense_learning_rate")
#: The first trials: good candidates of :mod:`.selection`.
_FIRST: tuple[dict[str, Any], ...] = (
    {"regularization": "none", "layers": "64"},
    {"regularization": "batch_norm", "layers": "256,128"},
    {"regularization": "l2", "layers": "64", "embedding_l2": 0.045, "epochs": 15, "batches": 4},
)


def tune(
    given: TrainSettings, settings: TrainSettings, schema: TableSchema, group: Group
) -> Choice:
    """Try settings until the time of ``--tune`` has passed.

    Settings that the user gave are not changed; the model is only searched if it is the default
    one. The trial that is running when the time ends is finished.

    Args:
        given: The settings that the user gave.
        settings: The same settings with the defaults of a run that is not tuned.
        schema: The columns of the data.
        group: This rank.

    Returns:
        The best settings, the training of the best trial, and on rank 0 the baselines.

    Raises:
        SettingsError: Optuna is not installed, or valid has no rows.
    """
    study = _make_study(given.seed) if group.rank == 0 else None
    trials = Trials(given, settings, schema, group)
    seconds = parse_duration(given.tune or "") / 1e6
    end = time.monotonic() + seconds
    is_over = False
    while not is_over:
        trial = None
        chosen = {}
        if study is not None:
            trial = study.ask()
            chosen = _suggest(trial, trials, given, schema, group)
        loss = trials.try_out(broadcast_object(group, chosen))
        if study is not None and trial is not None:
            _tell_loss(study, trial, loss)
        is_over = broadcast_object(group, time.monotonic() > end)
    if trials.best is None:
        raise SettingsError(
            f"--tune {given.tune}: no trial has a log loss of valid",
            "give valid rows ([split] of the spec); or, if training diverges, a lower "
            "--learning_rate",
        )
    if group.rank == 0:
        log.info(
            "the best settings, log loss of valid %.5f: %s",
            trials.best_loss, format_flags(trials.best),
        )  # fmt: skip
    return trials.choose_best()


def _make_study(seed: int) -> optuna.Study:
    """Return a study whose suggestions depend only on the seed and the results of the trials."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise make_missing_error(error, "--tune") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    for parameters in _FIRST:
        study.enqueue_trial(parameters)
    return study


def _tell_loss(study: optuna.Study, trial: optuna.Trial, loss: float | None) -> None:
    """Tell a study the loss of a trial. Without a loss it fails, and the sampler ignores it."""
    import optuna

    if loss is None:
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    else:
        study.tell(trial, values=loss)


def _suggest(
    trial: optuna.Trial,
    trials: Trials,
    given: TrainSettings,
    schema: TableSchema,
    group: Group,
) -> dict[str, Any]:
    """Return the study's suggestions for the settings that the user did not give."""
    chosen: dict[str, Any] = {"model": given.model}
    if given.model == DEFAULT_MODEL:
        chosen["model"] = trial.suggest_categorical("model", _list_models(given, schema))
    if given.over_arch_layer_sizes is None:
        layers = trial.suggest_categorical("layers", _LAYERS)
        chosen["over_arch_layer_sizes"] = (*map(int, layers.split(",")), given.label_count)
    if given.embedding_dim is None and given.dense_arch_layer_sizes is None:
        chosen["embedding_dim"] = trial.suggest_categorical("embedding_dim", _EMBEDDING_DIMS)
    if given.dropout is None:
        chosen["dropout"] = trial.suggest_categorical("dropout", _DROPOUTS)
    if all(getattr(given, name) is None for name in _REGULARIZING):
        chosen |= _suggest_regularization(trial, trials.fill(chosen).batch_size)
    if all(getattr(given, name) is None for name in _RATES):
        factor = trial.suggest_float("rate", _MIN_RATE_FACTOR, _MAX_RATE_FACTOR, log=True)
        settings = trials.fill(chosen)
        config = model_config(settings, schema)
        settings = choose_sharding(settings, config, group.device.type)
        rates = choose_rates(settings, config, settings.batch_size * group.world_size)
        for name, rate in zip(_RATES, rates, strict=True):
            chosen[name] = float(f"{factor * rate:.2g}")
    return chosen


def _list_models(given: TrainSettings, schema: TableSchema) -> list[str]:
    """Return the models that can be trained on the data with the flags that the user gave."""
    flags = [name for name in MODEL_FLAGS if getattr(given, name) not in (None, False)]
    models = []
    for name, model in MODELS.items():
        takes_data = bool(schema.histories) or not model.attends
        if takes_data and all(flag in model.flags for flag in flags):
            models.append(name)
    return models


def _suggest_regularization(trial: optuna.Trial, batch_size: int) -> dict[str, Any]:
    kind = trial.suggest_categorical("regularization", ("none", "batch_norm", "l2"))
    if kind != "l2":
        return {"batch_norm": kind == "batch_norm"}
    strength = trial.suggest_float("embedding_l2", _MIN_L2, _MAX_L2, log=True)
    epochs = trial.suggest_categorical("epochs", _EPOCHS)
    batch_size *= trial.suggest_categorical("batches", _BATCHES)
    return make_l2_run(float(f"{strength:.2g}"), epochs, batch_size)
