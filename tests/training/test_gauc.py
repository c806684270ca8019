"""GAUC beside AUROC: by which column, over all ranks, and what it cannot be."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.auroc import auroc
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.training.baselines.baselines import CLICK_RATE, REGRESSION
from tests.nvt_loader.data import write_split
from tests.plays import SHARE, SHARES, write_plays
from tests.training.runs import EXAMPLE_SGD, events, model_of, score, train_here, train_many


def test_one_rank_and_two_give_that_of_the_rows(tmp_path, caplog):
    caplog.set_level("INFO", "nvt_torchrec")
    split = write_plays(tmp_path, SHARE)
    flags = [*EXAMPLE_SGD, f"--binary_path={split}", "--gauc_column=item", "--learning_rate=0.1"]
    kept = f"--save_checkpoint_path={tmp_path / 'end'}"
    train_here(*flags, "--batch_size=64", f"--log_path={tmp_path / 'one'}", kept)
    train_many([[*flags, "--batch_size=32", f"--log_path={tmp_path / 'two'}"]], ranks=2)
    one, two = (events(tmp_path / name, "evaluation")[-1] for name in ("one", "two"))
    assert two["gauc"] == pytest.approx(one["gauc"], abs=1e-3)
    assert f"  GAUC {one['gauc']:.5f}  log loss" in caplog.text
    baselines = {e["name"]: e for e in events(tmp_path / "one", "baseline") if e["split"] == "test"}
    assert baselines[CLICK_RATE]["gauc"] == 0.5
    assert baselines[REGRESSION]["gauc"] > 0.7
    assert {e["gauc_samples"] for e in baselines.values()} == {one["gauc_samples"]}
    assert "GAUC" in (tmp_path / "one" / "training.html").read_text()

    model = model_of(tmp_path / "end")
    loader = KJTLoader(split / "test", 64, device="cpu", virtual_shards=1)
    logits, labels = score(model, loader)
    items = pq.read_table(split / "test")["item"].to_numpy()
    areas = {item: auroc(logits[items == item], labels[items == item]) for item in set(items)}
    rows = {item: np.sum(items == item) for item in areas if item > 2 and areas[item] is not None}
    expected = sum(areas[item] * count for item, count in rows.items()) / sum(rows.values())
    assert one["gauc"] == pytest.approx(expected, abs=1e-6)
    assert one["gauc_samples"] == sum(rows.values())


def test_what_it_cannot_be_by(tmp_path):
    split = write_plays(tmp_path, f'by = "column"\ncolumn = "at"\n{SHARES}')
    data = [f"--binary_path={split}", f"--log_path={tmp_path / 'log'}", "--batch_size=64"]
    with pytest.raises(SettingsError, match=r"--gauc_column users: .*\n.*did you mean 'user'"):
        train_here(*data, "--gauc_column=users")
    # a user is "at" one time, so that no user is in two splits
    train_here(*data, "--gauc_column=user")
    assert events(tmp_path / "log", "evaluation")[-1]["gauc"] is None
    (warning,) = (e for e in events(tmp_path / "log", "warning") if "GAUC" in e["text"])
    assert "give column user of the spec hash_buckets" in warning["remedy"]
    lists = tmp_path / "lists"
    write_split(lists, {name: [99] for name in ("train", "valid", "test")}, multi_hot=("cat_1",))
    with pytest.raises(SettingsError, match="--gauc_column cat_1: not a column with one id in"):
        train_here(f"--binary_path={lists}", "--gauc_column=cat_1")
