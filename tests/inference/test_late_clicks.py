"""Scoring with a workflow whose labels were in other files: a row to score needs no clicks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import ExtendSettings
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.inference.bulk import read_pieces
from nvt_torchrec.inference.encoder import Encoder
from nvt_torchrec.inference.predictor import make_input_spec
from nvt_torchrec.workflows import compiled
from tests.etl.click_logs import (
    BY_PAIR,
    BY_TIME,
    DAY,
    EVENTS,
    HOUR,
    make_clicks,
    make_shown,
    write_labelled,
    write_rows,
    write_spec,
)
from tests.etl.runs import read_split, settings


@pytest.mark.parametrize("window", [6 * HOUR, DAY])
def test_a_morning_scores_a_day_as_it_is_written_once_its_clicks_are_known(
    tmp_path: Path, window: int
) -> None:
    """Value for value, over three mornings: rates count the labels that were known by then."""
    rows = make_shown(900, 6)
    clicks = [click for click in make_clicks(rows, window) if click.user and click.item]
    within = f"{window // HOUR}h"
    spec = write_spec(tmp_path, BY_PAIR, within, BY_TIME, more=EVENTS.format(cut="day"))

    def write_day(day: int) -> None:
        write_rows(raw / f"day_{day}.csv", [row for row in rows if row.time // DAY == day])
        arrived = [click for click in clicks if click.at // DAY == day]
        write_rows(raw / f"clicks_{day}.csv", arrived)

    raw = tmp_path / "raw"
    raw.mkdir()
    for day in range(3):
        write_day(day)
    run(settings(raw, tmp_path / "out", spec))
    scored: dict[int, np.ndarray] = {}
    for morning in (3, 4, 5):
        today = [row for row in rows if row.time // DAY == morning]
        encoder = Encoder.load(tmp_path / "out/workflow")
        requests = [
            {
                "time": row.time,
                "price": float(row.price),
                "user": row.user or None,
                "item": int(row.item) if row.item else None,
                "category": row.category,
            }
            for row in today
        ]
        encoded = encoder.workflow.transform(encoder.read(requests))
        scored |= {rows.index(row): encoded.dense[:, i] for i, row in enumerate(today)}
        write_day(morning)
        manifest = extend(ExtendSettings(tmp_path / "out", str(raw / f"day_{morning}.csv")))
    # by time, test has all rows from the first day that was scored on, in their order
    count = manifest.rows["out"]
    written = read_split(tmp_path / "out", "test")[spec.dense_names].to_numpy()
    first = count - len(written)
    compared = 0
    for number, values in scored.items():
        if number < count:
            np.testing.assert_array_equal(values, written[number - first], err_msg=str(number))
            compared += 1
    assert compared > 250


def read_labels(spec: FeatureSpec, path: Path) -> bool:
    """Return whether the rows of a file to score have labels."""
    (piece,) = read_pieces(make_input_spec(spec, str(path)), str(path), 1 << 20)
    rows = piece.parse()
    assert len(rows) > 50
    assert len(rows.labels) == piece.label
    return piece.label


@pytest.mark.parametrize("events", ["", EVENTS.format(cut="event")])
def test_a_file_to_score_has_labels_only_in_a_column(tmp_path: Path, events: str) -> None:
    """Not because it has key and time: all its labels would be 0."""
    rows = make_shown(100, 3)
    raw = tmp_path / "raw"
    raw.mkdir()
    write_rows(raw / "day_0.csv", rows)
    write_rows(raw / "clicks.csv", make_clicks(rows, HOUR))
    spec = write_spec(tmp_path, BY_PAIR, "1h", BY_TIME, more=events)
    run(settings(raw, tmp_path / "out", spec))
    fitted = compiled.load(tmp_path / "out/workflow").spec
    assert fitted == spec
    assert not read_labels(fitted, raw / "day_0.csv")
    write_labelled(tmp_path / "joined.csv", rows, set(rows[::3]), 0)
    assert read_labels(fitted, tmp_path / "joined.csv")
    names = [field.name for field in dataclasses.fields(rows[0])]
    plain = dataclasses.replace(spec.input, header=False, columns=tuple(names))
    lines = (raw / "day_0.csv").read_text().split("\n", 1)[1]
    (tmp_path / "plain.csv").write_text(lines)
    assert not read_labels(dataclasses.replace(spec, input=plain), tmp_path / "plain.csv")


def test_the_log_may_have_no_header(tmp_path: Path) -> None:
    rows = make_shown(200, 3)
    raw, plain = tmp_path / "raw", tmp_path / "plain"
    for directory in (raw, plain):
        directory.mkdir()
        write_rows(directory / "clicks.csv", make_clicks(rows, HOUR))
    write_rows(raw / "day_0.csv", rows)
    (plain / "day_0.csv").write_text((raw / "day_0.csv").read_text().split("\n", 1)[1])
    spec = write_spec(tmp_path, BY_PAIR, "1h", BY_TIME, more=EVENTS.format(cut="event"))
    names = [field.name for field in dataclasses.fields(rows[0])]
    headless = dataclasses.replace(spec.input, header=False, columns=tuple(names))
    run(settings(raw, tmp_path / "expected", spec))
    run(settings(plain, tmp_path / "out", dataclasses.replace(spec, input=headless)))
    for split in SPLITS:
        expected = read_split(tmp_path / "expected", split)
        assert read_split(tmp_path / "out", split).equals(expected)
