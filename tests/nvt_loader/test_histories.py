"""Histories in batches: the newest events before each row, whatever the order of the rows."""

from __future__ import annotations

import dataclasses
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import BadInputError, SchemaError, SettingsError
from nvt_torchrec.formats.histories import StoredHistory
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.nvt_loader import KJTLoader, memory
from tests.nvt_loader.data import add_history, write_split
from tests.nvt_loader.helper import all_ranks, assert_same, global_batches, read_rows, rows_of
from tests.nvt_loader.test_multi_hot import assert_derived, bags

RECENT, SEEN = StoredHistory("recent", ("cat_1", "cat_2")), StoredHistory("seen", ("cat_1",))
ROWS, MAX_EVENTS = 780, 7


@pytest.fixture(scope="module", params=[(), ("cat_0",)], ids=["flat", "lists"])
def train(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    root = tmp_path_factory.mktemp("split")
    schema = write_split(root, {"train": [500, 250, 30]}, multi_hot=request.param)
    add_history(root, schema, RECENT, keys=12)
    add_history(root, dataclasses.replace(schema, histories=(RECENT,)), SEEN, keys=3)
    return root / "train"


@pytest.fixture
def copied(train: Path, tmp_path: Path) -> Path:
    return shutil.copytree(train.parent, tmp_path / "split") / "train"


def past_of(rows: dict[int, dict], history: StoredHistory) -> dict[int, list[list[int]]]:
    """The newest events before each row, by the rows alone."""
    past, found = defaultdict(list), {}
    for row in sorted(rows):
        key = rows[row][history.pointers[0]]
        found[row] = [[event[c] for event in past[key][-MAX_EVENTS:]] for c in history.columns]
        if key >= 0:
            past[key].append(rows[row])
        else:
            found[row] = [[] for _ in history.columns]
    return found


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("batch_size", "world_size", "piece"), [(64, 1, None), (7, 3, 900)])
def test_batches_hold_the_newest_events(
    train: Path, batch_size: int, world_size: int, piece: int | None, shuffle: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Events of another row, in another order, or of the row itself would be a past that was not.

    In small pieces of blocks as in whole ones.
    """
    rows, seen = read_rows(train), []
    past = {history.name: past_of(rows, history) for history in (RECENT, SEEN)}
    options = {"shuffle": shuffle, "shuffle_window": 256, "max_events": MAX_EVENTS}
    for loader in all_ranks(train, batch_size, world_size, **options):
        monkeypatch.setattr(memory, "BLOCK_BYTES", piece or memory.BLOCK_BYTES)
        for batch in loader:
            assert_derived(batch.sparse_features)
            parts = batch.sparse_features.to_dict()
            assert list(parts)[3:] == ["recent.cat_1", "recent.cat_2", "seen.cat_1"]
            for i, row in enumerate(rows_of([batch])):
                of_row = [*past["recent"][row], *past["seen"][row]]
                assert [bags(parts[key], i) for key in list(parts)[3:]] == of_row
                for name in ("cat_0", "cat_1"):
                    ids = rows[row][name]
                    assert bags(parts[name], i) == (ids if isinstance(ids, list) else [ids])
                assert batch.labels.reshape(-1)[i] == rows[row]["label"]
            seen += rows_of([batch])
        monkeypatch.undo()
    assert sorted(seen) == list(range(ROWS))
    assert max(len(lists[0]) for lists in past["recent"].values()) == MAX_EVENTS


def test_a_state_resumes_with_the_same_events(train: Path) -> None:
    """Bit for bit, on another number of ranks; with other events it is another run."""
    options = {"shuffle": True, "seed": 3, "max_events": MAX_EVENTS, "shuffle_window": 300}
    whole = global_batches(all_ranks(train, 48, 1, **options))
    stopped = KJTLoader(train, 48, device="cpu", **options)
    iterator = iter(stopped)
    for _ in range(9):
        next(iterator)
    resumed = all_ranks(train, 24, 2, **options)
    for loader in resumed:
        loader.load_state_dict(stopped.state_dict(trained_steps=7))
    assert_same(global_batches(resumed), whole[7:])
    other = KJTLoader(train, 48, device="cpu", **options | {"max_events": 5})
    with pytest.raises(SettingsError, match="max_events = 5, but 7 in the loader state"):
        other.load_state_dict(stopped.state_dict())
    without = KJTLoader(train, 48, device="cpu", shuffle=True, max_events=0)
    assert next(iter(without)).sparse_features.keys() == ["cat_0", "cat_1", "cat_2"]
    assert not without.schema.histories


def test_rows_in_memory(train: Path) -> None:
    """With the directory of the events; without it there is none beside them."""
    table = pq.read_table(train, schema=TableSchema.read(train).arrow)
    options = {"schema": TableSchema.read(train), "device": "cpu", "virtual_shards": 1}
    loader = KJTLoader(table, 64, histories=train.parent, **options)
    assert_same(list(loader), list(KJTLoader(train, 64, device="cpu", virtual_shards=1)))
    with pytest.raises(SettingsError, match="not stored next to the data\n  -> give histories="):
        KJTLoader(table, 64, **options)
    with pytest.raises(SettingsError, match="max_events = -1"):
        KJTLoader(table, 64, max_events=-1, **options)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("recent.events", 2**31 - 1, "2147483647 events of key"),
        ("recent.events", -1, "-1 events of key"),
        ("recent.key", 12, "key 12 of history recent, which has 12"),
        ("recent.key", -7, "key -7 of history"),
    ],
)
def test_pointers_outside_the_store(
    copied: Path, column: str, value: int, message: str, shuffle: bool
) -> None:
    """Else memory of anything would be a row's past; the error names part, row and value."""
    table = pq.read_table(copied / "part.1.parquet")
    values = np.array(table[column])
    values[200] = value
    index = table.column_names.index(column)
    pq.write_table(table.set_column(index, column, pa.array(values)), copied / "part.1.parquet")
    with pytest.raises(SchemaError, match=rf"train: .*{message}"):
        list(KJTLoader(copied, 64, shuffle=shuffle, device="cpu"))
    index = table.set_column(index, column, pa.array(values.astype(np.int64)))
    pq.write_table(index, copied / "part.1.parquet")
    with pytest.raises(SchemaError, match=f"column {column} is int64, not int32"):
        KJTLoader(copied, 64, device="cpu")


def test_ids_outside_their_table(copied: Path) -> None:
    """Else a lookup would end the process; the error names the file and the place in it."""
    file = copied.parent / "_histories" / "seen" / "2" / "cat_1.npy"
    ids = np.load(file)
    for value in (50, -1):
        ids[3] = value
        np.save(file, ids)
        with pytest.raises(SchemaError, match=rf"cat_1\.npy: id {value} at position 3, .* 50 rows"):
            list(KJTLoader(copied, 64, device="cpu"))
    shutil.rmtree(file.parents[2])
    with pytest.raises(BadInputError, match="the events of history recent: No such file"):
        KJTLoader(copied, 64, device="cpu")
