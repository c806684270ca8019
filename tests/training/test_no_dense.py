"""Data without a dense column: a DLRM of embeddings alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.training.settings.train_settings import TrainSettings, fill_sizes, parse_settings
from nvt_torchrec.training.sharding.initial_weights import fill_table
from nvt_torchrec.training.sharding.model_config import model_config
from nvt_torchrec.training.sharding.train_model import build_model
from tests.nvt_loader.data import write_split
from tests.training.runs import (
    EXAMPLE,
    MODEL,
    MODELS,
    assert_same,
    config_of,
    events,
    losses,
    model_of,
    score,
    small_run,
    train_here,
    train_many,
    with_tables,
)
from tests.training.shapes import dlrm

SIZES = (10, 50, 200)


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Path:
    """4 steps of 64 rows and one of a single row."""
    path = tmp_path_factory.mktemp("data") / "criteo_binary" / "split"
    files = {"train": [200, 57], "valid": [70], "test": [33]}
    write_split(path, files, dense=0, table_sizes=SIZES)
    return path


def flags(split: Path, path: Path, name: str, *more: str, batch_size: int = 64) -> list[str]:
    adagrad = [*EXAMPLE, "--epochs=2", "--adagrad", "--learning_rate=0.1", *MODELS[name]]
    return small_run(split, path, *adagrad, *more, batch_size=batch_size)


@pytest.mark.parametrize("name", MODELS)
def test_a_run_and_its_resumption(split, tmp_path, name):
    """Trained, evaluated, saved; gone on from a checkpoint; scored from the last."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train_here(*flags(split, whole, name))
    steps = [f"--checkpoint_dir={resumed / 'steps'}", "--checkpoint_freq=3"]
    first = ["--max_steps=4", f"--save_checkpoint_path={resumed / 'first'}"]
    train_here(*flags(split, resumed, name, *steps, *first))
    train_here(*flags(split, resumed, name, *steps, "--resume"))
    assert_same(whole / "final", resumed / "final")
    model, config = model_of(whole / "final"), config_of(whole / "final")
    assert not any("bottom" in name for name in model.state_dict())
    assert (config.dense, config.settings["over_arch_layer_sizes"]) == ((), [16, 1])
    assert CheckpointRecord.read(whole / "final").model["dense"] == []
    logits, labels = score(model, KJTLoader(split / "test", 64, device="cpu"))
    losses_of_rows = np.logaddexp(0, np.where(labels > 0, -logits, logits).astype(np.float64))
    event = events(whole / "log", "evaluation")[-1]
    assert event["log_loss"] == pytest.approx(losses_of_rows.mean(), abs=1e-6)
    trained = losses(whole / "log")
    assert np.mean(trained[5:]) < np.mean(trained[:5])


def test_two_ranks_train_as_one(split, tmp_path):
    train_here(*flags(split, tmp_path / "one", "original"))
    train_many([flags(split, tmp_path / "two", "original", batch_size=32)], 2)
    one, two = (losses(tmp_path / ranks / "log") for ranks in ("one", "two"))
    assert len(one) == 10
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)


def test_an_interaction_is_of_the_embeddings_alone():
    """Of the dot products: those of the pairs, by rising first, then second column."""
    config = dlrm((), ("a", "b", "c"), (5, 6, 7), 4, (), (8, 1), 0.0)
    model = with_tables(config, seed=3)
    bags = model.sparse_arch.embedding_bag_collection.embedding_bags
    for name, rows in config.tables.items():
        fill_table(bags[name].weight.detach(), name, rows, 4, 3, (0, 0))
    ids = torch.tensor([[0, 4], [5, 1], [6, 2]])
    kjt = KeyedJaggedTensor(["a", "b", "c"], ids.flatten(), lengths=torch.ones(6).int(), stride=2)
    e = [bags[name].weight[rows] for name, rows in zip(config.tables, ids, strict=True)]
    products = torch.stack([(e[i] * e[j]).sum(1) for i, j in ((0, 1), (0, 2), (1, 2))], 1)
    first, last = model.head.module.top
    expected = last(functional.relu(first(products))).squeeze(1)
    torch.testing.assert_close(model(torch.empty(2, 0), kjt).squeeze(1), expected)


SCHEMA = TableSchema("label", (), ("a", "b"), (5, 6))


def test_layers_for_dense_columns_that_are_not_there():
    """They need not end with the width of the tables."""
    given = ["--embedding_dim=8", "--dense_arch_layer_sizes=128"]
    settings = fill_sizes(parse_settings([*MODEL[2:], *given]), 0, 1)
    layers = model_config(settings, SCHEMA).settings
    assert (layers["dense_arch_layer_sizes"], layers["over_arch_layer_sizes"]) == ([], [16, 1])
    with pytest.raises(SchemaError, match=r"embedding_dim 8 and dense_arch_layer_sizes \(128,\)"):
        build_model(model_config(settings, TableSchema("label", ("d",), ("a",), (5,))))


def test_a_single_column_has_no_pairs():
    alone = TableSchema("label", (), ("a",), (5,))
    with pytest.raises(SchemaError, match=r"dot products need two vectors\n.*dcn"):
        build_model(model_config(fill_sizes(TrainSettings(), 0, 1), alone))
    config = model_config(fill_sizes(TrainSettings(interaction_type="dcn"), 0, 1), alone)
    model = with_tables(config)
    for table in model.sparse_arch.parameters():
        table.fill_(0.5)
    kjt = KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.ones(3).int())
    logits = model(torch.empty(3, 0), kjt)
    assert logits.shape == (3, 1)
    assert bool(torch.isfinite(logits).all())
