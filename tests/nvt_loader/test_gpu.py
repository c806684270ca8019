"""Blocks on the GPU hold what blocks on the CPU hold."""

from __future__ import annotations

import importlib.util

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from clicklog.errors import SchemaError
from nvt_loader import KJTLoader, gpu
from nvt_loader.cpu import CpuBlocks
from nvt_loader.device_rows import DeviceRows, build_on_device
from nvt_loader.layout import read_layout
from tests.nvt_loader.data import write_split
from tests.nvt_loader.helper import assert_same

LISTS = ("cat_0", "cat_2")
WEIGHTS = {"cat_0": "cat_0_weight"}


class TensorBlocks(CpuBlocks):
    """What a GPU does with its columns, after another decoder, in CPU memory."""

    def __init__(self, layout, *_):
        super().__init__(layout)
        self.decode = self._decode
        self._checker = gpu.DeviceChecker(layout, torch.device("cpu"))

    def _decode(self, piece, rows):
        layout, schema = self._layout, self._layout.schema
        group = layout.row_groups[piece.row_group]
        table = pq.ParquetFile(layout.files[group.file]).read_row_group(group.index)
        table = table.slice(piece.begin, piece.end - piece.begin)
        for first in range(0, len(table), rows):
            part = table.slice(first, rows).combine_chunks()
            single = [name for name in schema.categorical if name not in schema.multi_hot]
            chunk = DeviceRows(
                len(part),
                self._stack(part, [schema.label, *schema.dense], np.float32),
                self._stack(part, single, np.int64),
                tuple(self._lists(part, name) for name in schema.multi_hot),
            )
            yield self._checker.checked(chunk, group.file)

    @staticmethod
    def _stack(table, names, dtype):
        columns = [np.asarray(table[name]).astype(dtype) for name in names]
        empty = np.empty((len(table), 0), dtype)
        return torch.from_numpy(np.stack(columns, 1) if columns else empty)

    def _lists(self, table, name):
        column = pa.concat_arrays(table[name].chunks)
        weights = self._layout.weights.get(name)
        if weights:
            weights = pa.concat_arrays(table[weights].chunks).values.to_numpy().copy()
            weights = torch.from_numpy(weights)
        offsets = torch.from_numpy(column.offsets.to_numpy().copy())
        return offsets, torch.from_numpy(column.values.to_numpy().copy()), weights

    def build(self, steps, batch, sources):
        parts = [source.reader.take(steps * source.width) for source in sources]
        device = torch.device("cpu")
        return build_on_device(self._layout, parts, sources, steps, batch, device)


@pytest.mark.parametrize("lists", [(), LISTS, ("cat_0", "cat_1", "cat_2")])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("batch_size", "world_size", "shards"), [(64, 1, None), (15, 4, 6)])
def test_the_operators_of_a_gpu_make_the_same_batches(
    tmp_path, monkeypatch, lists, shuffle, batch_size, world_size, shards
):
    write_split(tmp_path, {"train": [1000, 0, 300]}, multi_hot=lists)
    options = {"shuffle": shuffle, "world_size": world_size, "virtual_shards": shards}
    options |= {"rank": world_size - 1, "device": "cpu", "weights": WEIGHTS if lists else None}
    expected = list(KJTLoader(tmp_path / "train", batch_size, **options))
    monkeypatch.setattr("nvt_loader.loader.choose_blocks", TensorBlocks)
    found = list(KJTLoader(tmp_path / "train", batch_size, **options))
    assert_same(found, expected)
    assert sum(batch.labels.shape[0] for batch in found) >= 1300 // world_size


def test_ids_outside_their_tables_on_the_device(tmp_path, monkeypatch):
    write_split(tmp_path, {"train": [300]}, multi_hot=LISTS)
    monkeypatch.setattr("nvt_loader.loader.choose_blocks", TensorBlocks)
    for sizes, column in (([10, 20, 200], "cat_1"), ([10, 50, 90], "cat_2")):
        options = {"table_sizes": sizes, "device": "cpu"}
        with pytest.raises(SchemaError, match=rf"column {column} holds id .* outside its table"):
            list(KJTLoader(tmp_path / "train", 64, **options))
        hashed = list(KJTLoader(tmp_path / "train", 64, hash_indices=True, **options))
        monkeypatch.undo()
        assert_same(hashed, list(KJTLoader(tmp_path / "train", 64, hash_indices=True, **options)))
        monkeypatch.setattr("nvt_loader.loader.choose_blocks", TensorBlocks)


def test_a_cpu_gets_cpu_blocks(tmp_path):
    write_split(tmp_path, {"train": [1]})
    layout = read_layout(tmp_path / "train")
    assert type(gpu.choose_blocks(layout, torch.device("cpu"))).__name__ == "CpuBlocks"


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KINDS = ["PinnedBlocks", "CudfBlocks"]


def gpu_blocks(kind: str):
    if kind == "CudfBlocks" and importlib.util.find_spec("pylibcudf") is None:
        pytest.skip("needs RAPIDS")
    return lambda layout, device, _threads: getattr(gpu, kind)(layout, device)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lists", [(), LISTS])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_on_the_gpu(tmp_path, monkeypatch, kind, lists, shuffle):
    write_split(tmp_path, {"train": [1000, 0, 300]}, multi_hot=lists)
    train = tmp_path / "train"
    options = {"shuffle": shuffle, "weights": WEIGHTS if lists else None}
    monkeypatch.setattr("nvt_loader.loader.choose_blocks", gpu_blocks(kind))
    found = list(KJTLoader(train, 64, device="cuda", **options))
    assert all(batch.labels.is_cuda and batch.sparse_features.lengths().is_cuda for batch in found)
    monkeypatch.undo()
    expected = KJTLoader(train, 64, device="cpu", **options)
    assert_same([batch.to(torch.device("cpu")) for batch in found], list(expected))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_no_batch_waits_for_the_device(tmp_path, monkeypatch, kind):
    write_split(tmp_path, {"train": [4000]}, row_group_rows=1000)
    monkeypatch.setattr("nvt_loader.loader.choose_blocks", gpu_blocks(kind))
    loader = KJTLoader(tmp_path / "train", 64, device="cuda")
    list(loader)  # the constants of each batch size are made once, by blocking copies
    batches = iter(loader)
    next(batches)  # the loader's own thread may wait, and the mode is the process's
    while not all(future.done() for future in batches._ahead):
        pass
    torch.cuda.set_sync_debug_mode("error")
    try:
        total = sum(batch.labels.sum() + batch.dense_features.sum() for batch in batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(torch.isfinite(total))
