"""Any parquet, hashing, undersampling, limits, budgets, accounts: what the loader does besides."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.formats.etl_output import SWITCH_FILE
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.nvt_loader import KJTLoader, options
from nvt_torchrec.nvt_loader.parquet.dataset import read_dataset
from nvt_torchrec.nvt_loader.plan import Plan
from tests.manifests import write_manifest
from tests.nvt_loader.data import row_numbers, write_split
from tests.nvt_loader.helper import all_ranks, assert_same, global_rows, read_rows, rows_of


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    root = tmp_path_factory.mktemp("split")
    write_split(root, {"train": [1000, 0, 100, 700, 50, 30]})
    return root / "train"


ROWS = 1880


def test_any_parquet_with_a_schema_in_hand(tmp_path):
    rng = np.random.default_rng(0)
    columns = {
        "clicked": rng.random(200) < 0.5,
        "user": rng.integers(0, 30, 200),
        "price": rng.random(200),
        "age": rng.integers(0, 99, 200).astype(np.int16),
        "title": ["x"] * 200,
    }
    pq.write_table(pa.table(columns), tmp_path / "log.parquet", row_group_size=30)
    schema = TableSchema("clicked", ("age", "price"), ("user",), (30,))
    for path in (tmp_path, tmp_path / "log.parquet"):
        loader = KJTLoader(path, 16, schema=schema, virtual_shards=1, device="cpu")
        assert loader.schema is loader.input_schema is schema
        batches = list(loader)
        labels = torch.cat([batch.labels for batch in batches])
        dense = torch.cat([batch.dense_features for batch in batches])
        ids = torch.cat([batch.sparse_features["user"].values() for batch in batches])
        assert labels.tolist() == columns["clicked"].tolist()
        assert dense[:, 0].tolist() == columns["age"].tolist()
        assert np.array_equal(dense[:, 1], columns["price"].astype(np.float32))
        assert ids.tolist() == columns["user"].tolist()
        assert ids.dtype == torch.int32


def test_leaves_of_nested_columns_are_no_columns(tmp_path):
    inner = pa.field("b", pa.int32(), nullable=False)
    fields = [
        pa.field("clicked", pa.float32(), nullable=False),
        pa.field("a.b", pa.int32(), nullable=False),
        pa.field("a", pa.struct([inner]), nullable=False),
        pa.field("c.d", pa.int32(), nullable=False),
        pa.field("c", pa.list_(pa.int32())),
    ]
    values = [[0.0, 1.0], [1, 2], [{"b": 7}, {"b": 8}], [3, 4], [[5], [9, 6]]]
    table = pa.table(list(map(pa.array, values, [f.type for f in fields])), pa.schema(fields))
    pq.write_table(table, tmp_path / "log.parquet")
    schema = TableSchema("clicked", (), ("a.b", "c"), (5, 10), ("c",))
    (batch,) = KJTLoader(tmp_path, 2, schema=schema, virtual_shards=1, device="cpu")
    assert batch.sparse_features["a.b"].values().tolist() == [1, 2]
    assert batch.sparse_features["c"].values().tolist() == [5, 9, 6]
    schema = TableSchema("clicked", (), ("a.b", "c"), (5, 9), ("c",))
    with pytest.raises(SchemaError, match="column c holds id 9"):
        list(KJTLoader(tmp_path, 2, schema=schema, virtual_shards=1, device="cpu"))


def test_table_sizes(train):
    with pytest.raises(SchemaError, match=r"cat_1 holds id .* table of 20 rows"):
        list(KJTLoader(train, 64, table_sizes=(10, 20, 50), device="cpu"))
    with pytest.raises(SchemaError, match="3 categorical columns, 2 table sizes"):
        KJTLoader(train, 64, table_sizes=(1, 2), device="cpu")


@pytest.mark.parametrize("world_size", [1, 3])
def test_undersampling(train, world_size):
    expected = read_rows(train)
    positive = {row for row, columns in expected.items() if columns["label"]}
    options = {"undersampling_rate": 0.25, "seed": 4}
    loaders = all_ranks(train, 48 // world_size, world_size, **options)
    epochs = [sum(global_rows(loaders), []) for _ in range(2)]  # noqa: RUF017
    assert sorted(epochs[0]) == sorted(epochs[1])
    kept = set(epochs[0])
    assert len(kept) == len(epochs[0]) == loaders[0].num_rows
    assert positive <= kept
    assert abs(len(kept - positive) / (ROWS - len(positive)) - 0.25) < 0.05
    other = KJTLoader(train, 48, undersampling_rate=0.25, seed=5, device="cpu")
    assert set(rows_of(other)) != kept
    for batch in loaders[0]:  # the other columns are still those of their rows
        for i, row in enumerate(row_numbers(batch.dense_features)):
            assert batch.sparse_features["cat_2"].values()[i] == expected[row]["cat_2"]
    assert sorted(rows_of(KJTLoader(train, 48, undersampling_rate=1.0, device="cpu"))) == list(
        range(ROWS)
    )
    none = set(rows_of(KJTLoader(train, 48, undersampling_rate=0.0, device="cpu")))
    assert none == positive


@pytest.mark.parametrize("shuffle", ["none", "row_groups", "rows"])
def test_limit_batches(train, shuffle):
    options = {"shuffle": shuffle, "shuffle_window": 500, "device": "cpu"}
    whole = list(KJTLoader(train, 64, **options))
    for limit in (1, 5, 29, 30, 100):
        loader = KJTLoader(train, 64, limit_batches=limit, **options)
        assert len(loader) == min(limit, 30)
        assert_same(list(loader), whole[:limit])
        assert len(list(loader)) == len(loader)


def test_map_and_transforms(train):
    loader = KJTLoader(train, 64, transforms=[lambda b: b.labels + 1], device="cpu")
    assert loader.map(lambda labels: labels.tolist()) is loader
    found = list(loader)
    assert len(found) == len(loader)
    assert set(found[0]) <= {1.0, 2.0}


def test_accounts(train, monkeypatch):
    loader = KJTLoader(train, 64, device="cpu")
    list(loader)
    loader.check_epoch()
    next(iter(loader))
    with pytest.raises(SchemaError, match=f"got 64 rows in this epoch, {ROWS} were planned"):
        loader.check_epoch()
    loader.load_state_dict(loader.state_dict() | {"epoch": 1, "step": 3})
    list(loader)
    loader.check_epoch()
    original = Plan.count_rank_rows
    monkeypatch.setattr(Plan, "count_rank_rows", lambda *a: original(*a) + 1)
    with pytest.raises(SchemaError, match=f"rank 0 got {ROWS} rows in epoch 2, {ROWS + 1} were"):
        list(loader)


def test_rows_against_the_manifest(tmp_path):
    split = tmp_path / "criteo_binary" / "split"
    write_split(split, {"train": [100, 30], "valid": [10]})

    def write(rows):
        write_manifest(tmp_path / "manifest.json", splits={"train": {"rows": rows}})

    write(130)
    KJTLoader(split / "train", 8, device="cpu")
    KJTLoader(split / "valid", 8, device="cpu")
    options.check_manifest(read_dataset(split / "train"))
    write(131)
    with pytest.raises(SchemaError, match=r"130 rows, but the ETL wrote 131 \(.*manifest\.json"):
        KJTLoader(split / "train", 8, device="cpu")
    KJTLoader(split / "train" / "part.1.parquet", 8, device="cpu")  # one file is no split
    (tmp_path / SWITCH_FILE).touch()
    with pytest.raises(BadInputError, match=r"is not finished\n.*wait for .*extend"):
        KJTLoader(split / "train", 8, device="cpu")
    (tmp_path / SWITCH_FILE).unlink()
    text = (tmp_path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text.replace('"rows": 131', '"rows": "many"'))
    with pytest.raises(BadInputError, match=r"manifest\.json: not what was written"):
        KJTLoader(split / "train", 8, device="cpu")


@pytest.mark.parametrize("threads", [1, 3])
def test_the_number_of_threads_changes_nothing(train, threads):
    expected = list(KJTLoader(train, 64, shuffle=True, decode_threads=2, device="cpu"))
    found = KJTLoader(train, 64, shuffle=True, decode_threads=threads, device="cpu")
    assert_same(list(found), expected)
