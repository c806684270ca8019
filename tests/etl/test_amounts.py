"""Aggregates of numbers of a log's own columns, against a loop over all pairs of rows."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from nvt_torchrec.etl.events import timeline, window_picks
from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings, ExtendSettings
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.inference.encoder import Encoder
from tests.etl.amount_logs import (
    Purchase,
    expected,
    frame_of,
    make_purchases,
    spec_of,
    write,
)
from tests.etl.event_logs import BY_DAYS, DAY, parquet, transformed
from tests.etl.extended import content, differences
from tests.etl.findings import bad

EVENTS = {
    "at once": "",
    "as they arrive": 'from = "arrived"',
    "by the day": 'cut = "day"\nknown = "1h"',
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of events, and queues that grow."""
    monkeypatch.setattr(timeline, "CHUNK_ROWS", 64)
    monkeypatch.setattr(window_picks, "_FIRST_NODES", 8)


def write_days(folder: Path, log: list[Purchase]) -> list[list[Purchase]]:
    """Write a file for each day; return the rows of each."""
    folder.mkdir()
    days = []
    for day, rows in itertools.groupby(log, key=lambda purchase: purchase.row.time // DAY):
        days.append([*rows])
        write(folder / f"day_{day}.csv", days[-1])
    return days


def written(output: Path, splits: tuple[str, ...]) -> dict[str, np.ndarray]:
    parts = [parquet(output, split) for split in splits]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def assert_values(output: Path, there: dict[str, np.ndarray], values: list[dict]) -> None:
    for name in values[0]:
        made = transformed(output, values, name)
        np.testing.assert_allclose(there[name], made, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("events", EVENTS.values(), ids=EVENTS)
def test_values_in_a_run_an_extension_and_at_inference(tmp_path: Path, events: str) -> None:
    """Those of all pairs of rows; in the evening before, too, where a day is cut off."""
    log = make_purchases(260, 4, seed=21)
    days = write_days(tmp_path / "log", log)
    spec = spec_of(tmp_path, BY_DAYS, events)
    once, output = tmp_path / "once", tmp_path / "out"
    run(EtlSettings(str(tmp_path / "log"), once, spec, engine="cpu"))
    values = expected(spec, log, log, events)
    last = len(days[3])
    assert_values(once, written(once, ("train",)), values[:-last])
    assert_values(once, written(once, SPLITS[1:]), values[-last:])
    run(EtlSettings(str(tmp_path / "log"), output, spec, days=frozenset({0, 1}), engine="cpu"))
    for day in (2, 3):
        encoder = Encoder.load(output / "workflow")  # of this morning
        before = content(output)
        extend(ExtendSettings(output, str(tmp_path / f"log/day_{day}.csv"), engine="cpu"))
        there = written(output, SPLITS[1:])
        begin = sum(map(len, days[:day]))
        assert_values(output, there, values[begin : begin + len(days[day])])
        if "day" in events:  # the same bits
            dense, _ = encoder.encode(frame_of(days[day]))
            for name, column in zip(spec.dense_names, dense.T, strict=True):
                np.testing.assert_array_equal(there[name], column.numpy(), err_msg=name)
        if day == 2:
            extend(ExtendSettings(output, undo=True))
            undone = {n: d for n, d in content(output).items() if not n.startswith(".previous")}
            assert differences(before, undone) == []
            extend(ExtendSettings(output, str(tmp_path / f"log/day_{day}.csv"), engine="cpu"))
    assert bad(output) == []
    # what is kept day by day is what a run at once keeps
    kept = {
        name: data
        for name, data in content(output).items()
        if "/events" in name and not name.startswith(".previous")
    }
    of_once = content(once)
    assert [
        name for name, data in kept.items() if name.endswith(".npy") and of_once[name] != data
    ] == []
