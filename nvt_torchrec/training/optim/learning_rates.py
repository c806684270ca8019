"""Learning rates: the defaults, and the rate of each step.

There is a default for the tables and one for the dense layers: one rate cannot serve both. A
table's row is trained by the few samples that hold its value, a dense weight by all of them, and an
adaptive optimizer's first steps move every weight by the rate itself, whatever the gradient: over a
thousand inputs of a layer such steps add up. So the dense rate falls with the width of the widest
layer (as Adam's in Yang et al. 2022, "Tensor Programs V", table 3), and the tables' with the root
of their width, because what the layers above see are dot products of such rows.

Adagrad's steps shrink as gradients are summed, so its rates serve any batch size. Adam's for the
dense layers follow the root of the global batch (Malladi et al. 2022, "On the SDEs and Scaling
Rules for Adaptive Gradient Algorithms"), and so do SGD's, up to a batch whose gradients are no
longer noise. Those of the tables do not: a rare row is in few batches, however large they are.
Adam's need no factor; SGD's grow with the batch itself, of which a sample's gradient is a part.

The factors are those that ``make bench-quality`` was run with. The rate of a step is a function
of the step alone, counted from 0 over all epochs, so a resumed run has the same.
"""

from __future__ import annotations

from typing import NamedTuple

from nvt_torchrec.base.command_line import as_text
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.head import widest_layer
from nvt_torchrec.models.registry import flags_of
from nvt_torchrec.training.settings.optimizers import OPTIMIZERS, Remedies
from nvt_torchrec.training.settings.train_settings import TrainSettings

#: The default warm-up: a share of an epoch's steps, and the least and the most steps.
_WARMUP_SHARE, _MIN_WARMUP, _MAX_WARMUP = 0.05, 10, 200
#: The rates of tables and dense layers in a continued run, as shares of those of a first training.
#: At the full rates the last batches of a day move the whole model up or down.
_CONTINUED = 0.4, 1 / 6
#: The share of the steps, at the end, over which the dense layers' rate falls to 0. At a constant
#: rate the last batches decide the mean prediction. Adagrad's tables, whose rows are seen seldom
#: and whose steps shrink anyway, lose by it; those of SGD and Adam need it for the same reason.
_DENSE_DECAY = 0.5
#: The lowest rate of facebookresearch/dlrm's decay.
_SMALLEST = 1e-7


def fill_rates(
    settings: TrainSettings, config: ModelConfig, global_batch: int, epoch_steps: int
) -> TrainSettings:
    """Fill in the learning rates, their schedule and epsilon that ``settings`` do not have.

    A given ``learning_rate`` serves the dense layers too, as in TorchRec's example and
    facebookresearch/dlrm; the schedule stays. A run that continues from a checkpoint has no
    warm-up, and lower rates (:data:`_CONTINUED`).

    Args:
        settings: The settings of the run.
        config: The model's shape.
        global_batch: The samples of a step, on all ranks.
        epoch_steps: The steps of an epoch.
    """
    tables, dense = default_rates(settings, config, global_batch)
    warmup = default_warmup(epoch_steps)
    if settings.lr_decay_steps:
        warmup = min(warmup, settings.lr_decay_start)
    if settings.continue_from:
        warmup = 0  # it is for random weights and optimizer state without a history
    if settings.change_lr:
        warmup = 0
    if settings.learning_rate is not None:
        tables = dense = settings.learning_rate
    scheduled = settings.lr_decay_steps or settings.change_lr or settings.continue_from
    return settings.filled(
        {
            "learning_rate": tables,
            "dense_learning_rate": dense,
            "lr_warmup_steps": warmup,
            "dense_decay": 0.0 if scheduled else _DENSE_DECAY,
            "eps": OPTIMIZERS[settings.table_optimizer].eps(global_batch),
        }
    )


def default_rates(
    settings: TrainSettings, config: ModelConfig, global_batch: int
) -> tuple[float, float]:
    """Return the default rates of tables and dense layers for a run."""
    optimizer = OPTIMIZERS[settings.table_optimizer]
    dim = config.embedding_dim
    tables, dense = optimizer.rates(dim, widest_layer(config), global_batch)
    if settings.sharding == "data_parallel":
        tables = optimizer.rate_of_whole_tables(dim) or tables
    tables, dense = _rounded(tables), _rounded(dense)
    if settings.continue_from:
        return _rounded(_CONTINUED[0] * tables), _rounded(_CONTINUED[1] * dense)
    return tables, dense


