"""Whatever the rows come from: the same batches, states and checks."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nvt_torchrec.base.errors import BadInputError, SchemaError, SettingsError
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.nvt_loader.parquet import sources
from nvt_torchrec.nvt_loader.parquet.dataset import read_dataset
from tests.nvt_loader import fake_libcudf
from tests.nvt_loader.data import write_split
from tests.nvt_loader.helper import all_ranks, assert_same
from tests.shell import ROOT, run

LISTS = ("cat_0", "cat_2")


@dataclasses.dataclass
class Own:
    """A stranger's source, which knows nothing of this package."""

    table: pa.Table
    name: str = "my rows"
    fingerprint: Any = "1"

    @property
    def row_counts(self) -> list[int]:
        return [min(64, len(self.table) - first) for first in range(0, len(self.table), 64)]

    def read(self, row_group: int, columns: list[str], rows: int) -> Iterator[pa.RecordBatch]:
        assert rows >= 1
        yield from self.table.slice(64 * row_group, 64).select(columns).to_batches()


@pytest.fixture(params=[(), LISTS], ids=["flat", "lists"])
def train(request, tmp_path, monkeypatch) -> Path:
    """One file with row groups of 64 rows, and tables are cut like it."""
    monkeypatch.setattr(sources, "ROW_GROUP_ROWS", 64)
    write_split(tmp_path, {"train": [1000]}, multi_hot=request.param)
    return tmp_path / "train"


@pytest.fixture
def uploaded(train) -> Iterator[str]:
    files = fsspec.filesystem("memory")
    files.put(f"{train}/", "/bucket/train/", recursive=True)
    yield "memory://bucket/train"
    files.rm("/bucket", recursive=True)


def sources_of(train: Path, uploaded: str) -> list[Any]:
    rows = pq.read_table(train)
    lists = TableSchema.read(train).multi_hot
    return [
        str(train / "part.0.parquet"),
        [train / "part.0.parquet"],
        f"{train}/part.*.parquet",
        uploaded,
        f"{uploaded}/part.*.parquet",
        [f"{uploaded}/part.0.parquet"],
        rows,
        Own(rows),
        *([] if lists else [rows.to_pandas()]),
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True, "seed": 3, "world_size": 3, "drop_last": True},
        {"shuffle": "row_groups", "undersampling_rate": 0.5},
    ],
    ids=str,
)
def test_the_same_batches_of_any_source(train, uploaded, options) -> None:
    schema = TableSchema.read(train)
    options = {"batch_size": 40, "world_size": 1} | options
    expected = [list(loader) for loader in all_ranks(train, **options)]
    for source in sources_of(train, uploaded):
        for loader, own in zip(all_ranks(source, schema=schema, **options), expected, strict=True):
            assert_same(list(loader), own)


def test_a_run_resumes_on_the_same_rows_only(train, uploaded) -> None:
    schema = TableSchema.read(train)
    options = {"schema": schema, "shuffle": True, "device": "cpu"}
    for source in sources_of(train, uploaded):
        loader = KJTLoader(source, 40, **options)
        whole = list(loader)
        loader.set_epoch(0)
        for _, _batch in zip(range(7), loader, strict=False):
            pass
        state = loader.state_dict(trained_steps=7)
        resumed = KJTLoader(source, 40, **options)
        resumed.load_state_dict(state)
        assert_same(list(resumed), whole[7:])
    rows = pq.read_table(train)
    changed = rows.set_column(1, "int_0", pa.array(np.zeros(1000, np.float32)))
    for old, new in (
        (rows, changed),
        (rows, rows.slice(1)),
        (Own(rows), Own(rows, fingerprint="2")),
        (rows, Own(rows)),
        (train, rows),
    ):
        state = KJTLoader(old, 40, **options).state_dict()
        with pytest.raises(SchemaError, match="data have changed"):
            KJTLoader(new, 40, **options).load_state_dict(state)


def test_chunks_of_a_table_change_nothing(train) -> None:
    rows, schema = pq.read_table(train), TableSchema.read(train)
    parts = [rows.slice(first, 77) for first in range(0, 1000, 77)]
    other = pa.concat_tables(parts).append_column("more", pa.array(range(1000)))
    states, batches = [], []
    for data in (rows, other):
        loader = KJTLoader(data, 40, schema=schema, shuffle=True, device="cpu")
        batches.append(list(loader))
        states.append(loader.state_dict())
    assert states[0] == states[1]
    assert_same(*batches)


