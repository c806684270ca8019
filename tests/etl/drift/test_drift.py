"""A planted shift is flagged, a day without one is not; the numbers are those of the log."""

from __future__ import annotations

import dataclasses
import gzip
import shutil
from collections import Counter
from pathlib import Path

import pytest

from nvt_torchrec.etl import day_drift as measure_module
from nvt_torchrec.etl.run import run
from nvt_torchrec.formats.feature_spec import InputFormat
from nvt_torchrec.formats.feature_spec.split import BY_DAYS
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.formats.manifest import Manifest
from tests.etl.drift.days import ROWS, changed, drift_of, read_rows
from tests.etl.runs import settings
from tests.logs import CRITEO
from tests.spec_logs import write_spec_log

CAT_6 = CRITEO.columns.index("cat_6")


def every(n: int, other: str):
    """A change of the values of every n-th row."""
    return lambda value, row: value if row % n else other


@pytest.mark.parametrize(
    ("column", "change", "name", "value"),
    [
        ("cat_6", every(4, ""), "missing rate", ""),
        ("int_2", every(4, ""), "missing rate", ""),
        ("int_1", every(4, ""), "missing rate", ""),
        ("int_2", lambda value, row: value or "1", "missing rate", ""),
        ("label", every(8, "1"), "label rate", "1"),
        ("cat_25", every(20, "not hex"), "malformed rows", "not hex"),
    ],
)
def test_a_planted_shift_is_flagged(
    log: Path, day: Path, tmp_path: Path, column: str, change, name: str, value: str
):
    other = changed(day, tmp_path / "day_3", column, change)
    drift = drift_of(log / "out", other)
    assert drift.read(drift.write(tmp_path)) == drift
    measured = column if name == "missing rate" else ""
    assert drift.measure(name, measured).flagged
    assert {measure.column for measure in drift.measures if measure.flagged} == {measured}
    fields = [row[CRITEO.columns.index(column)] for row in read_rows(other)]
    assert drift.measure(name, measured).now == [fields.count(value), ROWS]
    assert drift.rows == ROWS - fields.count("not hex")


def test_new_values_are_flagged(log: Path, day: Path, tmp_path: Path):
    new = changed(day, tmp_path / "day_3", "cat_6", every(5, "feedbeef"))
    drift = drift_of(log / "out", new)
    assert "cat_6 unseen share" in drift.flags
    assert {flag.split()[0] for flag in drift.flags} == {"cat_6"}
    unseen = drift.measure("unseen share", "cat_6")
    assert unseen.now[0] / unseen.now[1] == pytest.approx(0.2, abs=0.01)


def test_swapped_frequencies_are_flagged(log: Path, day: Path, tmp_path: Path):
    """Of the most and the least frequent value."""
    values = [row[CAT_6] for row in read_rows(day) if row[CAT_6]]
    (most, _), *_, (least, _) = Counter(values).most_common()
    pair = {most: least, least: most}
    swapped = changed(day, tmp_path / "day_3", "cat_6", lambda value, row: pair.get(value, value))
    assert drift_of(log / "out", swapped).flags == ["cat_6 PSI"]


def test_counts_are_those_of_the_log(log: Path, day: Path):
    drift = drift_of(log / "out", day)
    rows = read_rows(day)
    train = [row for d in (0, 1) for row in read_rows(log / "raw" / f"day_{d}")]
    held_out = read_rows(log / "raw" / "day_2")
    assert drift.baseline_days == [0, 1, 2]
    for name in (*CRITEO.dense_names, *CRITEO.categorical_names):
        index = CRITEO.columns.index(name)
        missing = sum(not row[index] for row in rows)
        found = drift.measure("missing rate", name)
        assert found.now == [missing, ROWS]
        assert found.then == [sum(not row[index] for row in train), 2 * ROWS]
        unseen = drift.measure("unseen share", name)
        assert sum(drift.measure("PSI", name).now) == ROWS - missing * (unseen is not None)
        assert (unseen is None) == (name in CRITEO.dense_names)
        if unseen is None:
            continue
        known = {row[index] for row in train} - {""}
        for days, (count, total) in ((rows, unseen.now), (held_out, unseen.then)):
            present = [row[index] for row in days if row[index]]
            assert (count, total) == (sum(v not in known for v in present), len(present))


def test_the_result_depends_neither_on_threads_nor_on_compression(
    log: Path, day: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    expected = drift_of(log / "out", day, workers=1)
    monkeypatch.setattr(measure_module, "PIECE_BYTES", 1 << 16)
    packed = tmp_path / "day_3.gz"
    packed.write_bytes(gzip.compress(day.read_bytes()))
    got = drift_of(log / "out", packed, workers=4)
    assert dataclasses.replace(got, input=expected.input) == expected


def test_an_output_of_the_first_rows_of_each_day(
    log: Path, day: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(measure_module, "PIECE_BYTES", 1 << 16)
    out = shutil.copytree(log / "out", tmp_path / "out")
    manifest = Manifest.read(out / "manifest.json")
    manifest.settings["limit_rows"] = 777
    manifest.write(out / "manifest.json")
    part = drift_of(out, day)
    assert 777 <= part.rows < ROWS
    assert part.measure("rows") is None  # only the first ones were read


@pytest.mark.parametrize("file_format", ["csv", "parquet"])
def test_lists_strings_hashed_and_shared_columns(tmp_path: Path, file_format: str):
    spec = dataclasses.replace(load_spec("retail"), input=InputFormat(file_format))
    write_spec_log(tmp_path / "raw", spec, days=4, rows=2000)
    run(settings(tmp_path / "raw", tmp_path / "out", spec, days=frozenset({0, 1, 2})))
    (day,) = (tmp_path / "raw").glob("day_3*")
    drift = drift_of(tmp_path / "out", day)
    assert drift.flags == []
    shared = [c for c in spec.categorical if len(spec.vocabularies[c.vocabulary_name]) > 1]
    assert shared
    for column in spec.categorical:
        unseen = drift.measure("unseen share", column.name)
        assert (unseen is None) == bool(column.hash_buckets)
        assert sum(drift.measure("PSI", column.name).then) > 1000
    assert drift_of(tmp_path / "out", day, workers=3) == drift


def test_columns_derived_from_the_time_are_left_out(tmp_path: Path):
    """All rows of a day have the same weekday, which is another one than the day before."""
    spec = load_spec("movielens_latest")
    write_spec_log(tmp_path / "raw", dataclasses.replace(spec, split=BY_DAYS), days=4, rows=2000)
    spec = dataclasses.replace(spec, split=BY_DAYS)
    run(settings(tmp_path / "raw", tmp_path / "out", spec, days=frozenset({0, 1, 2})))
    drift = drift_of(tmp_path / "out", tmp_path / "raw" / "day_3.csv")
    assert drift.flags == []
    assert {measure.column for measure in drift.measures} == {"", "userId", "movieId"}
