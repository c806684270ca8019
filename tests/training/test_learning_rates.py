"""Learning rates that a run chooses itself, with which it learns; and the rate of each step.

The latter against what the reference prints for the same settings.
"""

from __future__ import annotations

import itertools

import pytest

from nvt_torchrec.formats.histories import StoredHistory
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.models.registry import MODELS
from nvt_torchrec.training.optim.learning_rates import (
    choose_warmup,
    compute_scheduled_rate,
    fill_rates,
)
from nvt_torchrec.training.settings.optimizers import OPTIMIZERS
from nvt_torchrec.training.settings.train_settings import TrainSettings, fill_sizes, parse_settings
from nvt_torchrec.training.sharding.model_config import model_config
from tests.training.runs import events, losses, train_here

HISTORIES = (StoredHistory("recent", ("cat_0",)),)
SCHEMA = TableSchema("label", ("int_0",), ("cat_0",), (10,), histories=HISTORIES)
#: Wide enough for a learning rate that tables need to be far too high.
WIDE = ["--dense_arch_layer_sizes=64,8", "--over_arch_layer_sizes=512,512,1"]


def _resolved(*flags: str, global_batch: int = 16_384, epoch_steps: int = 1000):
    settings = fill_sizes(parse_settings(["--size=large", *flags]), rows=0, ranks=1)
    config = model_config(settings, SCHEMA)
    return fill_rates(settings, config, global_batch, epoch_steps)


@pytest.mark.parametrize(
    ("flags", "rates", "warmup"),
    [
        ("--adagrad --learning_rate=0.5", (0.5, 0.5), 50),
        ("--adagrad --learning_rate=0.5 --continue_from=checkpoint", (0.5, 0.5), 0),
        ("--learning_rate=0.5 --dense_learning_rate=0.1", (0.5, 0.1), 50),
        ("--adagrad --dense_learning_rate=0.5 --lr_warmup_steps=3", (0.018, 0.5), 3),
    ],
)
def test_given_rates(flags, rates, warmup):
    """One rate serves tables and dense layers, each can have its own; the schedule stays."""
    chosen = _resolved(*flags.split())
    assert (chosen.learning_rate, chosen.dense_learning_rate) == rates
    assert chosen.lr_warmup_steps == warmup


@pytest.mark.parametrize("model", MODELS)
def test_the_dense_rate_falls_with_the_width_of_any_model(model):
    narrow, wide = (
        _resolved(f"--model={model}", f"--over_arch_layer_sizes={size},{size},1", "--adagrad")
        for size in (1024, 4096)
    )
    assert wide.dense_learning_rate == pytest.approx(narrow.dense_learning_rate / 4, rel=0.1)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adagrad", "adam"])
def test_a_continued_run_has_lower_rates_and_no_warmup(optimizer):
    first = _resolved(f"--optimizer={optimizer}")
    chosen = _resolved(f"--optimizer={optimizer}", "--continue_from=checkpoint")
    assert chosen.learning_rate == pytest.approx(0.4 * first.learning_rate, rel=0.05)
    assert chosen.dense_learning_rate == pytest.approx(first.dense_learning_rate / 6, rel=0.05)
    assert chosen.lr_warmup_steps == 0 < first.lr_warmup_steps


def test_no_warmup_that_goes_on_when_the_decay_begins():
    chosen = _resolved("--lr_decay_start=7", "--lr_decay_steps=20")
    assert chosen.lr_warmup_steps == 7


@pytest.mark.parametrize(
    ("epoch_steps", "warmup"), [(0, 0), (1, 0), (8, 4), (62, 10), (245, 12), (10**6, 200)]
)
def test_warmup(epoch_steps, warmup):
    assert choose_warmup(epoch_steps) == warmup


@pytest.mark.parametrize(
    ("optimizer", "batch_size"),
    zip(
        (name for name, kind in OPTIMIZERS.items() if kind.ON_CPU),
        itertools.cycle([1024, 256]),
        strict=False,
    ),
)
def test_every_optimizer_learns_in_wide_layers(learnable, tmp_path, optimizer, batch_size):
    result = train_here(
        f"--binary_path={learnable}",
        f"--optimizer={optimizer}",
        f"--batch_size={batch_size}",
        f"--epochs={batch_size // 256}",
        f"--log_path={tmp_path}",
        *WIDE,
    )
    assert max(losses(tmp_path)) < 1.5
    assert result.metrics["test"]["auroc"] > 0.65
    warnings = [event["text"] for event in events(tmp_path, "warning")]
    assert not [text for text in warnings if "nothing is learned" in text or "diverges" in text]


def test_adam_trains_small_tables_without_a_gpu(learnable, tmp_path):
    """Each rank has them whole; FBGEMM would fail in the first step."""
    train_here(f"--binary_path={learnable}", "--optimizer=adam", f"--log_path={tmp_path}")
    (start,) = events(tmp_path, "start")
    assert {table["sharding"] for table in start["plan"]["tables"]} == {"data_parallel"}


# param_groups[0]["lr"] before each step under facebookresearch/dlrm's LRPolicyScheduler, lr = 2
DLRM_MAIN = {
    "--lr_warmup_steps=4 --lr_decay_start=7 --lr_decay_steps=5": (
        [0.5, 1, 1.5, 1.5, 1.5, 1.5, 2, 1.28, 0.72, 0.32, 0.08, 0.08, 0.08]
    ),
    "--lr_warmup_steps=5 --lr_decay_start=5 --lr_decay_steps=3": (
        [0.4, 0.8, 1.2, 1.6, 2, 8 / 9, 2 / 9, 2 / 9, 2 / 9]
    ),
    "--lr_warmup_steps=6 --lr_decay_start=6 --lr_decay_steps=2": (
        [1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2, 0.5, 0.5, 0.5]
    ),
}
#: Warm-up alone ends at the learning rate; a change counts steps over all epochs.
OURS = {
    "--lr_warmup_steps=4": [0.5, 1, 1.5, 2, 2, 2],
    "--change_lr --lr_change_point=0.7 --lr_after_change_point=0.5 --epochs=2": [2] * 7 + [0.5] * 3,
}


def _schedule(flags: str, steps: int) -> list[float]:
    settings = parse_settings(["--learning_rate=2", *flags.split()])
    return [
        compute_scheduled_rate(settings, settings.learning_rate, step, steps)
        for step in range(steps)
    ]


@pytest.mark.parametrize(("flags", "expected"), DLRM_MAIN.items())
def test_dlrm_main(flags, expected):
    assert _schedule(flags, len(expected)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("flags", "expected"), OURS.items())
def test_schedules_of_ours(flags, expected):
    assert _schedule(flags, len(expected)) == expected


def test_dlrm_main_never_falls_below_its_floor():
    settings = TrainSettings(learning_rate=1e-6, lr_decay_steps=1000)
    assert compute_scheduled_rate(settings, settings.learning_rate, 998, 2000) == 1e-7
