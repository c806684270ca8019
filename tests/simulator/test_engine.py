"""The engine for GPUs, with NumPy and numba's simulator instead of a card.

What it writes is what the cpu engine writes: the workflow byte for byte, the parquet row for row
and row group for row group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, LocalCluster, get_worker

from nvt_torchrec.base.device import DeviceError
from nvt_torchrec.base.errors import BadRowError, OutputError
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.etl.commands.check import check
from nvt_torchrec.etl.engines.device import device_blocks as blocks
from nvt_torchrec.etl.engines.device import gpu_workers as device
from nvt_torchrec.etl.engines.device.device_blocks import count_block
from nvt_torchrec.etl.engines.workers import Workers
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.units import counting
from nvt_torchrec.etl.units.unit_plan import DividedBlock
from nvt_torchrec.etl.units.writing import LostRowsError
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.columns import DENSE_TRANSFORMS
from nvt_torchrec.formats.splits import SPLITS, RowRule
from tests.etl.extended import add, copy_of, make_base, write_days
from tests.etl.runs import QUARANTINE, parts, settings, tree
from tests.logs import random_rows, write_day
from tests.simulator.device import SimulatedDevice

SPEC = FeatureSpec(
    "label",
    (DenseColumn("d0"), DenseColumn("d1", fill=70_000)),
    (
        CategoricalColumn("c0"),
        CategoricalColumn("c1", freq_threshold=3),
        CategoricalColumn("c2", max_table_size=9, num_buckets=2),
        CategoricalColumn("c3", hash_buckets=7),
        CategoricalColumn("c4", vocabulary="shared"),
        CategoricalColumn("c5", vocabulary="shared"),
    ),
    "log_normalize",
)
GROUP_ROWS = 5


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    options = {"processes": False, "dashboard_address": None, "threads_per_worker": 1}
    with LocalCluster(n_workers=2, **options) as workers, Client(workers) as opened:
        yield opened


@pytest.fixture(autouse=True)
def gpus(client: Client, monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    """Let the engine ``dask`` find workers with a card."""
    return simulate(client, monkeypatch)


def simulate(client: Client, monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    """Put simulated cards into the place of those of the client's workers."""

    @contextlib.contextmanager
    def cluster(*_: Any) -> Iterator[tuple[Client, bool]]:
        yield client, True

    simulated = SimulatedDevice()
    monkeypatch.setattr("nvt_torchrec.etl.engines.cluster.cluster", cluster)
    monkeypatch.setattr(device, "make_device", lambda: simulated)
    monkeypatch.setattr(device, "gpu_memory", lambda: 1 << 30)
    # so that a block has several pieces and its part several row groups
    monkeypatch.setattr(counting, "PIECE_BYTES", 400)
    monkeypatch.setattr("nvt_torchrec.etl.units.part_files.ROW_GROUP_ROWS", GROUP_ROWS)
    return simulated


def write(raw: Path, days: int = 12, rows: int = 8) -> None:
    for day in range(days):
        own = random_rows(rows + day % 3, 7 + day, SPEC)
        own[0][1] = ["65533", "1000000", "-7", "", "2147483647"][day % 5]
        write_day(raw / f"day_{day}", own)


def wait_for_workers() -> None:
    """Wait for tasks that the workers have begun: here they do not end with the run."""
    while any(thread.name.startswith(("lane", "sync")) for thread in threading.enumerate()):
        time.sleep(0.02)


def manifest(output: Path) -> dict:
    """The manifest without what the engines' files differ in."""
    found = json.loads((output / "manifest.json").read_text())
    assert found["settings"].pop("engine")
    assert found.pop("blake2b")
    return found


def assert_same(ours: Path, expected: Path) -> None:
    for name in ("workflow", "extension", "rejected"):
        assert tree(ours / name) == tree(expected / name)
    assert manifest(ours) == manifest(expected)
    for split in SPLITS:
        for own, other in zip(parts(ours, split), parts(expected, split), strict=True):
            assert own.name == other.name
            assert own.read_bytes() == other.read_bytes()
    errors = [finding for finding in check(ours) if finding.severity == "error"]
    assert not errors, errors


def compare(directory: Path, spec: FeatureSpec = SPEC, **options: Any) -> None:
    """Run with cards, or finish such a run, and with the cpu engine; the outputs are the same."""
    run(settings(directory / "raw", directory / "ours", spec, engine="dask", **options))
    run(settings(directory / "raw", directory / "cpu", spec, **options))
    assert_same(directory / "ours", directory / "cpu")


