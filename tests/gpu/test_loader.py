"""The loader's batches on a GPU: values as the CPU's, waiting, memory, copies."""

from __future__ import annotations

import concurrent.futures
import gc
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from nvt_torchrec.formats.vectors import StoredVectors
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.nvt_loader.cuda import builders as gpu
from tests.nvt_loader.data import add_vector, row_numbers, write_split
from tests.nvt_loader.helper import assert_same
from tests.nvt_loader.weighted import write_weighted

ROWS = 60_000


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("split")
    write_split(path, {"train": [ROWS]}, row_group_rows=8192)
    return path / "train"


@pytest.fixture(params=["PinnedBuilder", "CudfBuilder"])
def loader_on(request: pytest.FixtureRequest, device, monkeypatch: pytest.MonkeyPatch):
    """Makes loaders that decode on the CPU, or by libcudf; in a rehearsal as the CPU does."""
    if device.type == "cuda":
        if request.param == "CudfBuilder":
            request.getfixturevalue("rapids")
        kind = getattr(gpu, request.param)

        def chosen(dataset, on: torch.device) -> type:
            return kind if on == device else gpu.choose_builder(dataset, on)

        monkeypatch.setattr("nvt_torchrec.nvt_loader.loader.choose_builder", chosen)
    return lambda path, batch, **options: KJTLoader(path, batch, device=device, **options)


@pytest.mark.parametrize("lists", [(), ("cat_0", "cat_2"), ("cat_0", "cat_1", "cat_2")])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches(loader_on, device: torch.device, tmp_path: Path, lists, shuffle: bool) -> None:
    write_split(tmp_path, {"train": [1000, 0, 300]}, multi_hot=lists)
    found = list(loader_on(tmp_path / "train", 64, shuffle=shuffle))
    assert {batch.labels.device.type for batch in found} == {device.type}
    assert {batch.sparse_features.lengths().device.type for batch in found} == {device.type}
    expected = KJTLoader(tmp_path / "train", 64, device="cpu", shuffle=shuffle)
    assert_same([batch.to(torch.device("cpu")) for batch in found], list(expected))


@pytest.mark.parametrize("lists", [(), ("cat_0",)])
def test_vectors(device: torch.device, tmp_path: Path, lists) -> None:
    """They are gathered in pinned memory and copied, in blocks of a few steps."""
    schema = write_split(tmp_path, {"train": [5000, 0, 300]}, multi_hot=lists)
    add_vector(tmp_path, schema, StoredVectors("text", 384), keys=900)
    found = list(KJTLoader(tmp_path / "train", 64, shuffle=True, device=device))
    assert {batch.dense_vectors.device.type for batch in found} == {device.type}
    expected = KJTLoader(tmp_path / "train", 64, device="cpu", shuffle=True)
    assert_same([batch.to(torch.device("cpu")) for batch in found], list(expected))


