"""What a block does while it has a lane of the card: nothing that the host can do without one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.etl.engines.device import device_blocks as blocks
from nvt_torchrec.etl.engines.device.device_blocks import Gpu, count_block, encode_unit, merge_runs
from nvt_torchrec.etl.engines.runs import FAN_IN
from nvt_torchrec.etl.units import counting
from nvt_torchrec.etl.units.unit_plan import Unit
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.rows import UNLIMITED
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.compiled.device import DeviceWorkflow
from nvt_torchrec.workflows.vocabulary import fit_vocabulary
from nvt_torchrec.workflows.writer import Fitted, write_workflow
from tests.simulator.device import SimulatedDevice


def spec_of(categories: int) -> FeatureSpec:
    columns = tuple(CategoricalColumn(f"c{j}") for j in range(categories))
    return FeatureSpec("label", (DenseColumn("d0"), DenseColumn("d1")), columns, "log_normalize")


#: Functions of the host by the modules that call them.
HOST_WORK = {
    "count_newlines": blocks,
    "compute_moments": blocks,
    "merge_moments": blocks,
    "to_table": blocks,
    "write_units": blocks,
    "count_block": blocks.host,
    "encode_block": blocks.host,
}


class WatchedDevice(SimulatedDevice):
    """Notes what is done, in its order. A lane that is given back loses its text.

    Attributes:
        done: Names of kernels, "wait", "lane" and "free" where a lane is taken and given back, and
            what tests add.
    """

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []
        self._pinned: list[np.ndarray] = []

    def launch(self, kernel: Any, threads: int, *arguments: Any) -> None:
        self.done.append(kernel.fn.__name__)
        super().launch(kernel, threads, *arguments)

    def pinned(self, size: int) -> np.ndarray:
        self._pinned.append(super().pinned(size))
        return self._pinned[-1]

    def download(self, array: np.ndarray) -> np.ndarray:
        self.done.append("wait")
        return super().download(array)

    def download_all(self, arrays: Any) -> list[np.ndarray]:
        self.done.append("wait")
        return super().download_all(arrays)

    def stream(self) -> Any:
        return _Stream(self)

    @contextlib.contextmanager
    def lane(self) -> Iterator[None]:
        self.done.append("lane")
        yield
        for text in self._pinned:  # as another block would
            text[:] = 0xEE
        self.done.append("free")

    def host_work(self, *, with_lane: bool) -> list[str]:
        """What the host did, with or without a lane."""
        found, held = [], False
        for name in self.done:
            if name in ("lane", "free"):
                held = name == "lane"
            elif name in HOST_WORK and held == with_lane:
                found.append(name)
        return found


class _Stream:
    """A stream, which is entered once for each block."""

    def __init__(self, device: WatchedDevice) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._entered = self._device.lane()
        self._entered.__enter__()

    def __exit__(self, *error: object) -> None:
        self._entered.__exit__(*error)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> WatchedDevice:
    """A device that notes the work of the host, too."""
    watched = WatchedDevice()

    def note(module: Any, name: str) -> None:
        function = getattr(module, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            watched.done.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, noted)

    for name, module in HOST_WORK.items():
        note(module, name)
    monkeypatch.setattr(counting, "PIECE_BYTES", 64)
    return watched


def write(path: Path, spec: FeatureSpec, *, malformed: bool = False) -> Block:
    lines = []
    for i in range(12):
        fields = [str(i % 2), str(i * 7), "" if i % 3 else "70000"]
        fields += [f"{(i * j) % 5:x}" if i % 4 else "" for j in range(len(spec.categorical))]
        lines.append("\t".join(fields) + "\n")
    if malformed:
        lines[3] = "x" + lines[3]
    path.write_text("".join(lines))
    return Block(str(path), 0, path.stat().st_size, path.name)


@pytest.fixture
def workflow(tmp_path: Path) -> Path:
    """A saved workflow of two columns."""
    spec = spec_of(2)
    vocabularies = {
        name: fit_vocabulary(np.arange(3), np.array([3, 2, 1]), columns[0], 0)
        for name, columns in spec.vocabularies.items()
    }
    statistics = {column.name: {"mean": 1.0, "std": 2.0} for column in spec.dense}
    write_workflow(tmp_path / "workflow", spec, Fitted(statistics, vocabularies))
    return tmp_path / "workflow"


def encode(card: Gpu, block: Block, workflow: Path, work: Path) -> None:
    on_host = compiled.load(workflow)
    loaded = DeviceWorkflow(card.device, on_host)
    card.device.done.clear()
    unit = Unit("train", 0, 0, block)
    encode_unit(card, unit, loaded, on_host, work, max_bad_rows=UNLIMITED)


def test_the_host_counts_without_a_lane(device: WatchedDevice, tmp_path: Path) -> None:
    spec = spec_of(2)
    card = Gpu(device)
    count_block(card, write(tmp_path / "day_0", spec), spec, max_bad_rows=0)
    # the text is the lane's
    assert device.host_work(with_lane=True) == ["count_newlines"]
    three_pieces = ["compute_moments"] * 3
    assert device.host_work(with_lane=False) == [*three_pieces, "merge_moments"]
    device.done.clear()
    block = write(tmp_path / "day_1", spec, malformed=True)
    count_block(card, block, spec, max_bad_rows=UNLIMITED)
    assert device.host_work(with_lane=True) == ["count_newlines"]
    assert device.host_work(with_lane=False) == ["count_block"]
    # the counts are uploaded on a lane
    assert device.done[-2:] == ["lane", "free"]


def test_the_host_writes_without_a_lane(
    device: WatchedDevice, tmp_path: Path, workflow: Path
) -> None:
    card, spec = Gpu(device), spec_of(2)
    encode(card, write(tmp_path / "day_0", spec), workflow, tmp_path / "work")
    assert device.host_work(with_lane=True) == ["count_newlines"]
    assert device.host_work(with_lane=False) == ["to_table", "write_units"]
    block = write(tmp_path / "day_1", spec, malformed=True)
    encode(card, block, workflow, tmp_path / "work")
    assert device.host_work(with_lane=True) == ["count_newlines"]
    assert device.host_work(with_lane=False) == ["encode_block"]


def test_lines_are_counted_while_the_card_parses(device: WatchedDevice, tmp_path: Path) -> None:
    """The card has been told to parse, and nothing has waited for it yet."""
    spec = spec_of(2)
    count_block(Gpu(device), write(tmp_path / "day_0", spec), spec, max_bad_rows=0)
    at = device.done.index("count_newlines")
    assert device.done[at - 1 : at + 2] == ["parse_lines", "count_newlines", "wait"]


@pytest.mark.parametrize("categories", [2, 26])
def test_waits_do_not_grow_with_the_columns(
    device: WatchedDevice, tmp_path: Path, categories: int
) -> None:
    spec = spec_of(categories)
    card = Gpu(device)
    block = write(tmp_path / "day_0", spec)
    runs = [count_block(card, block, spec, max_bad_rows=0) for _ in range(FAN_IN)]
    # the number of lines, whether one is malformed, missing values, and the dense columns; CuPy's
    # unique waits, too
    assert device.done.count("wait") == 4 * FAN_IN
    device.done.clear()
    merge_runs(card, runs)
    assert device.done == ["lane", "wait", "free"]


def test_waits_of_an_encoded_block(device: WatchedDevice, tmp_path: Path, workflow: Path) -> None:
    encode(Gpu(device), write(tmp_path / "day_0", spec_of(2)), workflow, tmp_path / "work")
    # the number of lines, whether one is malformed, integers beyond the table and those of one
    # column, how many ids are null or out of the vocabulary, and the columns
    assert device.done.count("wait") == 6
