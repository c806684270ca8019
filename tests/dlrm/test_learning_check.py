"""A run that does not learn says so at once, and what to do."""

from __future__ import annotations

import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.dlrm.reporting.learning_check import _is_chance
from tests.dlrm.runs import events, train_here

WIDE = ["--dense_arch_layer_sizes=64,8", "--over_arch_layer_sizes=1024,1024,1"]


@pytest.fixture(scope="module")
def noise(learnable, tmp_path_factory):
    """The same with labels that depend on nothing."""
    path = shutil.copytree(learnable, tmp_path_factory.mktemp("noise") / "split")
    for part in path.glob("*/part.*.parquet"):
        table = pq.read_table(part)
        labels = np.random.default_rng(0).permutation(table["label"].to_numpy())
        at = table.column_names.index("label")
        pq.write_table(table.set_column(at, table.field(at), [labels]), part, row_group_size=4096)
    for file in path.glob("**/_metadata"):
        file.unlink()
    return path


def _warnings(data, log, *flags: str) -> list[str]:
    """Return the warnings of a run with Adagrad."""
    train_here(f"--binary_path={data}", f"--log_path={log}", "--adagrad", *flags)
    return [f"step {event['step']}: {event['text']}" for event in events(log, "warning")]


def test_a_run_that_learns_is_not_warned(learnable, tmp_path, caplog):
    assert not _warnings(learnable, tmp_path, "--batch_size=256", "--epochs=2")
    assert "nothing is learned" not in caplog.text


def test_a_loss_that_explodes(learnable, tmp_path, caplog):
    """The settings of public recipes: one learning rate for tables and wide layers."""
    flags = ["--learning_rate=0.1", "--batch_size=1024", "--max_steps=4", *WIDE]
    (first, *_) = _warnings(learnable, tmp_path, *flags)
    assert first.startswith(("step 1: loss", "step 2: loss", "step 4: loss"))
    assert "training diverges" in first
    assert "leave --learning_rate 0.1 out: these layers would be given" in caplog.text


def test_nothing_learned_by_an_evaluation_of_valid(noise, tmp_path, caplog):
    (text,) = _warnings(noise, tmp_path, "--batch_size=128")
    assert text.startswith("step 128: AUROC 0.")
    assert text.endswith("of valid: nothing is learned yet")
    assert "look whether the data tell anything of the label" in caplog.text


@pytest.mark.parametrize(
    ("area", "clicks", "rows", "chance"),
    [
        (0.50, 5_000, 20_000, True),
        (0.519, 5_000, 20_000, True),
        (0.521, 5_000, 20_000, False),
        (0.50, 600, 20_000, True),
        (0.519, 200, 20_000, False),  # a model of 0.55 may well show that
        (0.3, 1, 20_000, False),
        (0.5, 0, 20_000, False),
    ],
)
def test_too_few_clicks_do_not_tell(area, clicks, rows, chance):
    assert _is_chance(area, clicks, rows) is chance
