"""Choose the default learning rates, and compute the rate of each step.

Tables and dense layers have different defaults, because one rate cannot serve both. A table's row
is trained by the few samples that hold its value, a dense weight by all samples. And the first
steps of an adaptive optimizer move every weight by the rate itself, whatever the gradient; over a
thousand inputs of a layer such steps add up. So the dense rate falls with the width of the widest
layer (as for Adam in Yang et al. 2022, "Tensor Programs V", table 3). The tables' rate falls with
the square root of their width, because the layers above compute dot products of their rows.

The rates depend on the batch size as follows:

- Adagrad: not at all, because its steps shrink as it sums squared gradients.
- Dense layers with Adam or SGD: proportional to the square root of the global batch (for Adam,
  Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms"), up to a
  batch whose gradients are no longer dominated by noise.
- Tables with Adam: not at all, because a rare row is in few batches, however large they are.
- Tables with SGD: proportional to the batch, because each sample's gradient is divided by the batch
  size.

The constants were chosen with ``make bench-quality``. The rate of a step depends only on the step's
number, counted from 0 over all epochs, so a resumed run has the same rates.
"""

from __future__ import annotations

from typing import NamedTuple

from nvt_torchrec.base.command_line import format_value
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.head import find_widest_layer
from nvt_torchrec.models.registry import list_model_flags
from nvt_torchrec.training.settings.optimizers import OPTIMIZERS, Remedies
from nvt_torchrec.training.settings.train_settings import TrainSettings

#: The default warm-up as a share of an epoch's steps, and its bounds in steps.
_WARMUP_SHARE = 0.05
_MIN_WARMUP = 10
_MAX_WARMUP = 200
#: The rates of a continued run relative to a first training. At the full rates the last batches of
#: a day would move all predictions up or down.
_CONTINUED_TABLES = 0.4
_CONTINUED_DENSE = 1 / 6
#: The share of the steps, at the end, over which the dense layers' rate falls to 0. At a constant
#: rate the last batches would decide the mean prediction. The tables' rate with SGD and Adam falls
#: for the same reason. With Adagrad a falling rate makes models worse, because a row is seen rarely
#: and its steps shrink anyway.
_DENSE_DECAY = 0.5
#: The lower bound of the rate in facebookresearch/dlrm's decay.
_MIN_RATE = 1e-7


def fill_rates(
    settings: TrainSettings, config: ModelConfig, global_batch: int, epoch_steps: int
) -> TrainSettings:
    """Fill in the learning rates, their schedule and epsilon where ``settings`` leave them open.

    A given ``learning_rate`` also applies to the dense layers, as in TorchRec's example and
    facebookresearch/dlrm; the default schedule is kept. A run that continues from a checkpoint has
    no warm-up, and lower rates.

    Args:
        settings: The settings of the run.
        config: The model's shape.
        global_batch: The samples of a step, on all ranks.
        epoch_steps: The steps of an epoch.
    """
    tables, dense = choose_rates(settings, config, global_batch)
    warmup = choose_warmup(epoch_steps)
    if settings.lr_decay_steps:
        warmup = min(warmup, settings.lr_decay_start)
    # A warm-up protects random weights and an empty optimizer state, which a continued run lacks.
    if settings.continue_from or settings.change_lr:
        warmup = 0
    if settings.learning_rate is not None:
        tables = dense = settings.learning_rate
    scheduled = settings.lr_decay_steps or settings.change_lr or settings.continue_from
    return settings.fill_in(
        {
            "learning_rate": tables,
            "dense_learning_rate": dense,
            "lr_warmup_steps": warmup,
            "dense_decay": 0.0 if scheduled else _DENSE_DECAY,
            "eps": OPTIMIZERS[settings.table_optimizer].eps(global_batch),
        }
    )


def choose_rates(
    settings: TrainSettings, config: ModelConfig, global_batch: int
) -> tuple[float, float]:
    """Return a run's default learning rates of tables and dense layers."""
    optimizer = OPTIMIZERS[settings.table_optimizer]
    dim = config.embedding_dim
    tables, dense = optimizer.rates(dim, find_widest_layer(config), global_batch)
    if settings.sharding == "data_parallel":
        tables = optimizer.data_parallel_rate(dim) or tables
    tables = _round(tables)
    dense = _round(dense)
    if settings.continue_from:
        return _round(_CONTINUED_TABLES * tables), _round(_CONTINUED_DENSE * dense)
    return tables, dense


