"""Blocks on the GPU hold what blocks on the CPU hold."""

from __future__ import annotations

import dataclasses
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from nvt_torchrec.base.device import DeviceError
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.nvt_loader.cuda import builders as gpu
from nvt_torchrec.nvt_loader.cuda.device_rows import DeviceRowGroup
from nvt_torchrec.nvt_loader.epoch import EpochIterator, Position
from nvt_torchrec.nvt_loader.memory import HELD_BLOCKS, estimate_device_bytes
from nvt_torchrec.nvt_loader.parquet.dataset import read_dataset
from tests import fake_cuda
from tests.nvt_loader import fake_libcudf
from tests.nvt_loader.data import write_split
from tests.nvt_loader.helper import assert_same, limit_rows

LISTS = ("cat_0", "cat_2")


@pytest.fixture
def libcudf(monkeypatch):
    """Lets loaders on the CPU decode as on a GPU, with what stands for libcudf."""
    fake_libcudf.install(monkeypatch)
    return fake_libcudf


@pytest.mark.parametrize("shuffle", [False, True])
def test_row_groups_on_the_device_are_within_the_budget(tmp_path, libcudf, monkeypatch, shuffle):
    """Counted while the next blocks are read; what a plan of the tables leaves to the loader."""
    write_split(tmp_path, {"train": [6400]}, row_group_rows=100)
    limit_rows(monkeypatch, tmp_path / "train", DEVICE_BLOCK=800)
    held = []

    def counting(ahead, *given):
        wait(ahead, *given)
        groups = ahead.decode.__self__._groups.values()
        held.append(100 * sum(group.reading is not None for group in groups))

    ahead = sys.modules["nvt_torchrec.nvt_loader.cuda.cudf_reader"].ReadAhead
    wait = ahead.finish
    monkeypatch.setattr(ahead, "finish", counting)
    options = {"shuffle": shuffle, "shuffle_window": 800, "device": "cpu"}
    loader = KJTLoader(tmp_path / "train", 400, **options)
    list(loader)
    width = read_dataset(tmp_path / "train").batch_row_bytes
    maximum = estimate_device_bytes(
        loader._dataset, loader._measure_demand(), loader._divide_memory(), on_device=True
    )
    blocks = HELD_BLOCKS * loader._divide_memory().block_rows
    assert max(held) >= 1600
    assert width * (max(held) + blocks) <= maximum
    assert loader.device_bytes == 0, "it is on a CPU"


def test_an_error_ahead_is_raised_where_its_rows_come(tmp_path, libcudf, monkeypatch):
    """With the batches before it, as without reading ahead."""
    write_split(tmp_path, {"train": [300]}, row_group_rows=100)
    limit_rows(monkeypatch, tmp_path / "train", DEVICE_BLOCK=100)
    read = fake_libcudf.read_parquet

    def failing(options, *given, **named):
        if options.groups == [[2]]:
            raise RuntimeError("a page is damaged")
        return read(options, *given, **named)

    monkeypatch.setattr(libcudf.io.parquet, "read_parquet", failing)
    batches = iter(KJTLoader(tmp_path / "train", 50, device="cpu", virtual_shards=1))
    assert [len(next(batches).labels) for _ in range(4)] == [50] * 4
    for _ in range(2):
        with pytest.raises(BadInputError, match="a page is damaged"):
            next(batches)


@pytest.mark.parametrize("lists", [(), LISTS, ("cat_0", "cat_1", "cat_2")])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("step", "batch", "ranks"), [(0, 64, {}), (7, 64, {}), (0, 15, {"world_size": 4, "rank": 3})]
)
def test_the_same_batches_as_a_cpu(tmp_path, monkeypatch, lists, shuffle, step, batch, ranks):
    """The first block is compared with the host's, also in the middle of an epoch."""
    write_split(tmp_path, {"train": [3000, 0, 300]}, row_group_rows=100, multi_hot=lists)
    limit_rows(monkeypatch, tmp_path / "train", DEVICE_BLOCK=640, BLOCK=640)
    monkeypatch.setattr("nvt_torchrec.nvt_loader.memory.FIRST_ROWS", 320)
    options = {"shuffle": shuffle, "device": "cpu", "shuffle_window": 640, **ranks}

    def batches():
        loader = KJTLoader(tmp_path / "train", batch, **options)
        if step:
            state = {**loader.state_dict(), "step": step}
            loader.load_state_dict(state)
        return list(loader)

    expected = batches()
    fake_libcudf.install(monkeypatch)
    built, build = [], fake_libcudf.Blocks.build
    monkeypatch.setattr(
        fake_libcudf.Blocks, "build", lambda *given: built.append(given[1]) or build(*given)
    )
    found = batches()
    assert_same(found, expected)
    assert sum(built) >= len(found)


def wrong_id(block):
    block.ids.view(-1)[-1] += 1
    return block