def test_no_batch_waits_for_the_device(loader_on, device: torch.device, tmp_path: Path) -> None:
    if device.type == "cpu":
        pytest.skip("torch tells what waits for a GPU")
    write_split(tmp_path, {"train": [4000]}, row_group_rows=1000)
    loader = loader_on(tmp_path / "train", 64)
    list(loader)  # the constants of each batch size are made once, by blocking copies
    batches = iter(loader)
    next(batches)  # the loader's own thread may wait, and the mode is the process's
    concurrent.futures.wait(batches._ahead)
    torch.cuda.set_sync_debug_mode("error")
    try:
        total = sum(batch.labels.sum() + batch.dense_features.sum() for batch in batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(torch.isfinite(total))


@pytest.mark.parametrize("batch", [1, 1000, 65_536])
def test_batch_sizes(loader_on, split: Path, batch: int) -> None:
    limit = {"limit_batches": 300} if batch == 1 else {}
    found = [one.to(torch.device("cpu")) for one in loader_on(split, batch, **limit)]
    assert_same(found, list(KJTLoader(split, batch, device="cpu", **limit)))


def test_labels_and_weights(loader_on, tmp_path: Path) -> None:
    """They are copied to the device with the block, and carried by the batches."""
    write_weighted(tmp_path, {"train": [3000, 700]}, row_group_rows=512)
    found = list(loader_on(tmp_path / "train", 256, label="bought", shuffle=True))
    expected = list(KJTLoader(tmp_path / "train", 256, device="cpu", label="bought", shuffle=True))
    assert all(one.weights.device == one.labels.device for one in found)
    moved = [one.to(torch.device("cpu")) for one in found]
    assert_same(moved, expected)
    for one, other in zip(moved, expected, strict=True):
        assert torch.equal(one.weights, other.weights)


def test_resumes_on_the_device(loader_on, split: Path) -> None:
    loader = loader_on(split, 1000, shuffle=True, seed=3)
    whole = [row_numbers(batch.dense_features.cpu()).tolist() for batch in loader]
    again = loader_on(split, 1000, shuffle=True, seed=3)
    batches = iter(again)
    for _ in range(17):
        next(batches)
    state = again.state_dict()
    resumed = loader_on(split, 1000, shuffle=True, seed=3)
    resumed.load_state_dict(state)
    assert [row_numbers(batch.dense_features.cpu()).tolist() for batch in resumed] == whole[17:]


def test_memory_is_flat(loader_on, device: torch.device, split: Path) -> None:
    """The third epoch needs no more than the second, and an epoch leaves nothing behind: neither
    what torch counts nor what it keeps, nor libcudf."""
    if device.type == "cpu":
        pytest.skip("torch counts no memory of a CPU")
    loader, peaks, left, free = loader_on(split, 500), [], [], []
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats(device)
        for batch in loader:
            total = batch.labels.sum() + batch.sparse_features.values().sum()
        del batch, total
        torch.cuda.synchronize(device)
        gc.collect()
        peaks.append(torch.cuda.max_memory_allocated(device))
        left.append(torch.cuda.memory_allocated(device))
        free.append(torch.cuda.mem_get_info(device)[0])
    assert max(peaks[2:]) <= 1.1 * peaks[1] + (1 << 20)
    assert max(left[2:]) <= left[1] + (1 << 20)
    assert min(free[2:]) >= free[1] - (64 << 20)  # others may use the device, too


def test_copies_are_made_by_the_block(loader_on, device: torch.device, split: Path) -> None:
    """Nothing is copied for a batch: ten times as many batches make no more copies."""
    many, few = (copies(loader_on(split, batch), device) for batch in (50, 500))
    for way in ("DtoH", "HtoD"):
        assert many[way] <= few[way] + ROWS // 50 / 10


def copies(loader: KJTLoader, device: torch.device) -> dict[str, int]:
    """How many copies an epoch makes from and to the device."""
    list(loader)  # constants are made once
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profile(activities=activities) as profiled:
        steps = sum(1 for _ in loader)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    assert steps == len(loader)
    names = [event.name for event in profiled.events()]
    return {way: sum(way in name for name in names) for way in ("DtoH", "HtoD")}


@pytest.mark.parametrize("lists", [(), ("cat_0", "cat_2")])
def test_merlins_batches(device: torch.device, tmp_path: Path, lists) -> None:
    """With cuDF and CuPy on the device, or pandas and NumPy and copies."""
    from nvt_torchrec.nvt_loader.merlin import MerlinLoader  # nvt_compat: not with every stack

    write_split(tmp_path, {"train": [1000, 0, 300]}, multi_hot=lists)
    loader = MerlinLoader.from_split(tmp_path / "train", 64, device=device)
    expected = list(KJTLoader(tmp_path / "train", 64, device="cpu", virtual_shards=1))
    for _ in range(2):
        found = list(loader)
        assert {batch.sparse_features.device().type for batch in found} == {device.type}
        assert_same([batch.to(torch.device("cpu")) for batch in found], expected)
