"""What a training loop sees of the loader."""

from __future__ import annotations

import math
import zlib

import numpy as np
import pytest
import torch
from torchrec.datasets.utils import Batch

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.nvt_loader import KJTLoader
from tests.nvt_loader.data import write_split
from tests.nvt_loader.helper import (
    all_ranks,
    assert_same,
    embeddings,
    global_rows,
    read_rows,
    rows_of,
)

FILES = [1000, 0, 100, 700, 50, 30]  # on these merlin's Loader gives two ranks 18 steps and 1
ROWS = sum(FILES)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    root = tmp_path_factory.mktemp("split")
    write_split(root, {"train": FILES, "valid": [5]})
    return root / "train"


def test_the_order_is_the_same_for_ever(train):
    # what was trained before an upgrade of this project is not trained again after it
    order = rows_of(KJTLoader(train, 64, shuffle=True, seed=3, shuffle_window=256, device="cpu"))
    assert zlib.crc32(np.array(order, "<i4").tobytes()) == 1963582637


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("batch_size", "world_size", "virtual_shards"),
    [
        (1, 1, None),
        (64, 1, 1),
        (64, 1, None),
        (2000, 1, None),
        (60, 3, None),
        (7, 3, 1),
        (5, 8, 20),
        (64, 4, None),
        (3, 64, None),
    ],
)
def test_batches_hold_the_rows_of_the_files(train, batch_size, world_size, virtual_shards, shuffle):
    expected = read_rows(train)
    options = {"shuffle": shuffle, "virtual_shards": virtual_shards}
    seen = []
    for loader in all_ranks(train, batch_size, world_size, **options):
        batches = list(loader)
        assert len(batches) == len(loader) == math.ceil(ROWS / batch_size / world_size)
        for batch in batches:
            ids = batch.sparse_features.to_dict()
            for i, row in enumerate(rows_of([batch])):
                want = expected[row]
                assert batch.labels[i] == want["label"]
                assert batch.dense_features[i].tolist() == [want[f"int_{j}"] for j in range(3)]
                for key in ("cat_0", "cat_1", "cat_2"):
                    assert ids[key].values()[i] == want[key]
        seen += rows_of(batches)
    assert sorted(seen) == list(range(ROWS))


def test_shapes_dtypes_and_a_valid_kjt(train):
    loader = KJTLoader(train, 500, device="cpu")
    batches = list(loader)
    assert [batch.labels.shape[0] for batch in batches] == [500, 500, 500, 380]
    for batch in batches:
        size = batch.labels.shape[0]
        assert isinstance(batch, Batch)
        assert batch.labels.dtype == batch.dense_features.dtype == torch.float32
        assert batch.dense_features.shape == (size, 3)
        assert_valid(batch.sparse_features, size)


def assert_valid(kjt, size):
    """What the loader gave as constants is what TorchRec derives from the lengths."""
    assert kjt.keys() == ["cat_0", "cat_1", "cat_2"]
    assert kjt.values().dtype == torch.int32
    assert kjt.stride() == size
    derived = type(kjt)(kjt.keys(), kjt.values(), lengths=torch.ones(3 * size, dtype=torch.int32))
    derived._stride = size  # TorchRec divides by it
    assert torch.equal(kjt.lengths(), derived.lengths())
    assert torch.equal(kjt.offsets(), derived.offsets())
    assert kjt.length_per_key() == derived.length_per_key()
    assert kjt.offset_per_key() == derived.offset_per_key()
    assert kjt.index_per_key() == {"cat_0": 0, "cat_1": 1, "cat_2": 2}
    parts = list(kjt.to_dict().items())
    assert [key for key, _ in parts] == ["cat_0", "cat_1", "cat_2"]
    assert torch.equal(torch.cat([part.values() for _, part in parts]), kjt.values())
    for _, part in parts:
        assert torch.equal(part.lengths(), torch.ones(size))
        assert torch.equal(part.offsets(), torch.arange(size + 1))
    assert [part.stride() for part in kjt.split([1, 2])] == [size, size]


def test_the_last_step_is_split_evenly_and_empty_batches_are_valid(train):
    loaders = all_ranks(train.parent / "valid", 2, 8)
    batches = [list(loader) for loader in loaders]
    assert [len(rank) for rank in batches] == [1] * 8
    embed = embeddings()
    sizes = [rank[0].labels.shape[0] for rank in batches]
    assert sorted(sizes) == [0, 0, 0, 1, 1, 1, 1, 1]
    for (batch,), size in zip(batches, sizes, strict=True):
        assert batch.dense_features.shape == (size, 3)
        assert_valid(batch.sparse_features, size)
        assert batch.sparse_features.values().shape == (3 * size,)
        assert embed(batch.sparse_features).values().shape == (size, 12)


