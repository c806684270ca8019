"""The benchmark of a block's stages on a card runs, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.gpu.etl import of_block
from benchmarks.gpu.worker import GpuSettings
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.etl.engines.device.blocks import Card
from tests.logs import CRITEO, write_log
from tests.simulator.device import SimulatedDevice


def test_each_stage_of_a_block_is_timed(tmp_path: Path) -> None:
    write_log(tmp_path / "raw", [6])
    path = tmp_path / "raw" / "day_0"
    block = Block(str(path), 0, path.stat().st_size, "day_0")
    args = GpuSettings(device="cpu", data=tmp_path / "data", seconds=0)
    args.data.mkdir()
    results = list(of_block(args, Card(SimulatedDevice()), block, CRITEO, torch.device("cpu")))
    stages = [result["system"].removeprefix("on the card: ") for result in results]
    names = "read into pinned memory, upload, parse, count, encode, copy back, write"
    assert ", ".join(stages) == names
    assert all(result["rows_per_s"] > 0 for result in results)
    assert list(args.data.iterdir()) == []