def choose_warmup(epoch_steps: int) -> int:
    """Return the default number of warm-up steps, at most half an epoch."""
    warmup = max(_MIN_WARMUP, min(_MAX_WARMUP, round(_WARMUP_SHARE * epoch_steps)))
    return min(warmup, epoch_steps // 2)


def describe_sizes(settings: TrainSettings, config: ModelConfig, rows: int) -> str:
    """Describe the sizes of a run for its log."""
    layers = []
    for name in list_model_flags(config.model):
        sizes = config.settings.get(name)
        if isinstance(sizes, list):
            layers.append(format_value(tuple(sizes)))
    model = config.model
    if layers:
        model += f" of layers {' and '.join(layers)}"
    return (
        f"size {settings.size} ({rows:,} training rows): tables {config.embedding_dim} wide, "
        f"{model}, {settings.batch_size} samples per step and rank"
    )


def describe_rates(settings: TrainSettings) -> str:
    """Describe the learning rates of a run for its log."""
    decay = ""
    if settings.dense_decay:
        decay = f"falling to 0 over {settings.dense_decay:.0%} of the steps"
        decay = f", both {decay}" if decays_table_rate(settings) else f", {decay}"
    line = (
        f"{settings.table_optimizer}, learning rate {settings.learning_rate:g} (tables) and "
        f"{settings.dense_learning_rate:g} (dense layers{decay})"
    )
    if settings.lr_warmup_steps:
        line += f", after a warm-up of {settings.lr_warmup_steps} steps"
    return line


def find_remedies(
    given: TrainSettings, config: ModelConfig, global_batch: int, epoch_steps: int
) -> Remedies:
    """Return the remedies to suggest if a run does not learn as it should.

    Args:
        given: The settings as the user gave them, without defaults.
        config: The model's shape.
        global_batch: The samples of a step, on all ranks.
        epoch_steps: The steps of an epoch.
    """
    tables, dense = choose_rates(given, config, global_batch)
    flags = []
    for name in ("learning_rate", "dense_learning_rate"):
        rate = getattr(given, name)
        if rate:
            flags.append(f"--{name} {rate:g}")
    too_high = f"give a --learning_rate below {tables:g} (tables) and {dense:g} (dense layers)"
    if flags:
        too_high = (
            f"leave {' and '.join(flags)} out: the default is {tables:g} for the tables and "
            f"{dense:g} for the dense layers"
        )
    at_chance = (
        "check in the ETL's report.html whether any column says anything about the label, or "
        f"{too_high}"
    )
    if not OPTIMIZERS[given.table_optimizer].ADAPTIVE:
        at_chance += (
            f"; SGD learns slowly from {epoch_steps} steps per epoch: try --adagrad, or a smaller "
            "--batch_size"
        )
    at_end = "train on more rows, or in more steps with a smaller --batch_size"
    if given.first_order == 0:
        flags.append("--first_order 0")
    if flags and not given.continue_from:
        at_end = f"leave {' and '.join(flags)} out, so that the model starts from the regression"
    return Remedies(too_high, at_chance, at_end)


def _round(rate: float) -> float:
    """Round to two significant digits, which are easy to read and to type."""
    return float(f"{rate:.2g}")


class Rates(NamedTuple):
    """The learning rates of one step."""

    tables: float
    dense: float


def compute_rates(settings: TrainSettings, step: int, total_steps: int, epoch_steps: int) -> Rates:
    """Return the learning rates of a step.

    A run that may stop early repeats its schedule and restarts it after epochs 1, 3, 7, 15 … (warm
    restarts, Loshchilov & Hutter 2017, arXiv:1608.03983). So whenever it stops, it has a model of a
    finished schedule. The first schedule equals that of a run of one epoch.

    Args:
        settings: The settings of the run, from :func:`fill_rates`.
        step: The step, counted from 0 over all epochs.
        total_steps: The steps of all epochs.
        epoch_steps: The steps of an epoch.
    """
    tables = compute_scheduled_rate(settings, settings.learning_rate, step, total_steps)
    dense = compute_scheduled_rate(settings, settings.dense_learning_rate, step, total_steps)
    begin, end = 0, total_steps
    if settings.early_stopping:
        begin, end = find_period(step, epoch_steps)
        end = min(end, total_steps)
    decay_steps = settings.dense_decay * (end - begin)
    factor = min(1.0, (end - step) / decay_steps) if decay_steps else 1.0
    if decays_table_rate(settings):
        tables *= factor
    return Rates(tables, dense * factor)


def decays_table_rate(settings: TrainSettings) -> bool:
    """Return whether the tables' rate falls to 0 at the end, like that of the dense layers.

    With L2 regularization it must: a weight settles where its gradients and the regularization
    balance, and at a constant rate it would follow the last batches.
    """
    return OPTIMIZERS[settings.table_optimizer].DECAYS_TABLE_RATE or bool(settings.embedding_l2)


def find_period(step: int, epoch_steps: int) -> tuple[int, int]:
    """Return the steps [begin, end) of the schedule that contains a step of a run with restarts.

    Schedule n = 1, 2, … has 2**(n - 1) epochs, so it begins after 2**(n - 1) - 1 epochs.
    """
    number = (step // epoch_steps + 1).bit_length()
    epochs_before, epochs_after = 2 ** (number - 1) - 1, 2**number - 1
    return epoch_steps * epochs_before, epoch_steps * epochs_after


def compute_scheduled_rate(
    settings: TrainSettings, base: float, step: int, total_steps: int
) -> float:
    """Apply the warm-up and decay flags to ``base``, the rate of the run, at a step.

    With ``change_lr`` it is ``lr_after_change_point`` from step
    ``floor(total_steps * lr_change_point)`` on; the dense rate changes by the same factor.

    Warm-up over W steps and decay over D steps from step S on follow facebookresearch/dlrm
    (``LRPolicyScheduler``). With c = ``step`` + 1, ``base`` is multiplied by:

    - c/W for c < W;
    - ((S + D − c)/D)² for S ≤ c < S + D; the product is at least 1e-7;
    - at any other step of a run that decays, the most recent of these factors. So the factor is
      (W − 1)/W between warm-up and decay.

    Without a decay the warm-up ends at ``base``.
    """
    if settings.change_lr:
        if step < int(total_steps * settings.lr_change_point):
            return base
        return settings.lr_after_change_point * (base / settings.learning_rate)
    count = step + 1
    warmup = settings.lr_warmup_steps or 0
    start = settings.lr_decay_start
    length = settings.lr_decay_steps
    if count < warmup:
        return base * (1.0 - (warmup - count) / warmup)
    if not length:
        return base
    if count < start:
        # The rate of the last warm-up step is kept, if there was a warm-up.
        return base * (1.0 - 1 / warmup) if warmup > 1 else base
    decayed = min(count, start + length - 1) - start
    return max(_MIN_RATE, base * ((length - decayed) / length) ** 2)
