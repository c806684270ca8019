"""A run that does not learn says so at once, and what to do."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.dlrm.reporting.learning_check import _is_chance
from tests.dlrm.runs import events, train_here
from tests.nvt_loader.data import write_split

WIDE = ["--dense_arch_layer_sizes=64,8", "--over_arch_layer_sizes=1024,1024,1"]


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "split"
    files = {"train": [8192], "valid": [6000], "test": [200]}
    write_split(path, files, table_sizes=(10, 30, 50), row_group_rows=4096)
    return path


@pytest.fixture(scope="module")
def noise(split, tmp_path_factory):
    """The same with labels that depend on nothing."""
    path = tmp_path_factory.mktemp("noise") / "split"
    files = {"train": [8192], "valid": [6000], "test": [200]}
    write_split(path, files, table_sizes=(10, 30, 50), row_group_rows=4096)
    for part in path.glob("*/part.*.parquet"):
        table = pq.read_table(part)
        labels = np.random.default_rng(0).permutation(table["label"].to_numpy())
        at = table.column_names.index("label")
        pq.write_table(table.set_column(at, table.field(at), [labels]), part, row_group_size=4096)
    for file in path.glob("**/_metadata"):
        file.unlink()
    return path


def _warnings(log) -> list[str]:
    return [f"step {event['step']}: {event['text']}" for event in events(log, "warning")]


def test_a_run_that_learns_is_not_warned(split, tmp_path, caplog):
    flags = ["--adagrad", "--batch_size=256", "--epochs=2"]
    train_here(f"--binary_path={split}", f"--log_path={tmp_path}", *flags)
    assert not _warnings(tmp_path)
    assert "nothing is learned" not in caplog.text


def test_a_loss_that_explodes(split, tmp_path, caplog):
    """The settings of public recipes: one learning rate for tables and wide layers."""
    flags = ["--adagrad", "--learning_rate=0.1", "--batch_size=1024", "--max_steps=4", *WIDE]
    train_here(f"--binary_path={split}", f"--log_path={tmp_path}", *flags)
    (first, *_) = _warnings(tmp_path)
    assert first.startswith(("step 1: loss", "step 2: loss", "step 4: loss"))
    assert "training diverges" in first
    assert "leave --learning_rate 0.1 out: these layers would be given" in caplog.text


def test_nothing_learned_by_an_evaluation_of_valid(noise, tmp_path, caplog):
    flags = ["--adagrad", "--batch_size=64"]
    train_here(f"--binary_path={noise}", f"--log_path={tmp_path}", *flags)
    (text,) = _warnings(tmp_path)
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
