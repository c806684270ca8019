"""Rows of later times than the state: their own time decides what counts, as in the ETL."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from nvt_torchrec.base.arrays import strings
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError
from nvt_torchrec.clicklog.readers.log_format import get_format
from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings, ExtendSettings
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.inference.encoder import Encoder
from nvt_torchrec.inference.predictor import make_input_spec
from nvt_torchrec.workflows import compiled
from tests.etl.event_logs import (
    BY_DAYS,
    BY_TIME,
    DAY,
    HOUR,
    Row,
    expected,
    expected_lists,
    frame_of,
    make_rows,
    parquet,
    read_lists,
    spec_of,
    transformed,
    write,
)

EVENTS = {
    "at once": "",
    "an hour later": 'known = "1h"',
    "as they arrive": 'from = "arrived"',
    "by the day": 'cut = "day"\nknown = "1h"',
}


def later_rows(newest: int, count: int) -> list[Row]:
    """Rows from a minute to nine days after the last one."""
    random = np.random.default_rng(7)
    ages = [60, HOUR + 1, 2 * HOUR, 6 * HOUR, 12 * HOUR, 13 * HOUR, 2 * DAY, 9 * DAY]
    rows = []
    for i in range(count):
        time = newest + ages[i % len(ages)] + int(random.integers(0, 60))
        user, item = str(random.choice(["", "u1", "u2", "u3", "new"])), f"i{i % 5}"
        rows.append(Row(time, user, item, 0, time))
    return rows


def with_times(rows: list[Row]) -> pd.DataFrame:
    return frame_of(rows).assign(time=[row.time for row in rows])


@pytest.mark.parametrize("events", EVENTS.values(), ids=EVENTS)
def test_a_later_row_gets_what_the_etl_would_write(tmp_path: Path, events: str) -> None:
    """Each row as the only one after the log: windows have moved on, and late events are known."""
    log = make_rows(160, 3, seed=11)
    write(tmp_path / "log.csv", log)
    spec, output = spec_of(tmp_path, BY_TIME, events), tmp_path / "out"
    run(EtlSettings(str(tmp_path / "log.csv"), output, spec, engine="cpu"))
    newest = max(row.time for row in log)
    if "day" in events:  # the day after: the state is that of its morning
        newest = newest // DAY * DAY + DAY
    rows = later_rows(newest, 24)
    values = [expected([*log, row], events)[-1] for row in rows]
    assert len({value["user_count_12h"] for value in values}) > 2
    encoder = Encoder.load(output / "workflow")
    frame = with_times(rows)
    dense, ids = encoder.encode(frame)
    for name, column in zip(spec.dense_names, dense.T, strict=True):
        if name != "price":
            wanted = transformed(output, values, name)
            np.testing.assert_allclose(column.numpy(), wanted, rtol=1e-5, atol=1e-5, err_msg=name)
    workflow = compiled.load(output / "workflow")
    for feature in ("recent.item", "liked.item"):
        lists = [expected_lists([*log, row], events)[feature][-1][-50:] for row in rows]
        found = np.split(ids[feature].values().numpy(), ids[feature].lengths().cumsum(0)[:-1])
        for row_ids, names in zip(found, lists, strict=True):
            known = workflow.encode_values("item", strings(names)) if names else []
            assert row_ids.tolist() == [*known]
    # the same in every form of rows; a file may lack labels, and time
    records = frame.astype(object).where(frame.notna(), None).to_dict("records")
    assert torch.equal(encoder.encode(records)[0], dense)
    assert torch.equal(encoder.encode(records[:1])[0], dense[:1])
    without = encoder.encode(frame.drop(columns="time"))[0]
    assert torch.equal(encoder.encode([{**row, "time": None} for row in records])[0], without)
    assert not torch.equal(without, dense)
    for rows_of_file, wanted in ((frame, dense), (frame.drop(columns="time"), without)):
        file = tmp_path / f"{len(rows_of_file.columns)}.csv"
        rows_of_file.to_csv(file, index=False)
        (piece,) = get_format(make_input_spec(encoder.spec, str(file))).stream(str(file), 1 << 20)
        read = encoder.workflow.transform(piece.parse())
        np.testing.assert_array_equal(read.dense.T, wanted.numpy())
    with pytest.raises(InvalidRowError, match=r"row 0, column time: .*such as|expected a time"):
        encoder.encode([{**records[0], "time": "soon"}])


def test_a_week_without_extend(tmp_path: Path) -> None:
    """With cut = "day", a day a week later is encoded before as the ETL then writes it."""
    log, output = make_rows(300, 3, seed=12), tmp_path / "out"
    (tmp_path / "log").mkdir()
    for day in range(3):
        write(tmp_path / f"log/day_{day}.csv", [row for row in log if row.time // DAY == day])
    later = [
        Row(row.time + 9 * DAY, row.user, row.item, row.clicked, row.arrived + 9 * DAY)
        for row in make_rows(80, 1, seed=13)
    ]
    write(tmp_path / "day_9.csv", later)
    spec = spec_of(tmp_path, BY_DAYS, 'cut = "day"\nknown = "1h"')
    run(EtlSettings(str(tmp_path / "log"), output, spec, engine="cpu"))
    dense, ids = Encoder.load(output / "workflow").encode(with_times(later))
    day_9 = str(tmp_path / "day_9.csv")
    extend(ExtendSettings(output, day_9, days=frozenset({9}), engine="cpu"))
    there = [parquet(output, split) for split in SPLITS[1:]]
    for name, column in zip(spec.dense_names, dense.T, strict=True):
        written = np.concatenate([part[name] for part in there])
        np.testing.assert_array_equal(written, column.numpy(), err_msg=name)
    for feature in ("recent.item", "liked.item"):
        written = [ids for split in SPLITS[1:] for ids in read_lists(output, split)[feature]]
        looked_up = [row.tolist() for row in ids[feature].to_dense()]
        assert looked_up == [row[-50:] for row in written]
