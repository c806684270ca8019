"""The benchmark of the stages runs, and leaves nothing behind; the comparison finds differences."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.gpu.card import compared
from benchmarks.gpu.etl import of_block
from benchmarks.gpu.worker import GpuSettings
from nvt_torchrec.clicklog.readers.raw import Block
from nvt_torchrec.etl.engines.device.blocks import Card
from tests.logs import CRITEO, write_log
from tests.simulator import fake_libcudf
from tests.simulator.device import SimulatedDevice


@pytest.fixture
def block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Block:
    fake_libcudf.install(monkeypatch)
    write_log(tmp_path / "raw", [6])
    path = tmp_path / "raw" / "day_0"
    return Block(str(path), 0, path.stat().st_size, "day_0")


def test_each_stage_is_timed(tmp_path: Path, block: Block) -> None:
    args = GpuSettings(device="cpu", data=tmp_path / "data", seconds=0)
    args.data.mkdir()
    found = list(of_block(args, Card(SimulatedDevice()), block, CRITEO, torch.device("cpu")))
    stages = [result["system"].removeprefix("on the card: ") for result in found]
    assert stages == ["read into pinned memory", "upload", "parse", "count", "encode", "write"]
    assert all(result["rows_per_s"] > 0 for result in found)
    assert list(args.data.iterdir()) == []


def test_the_card_is_compared_with_the_host(block: Block, tmp_path: Path) -> None:
    found = list(compared(Card(SimulatedDevice()), block, CRITEO, tmp_path))
    steps = [result["system"].removeprefix("the card as the host: ") for result in found]
    assert steps == ["parse", "count and merge 8 blocks at once", "encode", "write"]
    metadata = pq.read_metadata(tmp_path / "split" / "train" / "_metadata")
    assert metadata.num_rows == 12  # of both parts


def _parsed_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = Card.parse

    def changed(*arguments):
        rows = parse(*arguments)
        rows.dense[3, 2] += 1
        return rows

    monkeypatch.setattr(Card, "parse", changed)


def _counted_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from nvt_torchrec.etl.engines.device import blocks as device_blocks

    merge = device_blocks.merge_on_device

    def changed(device, several):
        counts = merge(device, several)
        return dataclasses.replace(counts, counts=counts.counts + 1)

    monkeypatch.setattr(device_blocks, "merge_on_device", changed)


def _encoded_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from nvt_torchrec.workflows.compiled.device import DeviceWorkflow

    transform = DeviceWorkflow.transform

    def changed(*arguments):
        encoded = transform(*arguments)
        encoded.ids[25, 5] += 1
        return encoded

    monkeypatch.setattr(DeviceWorkflow, "transform", changed)


def _written_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from nvt_torchrec.etl.engines.device import parquet as device_parquet

    monkeypatch.setattr(device_parquet, "ROW_GROUP_ROWS", 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_parsed_wrong, r"parse: integers: 1 of 78 differ, first at \(3, 2\)"),
        (_counted_wrong, "count: how often they occur, cat_0: "),
        (_encoded_wrong, r"encode: ids: 1 of 156 differ, first at \(25, 5\)"),
        (_written_wrong, r"write: row groups of \[4, 2\] rows, the host's \[6\]"),
    ],
)
def test_what_differs_is_named(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change, message: str
) -> None:
    change(monkeypatch)
    with pytest.raises(SystemExit, match=f"wrong: {message}"):
        list(compared(Card(SimulatedDevice()), block, CRITEO, tmp_path))
