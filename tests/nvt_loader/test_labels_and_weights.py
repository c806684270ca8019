"""Data with several labels and a weight for each row: which label is delivered, and the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvt_torchrec.base.errors import SchemaError, SettingsError
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.nvt_loader import KJTLoader
from tests.nvt_loader import fake_libcudf
from tests.nvt_loader.data import row_numbers
from tests.nvt_loader.helper import all_ranks, assert_same, read_rows, rows_of
from tests.nvt_loader.weighted import write_weighted

LISTS = ("cat_0", "cat_2")


@pytest.fixture(scope="module", params=[(), LISTS], ids=["flat", "lists"])
def root(request, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("weighted")
    write_weighted(root, {"train": [300, 0, 157]}, multi_hot=request.param)
    return root


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    batch_size=st.integers(1, 130),
    world_size=st.integers(1, 4),
    shuffle=st.sampled_from(["none", "row_groups", "rows"]),
    label=st.sampled_from(
        [None, "label", "liked", "bought", ("bought",), ("liked", "label"), ["label", "bought"]]
    ),
    on_device=st.booleans(),
)
def test_rows_have_their_label_and_weight(
    root: Path, batch_size: int, world_size: int, shuffle: str, label: Any, on_device: bool
) -> None:
    """And nothing else of a batch differs from that of the same rows without weights."""
    several = isinstance(label, tuple | list)
    options = {"shuffle": shuffle, "virtual_shards": min(6, batch_size * world_size)}
    expected, found = read_rows(root / "train"), []
    with pytest.MonkeyPatch.context() as patch:
        if on_device:
            fake_libcudf.install(patch)
        ranks = all_ranks(root / "train", batch_size, world_size, label=label, **options)
        plain = all_ranks(root / "plain" / "train", batch_size, world_size, **options)
        for loader, without in zip(ranks, plain, strict=True):
            batches, others = list(loader), list(without)
            for batch, other in zip(batches, others, strict=True):
                rows = row_numbers(batch.dense_features).tolist()
                labels = [
                    [expected[i][name] for name in label]
                    if several
                    else expected[i][label or "label"]
                    for i in rows
                ]
                assert batch.labels.tolist() == labels
                assert batch.labels.is_contiguous()
                assert batch.labels.shape == (len(rows), *([len(label)] if several else []))
                assert batch.weights.dtype == torch.float32
                assert batch.weights.tolist() == [expected[i]["w"] for i in rows]
                assert batch.dense_features.is_contiguous()
                assert other.weights is None
                found += rows
                if label in (None, "label"):
                    assert_same([batch], [other])
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("dictionary", [False, True])
def test_a_weight_of_negative_zero_is_zero(tmp_path: Path, dictionary: bool) -> None:
    """Its sign is the bit that says that a weight is negative."""
    rows = {"y": [0.0, 1.0] * 8, "w": [-0.0, 1.0] * 8}
    columns = {name: pa.array(values, pa.float32()) for name, values in rows.items()}
    table = pa.table(columns | {"c": pa.array(range(16), pa.int32())})
    pq.write_table(table, tmp_path / "part.parquet", use_dictionary=dictionary)
    schema = TableSchema("y", (), ("c",), (16,), weight="w")
    (batch,) = KJTLoader(tmp_path, 16, schema=schema, device="cpu", virtual_shards=1)
    assert batch.weights.tolist() == [0, 1] * 8
    assert batch.sparse_features.values().tolist() == list(range(16))


def test_several_labels_that_cannot_be_read(root: Path) -> None:
    for label, what in ((("bought", "likes"), "'likes'.*no such label"), (["label"] * 2, "twice")):
        with pytest.raises(SettingsError, match=what):
            KJTLoader(root / "train", 40, device="cpu", label=label)
    options = {"label": ("label", "liked"), "undersampling_rate": 0.5}
    with pytest.raises(SettingsError, match="undersampling_rate with the labels label, liked"):
        KJTLoader(root / "train", 40, device="cpu", **options)


def test_undersampling_keeps_what_the_label_says_is_positive(root: Path) -> None:
    kept = KJTLoader(root / "train", 50, device="cpu", undersampling_rate=0.0, label="bought")
    assert kept.schema == TableSchema.read(root)
    expected = {i for i, row in read_rows(root / "train").items() if row["bought"]}
    assert set(rows_of(kept)) == expected
    assert all(torch.all(batch.labels == 1) for batch in kept)


def test_a_state_of_another_label_is_refused(root: Path) -> None:
    one, other = (
        KJTLoader(root / "train", 40, device="cpu", label=label) for label in ("liked", "bought")
    )
    with pytest.raises(SchemaError, match="data have changed"):
        other.load_state_dict(one.state_dict())


def test_a_label_that_is_not_there(root: Path) -> None:
    with pytest.raises(SettingsError, match=r"'likes'.*no such label\n.*mean 'liked'\?"):
        KJTLoader(root / "train", 40, device="cpu", label="likes")
    with pytest.raises(SettingsError, match=r"'int_0'.*no such label"):
        KJTLoader(root / "train", 40, device="cpu", label="int_0")


@pytest.mark.parametrize(
    ("value", "what"), [(-0.5, "negative weight, -0.5"), (np.inf, "w holds inf"), (np.nan, "nan")]
)
@pytest.mark.parametrize("on_device", [False, True])
def test_weights_that_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, what: str, on_device: bool
) -> None:
    write_weighted(tmp_path, {"train": [40]})
    path = tmp_path / "train" / "part.0.parquet"
    table = pq.read_table(path)
    weights = table["w"].to_numpy().copy()
    weights[17] = value
    at = table.schema.get_field_index("w")
    pq.write_table(table.set_column(at, "w", pa.array(weights)), path)
    if on_device:
        fake_libcudf.install(monkeypatch)
    with pytest.raises(SchemaError, match=what):
        list(KJTLoader(tmp_path / "train", 40, device="cpu"))