def test_drop_last(train):
    loaders = all_ranks(train, 100, 2, drop_last=True)
    steps = global_rows(loaders)
    assert [len(step) for step in steps] == [200] * 9
    assert len(loaders[0]) == 9
    assert len(set().union(*steps)) == 1800
    assert list(KJTLoader(train.parent / "valid", 6, drop_last=True, device="cpu")) == []


def test_one_virtual_shard_is_the_order_of_the_files(train):
    steps = global_rows(all_ranks(train, 25, 4, virtual_shards=1))
    assert sum(steps, []) == list(range(ROWS))  # noqa: RUF017


def test_a_fresh_iterator_per_epoch(train):
    loader = KJTLoader(train, 100, device="cpu")
    first, second = iter(loader), iter(loader)
    assert first is not second
    assert iter(first) is first
    assert_same(list(first), list(second))
    assert list(first) == []
    assert len(list(loader)) == len(loader)


def test_shuffled_epochs(train):
    torch.manual_seed(0)
    np.random.seed(0)
    global_state = torch.get_rng_state()
    options = {"shuffle": True, "shuffle_window": 512, "device": "cpu"}
    loader = KJTLoader(train, 64, seed=7, **options)
    epochs = [list(loader) for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), global_state)
    orders = [rows_of(batches) for batches in epochs]
    assert all(sorted(order) == list(range(ROWS)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    torch.manual_seed(1)
    again = KJTLoader(train, 64, seed=7, **options)
    iter(again)  # as Lightning's probe: no batch is drawn, so no epoch is skipped
    assert_same(list(again), epochs[0])
    again.set_epoch(2)
    assert_same(list(again), epochs[2])
    state = again.state_dict()
    assert (state["epoch"], state["step"]) == (3, 0)
    other = KJTLoader(train, 64, seed=8, **options)
    assert rows_of(other) != orders[0]


def test_shuffling_moves_row_groups_and_rows(train):
    order = rows_of(KJTLoader(train, 2000, shuffle=True, virtual_shards=1, device="cpu"))
    groups = [row // 64 for row in order]
    assert groups != sorted(groups)
    loader = KJTLoader(train, 2000, shuffle="row_groups", virtual_shards=1, device="cpu")
    order = rows_of(loader)
    assert sorted(order) == list(range(ROWS)) != order
    assert rows_of(loader) != order  # of the next epoch
    assert (np.diff(order) == 1).mean() > 0.9  # rows keep their neighbours
    order = np.array(rows_of(KJTLoader(train, 64, shuffle=True, device="cpu")))
    assert (np.diff(order) == 1).mean() < 0.05  # few rows still follow their neighbour


def test_files_come_in_numeric_order(tmp_path):
    write_split(tmp_path, {"train": [3] * 12})
    loader = KJTLoader(tmp_path / "train", 36, virtual_shards=1, device="cpu")
    assert rows_of(loader) == list(range(36))


def test_a_split_without_rows_has_no_steps(tmp_path):
    write_split(tmp_path, {"train": [0, 0]})
    loader = KJTLoader(tmp_path / "train", 4, device="cpu")
    assert len(loader) == loader.num_rows == 0
    assert list(loader) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size = 0"),
        ({"rank": 2, "world_size": 2}, "rank = 2 with world_size = 2"),
        ({"seed": -1}, "seed = -1"),
        ({"shuffle": "all"}, "shuffle = 'all'"),
        ({"undersampling_rate": 2}, "undersampling_rate = 2"),
        ({"shuffle_window": 0}, "shuffle_window = 0"),
        ({"batch_size": "4"}, "batch_size = '4', of type str\n.*give an integer"),
        ({"seed": True}, "seed = True, of type bool"),
        ({"loader_memory": "1 GiB"}, "loader_memory = '1 GiB'"),
        ({"undersampling_rate": "0.5"}, "undersampling_rate = '0.5'.*\n.*a number from 0 to 1"),
        ({"schema": {}}, "schema = {}, of type dict\n.*a TableSchema"),
        ({"table_sizes": 10}, "table_sizes = 10, of type int\n.*for each categorical column"),
        ({"label": 3}, "label = 3, of type int\n.*the name of a label"),
        ({"device": "gpu"}, "device = 'gpu': .*\n.*'cuda'"),
        ({"virtual_shards": 5}, "virtual_shards = 5 with a global batch of 4 rows"),
    ],
)
def test_settings(train, options, message):
    with pytest.raises(SettingsError, match=message):
        KJTLoader(train, **{"batch_size": 4, "device": "cpu", **options})


@pytest.mark.parametrize(("workers", "made_in"), [(2, "worker"), (1, "parent")])
def test_refused_in_dataloader_workers(train, workers, made_in):
    loader = KJTLoader(train, 4, device="cpu")

    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(KJTLoader(train, 4, device="cpu") if made_in == "worker" else loader)

    workers = torch.utils.data.DataLoader(Rows(), batch_size=None, num_workers=workers)
    with pytest.raises(SettingsError, match="each would deliver all rows"):
        next(iter(workers))
