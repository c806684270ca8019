from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nvt_torchrec.training.data.loaders import TrainBatch
from nvt_torchrec.training.loop.finish import _permute_column
from nvt_torchrec.training.sharding import initial_weights
from nvt_torchrec.training.sharding.initial_weights import fill_table
from nvt_torchrec.training.sharding.train_model import build_model
from tests import fake_cuda
from tests.training.shapes import dlrm

CONFIG = dlrm(("int_0",), ("cat_0", "cat_1"), (100, 7), 8, (16, 8), (16, 1), 0.0)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(initial_weights, "BLOCK_ROWS", 32)


def filled(rows: int, columns: int, offsets=(0, 0), table="t", seed=0) -> torch.Tensor:
    shard = torch.empty(rows, columns)
    fill_table(shard, table, 100, 8, seed, offsets)
    return shard


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "shard", [(0, 100, 0, 8), (0, 50, 0, 8), (50, 100, 0, 8), (31, 33, 4, 8), (64, 64, 0, 8)]
)
def test_a_shard_is_filled_as_its_part_of_the_whole_table(shard):
    first, end, left, right = shard
    part = filled(end - first, right - left, (first, left))
    assert torch.equal(part, filled(100, 8)[first:end, left:right])


def test_initial_weights_differ_by_table_and_seed_and_are_uniform():
    weights = filled(100, 8)
    assert not torch.equal(weights, filled(100, 8, table="u"))
    assert not torch.equal(weights, filled(100, 8, seed=1))
    assert weights.abs().max() <= 0.1
    assert weights.abs().max() > 0.099
    assert abs(weights.mean()) < 0.01


def test_dense_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_model(CONFIG, seed=3)
    assert torch.equal(torch.get_rng_state(), before), "building a model moved the generator"
    torch.manual_seed(2)
    second, third = build_model(CONFIG, seed=3), build_model(CONFIG, seed=4)
    pairs = zip(first.head.parameters(), second.head.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(next(first.head.parameters()), next(third.head.parameters()))


@pytest.mark.parametrize("name", ["d", "a", "b"])
def test_the_values_of_a_column_change_their_rows(name):
    """Those of lists, too; the other columns stay, and padding rows keep none."""
    lengths = torch.tensor([1, 1, 1, 0, 2, 0, 2, 0])
    ids = KeyedJaggedTensor(["a", "b"], torch.arange(7), lengths=lengths)
    batch = TrainBatch(torch.arange(8.0).view(4, 2), ids, torch.zeros(4), rows=3, global_size=3)
    shape = dlrm(("c", "d"), ("a", "b"), (9, 9), 4, (8, 4), (8, 1), 0.0)
    moved = _permute_column(batch, name, shape, torch.tensor([2, 0, 1, 3]))
    lists = {key: [v.tolist() for v in moved.sparse_features[key].to_dense()] for key in "ab"}
    expected = {"a": [[0], [1], [2], []], "b": [[3, 4], [], [5, 6], []]}
    dense = batch.dense_features.clone()
    if name == "d":
        dense[:, 1] = torch.tensor([5.0, 1, 3, 7])
    else:
        first, second, third, last = expected[name]
        expected[name] = [third, first, second, last]
    assert lists == expected
    assert torch.equal(moved.dense_features, dense)


def test_tables_have_no_memory_before_sharding():
    parameters = build_model(CONFIG).sparse_arch.parameters()
    assert all(parameter.is_meta for parameter in parameters)


@pytest.mark.usefixtures("small_blocks")
def test_threads_that_fill_a_shard_touch_its_device_only(monkeypatch):
    touched = fake_cuda.install(monkeypatch)
    weights = torch.empty(100, 8)
    shard = SimpleNamespace(
        shape=weights.shape, is_cuda=True, device=torch.device("cuda:3"), detach=lambda: weights
    )
    fill_table(shard, "t", 100, 8, 0, (0, 0))
    assert touched == {3}
    assert torch.equal(weights, filled(100, 8))