def nan(block):
    block.dense.view(-1)[0] = float("nan")
    return block


def wide(block):
    return dataclasses.replace(block, labels=block.labels.double())


def broken(block):
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (wrong_id, r"ids\[\d+, 2, \d+\] is \d+ instead of \d+ \(1 of \d+ values differ\)"),
        (nan, r"dense\[0, 0, 0\] is nan instead of"),
        (wide, r"labels is float64 .* instead of float32"),
        (broken, "RuntimeError: no kernel image"),
    ],
)
def test_a_device_that_differs_is_not_used(tmp_path, monkeypatch, caplog, shuffle, fault, what):
    """One warning; the host makes this epoch's blocks and those of later ones."""
    write_split(tmp_path, {"train": [3000]}, row_group_rows=100)
    limit_rows(monkeypatch, tmp_path / "train", DEVICE_BLOCK=640, BLOCK=640)
    monkeypatch.setattr("nvt_torchrec.nvt_loader.memory.FIRST_ROWS", 320)
    options = {"shuffle": shuffle, "device": "cpu", "shuffle_window": 640}
    loader = KJTLoader(tmp_path / "train", 64, **options)
    expected = [list(loader) for _ in range(2)]
    fake_libcudf.install(monkeypatch, strict=False)
    build = gpu.build_on_device
    monkeypatch.setattr(gpu, "build_on_device", lambda *given: fault(build(*given)))
    loader = KJTLoader(tmp_path / "train", 64, **options)
    for batches in expected:
        assert_same(list(loader), batches)
    (warning,) = caplog.messages
    assert re.search(f"decoding by libcudf differs from the CPU's: .*{what}", warning)
    with pytest.raises(DeviceError, match=what):
        list(KJTLoader(tmp_path / "train", 64, strict_gpu=True, **options))


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error encountered at: pool.hpp:1: cudaErrorX",
        "parallel_for failed: cudaErrorIllegalAddress: x",
    ],
)
def test_what_the_device_lacks_is_not_the_files_fault(tmp_path, libcudf, monkeypatch, message):
    write_split(tmp_path, {"train": [100]})

    def read_parquet(*_, **__):
        raise RuntimeError(message)

    monkeypatch.setattr(libcudf.io.parquet, "read_parquet", read_parquet)
    with pytest.raises(DeviceError, match=r"RuntimeError: .*cudaError"):
        list(KJTLoader(tmp_path / "train", 64, device="cpu"))


def test_threads_touch_the_device_of_their_rank_only(tmp_path, libcudf, monkeypatch):
    """The one that builds blocks, and the one that reads ahead."""
    write_split(tmp_path, {"train": [100]})
    touched, device = fake_cuda.install(monkeypatch), torch.device("cuda:3")
    monkeypatch.setattr(gpu, "get_stream", lambda device, _: fake_cuda.Stream(device))
    builder = gpu.PinnedBuilder(read_dataset(tmp_path / "train"), device)
    block = SimpleNamespace(
        to=lambda _: block, tensors={}, iterate_batches=lambda steps, _: iter([steps])
    )
    batch = SimpleNamespace(labels=torch.zeros(1))
    produced = iter([(batch, block)] * 3)
    ignore = [lambda _: None] * 2
    found = EpochIterator(produced, builder, None, Position(0), *ignore)
    assert list(found) == [batch] * 3
    assert touched == {3}
    touched.clear()
    reader = SimpleNamespace(decode=None, read=lambda groups: None)
    read_ahead = sys.modules[fake_libcudf.CUDF_READER].ReadAhead
    ahead = read_ahead(reader, fake_cuda.Stream(device), device)
    group = DeviceRowGroup(0, decoded=SimpleNamespace(tensors=[]))
    ahead.finish([group], fake_cuda.Stream(device))
    ahead.close()
    assert touched == {3}


@pytest.mark.parametrize("error", [MemoryError("std::bad_alloc"), RuntimeError("CUDA error: x")])
def test_a_device_that_fails_later(tmp_path, libcudf, monkeypatch, error):
    """One sentence, and what it advises works."""
    write_split(tmp_path, {"train": [3000]}, row_group_rows=100)
    limit_rows(monkeypatch, tmp_path / "train", DEVICE_BLOCK=640, BLOCK=640)
    expected = list(KJTLoader(tmp_path / "train", 64, device="cpu"))
    build, built = gpu.build_on_device, []

    def failing(*given):
        built.append(given)
        if len(built) > 1:
            raise error
        return build(*given)

    monkeypatch.setattr(gpu, "build_on_device", failing)
    with pytest.raises(DeviceError, match=rf"the GPU failed: .*{error}\n.*--cpu_decoding"):
        list(KJTLoader(tmp_path / "train", 64, device="cpu"))
    built.clear()
    assert_same(list(KJTLoader(tmp_path / "train", 64, device="cpu", cpu_decoding=True)), expected)
    assert not built
