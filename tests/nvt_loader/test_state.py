"""Resuming: the next batches are exactly those that were not trained."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import SchemaError, SettingsError
from nvt_torchrec.nvt_loader import KJTLoader
from tests.nvt_loader.data import WRITER, make_columns, write_split
from tests.nvt_loader.helper import all_ranks, assert_same, global_batches, limit_rows


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    root = tmp_path_factory.mktemp("split")
    write_split(root, {"train": [300, 450, 7]})  # 757 rows: 7 full steps of 96 and one of 85
    return root / "train"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, train):
    """Several blocks and shuffling windows in these 757 rows."""
    limit_rows(monkeypatch, train, BLOCK=200, DECODE=16)
    monkeypatch.setattr("nvt_torchrec.nvt_loader.memory.FIRST_ROWS", 100)
    monkeypatch.setattr("nvt_torchrec.nvt_loader.memory.MIN_DECODE_ROWS", 16)


def through_json(state):
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("trained", range(9))
def test_resume_is_the_rest_of_the_run(train, trained, shuffle):
    options = {"shuffle": shuffle, "shuffle_window": 288, "seed": 5, "device": "cpu"}
    loader = KJTLoader(train, 96, **options)
    list(loader)  # epoch 0
    epoch_1 = list(loader)
    epoch_2 = list(loader)
    stopped = KJTLoader(train, 96, **options)
    stopped.set_epoch(1)
    iterator = iter(stopped)
    for _ in range(min(trained + 2, 8)):  # the pipeline draws two batches more than it trains
        next(iterator)
    state = through_json(stopped.state_dict(trained_steps=trained))
    resumed = KJTLoader(train, 96, **options)
    resumed.load_state_dict(state)
    again = resumed.state_dict()
    if trained == 8:
        assert (again["epoch"], again["step"]) == (2, 0)
    else:
        assert (again["epoch"], again["step"]) == (1, trained)
        assert_same(list(resumed), epoch_1[trained:])
    assert_same(list(resumed), epoch_2)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("shards", [None, 3])  # those of the state count
@pytest.mark.parametrize(("before", "after"), [(1, 2), (8, 1), (3, 2), (2, 3), (16, 1)])
def test_resume_on_another_world_size(train, before, after, shards, shuffle):
    options = {"shuffle": shuffle, "shuffle_window": 288}
    first = options | {"virtual_shards": shards}
    expected = global_batches(all_ranks(train, 96 // before, before, **first))
    loaders = all_ranks(train, 96 // before, before, **first)
    for loader in loaders:
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
    states = [loader.state_dict(trained_steps=3) for loader in loaders]
    assert all(state == states[0] for state in states)
    resumed = all_ranks(train, 96 // after, after, **options)
    for loader in resumed:
        loader.load_state_dict(states[0])
    assert_same(global_batches(resumed), expected[3:])


def test_what_a_state_counts(train):
    loader = KJTLoader(train, 96, device="cpu")
    assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (0, 0)
    assert len(json.dumps(loader.state_dict())) < 500
    iterator = iter(loader)
    next(iterator), next(iterator), next(iterator)
    assert loader.state_dict()["step"] == 3
    assert loader.state_dict(trained_steps=1)["step"] == 1
    with pytest.raises(SettingsError, match=r"trained_steps = 4 .* steps 0 to 3 were drawn"):
        loader.state_dict(trained_steps=4)
    loader.load_state_dict(loader.state_dict(trained_steps=2))
    assert loader.state_dict()["step"] == 2
    next(iter(loader))
    assert loader.state_dict()["step"] == 3
    with pytest.raises(SettingsError, match=r"trained_steps = 1 .* steps 2 to 3 were drawn"):
        loader.state_dict(trained_steps=1)  # counted from the resume, not from the epoch's start
    list(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["step"]) == (2, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 48}, "global_batch = 48, but 96 in the loader state"),
        ({"shuffle": True}, "shuffle = rows, but none"),
        ({"seed": 1}, "seed = 1, but 0"),
        ({"drop_last": True}, "drop_last = True, but False"),
    ],
)
def test_other_settings_are_refused(train, options, message):
    state = KJTLoader(train, 96, device="cpu").state_dict()
    other = KJTLoader(train, **{"batch_size": 96, "device": "cpu", **options})
    with pytest.raises(SettingsError, match=message):
        other.load_state_dict(state)


def test_another_version_is_refused(train):
    loader = KJTLoader(train, 96, device="cpu")
    with pytest.raises(SettingsError, match="version 0, not 2"):
        loader.load_state_dict(loader.state_dict() | {"version": 0})
    with pytest.raises(SettingsError, match="version None"):
        loader.load_state_dict({})


def write_rows(path, first_row, rows, **options):
    columns = make_columns(first_row, rows, table_sizes=(10, 50, 200), dense=3, seed=0)
    pq.write_table(pa.table(columns), path, **{**WRITER, **options})


def test_changed_data_is_refused(tmp_path):
    write_split(tmp_path, {"train": [100, 100]})
    train = tmp_path / "train"
    state = KJTLoader(train, 10, device="cpu").state_dict()

    def refusal() -> str:
        with pytest.raises(SchemaError, match="have changed since") as caught:
            KJTLoader(train, 10, device="cpu").load_state_dict(state)
        return str(caught.value)

    write_rows(train / "part.2.parquet", 200, 5)
    assert "files 2 → 3" in refusal()
    assert "rows 200 → 205" in refusal()
    (train / "part.2.parquet").unlink()
    KJTLoader(train, 10, device="cpu").load_state_dict(state)
    write_rows(train / "part.1.parquet", 100, 100, row_group_size=50)
    assert "row_groups 4 → " not in refusal()  # as many row groups of other sizes
    assert "digest" in refusal()
