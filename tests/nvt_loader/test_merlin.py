"""Batches that Merlin's Loader reads are those of KJTLoader, and no epoch hangs or loses rows."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.nvt_loader.merlin import Loader, MerlinDataset, MerlinLoader
from tests.nvt_loader.data import write_split
from tests.nvt_loader.helper import assert_same, rows_of
from tests.nvt_loader.weighted import write_weighted

FILES = [0, 1000, 100, 0, 31]


def ranks_of(path, batch_size, world_size, **options):
    return [
        MerlinLoader.from_split(
            path, batch_size, rank=rank, world_size=world_size, device="cpu", **options
        )
        for rank in range(world_size)
    ]


def read_by(path, **options):
    """Merlin's Loader as its documentation has it."""
    files = [str(file) for file in sorted(path.glob("*.parquet"))]
    return Loader(MerlinDataset(files, engine="parquet"), 60, **options)


@pytest.mark.parametrize("lists", [(), ("cat_1", "cat_2"), ("cat_0", "cat_1", "cat_2")])
def test_the_batches_of_one_rank_are_those_of_kjtloader(tmp_path, lists):
    write_split(tmp_path, {"train": FILES}, multi_hot=lists)
    for options in ({}, {"drop_last": True}, {"limit_batches": 3}):
        ours = KJTLoader(tmp_path / "train", 60, device="cpu", virtual_shards=1, **options)
        (loader,) = ranks_of(tmp_path / "train", 60, 1, **options)
        assert (len(loader), loader.num_rows) == (len(ours), ours.num_rows)
        expected = list(ours)  # with drop_last, the first epoch leaves out the last rows
        for _ in range(3):
            assert_same(list(loader), expected)
            loader.check_epoch()


@pytest.mark.parametrize("world_size", [2, 3, 40])
def test_ranks_take_equal_steps_and_every_row_comes_once(tmp_path, world_size):
    """With row groups of other sizes, and fewer of them than ranks."""
    write_split(tmp_path, {"train": [1000, 100, 700, 50, 31]})
    loaders = ranks_of(tmp_path / "train", 60, world_size)
    for _ in range(2):
        epochs = [list(loader) for loader in loaders]
        assert {len(epoch) for epoch in epochs} == {len(loaders[0])}
        assert sorted(row for epoch in epochs for row in rows_of(epoch)) == list(range(1881))
        for step, batches in enumerate(zip(*epochs, strict=True)):
            assert loaders[0].step_rows(step) == [len(batch.labels) for batch in batches]
    assert len(loaders[0]) == -(-max(len(rows_of(epoch)) for epoch in epochs) // 60)


def test_labels_and_weights(tmp_path):
    write_weighted(tmp_path, {"train": [100, 31]})
    for label in (None, "bought"):
        ours = KJTLoader(tmp_path / "train", 60, label=label, device="cpu", virtual_shards=1)
        (loader,) = ranks_of(tmp_path / "train", 60, 1, label=label)
        found, expected = list(loader), list(ours)
        assert_same(found, expected)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.weights, b.weights)


def test_some_files(tmp_path):
    """Those of some days, and no others."""
    write_split(tmp_path, {"train": [100, 70, 30]})
    files = [tmp_path / "train" / f"part.{number}.parquet" for number in (0, 2)]
    (loader,) = ranks_of(files, 60, 1)
    assert rows_of(loader) == [*range(100), *range(170, 200)]


def test_no_rows(tmp_path):
    write_split(tmp_path, {"train": [0]})
    (loader,) = ranks_of(tmp_path / "train", 60, 1)
    assert (len(loader), list(loader)) == (0, [])


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_existing_loader(tmp_path, caplog, shuffle):
    """Its own number of partitions, shuffle, and queue from earlier use have no effect on rows."""
    write_split(tmp_path, {"train": [1000, 100]}, multi_hot=("cat_1",))
    options = {"shuffle": shuffle, "global_size": 2}
    loaders = [read_by(tmp_path / "train", global_rank=rank, **options) for rank in range(2)]
    assert len(loaders[0]) == 17
    ours = list(map(MerlinLoader, loaders))
    assert caplog.text.count("here 100 and 1,000 rows") == 1  # ranks wait for each other
    for _ in range(2):
        epochs = list(map(rows_of, ours))
        assert (epochs[0] == list(range(1000))) is not shuffle
        assert list(map(sorted, epochs)) == [list(range(1000)), list(range(1000, 1100))]


def test_an_existing_loader_of_a_frame(tmp_path):
    """Its partitions are counted by making them; its lists may all have the same length."""
    write_split(tmp_path, {"train": [130]})
    split = read_by(tmp_path / "train").dataset
    frame = pd.read_parquet(tmp_path / "train" / "part.0.parquet")
    frame["cat_1"] = [[row % 50, 3] for row in range(130)]
    schema = split.schema.remove_col("cat_1")
    column = split.schema["cat_1"].with_shape((None, 2))
    data = MerlinDataset(frame, npartitions=3, schema=schema + type(schema)([column]))
    batches = list(MerlinLoader(Loader(data, 60)))
    assert rows_of(batches) == list(range(130))
    jagged = batches[0].sparse_features["cat_1"]
    assert jagged.lengths().tolist() == [2] * 60
    assert jagged.values()[:6].tolist() == [0, 3, 1, 3, 2, 3]


def test_threads_of_a_dropped_iterator_end(tmp_path):
    write_split(tmp_path, {"train": [1000]})
    (loader,) = ranks_of(tmp_path / "train", 10, 1)
    before = set(threading.enumerate())
    batches = iter(loader)
    next(batches)
    started = set(threading.enumerate()) - before
    assert any("load_chunks" in thread.name for thread in started)
    del batches
    gc.collect()
    for thread in started:
        thread.join()


def test_what_is_wrong_is_refused(tmp_path):
    write_split(tmp_path, {"train": [100]})
    (loader,) = ranks_of(tmp_path / "train", 60, 1, table_sizes=(10, 50, 7))
    batches = iter(loader)
    for _ in range(2):
        with pytest.raises(SchemaError, match=r"train: column cat_2 holds id \d+, outside its"):
            next(batches)
    path = tmp_path / "train" / "part.0.parquet"
    (loader,) = ranks_of(tmp_path / "train", 60, 1)
    table = pq.read_table(path)
    nulls = pa.array([None, *range(1, 100)], pa.int32())
    pq.write_table(table.set_column(4, "cat_0", nulls), path)
    with pytest.raises(BadInputError, match="the loader was made"):
        iter(loader)
    (loader,) = ranks_of(tmp_path / "train", 60, 1)
    with pytest.raises(SchemaError, match=r"column cat_0 holds nulls"):
        next(iter(loader))
    (loader,) = ranks_of(tmp_path / "train", 60, 1)
    content = path.read_bytes()
    path.write_bytes(b"\xff" * 400 + content[400:])
    with pytest.raises(BadInputError, match=r"(?s)train: Merlin's Loader fails: .* -> .*etl check"):
        next(iter(loader))


def test_a_stream_waits_for_what_merlin_computes(tmp_path, monkeypatch):
    """On a GPU: Merlin's work is on the default stream, the loader's on one of its own."""
    write_split(tmp_path, {"train": [100]})
    (loader,) = ranks_of(tmp_path / "train", 60, 1)
    device, waited = torch.device("cuda:3"), []
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"default of {device}")
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda device: SimpleNamespace(wait_stream=lambda other: waited.append((device, other))),
    )
    loader._source = device
    assert len(list(loader)) == 2
    assert waited == [(device, "default of cuda:3")] * 2