@pytest.mark.parametrize("transform", DENSE_TRANSFORMS)
def test_as_the_cpu_engine(
    tmp_path: Path, transform: str, caplog: pytest.LogCaptureFixture
) -> None:
    spec = FeatureSpec(SPEC.label, SPEC.dense, SPEC.categorical, transform)
    write(tmp_path / "raw", *(() if transform == "log_normalize" else (3, 5)))
    # the last line has no newline, another file ends its lines with \r\n
    for day, change in (
        (0, lambda text: text[:-1]),
        (1, lambda text: text.replace(b"\n", b"\r\n")),
    ):
        path = tmp_path / "raw" / f"day_{day}"
        path.write_bytes(change(path.read_bytes()))
    with caplog.at_level("INFO"):
        compare(tmp_path, spec)
    assert caplog.text.count("kernels on the GPUs") == 1
    assert json.loads((tmp_path / "ours" / "timings.json").read_text())["seconds"]["compare"] > 0


def test_blocks_with_malformed_rows_are_parsed_by_the_host(tmp_path: Path) -> None:
    write(tmp_path / "raw", 4)
    path = tmp_path / "raw" / "day_1"
    lines = path.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b"\t", b"\tx", 1)
    path.write_bytes(b"\n".join(lines))
    compare(tmp_path, **QUARANTINE)
    messages = []
    for engine in ("dask", "cpu"):
        with pytest.raises(BadRowError) as error:
            run(settings(tmp_path / "raw", tmp_path / f"error-{engine}", SPEC, engine=engine))
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert "day_1, line 3" in messages[0]


def test_lines_longer_than_a_piece_are_parsed_by_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "raw", 3)
    path = tmp_path / "raw" / "day_0"
    lines = path.read_bytes().split(b"\n")
    lines[3] = lines[3].replace(b"\t", b"\t" + b"0" * 500, 1).replace(b"0\t", b"07\t", 1)
    path.write_bytes(b"\n".join(lines))
    on_card, copy = [], blocks.copy_encoded
    monkeypatch.setattr(blocks, "copy_encoded", lambda *of: on_card.append(of) or copy(*of))
    compare(tmp_path)
    assert len(on_card) == 3  # of 4 parts


def test_a_failed_write_leaves_no_part_and_resume_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "raw", 4)
    write_units, written = blocks.write_units, []

    def full_at_first(*given):
        written.append(given)
        if len(written) == 1:
            raise OutputError("no space left", "free some")
        return write_units(*given)

    monkeypatch.setattr(Workers, "_agrees", lambda *_: True)
    monkeypatch.setattr(blocks, "write_units", full_at_first)
    with pytest.raises(OutputError, match="no space left"):
        compare(tmp_path)
    wait_for_workers()
    left = [path.name for path in (tmp_path / "ours").rglob("*.parquet*")]
    assert not [name for name in left if name.startswith(".")]
    before = len(written)
    monkeypatch.setattr(device, "count_block", None)  # it is fitted already
    compare(tmp_path)
    assert 0 < len(written) - before <= 5


def test_an_interrupted_fit_counts_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "raw", 11)
    count, seen, failed = device.count_block, [], []

    def counted(card, block, spec, **options):
        if "day_9" in block.path and not failed:
            failed.append(block)
            raise MemoryError("simulated")
        seen.append(Path(block.path).name)
        return count(card, block, spec, **options)

    monkeypatch.setattr(device, "count_block", counted)
    with pytest.raises(DeviceError, match=r"the GPU failed: .*simulated\n.*--engine cpu --restart"):
        compare(tmp_path)
    wait_for_workers()
    runs = {path.name for path in (tmp_path / "ours").rglob("*.npz")}
    assert runs
    seen.clear()
    compare(tmp_path)
    assert "day_9" in seen
    assert len(seen) < 10


def test_vocabularies_that_do_not_fit_are_encoded_by_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "raw", 3)
    monkeypatch.setattr(device, "gpu_memory", lambda: 100)
    compare(tmp_path)
    assert "vocabularies take" in caplog.text


def test_a_day_is_added(tmp_path: Path) -> None:
    """Extensions count and encode on the card, too."""
    write_days(tmp_path / "raw", dict.fromkeys(range(4), 12))
    base = make_base(tmp_path / "raw", tmp_path / "base")
    outputs = []
    for engine in ("dask", "cpu"):
        (tmp_path / engine).mkdir()
        outputs.append(copy_of(base, tmp_path / engine))
        add(outputs[-1], tmp_path / "raw" / "day_3", engine=engine)
    assert_same(*outputs)


def test_lines_that_the_card_does_not_find_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "raw", 3)
    monkeypatch.setattr(Workers, "_agrees", lambda *_: True)  # its first block is right
    monkeypatch.setattr(
        "nvt_torchrec.etl.engines.device.device_blocks.count_newlines", lambda text: 10**6
    )
    with pytest.raises(LostRowsError, match="1000000 lines, but the GPU found"):
        compare(tmp_path)


