"""The learning rate of each step, against what the reference prints for the same settings."""

from __future__ import annotations

import pytest

from nvt_torchrec.dlrm.optim.learning_rates import learning_rate
from nvt_torchrec.dlrm.settings.train_settings import TrainSettings

# param_groups[0]["lr"] before each step under facebookresearch/dlrm's LRPolicyScheduler, lr = 2
DLRM_MAIN = {
    (4, 7, 5): [0.5, 1, 1.5, 1.5, 1.5, 1.5, 2, 1.28, 0.72, 0.32, 0.08, 0.08, 0.08],
    (5, 5, 3): [0.4, 0.8, 1.2, 1.6, 2, 8 / 9, 2 / 9, 2 / 9, 2 / 9],
    (6, 6, 2): [1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2, 0.5, 0.5, 0.5],
}


def _rates(settings: TrainSettings, steps: int) -> list[float]:
    return [learning_rate(settings, settings.learning_rate, step, steps) for step in range(steps)]


@pytest.mark.parametrize("shape", DLRM_MAIN)
def test_dlrm_main(shape):
    warmup, start, steps = shape
    settings = TrainSettings(
        learning_rate=2.0, lr_warmup_steps=warmup, lr_decay_start=start, lr_decay_steps=steps
    )
    expected = DLRM_MAIN[shape]
    assert _rates(settings, len(expected)) == pytest.approx(expected, rel=1e-12)


def test_dlrm_main_never_falls_below_its_floor():
    settings = TrainSettings(learning_rate=1e-6, lr_decay_steps=1000)
    assert learning_rate(settings, settings.learning_rate, 998, 2000) == 1e-7


def test_warmup_alone_ends_at_the_learning_rate():
    settings = TrainSettings(learning_rate=8.0, lr_warmup_steps=4)
    assert _rates(settings, 6) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_change_counts_steps_over_all_epochs():
    settings = TrainSettings(
        learning_rate=1.0, change_lr=True, lr_change_point=0.7, lr_after_change_point=0.5, epochs=2
    )
    assert _rates(settings, 10) == [1.0] * 7 + [0.5] * 3
