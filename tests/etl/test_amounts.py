"""Aggregates of numbers of a log's own columns, against a loop over all pairs of rows."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from nvt_torchrec.base.errors import BadRowError, SettingsError
from nvt_torchrec.etl.events import partitions, timeline, window_picks
from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings, ExtendSettings
from nvt_torchrec.formats.feature_spec.aggregates import AGGREGATES, AggregateValue, EventsBefore
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
from tests.etl.event_logs import BY_DAYS, BY_TIME, DAY, HOUR, Row, parquet, transformed
from tests.etl.extended import content, differences
from tests.etl.findings import bad

if TYPE_CHECKING:
    import distributed

EVENTS = {
    "at once": "",
    "as they arrive": 'from = "arrived"',
    "by the day": 'cut = "day"\nknown = "1h"',
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of events, and queues that grow."""
    monkeypatch.setattr(timeline, "CHUNK_ROWS", 64)
    monkeypatch.setattr(partitions, "PARTITION_EVENTS", 40)
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


def test_workers_blocks_and_engines_do_not_matter(
    tmp_path: Path, dask_client: distributed.Client
) -> None:
    log = make_purchases(300, 3, seed=22)
    spec = spec_of(tmp_path, BY_TIME, 'known = "1h"')
    for name, cuts in {"one": [0, 170, 300], "many": [0, 7, 120, 200, 290, 300]}.items():
        (tmp_path / name).mkdir()
        for day, (begin, end) in enumerate(itertools.pairwise(cuts)):
            write(tmp_path / name / f"day_{day}.csv", log[begin:end])
    dask = {"engine": "dask", "scheduler": dask_client.scheduler.address}
    ways = {"one thread": {"engine": "cpu", "workers": 1}, "three": {"engine": "cpu", "workers": 3}}
    for name, options in (ways | {"dask": dask}).items():
        run(EtlSettings(str(tmp_path / "one"), tmp_path / name, spec, **options))
    run(EtlSettings(str(tmp_path / "many"), tmp_path / "blocks", spec, engine="cpu"))
    first = content(tmp_path / "one thread")
    values = {name: data for name, data in first.items() if "events" in name or "split/" in name}
    assert "workflow/events/0.previous.npy" in values
    for name in ("three", "dask"):
        there = content(tmp_path / name)
        assert differences(values, {file: there.get(file, b"") for file in values}) == []
    for split in SPLITS:
        one, many = parquet(tmp_path / "one thread", split), parquet(tmp_path / "blocks", split)
        for name in one:
            np.testing.assert_array_equal(one[name], many[name], err_msg=name)


