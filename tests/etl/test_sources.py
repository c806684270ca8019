"""Events of other files than the log, against a loop over all pairs of a row and an event."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from nvt_torchrec.etl.events import partitions, source_events, timeline, window_picks
from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings, ExtendSettings
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.inference.encoder import Encoder
from nvt_torchrec.workflows.inspection import report
from tests.etl.event_logs import BY_DAYS, BY_TIME, parquet, transformed
from tests.etl.extended import content, differences
from tests.etl.findings import bad
from tests.etl.runs import settings
from tests.etl.source_logs import (
    DAY,
    HOUR,
    TABLE,
    Click,
    Purchase,
    expected,
    frame_of,
    load_source_spec,
    make_bought,
    make_clicks,
    write_clicks,
    write_rows,
)
from tests.logs import pack

EVENTS = {"at once": "", "by the day": 'cut = "day"'}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of events, queues that grow, and several blocks of a file."""
    monkeypatch.setattr(timeline, "CHUNK_ROWS", 64)
    monkeypatch.setattr(partitions, "PARTITION_EVENTS", 40)
    monkeypatch.setattr(window_picks, "_FIRST_NODES", 8)
    monkeypatch.setattr(source_events, "_BLOCK_BYTES", 2000)


def written(output: Path, splits: tuple[str, ...]) -> dict[str, np.ndarray]:
    parts = [parquet(output, split) for split in splits]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def assert_values(output: Path, there: dict[str, np.ndarray], values: list[dict]) -> None:
    for name in values[0]:
        made = transformed(output, values, name)
        np.testing.assert_allclose(there[name], made, rtol=1e-6, atol=1e-6, err_msg=name)


def current(output: Path) -> dict[str, bytes]:
    """All files but those of the generation before."""
    return {n: data for n, data in content(output).items() if not n.startswith(".previous")}


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "tsv", "jsonl", "parquet"])
def test_each_format(tmp_path: Path, ending: str) -> None:
    """Two files, whose rows lie in any order; users of one side only; missing values."""
    log, bought = make_clicks(240, 3, seed=1), make_bought(150, -1, 3, seed=2)
    days = write_clicks(tmp_path / "raw", log)
    plain = ending.removesuffix(".gz")
    for number, part in enumerate((bought[:70], bought[70:])):
        file = tmp_path / f"raw/purchases_{number}.{plain}"
        write_rows(file, part)
        if ending.endswith(".gz"):
            pack(file)
    spec = load_source_spec(tmp_path, BY_DAYS)
    run(settings(tmp_path / "raw", tmp_path / "out", spec))
    values = expected(spec, bought, log)
    last = len(days[2])
    assert_values(tmp_path / "out", written(tmp_path / "out", ("train",)), values[:-last])
    assert_values(tmp_path / "out", written(tmp_path / "out", SPLITS[1:]), values[-last:])
    assert len({value["user_purchases_amount_sum"] for value in values}) > 20
    assert bad(tmp_path / "out") == []
    shown = report(tmp_path / "out/workflow")
    assert re.search(r"purchases +at +20m +user_purchases_count, user_purchases_amount_sum", shown)


@pytest.mark.parametrize("events", EVENTS.values(), ids=EVENTS)
def test_a_run_an_extension_and_inference(tmp_path: Path, events: str) -> None:
    """A day takes its own file, or what the run has taken already; a table is there as well."""
    log, by_day = make_clicks(280, 4, seed=3), "day" in events
    # the events of a day are known on that day or later
    bought = [make_bought(45, day, day + 1, seed=day) for day in range(4)]
    bought[2] = []
    days = write_clicks(tmp_path / "log", log)
    (tmp_path / "log/cities.csv").write_text("user,city\nu1,Wien\nu2,Graz\n")
    for day, of_day in enumerate(bought):
        write_rows(tmp_path / f"log/purchases_{day}.csv", of_day)
    every = [event for of_day in bought for event in of_day]
    spec = load_source_spec(tmp_path, BY_DAYS, events, more=TABLE)
    once, output = tmp_path / "once", tmp_path / "out"
    run(EtlSettings(str(tmp_path / "log"), once, spec, engine="cpu"))
    values = expected(spec, every, log, by_day=by_day)
    assert_values(once, written(once, ("train",)), values[: -len(days[3])])
    later = tmp_path / "purchases_3.csv"
    (tmp_path / "log/purchases_3.csv").rename(later)
    run(EtlSettings(str(tmp_path / "log"), output, spec, days=frozenset({0, 1}), engine="cpu"))
    for day in (2, 3):
        encoder = Encoder.load(output / "workflow")  # of this morning
        before = current(output)
        paths = () if day == 2 else (f"purchases={later}",)
        adding = ExtendSettings(
            output, str(tmp_path / f"log/day_{day}.csv"), table=paths, engine="cpu"
        )
        extend(adding)
        there = written(output, SPLITS[1:])
        begin = sum(map(len, days[:day]))
        assert_values(output, there, values[begin : begin + len(days[day])])
        if by_day:  # the same bits
            dense, _ = encoder.encode(frame_of(days[day]))
            for name, column in zip(spec.dense_names, dense.T, strict=True):
                np.testing.assert_array_equal(there[name], column.numpy(), err_msg=name)
        if day == 3:
            extend(ExtendSettings(output, undo=True))
            assert differences(before, current(output)) == []
            extend(adding)
            assert_values(output, written(output, SPLITS[1:]), values[begin:])
    assert bad(output) == []
    # what is kept day by day is what a run at once keeps
    of_once = content(once)
    for name, data in current(output).items():
        if "/events" in name and name.endswith(".npy"):
            assert of_once[name] == data, name


