"""Runs on disk: whatever order, end or loss they meet, each block is counted once."""

from __future__ import annotations

import time
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.engines import runs as cpu_runs
from nvt_torchrec.etl.engines.runs import Runs, SortedRun
from nvt_torchrec.etl.units.counting import count, merge, merge_moments

_WORDS = pa.array(["", "a", "é", "a", "日本"], pa.string())


def _run(block: int) -> SortedRun:
    """What a block holds: hex, int and string values that tell blocks apart."""
    rng = np.random.default_rng(block)
    return SortedRun(
        rows=block + 1,
        nulls=np.array([block, 1, 0]),
        moments=np.array([[[block + 1.0, rng.normal(), rng.normal(), rng.random()]]]),
        counts=[
            count([rng.integers(0, 50, 20, dtype=np.uint32)]),
            count([np.array([-block, 7, 2**53 - block])]),
            count([_WORDS.take(rng.integers(0, 5, 3))]),
        ],
    )


def _open(directory: Path, blocks: int, key: str = "key") -> Runs:
    runs = Runs(directory, blocks, 3, key)
    runs.compact()
    return runs


def _fill(runs: Runs, order: list[int] | None = None) -> None:
    for block in order if order is not None else runs.missing:
        runs.add(block, _run(block))
        _settle(runs)


def _settle(runs: Runs) -> None:
    """Wait for the disk, and merge what is complete by then, until nothing is left to do."""
    files = -1
    while files != len(runs.files):
        files = len(runs.files)
        runs.compact()


def _total(runs: Runs) -> tuple:
    """Everything the runs hold together, comparable."""
    files = runs.files
    counts = [merge(file.counts(v) for file in files) for v in range(3)]
    plain = [Counter(dict(zip(c.values.tolist(), c.counts.tolist(), strict=True))) for c in counts]
    rows = sum(int(file.array("rows")) for file in files)
    nulls = sum(file.array("nulls") for file in files).tolist()
    moments = merge_moments([one for file in files for one in file.array("moments")]).tolist()
    return rows, nulls, moments, plain


def _expected(blocks: int) -> tuple[int, list[int], list[Counter]]:
    runs = [_run(block) for block in range(blocks)]
    counters = []
    for v in range(3):
        counter: Counter = Counter()
        for run in runs:
            values, counts = run.counts[v].values.tolist(), run.counts[v].counts.tolist()
            counter.update(dict(zip(values, counts, strict=True)))
        counters.append(counter)
    return sum(run.rows for run in runs), sum(run.nulls for run in runs).tolist(), counters


@pytest.fixture(params=[2, 8])
def fan_in(request, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(cpu_runs, "FAN_IN", request.param)
    return request.param


@pytest.mark.parametrize("blocks", [1, 7, 8, 9, 70])
def test_whatever_the_order_few_files_remain(tmp_path: Path, fan_in: int, blocks: int) -> None:
    order = np.random.default_rng(blocks).permutation(blocks).tolist()
    runs = _open(tmp_path / "shuffled", blocks)
    _fill(runs, order)
    digits = sum(map(int, np.base_repr(blocks, fan_in)))  # one file for each unit of each digit
    assert len(list((tmp_path / "shuffled").glob("*.npz"))) == len(runs.files) == digits
    assert runs.missing == []
    rows, nulls, moments, counters = _total(runs)
    assert (rows, nulls, counters) == _expected(blocks)
    straight = _open(tmp_path / "straight", blocks)
    _fill(straight)
    assert _total(straight)[2] == moments  # to the last bit
    again = _open(tmp_path / "shuffled", blocks)
    assert again.missing == []
    assert _total(again) == _total(runs)


def test_runs_of_other_blocks_are_not_used(tmp_path: Path) -> None:
    _fill(_open(tmp_path, 3))
    assert _open(tmp_path, 3).missing == []
    assert _open(tmp_path, 3, "another").missing == [0, 1, 2]
    assert list(tmp_path.glob("*.npz")) == []


def test_threads_read_a_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since Python 3.12 a ZipFile that two threads read gives them each other's bytes."""
    runs = _open(tmp_path, 1)
    _fill(runs)
    original, reading, maximum = zipfile.ZipFile.read, [], []

    def read(archive: zipfile.ZipFile, name: str) -> bytes:
        reading.append(name)
        time.sleep(0.005)  # for others to begin
        maximum.append(len(reading))
        reading.remove(name)
        return original(archive, name)

    monkeypatch.setattr(zipfile.ZipFile, "read", read)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(runs.files[0].counts, [0, 1, 2] * 4))
    assert {*maximum} == {1}
    for number, column in enumerate(found):
        assert column.counts.tolist() == _run(0).counts[number % 3].counts.tolist()


def test_a_damaged_run_is_an_error_that_names_it(tmp_path: Path) -> None:
    runs = _open(tmp_path, 1)
    _fill(runs)
    path = tmp_path / "0-1.npz"
    data = bytearray(path.read_bytes())
    at = data.index(_run(0).counts[0].values.tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadInputError, match=r"0-1\.npz: damaged"):
        runs.files[0].counts(0)
    path.write_bytes(data[:100])
    with pytest.raises(BadInputError, match=r"0-1\.npz: damaged"):
        _total(_open(tmp_path, 1))
