"""The benchmark of a block's stages on a card runs, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

from benchmarks.stages import of_block
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.etl.engines.device.blocks import Card
from tests.logs import CRITEO, write_log
from tests.simulator.device import SimulatedDevice


def test_each_stage_of_a_block_is_timed(tmp_path: Path) -> None:
    write_log(tmp_path / "raw", [6])
    path = tmp_path / "raw" / "day_0"
    block = Block(str(path), 0, path.stat().st_size, "day_0")
    work = tmp_path / "work"
    stages = list(of_block(Card(SimulatedDevice()), block, CRITEO, work, seconds=0))
    names = "read into pinned memory, upload, parse, count, encode, copy back, write"
    assert ", ".join(name for name, *_ in stages) == names
    assert all((rows, size) == (6, block.end) and took > 0 for _, rows, size, took in stages)
    assert not work.exists()