def default_warmup(epoch_steps: int) -> int:
    """Return the steps over which the learning rate grows from 0, at most half of the epoch."""
    warmup = max(_MIN_WARMUP, min(_MAX_WARMUP, round(_WARMUP_SHARE * epoch_steps)))
    return min(warmup, epoch_steps // 2)


def sizes_line(settings: TrainSettings, config: ModelConfig, rows: int) -> str:
    """Describe the sizes of a run, for its log."""
    widths = [config.settings.get(name) for name in flags_of(config.model)]
    layers = " and ".join(as_text(tuple(sizes)) for sizes in widths if isinstance(sizes, list))
    return (
        f"size {settings.size} ({rows:,} training rows): tables {config.embedding_dim} wide, "
        f"{config.model}{f' of layers {layers}' if layers else ''}, "
        f"{settings.batch_size} samples per step and rank"
    )


def rates_line(settings: TrainSettings) -> str:
    """Describe the learning rates of a run, for its log."""
    both = "both " if tables_fall(settings) else ""
    falls = f", {both}falling to 0 over {settings.dense_decay:.0%} of the steps"
    line = (
        f"{settings.table_optimizer}, learning rate {settings.learning_rate:g} (tables) and "
        f"{settings.dense_learning_rate:g} (dense layers{falls if settings.dense_decay else ''})"
    )
    warmup = settings.lr_warmup_steps
    return f"{line}, after a warm-up of {warmup} steps" if warmup else line


def remedies(
    given: TrainSettings, config: ModelConfig, global_batch: int, epoch_steps: int
) -> Remedies:
    """Return the remedies for a run that does not learn as it should.

    Args:
        given: The settings as the user gave them, without defaults filled in.
        config: The model's shape.
        global_batch: The samples of a step, on all ranks.
        epoch_steps: The steps of an epoch.
    """
    tables, dense = default_rates(given, config, global_batch)
    names = ("learning_rate", "dense_learning_rate")
    flags = [f"--{name} {rate:g}" for name in names if (rate := getattr(given, name))]
    too_high = f"give a --learning_rate below {tables:g} (tables) and {dense:g} (dense layers)"
    if flags:
        too_high = (
            f"leave {' and '.join(flags)} out: the default is {tables:g} for the tables and "
            f"{dense:g} for the dense layers"
        )
    at_chance = (
        f"look whether the data tell anything of the label (report.html of the ETL), or {too_high}"
    )
    if not OPTIMIZERS[given.table_optimizer].ADAPTIVE:
        at_chance += (
            f"; SGD learns slowly from {epoch_steps} steps an epoch: try --adagrad, or a smaller "
            "--batch_size"
        )
    at_end = "train on more rows, or in more steps, by a smaller --batch_size"
    if given.first_order == 0:
        flags.append("--first_order 0")
    if flags and not given.continue_from:
        at_end = f"leave {' and '.join(flags)} out, so that the model starts from the regression"
    return Remedies(too_high, at_chance, at_end)


def _rounded(rate: float) -> float:
    """Round to two significant digits, which are easy to read and to type."""
    return float(f"{rate:.2g}")


class Rates(NamedTuple):
    """The learning rates of one step."""

    tables: float
    dense: float


def learning_rates(settings: TrainSettings, step: int, total_steps: int, epoch_steps: int) -> Rates:
    """Return the learning rates of step ``step`` (from 0) out of ``total_steps``, of all epochs.

    A run that may stop early decays its rates again and again, at the end of epochs 1, 3, 7, 15 …
    (warm restarts, Loshchilov & Hutter 2017, arXiv:1608.03983): whenever it stops, there is a model
    of a finished schedule, and the first is that of a run of one epoch.

    ``settings`` come from :func:`fill_rates`.
    """
    bases = settings.learning_rate, settings.dense_learning_rate
    tables, dense = (learning_rate(settings, base, step, total_steps) for base in bases)
    begin, end = 0, total_steps
    if settings.early_stopping:
        begin, end = period(step, epoch_steps)
        end = min(end, total_steps)
    falling = settings.dense_decay * (end - begin)
    share = min(1.0, (end - step) / falling) if falling else 1.0
    if tables_fall(settings):
        tables *= share
    return Rates(tables, dense * share)


def tables_fall(settings: TrainSettings) -> bool:
    """Return whether the tables' rate falls at the end, too.

    A regularized weight is where its last gradients and the regularization balance: at a constant
    rate it follows the last batches.
    """
    falls = OPTIMIZERS[settings.table_optimizer].TABLES_FALL
    return falls or bool(settings.embedding_l2)


def period(step: int, epoch_steps: int) -> tuple[int, int]:
    """Return the first step of the schedule that a step is of, and of the next one."""
    number = (step // epoch_steps + 1).bit_length()
    return epoch_steps * ((1 << number - 1) - 1), epoch_steps * ((1 << number) - 1)


def learning_rate(settings: TrainSettings, base: float, step: int, total_steps: int) -> float:
    """Return the learning rate of one step for ``base``, the rate that the run was given.

    ``change_lr``: it is ``lr_after_change_point`` from step
    ``floor(total_steps * lr_change_point)`` on; another base changes by the same factor.

    Warm-up over W steps and decay over D steps from step S on are those of facebookresearch/dlrm
    (``LRPolicyScheduler``). With c = ``step`` + 1: c/W for c < W; ((S + D − c)/D)² for
    S ≤ c < S + D, 1e-7 at least; at any other step, if it decays at all, what the last of these
    steps had, so that the peak is (W − 1)/W until the decay begins. All times ``base``. Without a
    decay the warm-up ends at ``base``.
    """
    if settings.change_lr:
        changed = step >= int(total_steps * settings.lr_change_point)
        ratio = base / settings.learning_rate
        return settings.lr_after_change_point * ratio if changed else base
    count = step + 1
    warmup = settings.lr_warmup_steps or 0
    start, length = settings.lr_decay_start, settings.lr_decay_steps
    if count < warmup:
        return base * (1.0 - (warmup - count) / warmup)
    if not length:
        return base
    if count < start:  # frozen at the last step of the warm-up, if there was one
        return base * (1.0 - 1 / warmup) if warmup > 1 else base
    done = min(count, start + length - 1) - start
    return max(_SMALLEST, base * ((length - done) / length) ** 2)
