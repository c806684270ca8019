"""Flags that choose which rows and ids a run sees."""

from __future__ import annotations

import numpy as np
import pytest

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.nvt_loader import KJTLoader
from tests.dlrm.runs import events, losses, train_here


def _train(data, log, *flags: str):
    flags = (f"--binary_path={data}", "--batch_size=32", "--learning_rate=0.1", *flags)
    return train_here(*flags, f"--log_path={log}")


def test_limits(data, tmp_path):
    _train(data, tmp_path / "all")
    flags = ["--limit_train_batches=5", "--limit_val_batches=3", "--limit_test_batches=2"]
    result = _train(data, tmp_path / "few", *flags)
    assert (result.steps, result.samples) == (5, 160)
    assert result.metrics["valid"].samples == 96
    assert result.metrics["test"].samples == 64
    assert losses(tmp_path / "few") == losses(tmp_path / "all")[:5]


def test_drop_last_training_batch(data, tmp_path):
    result = _train(data, tmp_path, "--drop_last_training_batch")
    assert (result.steps, result.samples) == (29, 928)
    assert result.metrics["test"].samples == 201, "evaluation drops nothing"


def test_undersampling_keeps_every_positive(data, tmp_path):
    labels = np.concatenate(
        [batch.labels.numpy() for batch in KJTLoader(data / "train", 64, device="cpu")]
    )
    result = _train(data, tmp_path, "--undersampling_rate=0.3")
    positives, negatives = int(labels.sum()), int((1 - labels).sum())
    assert positives + 0.15 * negatives < result.samples < positives + 0.45 * negatives


def test_hash_indices_trains_smaller_tables(data, tmp_path):
    sizes = "--num_embeddings_per_feature=10,20,40,3"
    with pytest.raises(SettingsError, match=r"cat_1 needs 50 rows.*\n.*--hash_indices"):
        _train(data, tmp_path, sizes)
    result = _train(data, tmp_path, sizes, "--hash_indices")
    assert result.samples == 929
    assert events(tmp_path, "start")[-1]["model"]["num_embeddings"] == [10, 20, 40, 3]


def test_a_small_loader_memory_changes_nothing(data, tmp_path):
    _train(data, tmp_path / "a")
    _train(data, tmp_path / "b", "--loader_memory=8")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
