"""Blocks on the GPU hold what blocks on the CPU hold."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from nvt_loader import KJTLoader, gpu
from nvt_loader.blocks import Block, fill_cpu
from nvt_loader.layout import read_layout
from tests.nvt_loader.data import write_split
from tests.nvt_loader.helper import assert_same


@pytest.mark.parametrize("share", [slice(0, 5), slice(1, 4)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_filling_from_device_columns_is_filling_from_arrays(tmp_path, share, shuffle):
    schema = write_split(tmp_path, {"train": [1]})
    rng = np.random.default_rng(0)
    parts, device_parts = [], []
    for rows in (7, 1, 12):  # four steps of five rows
        floats = rng.random((rows, 4), dtype=np.float32)
        ids = rng.integers(0, 9, (rows, 3), dtype=np.int32)
        parts.append([*np.asfortranarray(floats).T, *np.asfortranarray(ids).T])
        device_parts.append([torch.from_numpy(floats), torch.from_numpy(ids)])
    order = rng.permutation(20) if shuffle else None
    blocks = [Block.empty(4, 8, schema) for _ in range(2)]
    for block in blocks:
        for tensor in (block.labels, block.dense, block.ids):
            tensor.zero_()
    fill_cpu(blocks[0], 2, parts, share, order)
    gpu.CudfBlocks.fill(blocks[1], 2, device_parts, share, order)
    assert torch.equal(blocks[0].labels, blocks[1].labels)
    assert torch.equal(blocks[0].dense, blocks[1].dense)
    assert torch.equal(blocks[0].ids, blocks[1].ids)
    assert blocks[0].labels.count_nonzero() == 4 * (share.stop - share.start)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["PinnedBlocks", "CudfBlocks"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_on_the_gpu(tmp_path, monkeypatch, kind, shuffle):
    if kind == "CudfBlocks" and importlib.util.find_spec("pylibcudf") is None:
        pytest.skip("needs RAPIDS")
    write_split(tmp_path, {"train": [1000, 0, 300]})
    train = tmp_path / "train"
    monkeypatch.setattr("nvt_loader.loader.choose_blocks", getattr(gpu, kind))
    found = list(KJTLoader(train, 64, shuffle=shuffle, device="cuda"))
    assert all(batch.labels.is_cuda and batch.sparse_features.lengths().is_cuda for batch in found)
    monkeypatch.undo()
    expected = KJTLoader(train, 64, shuffle=shuffle, device="cpu")
    assert_same([batch.to(torch.device("cpu")) for batch in found], list(expected))


def test_a_cpu_gets_cpu_blocks(tmp_path):
    write_split(tmp_path, {"train": [1]})
    layout = read_layout(tmp_path / "train")
    assert type(gpu.choose_blocks(layout, torch.device("cpu"))).__name__ == "CpuBlocks"