def test_on_a_gpu_the_host_decodes_what_libcudf_cannot_read(train, uploaded, monkeypatch) -> None:
    from nvt_torchrec.nvt_loader.cuda.builders import CudfBuilder, PinnedBuilder, choose_builder

    monkeypatch.setitem(__import__("sys").modules, "pylibcudf", fake_libcudf)
    monkeypatch.setattr(fake_libcudf, "__spec__", object(), raising=False)
    schema, card = TableSchema.read(train), torch.device("cuda:0")
    kinds = [
        choose_builder(read_dataset(data, schema), card)
        for data in (train, pq.read_table(train), uploaded)
    ]
    assert kinds == [CudfBuilder, PinnedBuilder, PinnedBuilder]


@pytest.mark.parametrize("kind", ["table", "own"])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda rows: rows.drop_columns(["int_1"]), "column int_1 is missing"),
        (
            lambda rows: rows.set_column(4, "cat_0", pa.array(["x"] * len(rows))),
            "column cat_0 is string, not integer ids",
        ),
        (
            lambda rows: rows.set_column(5, "cat_1", pa.array([50] * len(rows))),
            "column cat_1 holds id 50, outside its table of 50 rows .* in row group 0",
        ),
        (
            lambda rows: rows.set_column(1, "int_0", pa.array([None] * len(rows), pa.float32())),
            "column int_0 holds .* null values, in row group 0",
        ),
    ],
)
def test_values_are_checked(tmp_path, kind, change, what) -> None:
    schema = write_split(tmp_path, {"train": [100]})
    rows = change(pq.read_table(tmp_path / "train"))
    if kind == "own":
        data, name = Own(rows), "my rows"
        data.read = lambda row_group, *_: rows.slice(64 * row_group, 64).to_batches()
    else:
        data, name = rows, "table"
    with pytest.raises(SchemaError, match=f"{name}.*: {what}") as refused:
        list(KJTLoader(data, 40, schema=schema, device="cpu", virtual_shards=1))
    assert "ETL" not in str(refused.value)


def test_data_that_cannot_be_read(tmp_path, uploaded, train) -> None:
    rows, schema = pq.read_table(train), TableSchema.read(train)
    for data, options, what in (
        (rows, {}, "data of type Table without a schema\n.*schema=TableSchema"),
        ([], {"schema": schema}, "data of type list"),
        ([1, 2], {}, r"data of type list: \[1, 2\]\n.*a list of paths"),
        (3, {"schema": schema}, "data of type int: 3\n.*a path, a list of paths, an Arrow table"),
    ):
        with pytest.raises(SettingsError, match=what):
            KJTLoader(data, 40, device="cpu", **options)
    (tmp_path / "none").mkdir()
    for data, what in (
        (str(tmp_path / "*.csv"), "no parquet file in it"),
        ([train, tmp_path / "none"], "no parquet file in it"),
        (f"{uploaded}/part.7.parquet", r"memory://.*part\.7\.parquet: no parquet file in it"),
        ("nosuch://bucket/train", r"nosuch://bucket/train: cannot be opened"),
    ):
        with pytest.raises(BadInputError, match=what):
            KJTLoader(data, 40, device="cpu", schema=schema)


def test_remote_files_that_change(train, uploaded) -> None:
    files = fsspec.filesystem("memory")
    loader = KJTLoader(uploaded, 40, device="cpu")
    files.pipe("/bucket/train/part.0.parquet", files.cat("/bucket/train/part.0.parquet")[:-30])
    with pytest.raises(BadInputError, match=r"part\.0\.parquet: rewritten, cut short or removed"):
        list(loader)
    assert "rewritten" in str(loader.changed_file())
    with pytest.raises(BadInputError, match=r"memory://.*: not a whole parquet file"):
        KJTLoader(uploaded, 40, device="cpu")
    files.rm("/bucket/train/.merlin/schema.json")
    with pytest.raises(BadInputError, match=r"memory://.*schema\.json: not a schema.*\n.*schema="):
        KJTLoader(uploaded, 40, device="cpu")


def test_the_example_trains_from_a_source_of_its_own(tmp_path) -> None:
    """By a file elsewhere, of which only the installed package is known."""
    example = ROOT / "examples" / "own_source.py"
    shutil.copy(example, tmp_path)
    status, printed = run(tmp_path, "python own_source.py 2>&1 | grep -v is_fx_tracing")
    assert status == 0
    losses = [float(line.rpartition(" ")[2]) for line in printed.splitlines()]
    assert len(losses) == 6, printed
    assert max(losses[1:]) < 0.7 < losses[0]