@pytest.mark.parametrize("events", EVENTS.values(), ids=EVENTS)
def test_a_later_row_gets_what_the_etl_would_write(tmp_path: Path, events: str) -> None:
    """Each row as the only one after the log: windows move on, and late events become known."""
    log = make_purchases(160, 3, seed=23)
    write(tmp_path / "log.csv", log)
    spec, output = spec_of(tmp_path, BY_TIME, events), tmp_path / "out"
    run(EtlSettings(str(tmp_path / "log.csv"), output, spec, engine="cpu"))
    newest = max(purchase.row.time for purchase in log)
    if "day" in events:  # the state is that of the next morning
        newest = newest // DAY * DAY + DAY
    ages = [60, HOUR + 1, 2 * HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, 13 * HOUR, 2 * DAY]
    rows = []
    for i in range(24):
        user, time = ("u1", "u2", "", "new")[(i + i // 8) % 4], newest + ages[i % len(ages)] + i
        rows.append(Purchase(Row(time, user, f"i{i % 5}", 0, time), 1.0))
    values = [expected(spec, log, [row], events)[0] for row in rows]
    assert len({value["user_price_sum_12h"] for value in values}) > 2
    assert len({value["user_shop_distinct_12h"] for value in values}) > 2
    frame = frame_of(rows, times=True)
    encoder = Encoder.load(output / "workflow")
    dense, _ = encoder.encode(frame)
    there = dict(zip(spec.dense_names, dense.numpy().T, strict=True))
    assert_values(output, there, values)
    records = frame.astype(object).where(frame.notna(), None).to_dict("records")
    assert torch.equal(encoder.encode(records)[0], dense)
    assert torch.equal(encoder.encode(records[:1])[0], dense[:1])


def test_numbers_that_cannot_be_summed_up_are_malformed(tmp_path: Path) -> None:
    log = make_purchases(80, 3, seed=24)
    texts = [purchase.text() for purchase in log]
    for index, amount in {20: "1e17", 30: "-9.1e15", 40: "inf", 50: "much"}.items():
        texts[index] = texts[index].rpartition(",")[0] + f",{amount}"
    lines = ["time,user,item,price,clicked,arrived,shop,amount", *texts, ""]
    (tmp_path / "log.csv").write_text("\n".join(lines))
    spec, log_path = spec_of(tmp_path, BY_TIME, ""), str(tmp_path / "log.csv")
    with pytest.raises(BadRowError, match=r"line 22: column amount: '1e17': .* -2\^53 to 2\^53"):
        run(EtlSettings(log_path, tmp_path / "strict", spec, engine="cpu"))
    options = {"engine": "cpu", "on_bad_rows": "quarantine", "max_bad_fraction": 0.1}
    run(EtlSettings(log_path, tmp_path / "out", spec, **options))
    kept = [purchase for i, purchase in enumerate(log) if i not in (20, 30, 40, 50)]
    values = expected(spec, kept, kept, "")
    there = written(tmp_path / "out", SPLITS)
    in_order = np.concatenate([parquet(tmp_path / "out", split)["price"] for split in SPLITS])
    assert len(in_order) == len(kept)
    assert sorted(there["user_amount_sum"]) == pytest.approx(
        sorted(transformed(tmp_path / "out", values, "user_amount_sum")), abs=1e-6
    )


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ("sum", 'write "sum(…)" with the name of a column'),
        ("distinct", 'write "distinct(…)" with the name of a column'),
        ("count(amount)", 'write "count" without a column'),
        ("since(amount)", 'write "since" without a column'),
        ("median(amount)", "give one of count, rate, since, sum, mean"),
        ("sum()", "give one of"),
        (["sum(amount)", "sum(amount)"], "used twice"),
    ],
)
def test_values_that_mean_nothing(tmp_path: Path, values: object, what: str) -> None:
    events = f'[[aggregate]]\nof = "item"\nvalues = {json.dumps(values)}'
    with pytest.raises(SettingsError) as caught:
        spec_of(tmp_path, BY_TIME, events)
    assert what in str(caught.value)


def test_columns_of_values(tmp_path: Path) -> None:
    """Their names, and a transform of one's own; a spec without such values is as it was."""
    events = '[[aggregate]]\nof = "item"\nvalues = ["sum(amount)"]\nwindow = "7d"\n'
    spec = spec_of(tmp_path, BY_TIME, events + 'transform = "log_normalize"')
    column = next(column for column in spec.aggregates if column.name == "item_amount_sum_7d")
    assert column.transform == "log_normalize"
    stored = {column["name"]: column["aggregate"] for column in spec.to_dict()["dense"]}
    assert stored["item_amount_sum_7d"]["column"] == "amount"
    assert "column" not in stored["user_count"]


class Spread(AggregateValue):
    """What a change here adds: a class, and its line in the registry."""

    name, keeps, has_column, allows_missing = "spread", ("smallest", "largest"), True, True
    minimum, unit = 0, "a number of at least 0"

    def compute(self, before: EventsBefore) -> np.ndarray:
        assert before.smallest is not None
        assert before.largest is not None
        return before.largest - before.smallest


def test_a_value_is_a_class_and_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AGGREGATES, "spread", Spread())
    log = make_purchases(120, 3, seed=25)
    write(tmp_path / "log.csv", log)
    events = '[[aggregate]]\nof = "user"\nvalues = "spread(amount)"'
    spec, output = spec_of(tmp_path, BY_TIME, events), tmp_path / "out"
    run(EtlSettings(str(tmp_path / "log.csv"), output, spec, engine="cpu"))
    read = Encoder.load(output / "workflow").read(frame_of(log[-20:]))
    by_name = dict(zip(spec.dense_names, read.dense, strict=True))
    wanted = by_name["user_amount_max"] - by_name["user_amount_min"]
    np.testing.assert_array_equal(by_name["user_amount_spread"], wanted)
    assert wanted.max() > 0
