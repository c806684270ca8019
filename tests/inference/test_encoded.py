"""Encoder and Scorer: the ETL's parquet from rows in memory, and scores of such rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nvt_torchrec import Encoder, KJTLoader, Predictor, Scorer
from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError
from nvt_torchrec.formats.schema import TableSchema
from tests.inference.conftest import Trained
from tests.inference.test_predictor import read_dicts
from tests.logs import CRITEO


def criteo_frame(trained: Trained) -> pd.DataFrame:
    """The last day as it is read from its file."""
    file = trained.raw / "day_2"
    return pd.read_csv(file, sep="\t", names=CRITEO.columns, dtype=str)


def last_day(parquet: Path) -> pa.Table:
    """What the ETL wrote of the last day, which is one part of valid and one of test."""
    parts = [next((parquet / split).glob("part.*.parquet")) for split in ("valid", "test")]
    return pa.concat_tables([pq.read_table(part) for part in parts])


def assert_encodes(encoder: Encoder, rows: object, table: pa.Table) -> None:
    dense, ids = encoder.encode(rows)
    assert (dense.dtype, ids.values().dtype) == (torch.float32, torch.int32)
    assert ids.keys() == encoder.spec.categorical_names
    expected = np.stack([table.column(name).to_numpy() for name in encoder.spec.dense_names], 1)
    np.testing.assert_array_equal(dense.numpy().view(np.int32), expected.view(np.int32))
    for name in ids.keys():  # noqa: SIM118
        column, one = table.column(name).to_pylist(), ids[name]
        got = [part.tolist() for part in one.values().split(one.lengths().tolist())]
        assert got == [cell if isinstance(cell, list) else [cell] for cell in column], name


def test_criteos_columns_as_the_etl_writes_them(trained: Trained, bundle: Path) -> None:
    frame, table = criteo_frame(trained), last_day(trained.parquet)
    for path in (trained.workflow, bundle / "workflow"):
        assert_encodes(Encoder.load(path, check=True), frame, table)
    ids = Encoder.load(trained.workflow).encode(frame)[1].values()
    assert {1, 2} <= set(ids.tolist())  # missing and unseen values


def test_every_raw_type_in_every_container(shop: Trained) -> None:
    encoder, table = Encoder.load(shop.workflow), last_day(shop.parquet)
    rows = read_dicts(shop.raw / "day_2.csv", encoder.spec)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    frame = pd.DataFrame(columns)
    arrow = pa.Table.from_pandas(frame)
    for form in (rows, columns, frame, arrow, frame.convert_dtypes()):
        assert_encodes(encoder, form, table)
    few = encoder.encode(rows[:3])[1]
    assert few.stride() == 3
    assert any(row["recent_products"] == [] for row in rows)


def test_a_batch_is_the_loaders(shop: Trained) -> None:
    rows = read_dicts(shop.raw / "day_2.csv", Encoder.load(shop.workflow).spec)
    (batch,) = KJTLoader(shop.parquet / "valid", 1000, device="cpu", virtual_shards=1)
    dense, ids = Encoder.load(shop.workflow).encode(rows[: len(batch.labels)])
    assert torch.equal(dense, batch.dense_features)
    for part in ("values", "lengths", "offsets"):
        ours, loaders = getattr(ids, part)(), getattr(batch.sparse_features, part)()
        assert torch.equal(ours, loaders), part
        assert ours.dtype == loaders.dtype


def test_what_is_made_here_asks_nothing_of_torch_fx(
    shop: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch logs a warning when it is asked, at the first KeyedJaggedTensor of a process."""
    asked: list[str] = []
    monkeypatch.setattr("torch.fx._symbolic_trace.is_fx_tracing_warning", lambda: asked.append(""))
    encoder = Encoder.load(shop.workflow)
    rows = read_dicts(shop.raw / "day_2.csv", encoder.spec)
    dense, ids = encoder.encode(rows)
    Scorer.load(shop.workflow, shop.checkpoint).predict(dense, ids)
    for loader in (KJTLoader(shop.parquet / "valid", 64, device="cpu"), one_id_loader()):
        assert len(list(loader)) > 1
    assert not asked
    KeyedJaggedTensor(["a"], torch.zeros(1), torch.ones(1))
    assert asked  # as others make it


def one_id_loader() -> KJTLoader:
    """A loader of a table without lists."""
    table = pa.table({"label": pa.array([0, 1] * 50, pa.float32()), "a": pa.array([3] * 100)})
    schema = TableSchema("label", dense=(), categorical=("a",), table_sizes=(4,))
    return KJTLoader(table, 64, schema=schema, device="cpu")


def test_encoded_rows_score_as_raw_ones(trained: Trained, bundle: Path) -> None:
    frame = criteo_frame(trained)
    dense, ids = Encoder.load(bundle / "workflow").encode(frame)
    expected = Predictor.load(bundle).predict(frame)
    assert np.ptp(expected) > 0.1
    scorer, table = Scorer.load(bundle, check=True), last_day(trained.parquet).to_pandas()
    rows = table[list(scorer.schema.categorical)]
    array, reversed_keys = rows.to_numpy(), ids.permute([*range(25, -1, -1)])
    for form in (ids, reversed_keys, rows, array, torch.tensor(array), array.tolist()):
        np.testing.assert_array_equal(scorer.predict(dense, form), expected)
    np.testing.assert_array_equal(scorer.predict(table[[*scorer.schema.dense]], ids), expected)
    assert scorer.predict(dense[:0], array[:0]).shape == (0,)


def test_encoded_lists_score_as_raw_ones(shop: Trained, shop_predictor: Predictor) -> None:
    rows = read_dicts(shop.raw / "day_2.csv", shop_predictor.spec)
    dense, ids = Encoder.load(shop.workflow).encode(rows)
    scorer, expected = Scorer.load(shop.workflow, shop.checkpoint), shop_predictor.predict(rows)
    table = last_day(shop.parquet).select(scorer.schema.categorical)
    for form in (ids, table.to_pandas(), [[*row.values()] for row in table.to_pylist()]):
        np.testing.assert_array_equal(scorer.predict(dense, form), expected)


def test_what_was_encoded_otherwise_is_named(bundle: Path) -> None:
    scorer = Scorer.load(bundle)
    dense, ids = np.zeros((3, 13), np.float32), np.ones((3, 26), np.int32)
    size = scorer.schema.table_sizes[4]
    for wrong in (-1, size):
        ids[2, 4] = wrong
        with pytest.raises(
            InvalidRowError, match=f"row 2, column cat_4: id {wrong} .* {size} rows"
        ):
            scorer.predict(dense, ids)
    ids[2, 4] = size - 1
    assert scorer.predict(dense, ids).shape == (3,)
    with pytest.raises(SchemaError, match=r"dense values of shape \[3, 12\] with ids of 3 rows"):
        scorer.predict(dense[:, 1:], ids)
    with pytest.raises(SchemaError, match=r"ids of shape \[3, 25\]"):
        scorer.predict(dense, ids[:, 1:])
    with pytest.raises(SchemaError, match="ids of type float32"):
        scorer.predict(dense, ids.astype(np.float32))
    with pytest.raises(InvalidRowError, match="row 1: the model computed"):
        scorer.predict(np.float32([[0] * 13, [np.inf] * 13, [0] * 13]), ids)
