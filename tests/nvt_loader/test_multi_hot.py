"""List columns become jagged features: right ids, lengths and offsets."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.nvt_loader.parquet.dataset import read_dataset
from tests.nvt_loader import fake_libcudf
from tests.nvt_loader.data import write_split
from tests.nvt_loader.helper import all_ranks, assert_same, embeddings, read_rows, rows_of

LISTS = ("cat_0", "cat_2")
ROWS = 1580


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    root = tmp_path_factory.mktemp("split")
    write_split(root, {"train": [1000, 0, 550, 30], "valid": [5]}, multi_hot=LISTS)
    return root / "train"


def bags(jagged, row: int) -> list[float]:
    begin, end = jagged.offsets()[row], jagged.offsets()[row + 1]
    assert end - begin == jagged.lengths()[row]
    return jagged.values()[begin:end].tolist()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("batch_size", "world_size", "shards"), [(64, 1, None), (7, 3, 1)])
def test_batches_hold_the_lists_of_the_files(train, batch_size, world_size, shards, shuffle):
    expected = read_rows(train)
    seen = []
    options = {"shuffle": shuffle, "virtual_shards": shards}
    for loader in all_ranks(train, batch_size, world_size, shuffle_window=512, **options):
        for batch in loader:
            kjt, size = batch.sparse_features, batch.labels.shape[0]
            assert kjt.keys() == ["cat_0", "cat_1", "cat_2"]
            assert kjt.stride() == size
            assert_derived(kjt)
            parts = kjt.to_dict()
            for i, row in enumerate(rows_of([batch])):
                want = expected[row]
                assert bags(parts["cat_0"], i) == want["cat_0"]
                assert bags(parts["cat_1"], i) == [want["cat_1"]]
                assert bags(parts["cat_2"], i) == want["cat_2"]
                assert batch.labels[i] == want["label"]
            seen += rows_of([batch])
    assert sorted(seen) == list(range(ROWS))
    assert any(not row["cat_0"] for row in expected.values())  # there are empty lists


def assert_derived(kjt):
    """What the loader gives is what TorchRec derives from the lengths alone."""
    derived = type(kjt)(kjt.keys(), kjt.values(), lengths=kjt.lengths())
    assert kjt.values().dtype == kjt.lengths().dtype == kjt.offsets().dtype == torch.int32
    assert torch.equal(kjt.offsets(), derived.offsets())
    assert kjt.length_per_key() == derived.length_per_key()
    assert kjt.offset_per_key() == derived.offset_per_key()


def test_embeddings_of_jagged_and_empty_batches(train):
    embed = embeddings()
    for loader in all_ranks(train.parent / "valid", 2, 8):
        (batch,) = list(loader)
        size = batch.labels.shape[0]
        assert size in (0, 1)
        assert embed(batch.sparse_features).values().shape == (size, 12)


def rewrite(train, **columns):
    table = pq.read_table(train / "part.0.parquet")
    for name, array in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, array)
    pq.write_table(table, train / "part.0.parquet", row_group_size=64)


@pytest.fixture(params=["cpu", "libcudf"])
def small(request, monkeypatch, tmp_path):
    """A split, read by either decoder."""
    if request.param == "libcudf":
        fake_libcudf.install(monkeypatch)
    write_split(tmp_path, {"train": [100]}, multi_hot=LISTS)
    return tmp_path / "train"


def lists_of(train, name):
    return pq.read_table(train / "part.0.parquet")[name].to_pylist()


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.uint16())]
)
def test_lists_of_another_type_are_converted(small, kind):
    expected = list(KJTLoader(small, 16, device="cpu"))
    rewrite(small, cat_0=pa.array(lists_of(small, "cat_0"), kind))
    assert_same(list(KJTLoader(small, 16, device="cpu")), expected)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_block_without_a_single_id(small, shuffle):
    """All categorical columns are lists, and none of a block's lists has an id in it."""
    empty = pa.array([[]] * 100, pa.list_(pa.int32()))
    names = ("cat_0", "cat_1", "cat_2")
    rewrite(small, **dict.fromkeys(names, empty))
    schema = dataclasses.replace(TableSchema.read(small), multi_hot=names)
    options = {"schema": schema, "shuffle": shuffle, "device": "cpu"}
    embed = embeddings()
    rows = 0
    for batch in KJTLoader(small, 16, **options):
        kjt, size = batch.sparse_features, batch.labels.shape[0]
        assert_derived(kjt)
        assert kjt.values().numel() == 0
        assert kjt.lengths().tolist() == [0] * 3 * size
        assert embed(batch.sparse_features).values().tolist() == [[0.0] * 12] * size
        rows += size
    assert rows == 100


@pytest.mark.parametrize("row", [0, 70])
@pytest.mark.parametrize("broken", [None, [None], [1, None]])
def test_nulls_in_lists(small, row, broken):
    lists = lists_of(small, "cat_0")
    lists[row] = broken
    rewrite(small, cat_0=pa.array(lists, pa.list_(pa.int32())))
    with pytest.raises(SchemaError, match=r"part\.0\.parquet: column cat_0 holds 1 null"):
        list(KJTLoader(small, 16, device="cpu"))


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64()])
@pytest.mark.parametrize("value", [10, -1])
def test_an_id_of_a_list_outside_its_table(small, kind, value):
    lists = lists_of(small, "cat_0")
    lists[80] = [1, value]
    rewrite(small, cat_0=pa.array(lists, pa.list_(kind)))
    with pytest.raises(SchemaError, match=rf"cat_0 holds id {value}, .* table of 10 rows"):
        list(KJTLoader(small, 16, device="cpu"))


def test_bytes_of_a_row(train):
    lists = [len(ids) for row in read_rows(train).values() for ids in (row["cat_0"], row["cat_2"])]
    found = read_dataset(train).batch_row_bytes
    assert found == pytest.approx(4 * 4 + 24 + 2 * (4 * np.mean(lists) + 16), rel=0.2)
