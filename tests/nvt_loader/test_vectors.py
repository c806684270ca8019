"""Vectors in batches: each row has that of its number, whatever the order of the rows."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nvt_torchrec.base.errors import BadInputError, SchemaError, SettingsError
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.vectors import VALUES, VECTORS, StoredVectors
from nvt_torchrec.nvt_loader import KJTLoader, memory
from nvt_torchrec.nvt_loader.cuda import builders
from nvt_torchrec.nvt_loader.parquet.dataset import read_dataset
from tests.nvt_loader.data import add_history, add_vector, write_split
from tests.nvt_loader.helper import all_ranks, assert_same, global_batches, read_rows, rows_of
from tests.nvt_loader.test_histories import MAX_EVENTS, RECENT
from tests.nvt_loader.test_multi_hot import assert_derived, bags

TEXT, PICTURE = StoredVectors("text", 5), StoredVectors("picture", 3, "float16")
ROWS, KEYS = 780, 40
PARAMS = ["flat", "lists", "histories", "both"]


@pytest.fixture(scope="module", params=PARAMS)
def train(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    root = tmp_path_factory.mktemp("split")
    lists = ("cat_0",) if request.param in ("lists", "both") else ()
    schema = write_split(root, {"train": [500, 250, 30]}, multi_hot=lists)
    if request.param in ("histories", "both"):
        schema = add_history(root, schema, RECENT, keys=12)
    schema = add_vector(root, schema, TEXT, keys=KEYS)
    add_vector(root, schema, PICTURE, keys=KEYS, seed=1)
    return root / "train"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    root = tmp_path / "split"
    schema = write_split(root, {"train": [500, 280]})
    add_vector(root, schema, TEXT, keys=KEYS)
    return root / "train"


def inputs_of(train: Path) -> dict[int, list[float]]:
    """The values and indicators of each row, by the rows and files alone."""
    found: dict[int, list[float]] = {}
    for vectors in (TEXT, PICTURE):
        directory = train.parent / VECTORS / vectors.name
        parts = sorted(directory.iterdir(), key=lambda part: int(part.name))
        values = np.concatenate([np.load(part / VALUES) for part in parts]).astype(np.float32)
        for row, columns in read_rows(train).items():
            number = columns[vectors.pointer]
            own = [*values[number], 1.0] if number >= 0 else [0.0] * vectors.num_inputs
            found.setdefault(row, []).extend(own)
    return found


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("batch_size", "world_size", "piece"), [(64, 1, None), (7, 3, 900)])
def test_batches_hold_the_vectors_of_their_rows(
    train: Path, batch_size: int, world_size: int, piece: int | None, shuffle: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Beside their own ids, lists and events; in small pieces of blocks as in whole ones."""
    rows, expected, seen = read_rows(train), inputs_of(train), []
    options = {"shuffle": shuffle, "shuffle_window": 256, "max_events": MAX_EVENTS}
    for loader in all_ranks(train, batch_size, world_size, **options):
        monkeypatch.setattr(memory, "BLOCK_BYTES", piece or memory.BLOCK_BYTES)
        for batch in loader:
            assert_derived(batch.sparse_features)
            assert batch.dense_vectors.dtype == torch.float32
            assert batch.dense_vectors.shape == (len(batch.labels), 10)
            assert batch.dense_vectors.is_contiguous()
            parts = batch.sparse_features.to_dict()
            for i, row in enumerate(rows_of([batch])):
                assert batch.dense_vectors[i].tolist() == expected[row]
                for name in ("cat_0", "cat_1", "cat_2"):
                    ids = rows[row][name]
                    assert bags(parts[name], i) == (ids if isinstance(ids, list) else [ids])
                assert batch.labels.reshape(-1)[i] == rows[row]["label"]
            seen += rows_of([batch])
        monkeypatch.undo()
    assert sorted(seen) == list(range(ROWS))
    missing = sum(values[5] == 0 for values in expected.values())
    assert 40 < missing < 120


def test_ids_and_events_are_those_without_vectors(train: Path) -> None:
    """Reading vectors changes nothing else."""
    options = {"shuffle": True, "seed": 3, "max_events": MAX_EVENTS, "device": "cpu"}
    without = list(KJTLoader(train, 48, read_vectors=False, **options))
    assert without[0].dense_vectors is None
    assert_same(without, list(KJTLoader(train, 48, **options)))


def test_a_state_resumes_with_the_same_vectors(train: Path) -> None:
    """Bit for bit, on another number of ranks; a loader without them reads other data."""
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
    other = KJTLoader(train, 48, device="cpu", read_vectors=False, **options)
    with pytest.raises(SchemaError, match="the data have changed since the loader state"):
        other.load_state_dict(stopped.state_dict())
    again = pickle.loads(pickle.dumps(KJTLoader(train, 48, device="cpu", **options)))
    assert_same(list(again), whole)


def test_batches_move_with_their_vectors(copied: Path) -> None:
    """To a device, and to the streams that use them."""
    batch = next(iter(KJTLoader(copied, 64, device="cpu")))
    moved = batch.to(torch.device("meta"))
    assert moved.dense_vectors.device.type == "meta"
    names = {name for name, part in vars(moved).items() if part is not None}
    assert names == {"dense_features", "sparse_features", "labels", "dense_vectors"}