def test_workers_blocks_and_engines_do_not_matter(
    tmp_path: Path, dask_client, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = tmp_path / "raw"
    log, bought = make_clicks(300, 3, seed=5), make_bought(200, 0, 3, seed=6)
    write_clicks(raw, log)
    write_rows(raw / "purchases.csv", bought)
    spec = load_source_spec(tmp_path, BY_TIME)
    dask = {"engine": "dask", "scheduler": dask_client.scheduler.address}
    run(EtlSettings(str(raw), tmp_path / "dask", spec, **dask))
    run(EtlSettings(str(raw), tmp_path / "three", spec, engine="cpu", workers=3))
    monkeypatch.setattr(source_events, "_BLOCK_BYTES", 1 << 20)
    run(EtlSettings(str(raw), tmp_path / "one", spec, engine="cpu", workers=1))
    first = content(tmp_path / "one")
    values = {name: data for name, data in first.items() if "events" in name or "split/" in name}
    for name in ("three", "dask"):
        there = content(tmp_path / name)
        assert differences(values, {file: there.get(file, b"") for file in values}) == []
    in_time = sorted(log, key=lambda row: row.time)  # of the parquet and of the loop
    made = np.sort(written(tmp_path / "one", SPLITS)["user_purchases_count"])
    wanted = transformed(tmp_path / "one", expected(spec, bought, in_time), "user_purchases_count")
    np.testing.assert_allclose(made, np.sort(wanted), atol=1e-6)


@pytest.mark.parametrize("events", EVENTS.values(), ids=EVENTS)
def test_a_later_row_gets_what_the_etl_would_write(tmp_path: Path, events: str) -> None:
    """Windows move on, and purchases after the last row of the log begin to count."""
    log, bought = make_clicks(120, 2, seed=7), make_bought(160, 0, 4, seed=8)
    write_clicks(tmp_path / "raw", log)
    write_rows(tmp_path / "raw/purchases.csv", bought)
    by_day, output = "day" in events, tmp_path / "out"
    spec = load_source_spec(tmp_path, BY_TIME, events)
    run(settings(tmp_path / "raw", output, spec))
    ages = [0, 300, HOUR, 3 * HOUR, 13 * HOUR, 30 * HOUR, 3 * DAY]
    rows = []
    for i in range(28):
        user = ("u1", "u2", "", "new")[(i + i // 7) % 4]
        rows.append(Click(2 * DAY + ages[i % len(ages)] + 60 * i, user, str(i % 4), 0))
    values = expected(spec, bought, rows, by_day=by_day)
    assert len({value["user_purchases_shop_distinct_12h"] for value in values}) > 2
    encoder = Encoder.load(output / "workflow")
    frame = frame_of(rows)
    dense, _ = encoder.encode(frame)
    there = dict(zip(spec.dense_names, dense.numpy().T, strict=True))
    assert_values(output, there, values)
    records = frame.astype(object).where(frame.notna(), None).to_dict("records")
    assert torch.equal(encoder.encode(records)[0], dense)
    assert torch.equal(encoder.encode(records[:1])[0], dense[:1])


def test_a_purchase_of_the_second_of_a_row_does_not_count(tmp_path: Path) -> None:
    """Planted: what is written when a click arrives tells the label of its row."""
    raw = tmp_path / "raw"
    log = [row for row in make_clicks(300, 3, seed=9) if row.user]
    bought = [
        Purchase(row.time, row.user, row.item, str(1000 * row.clicked), "", "") for row in log
    ]
    write_clicks(raw, log)
    write_rows(raw / "purchases.csv", bought)
    spec = load_source_spec(tmp_path, BY_TIME)
    (rule,) = spec.event_sources
    at_once = type(rule)(**{**vars(rule), "known": ""})
    spec = type(spec)(**{**vars_of(spec), "event_sources": (at_once,)})
    run(settings(raw, tmp_path / "out", spec))
    train = written(tmp_path / "out", ("train",))
    agree = np.corrcoef(train["user_purchases_amount_last"], train["clicked"])[0, 1]
    assert abs(agree) < 0.3, "a row sees its own label"
    seen = np.sort(written(tmp_path / "out", SPLITS)["user_purchases_amount_last"])
    wanted = transformed(
        tmp_path / "out", expected(spec, bought, log, delay=0), "user_purchases_amount_last"
    )
    np.testing.assert_allclose(seen, np.sort(wanted), atol=1e-6)


def vars_of(spec: object) -> dict[str, object]:
    """The fields of a spec, without what it has computed of them."""
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}
