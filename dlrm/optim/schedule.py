"""The learning rate of each step, a function of the step alone.

Steps count from 0 over all epochs, so a resumed run goes on where it was.
"""

from __future__ import annotations

from typing import NamedTuple

from nvt_torchrec.dlrm.settings.train_settings import TrainSettings

#: The lowest rate of facebookresearch/dlrm's decay.
_SMALLEST = 1e-7


class Rates(NamedTuple):
    """The learning rates of one step."""

    tables: float
    dense: float


def learning_rates(settings: TrainSettings, step: int, total_steps: int) -> Rates:
    """Return the learning rates of step ``step`` (from 0) out of ``total_steps``, of all epochs.

    ``settings`` come from :func:`dlrm.optim.default_rates.with_default_rates`.
    """
    bases = Rates(settings.learning_rate, settings.dense_learning_rate)
    return Rates(*(learning_rate(settings, base, step, total_steps) for base in bases))


def learning_rate(settings: TrainSettings, base: float, step: int, total_steps: int) -> float:
    """Return the learning rate of one step for ``base``, the rate that the run was given.

    ``change_lr``: it is ``lr_after_change_point`` from step
    ``floor(total_steps * lr_change_point)`` on; another base changes by the same factor.

    Warm-up over W steps and decay over D steps from step S on, with c = ``step`` + 1:

    * ``dlrm_main`` (``LRPolicyScheduler`` of facebookresearch/dlrm): c/W for c < W;
      ((S + D − c)/D)² for S ≤ c < S + D, 1e-7 at least; at any other step, if it decays at all,
      what the last of these steps had, so that the peak is (W − 1)/W until the decay begins.
    * ``nvidia`` (``LearningRateScheduler`` of NVIDIA's DLRM, warm-up factor 0): c/W for c ≤ W;
      ((S + D − c)/D)^``decay_power`` for S < c ≤ S + D; ``decay_end_lr`` at least and after it
      (``base``, if that is less).

    All times ``base``. Without a decay the warm-up ends at ``base``.
    """
    if settings.change_lr:
        changed = step >= int(total_steps * settings.lr_change_point)
        ratio = base / settings.learning_rate
        return settings.lr_after_change_point * ratio if changed else base
    if settings.lr_policy == "nvidia":
        return _nvidia(settings, base, step + 1)
    return _dlrm_main(settings, base, step + 1)


def _dlrm_main(settings: TrainSettings, base: float, count: int) -> float:
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


def _nvidia(settings: TrainSettings, base: float, count: int) -> float:
    warmup = settings.lr_warmup_steps or 0
    start, length = settings.lr_decay_start, settings.lr_decay_steps
    if count <= warmup:
        return base * (1 - (warmup - count) / warmup)
    if not length or count <= start:
        return base
    left = max(0, start + length - count) / length
    return max(min(base, settings.decay_end_lr), base * left**settings.decay_power)