def test_a_gpu_gets_vectors_from_pinned_memory(copied: Path, monkeypatch) -> None:
    """libcudf decodes on the device, which the stores are not on."""
    monkeypatch.setattr(builders.importlib.util, "find_spec", lambda name: True)
    device, dataset = torch.device("cuda", 0), read_dataset(copied)
    assert builders.choose_builder(dataset, device) is builders.PinnedBuilder
    without = read_dataset(copied, read_vectors=False)
    assert builders.choose_builder(without, device) is builders.CudfBuilder


def test_rows_in_memory(copied: Path) -> None:
    """With the directory of the vectors; without it there is none beside them."""
    schema = TableSchema.read(copied)
    table = pq.read_table(copied, schema=schema.arrow)
    options = {"schema": schema, "device": "cpu", "virtual_shards": 1}
    loader = KJTLoader(table, 64, vectors=copied.parent, **options)
    assert_same(list(loader), list(KJTLoader(copied, 64, device="cpu", virtual_shards=1)))
    with pytest.raises(SettingsError, match=r"next to the data\n  -> give vectors=.*read_vec"):
        KJTLoader(table, 64, **options)
    assert next(iter(KJTLoader(table, 64, read_vectors=False, **options))).dense_vectors is None
    with pytest.raises(SettingsError, match="vectors = 3"):
        KJTLoader(table, 64, vectors=3, **options)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("value", [KEYS, 2**31 - 1, -2])
def test_numbers_outside_the_store(copied: Path, value: int, shuffle: bool) -> None:
    """Else memory of anything would be a row's vector; the error names data and number."""
    table = pq.read_table(copied / "part.1.parquet")
    numbers = np.array(table["text.vector"])
    numbers[200] = value
    index = table.column_names.index("text.vector")
    pq.write_table(
        table.set_column(index, "text.vector", pa.array(numbers)), copied / "part.1.parquet"
    )
    with pytest.raises(SchemaError, match=rf"train: vector {value} of text, which has {KEYS}"):
        list(KJTLoader(copied, 64, shuffle=shuffle, device="cpu"))
    wide = table.set_column(index, "text.vector", pa.array(numbers.astype(np.int64)))
    pq.write_table(wide, copied / "part.1.parquet")
    with pytest.raises(SchemaError, match=r"column text\.vector is int64, not int32"):
        KJTLoader(copied, 64, device="cpu")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite(copied: Path, value: float) -> None:
    """One step of training would spread it over the whole model; the error names the file."""
    file = copied.parent / VECTORS / "text" / "0" / VALUES
    values = np.load(file)
    values[7, 2] = value
    np.save(file, values)
    with pytest.raises(SchemaError, match=r"text/0/values\.npy: a value of vector 7 is not finite"):
        list(KJTLoader(copied, 64, device="cpu"))


def test_a_store_that_is_changed_while_it_is_read(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut short, the next access would end the process; a file renamed over it is not read."""
    monkeypatch.setattr(memory, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(memory, "FIRST_ROWS", 64)
    file = copied.parent / VECTORS / "text" / "0" / VALUES
    whole = list(KJTLoader(copied, 64, device="cpu"))
    batches = iter(KJTLoader(copied, 64, device="cpu"))
    first = next(batches)
    other = file.with_name("other.npy")
    np.save(other, np.zeros_like(np.load(file)))
    other.rename(file)
    assert_same([first, *batches], whole)
    np.save(file, np.load(file) + 1)

    batches = iter(KJTLoader(copied, 64, device="cpu"))
    next(batches)
    with open(file, "rb+") as opened:
        opened.truncate(300)
    with pytest.raises(BadInputError, match=r"values\.npy: was written to or truncated"):
        list(batches)
    with pytest.raises(BadInputError, match=r"values\.npy: is not an \.npy file"):
        KJTLoader(copied, 64, device="cpu")
    shutil.rmtree(file.parents[1])
    with pytest.raises(BadInputError, match="text: the values of vector text: No such file"):
        KJTLoader(copied, 64, device="cpu")
    KJTLoader(copied, 64, device="cpu", read_vectors=False)


def test_merlins_loader(copied: Path) -> None:
    """It reads the numbers, and ours the vectors of them."""
    merlin = pytest.importorskip("nvt_torchrec.nvt_loader.merlin")
    found = {}
    for rank in range(2):
        loader = merlin.MerlinLoader.from_split(copied, 48, rank=rank, world_size=2, device="cpu")
        for batch in loader:
            for row, values in zip(rows_of([batch]), batch.dense_vectors.tolist(), strict=True):
                found[row] = values
    expected = KJTLoader(copied, 48, device="cpu")
    for batch in expected:
        for row, values in zip(rows_of([batch]), batch.dense_vectors.tolist(), strict=True):
            assert found.pop(row) == values
    assert not found
    without = merlin.MerlinLoader.from_split(copied, 48, device="cpu", read_vectors=False)
    assert next(iter(without)).dense_vectors is None


def test_their_memory_on_a_gpu_is_counted(copied: Path) -> None:
    """Tables get what the loaders leave: four blocks of some steps, or of one that is larger."""
    found = []
    for batch_size, read_vectors in ((64, False), (64, True), (10**6, False), (10**6, True)):
        loader = KJTLoader(copied, batch_size, device="cpu", read_vectors=read_vectors)
        taken = loader._dataset, loader._measure_demand(), loader._divide_memory()
        found.append(memory.estimate_device_bytes(*taken, on_device=False))
    pointers = 4 * memory.HELD_BLOCKS * 10**6
    assert found[1] - found[0] >= memory.HELD_BLOCKS * memory.BLOCK_BYTES
    assert found[3] - found[2] == memory.HELD_BLOCKS * 4 * 6 * 10**6 + pointers
