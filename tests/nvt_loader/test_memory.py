"""``loader_memory`` bounds what a rank holds, at any world size."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.nvt_loader import KJTLoader, memory
from nvt_torchrec.nvt_loader.parquet.dataset import read_dataset
from nvt_torchrec.nvt_loader.parquet.row_chunks import Buffers
from nvt_torchrec.nvt_loader.plan import Plan
from tests.nvt_loader.data import write_split


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    root = tmp_path_factory.mktemp("split")
    write_split(root, {"train": [40000]}, row_group_rows=5000)
    return root / "train"


@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("shards", [1, 8, 64])
@pytest.mark.parametrize("world_size", [1, 3, 8, 16, 64, 512])
def test_what_every_rank_holds(train, world_size, shards, threads):
    """Counted from the plan: blocks, the windows that are decoded at a time, chunks ahead."""
    dataset, size, batch = read_dataset(train), 8 << 20, 64
    width = dataset.batch_row_bytes
    for window in (1, 4096, 1 << 16, 1 << 20):
        plan = Plan(1 << 24, batch * world_size, shards, window_rows=window)
        for rank in {0, world_size // 2, world_size - 1}:
            demand = memory.Demand.measure_rank(
                plan, rank, world_size, shuffled=True, threads=threads
            )
            try:
                budget = memory.divide_memory(dataset, size, demand)
            except SettingsError:
                assert window > 4096 or world_size > 64
                continue
            steps = plan.window_steps
            spans = sorted(plan.list_spans(rank, world_size), key=lambda span: span.width)[
                -threads:
            ]
            decoded = steps * sum(span.width for span in spans)
            shuffled = steps * max(span.end - span.begin for span in spans)
            held = memory.HELD_BLOCKS * steps * batch + decoded + shuffled
            shards_read = len(plan.list_spans(rank, world_size))
            held += memory.HELD_CHUNKS * shards_read * budget.decode_rows
            assert width * held <= size


def test_the_default_grows_as_needed(train):
    """Up to four times; beyond that the user decides."""
    dataset = read_dataset(train)
    names = [f"c{i}" for i in range(1500)]
    schema = dataclasses.replace(
        dataset.schema, dense=tuple(names), categorical=tuple(names), table_sizes=(9,) * 1500
    )
    wide = dataclasses.replace(dataset, schema=schema)
    for on_device, usual in ((False, memory.LOADER_MEMORY), (True, memory.DEVICE_MEMORY)):
        for batch, enough in ((64, True), (4096, True), (1 << 20, False)):
            demand = memory.Demand(batch, shards=16)
            if not enough:
                maximum = f"loader_memory = {4 * usual >> 20} MiB is too little"
                with pytest.raises(SettingsError, match=maximum):
                    memory.divide_memory(wide, None, demand, on_device=on_device)
                continue
            budget = memory.divide_memory(wide, None, demand, on_device=on_device)
            held = memory.count_held_rows(demand, budget, whole=on_device)
            assert wide.batch_row_bytes * held <= 4 * usual
            assert budget.block_rows >= batch
    with pytest.raises(SettingsError, match="256 MiB is too little"):  # what is given is a bound
        memory.divide_memory(wide, 256 << 20, memory.Demand(4096, shards=16))
    narrow = memory.Demand(64, shards=8)
    usual_budget = memory.divide_memory(dataset, memory.LOADER_MEMORY, narrow)
    assert memory.divide_memory(dataset, None, narrow) == usual_budget


def test_rows_that_other_ranks_share_count(train):
    """64 ranks on 8 virtual shards: each decodes eight times the rows that it delivers."""
    options = {"shuffle": True, "loader_memory": 150_000, "device": "cpu"}
    with pytest.raises(SettingsError, match=r"too little[\s\S]*virtual_shards"):
        KJTLoader(train, 512, rank=5, world_size=64, **options)
    loader = KJTLoader(train, 512, rank=5, world_size=64, virtual_shards=64, **options)
    assert next(iter(loader)).labels.shape == (512,)


def test_a_buffer_that_another_thread_takes():
    class Racing(collections.deque):
        def popleft(self):
            found = super().popleft()
            self.clear()
            return found

    buffers = Buffers()
    for sizes in ([100, 100], [10, 100]):
        buffers._free = Racing(np.empty(size, np.uint8) for size in sizes)
        assert len(buffers.take(100)) == 100
        buffers._free = Racing(np.empty(size, np.uint8) for size in sizes)
        assert len(buffers.take(1_000_000)) == 1_000_000