@pytest.fixture
def one_worker(client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """A worker of two threads, with a simulated card."""
    options = {"processes": False, "dashboard_address": "127.0.0.1:0"}
    with (
        LocalCluster(n_workers=1, threads_per_worker=2, **options) as worker,
        Client(worker, set_as_default=False) as opened,
    ):
        simulate(opened, monkeypatch)
        yield opened


def test_two_tasks_at_once(
    tmp_path: Path, one_worker: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share a card and a workflow, which are made once, and write what one task writes."""
    write(tmp_path / "raw")
    made: list[str] = []
    begun: dict[str, int] = {"get_worker_gpu": 0, "load_once": 0}
    both = {name: threading.Barrier(2, timeout=20) for name in begun}
    counting_begun = threading.Lock()

    def meet(name: str) -> None:
        """Wrap what the tasks begin with: the first two to call it wait for each other."""
        function = getattr(device, name)

        def called(*arguments: Any) -> Any:
            with counting_begun:
                begun[name] += 1
                is_first = begun[name] <= 2
            if is_first:
                both[name].wait()
            return function(*arguments)

        monkeypatch.setattr(device, name, called)

    def note(name: str) -> None:
        make = getattr(device, name)

        def slowly(*arguments: Any) -> Any:
            made.append(name)
            time.sleep(0.2)  # the other task comes, too
            return make(*arguments)

        monkeypatch.setattr(device, name, slowly)

    monkeypatch.setattr(Workers, "_agrees", lambda *_: True)  # a comparison is a task alone
    for name in begun:
        meet(name)
    for name in ("Gpu", "DeviceWorkflow"):
        note(name)
    compare(tmp_path)
    assert made == ["Gpu", "DeviceWorkflow"]
    assert min(begun.values()) >= 2


@pytest.mark.parametrize(
    ("items", "threads", "sizes"),
    [
        # while a task of 32 is in its middle, the other one ends
        (160, [2], [16, 32, 32, 32, 32, 16]),
        (160, [1], [32, 32, 32, 32, 32]),
        (100, [1] * 8, [13, 13, 13, 13, 13, 13, 13, 9]),
        (100, [2] * 8, [5] * 8 + [9] * 6 + [6]),
        (20, [2], [7, 13]),
        (1, [2, 2], [1]),
        (0, [2], []),
        (3, [], [3]),
    ],
)
def test_how_blocks_are_divided(items: int, threads: list[int], sizes: list[int]) -> None:
    workers = {f"tcp://{i}": {"nthreads": count} for i, count in enumerate(threads)}
    found = SimpleNamespace(scheduler_info=lambda n_workers: {"workers": workers})
    tasks = device.divide_tasks(range(items), found)
    assert [len(task) for task in tasks] == sizes
    assert [item for task in tasks for item in task] == list(range(items))


def test_groups_of_blocks_are_those_that_runs_are_merged_into() -> None:
    found = list(device._group_neighbours([0, 1, 2, 5, 6, 7, 8, 9, 15, 16]))
    assert found == [[0, 1, 2], [5, 6, 7], [8, 9], [15], [16]]
    assert list(device._group_neighbours([])) == []


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        FeatureSpec("label", (), (CategoricalColumn("s", raw="string"),)),
        FeatureSpec(
            "label",
            (DenseColumn("a"), DenseColumn("b", transform="normalize")),
            (CategoricalColumn("c"),),
        ),
    ],
)
def test_what_is_taken(spec: FeatureSpec) -> None:
    block = Block("day_0", 0, 10, "day_0")
    assert device.takes(spec, [block]) == (spec is SPEC)
    rule = RowRule("share", (2**62, 2**63))
    assert not device.takes(SPEC, [block, DividedBlock("day_0", 10, 20, "day_0", rule, 0)])


def _other_moments(card, block, spec, **options):
    """One worker's card is right."""
    run = count_block(card, block, spec, **options)
    return dataclasses.replace(run, moments=run.moments + get_worker().name)


def _failing(*arguments, **options):
    raise ValueError("illegal memory access")


@pytest.mark.parametrize(
    ("name", "faulty", "match"),
    [
        ("count_block", _other_moments, r"counting on the GPU differs from the CPU's: moments\[0"),
        ("encode_unit", _failing, r"encoding on the GPU differs .*illegal memory access"),
    ],
)
def test_a_card_that_differs_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog, name: str, faulty, match: str
) -> None:
    write(tmp_path / "raw", days=3)
    monkeypatch.setattr(device, name, faulty)
    compare(tmp_path)
    assert re.search(match, caplog.text)
    assert caplog.text.count("differs from the CPU's") == 1
    with pytest.raises(DeviceError, match=match):
        run(settings(tmp_path / "raw", tmp_path / "no", SPEC, engine="dask", strict_gpu=True))
