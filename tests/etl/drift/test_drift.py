"""A planted shift is flagged, a day without one is not; the numbers are those of the log."""

from __future__ import annotations

import dataclasses
import gzip
from collections import Counter
from pathlib import Path

import pytest

from nvt_torchrec.etl.drift import tally as tally_module
from nvt_torchrec.etl.drift.page import page
from nvt_torchrec.etl.drift.table import table
from nvt_torchrec.etl.run import run
from nvt_torchrec.formats.spec.feature_spec import InputFormat
from nvt_torchrec.formats.spec.toml_file import load_spec
from tests.etl.drift.days import ROWS, changed, drift_of, make_log, read_rows, with_larger_int_2
from tests.etl.runs import settings
from tests.etl.test_report import Page
from tests.logs import CRITEO
from tests.spec_logs import write_spec_log

INT_2, CAT_6 = CRITEO.columns.index("int_2"), CRITEO.columns.index("cat_6")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_log(tmp_path_factory.mktemp("drift"))


@pytest.fixture(scope="module")
def day(log: Path) -> Path:
    return log / "raw" / "day_3"


def swap(values: list[str], a: int, b: int):
    """A change that swaps the a-th and b-th most frequent of some values."""
    ranked = [value for value, _ in Counter(values).most_common() if value]
    pair = {ranked[a]: ranked[b], ranked[b]: ranked[a]}
    return lambda value, row: pair.get(value, value)


def test_a_day_without_a_shift_is_not_flagged(log: Path, day: Path):
    assert drift_of(log / "out", day).flags == []


def test_new_values_are_flagged_and_named(log: Path, day: Path, tmp_path: Path):
    new = changed(day, tmp_path / "day_3", "cat_6", lambda v, i: v if i % 5 else "feedbeef")
    drift = drift_of(log / "out", new)
    assert "cat_6 unseen share" in drift.flags
    assert {flag.split()[0] for flag in drift.flags} == {"cat_6"}
    column = drift.column("cat_6")
    assert (column.new_values[0].value, column.new_values[0].then) == ("feedbeef", None)
    assert column.new_values[0].now == pytest.approx(0.2)


def test_swapped_frequencies_are_flagged_and_their_values_named(
    log: Path, day: Path, tmp_path: Path
):
    values = [row[CAT_6] for row in read_rows(day)]
    most, rare = Counter(values).most_common()[0][0], Counter(values).most_common()[-1][0]
    other = changed(day, tmp_path / "day_3", "cat_6", swap(values, 0, len(set(values)) - 1))
    drift = drift_of(log / "out", other)
    assert drift.flags == ["cat_6 PSI"]
    assert most in [mover.value for mover in drift.column("cat_6").movers]
    share = Counter(values)[most] / len(values)
    assert next(m.now for m in drift.column("cat_6").movers if m.value == most) == pytest.approx(
        Counter(values)[rare] / len(values)
    )
    assert drift.column("cat_6").movers[0].then == pytest.approx(share, rel=0.2)


@pytest.mark.parametrize("column", ["cat_6", "int_2", "int_1"])
def test_more_missing_values_are_flagged(log: Path, day: Path, tmp_path: Path, column: str):
    other = changed(day, tmp_path / "day_3", column, lambda v, i: v if i % 4 else "")
    drift = drift_of(log / "out", other)
    assert f"{column} missing rate" in drift.flags
    assert {flag.split()[0] for flag in drift.flags} == {column}
    index = CRITEO.columns.index(column)
    now = sum(not row[index] for row in read_rows(other))
    assert (drift.column(column).missing.count, drift.column(column).missing.total) == (now, ROWS)


def test_fewer_missing_values_are_flagged(log: Path, day: Path, tmp_path: Path):
    other = changed(day, tmp_path / "day_3", "int_2", lambda v, i: v or "1")
    assert "int_2 missing rate" in drift_of(log / "out", other).flags


def test_another_scale_of_a_dense_column_is_flagged(log: Path, day: Path, tmp_path: Path):
    other = with_larger_int_2(day, tmp_path / "day_3")
    drift = drift_of(log / "out", other)
    assert drift.flags == ["int_2 PSI"]
    median = next(q for q in drift.column("int_2").quantiles if q.share == 0.5)
    raw = sorted(int(row[INT_2] or 0) for row in read_rows(other))
    assert median.now == raw[ROWS // 2 - 1]


def test_another_label_rate_is_flagged(log: Path, day: Path, tmp_path: Path):
    other = changed(day, tmp_path / "day_3", "label", lambda v, i: "1" if i % 8 == 0 else v)
    drift = drift_of(log / "out", other)
    assert drift.flags == ["label rate"]
    assert drift.label_rate.count == sum(row[0] == "1" for row in read_rows(other))


def test_malformed_rows_are_flagged_and_left_out(log: Path, day: Path, tmp_path: Path):
    other = changed(day, tmp_path / "day_3", "cat_25", lambda v, i: v if i % 20 else "not hex")
    drift = drift_of(log / "out", other)
    assert drift.flags == ["malformed rows"]
    assert (drift.rows, drift.malformed.count) == (ROWS - ROWS // 20, ROWS // 20)


def test_counts_are_those_of_the_log(log: Path, day: Path):
    drift = drift_of(log / "out", day)
    rows = read_rows(day)
    train = [row for d in (0, 1) for row in read_rows(log / "raw" / f"day_{d}")]
    held_out = read_rows(log / "raw" / "day_2")
    assert drift.baseline_days == [0, 1, 2]
    for name in (*CRITEO.dense_names, *CRITEO.categorical_names):
        index = CRITEO.columns.index(name)
        column = drift.column(name)
        missing = sum(not row[index] for row in rows)
        assert (column.missing.count, column.missing.total) == (missing, ROWS)
        assert column.missing.then_count == sum(not row[index] for row in train)
        assert sum(column.psi.now) == ROWS - missing * (column.kind == "categorical")
        if column.kind != "categorical":
            continue
        known = {row[index] for row in train} - {""}
        for days, (count, total) in (
            (rows, (column.unseen.count, column.unseen.total)),
            (held_out, (column.unseen.then_count, column.unseen.then_total)),
        ):
            present = [row[index] for row in days if row[index]]
            assert (count, total) == (sum(v not in known for v in present), len(present))
        unseen = Counter(row[index] for row in rows if row[index] and row[index] not in known)
        assert {mover.value for mover in column.new_values} <= unseen.keys()
        top = sorted(unseen.values(), reverse=True)[:5]
        present_now = ROWS - missing
        assert [m.now for m in column.new_values] == pytest.approx([n / present_now for n in top])


def test_movers_are_the_values_whose_shares_changed_most(log: Path, day: Path):
    drift = drift_of(log / "out", day)
    train = Counter(
        row[CAT_6] for d in (0, 1) for row in read_rows(log / "raw" / f"day_{d}") if row[CAT_6]
    )
    now = Counter(row[CAT_6] for row in read_rows(day) if row[CAT_6])
    change = {
        value: abs(now[value] / now.total() - count / train.total())
        for value, count in train.items()
    }
    expected = sorted(change.values(), reverse=True)[:5]
    got = [abs(mover.now - mover.then) for mover in drift.column("cat_6").movers]
    assert got == pytest.approx(expected)
    for mover in drift.column("cat_6").movers:
        assert mover.then == train[mover.value] / train.total()
        assert mover.now == now[mover.value] / now.total()


def test_the_result_depends_neither_on_threads_nor_on_compression(
    log: Path, day: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    expected = drift_of(log / "out", day, workers=1)
    monkeypatch.setattr(tally_module, "PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(tally_module, "_WAITING", 100)
    packed = tmp_path / "day_3.gz"
    packed.write_bytes(gzip.compress(day.read_bytes()))
    got = drift_of(log / "out", packed, workers=4)
    assert dataclasses.replace(got, input=expected.input) == expected


def test_a_sample_of_dense_values_is_the_same_with_any_number_of_threads(
    log: Path, day: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tally_module, "PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(tally_module, "SAMPLE_ROWS", 300)
    one, four = (drift_of(log / "out", day, workers=n) for n in (1, 4))
    assert one == four


def test_only_the_most_frequent_new_values_are_kept(
    log: Path, day: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tally_module, "NEW_VALUES", 6)
    monkeypatch.setattr(tally_module, "_WAITING", 50)
    monkeypatch.setattr(tally_module, "PIECE_BYTES", 1 << 14)
    new = changed(
        day, tmp_path / "day_3", "cat_6", lambda v, i: f"fe{i:06x}" if i % 3 else "feedbeef"
    )
    column = drift_of(log / "out", new).column("cat_6")
    assert column.new_values[0].value == "feedbeef"
    assert column.new_values[0].now == pytest.approx(1 / 3, abs=1e-3)


def test_the_first_rows_only(log: Path, day: Path, tmp_path: Path):
    rows = 777
    head = tmp_path / "day_3"
    head.write_text("".join(day.read_text().splitlines(keepends=True)[:rows]))
    got = drift_of(log / "out", day, limit_rows=rows)
    expected = drift_of(log / "out", head)
    assert got.limit_rows == rows
    assert dataclasses.replace(got, limit_rows=None, input=expected.input) == expected


def test_a_day_without_labels_has_no_label_rate(log: Path, day: Path, tmp_path: Path):
    bare = tmp_path / "day_3"
    bare.write_text("".join("\t".join(row[1:]) + "\n" for row in read_rows(day)))
    drift = drift_of(log / "out", bare)
    assert drift.label_rate is None
    assert drift.flags == []
    assert "label rate" not in table(drift)
    Page(page(drift))


@pytest.mark.parametrize("file_format", ["csv", "parquet"])
def test_lists_strings_hashed_and_shared_columns(tmp_path: Path, file_format: str):
    spec = dataclasses.replace(load_spec("retail"), input=InputFormat(file_format))
    write_spec_log(tmp_path / "raw", spec, days=4, rows=2000)
    run(settings(tmp_path / "raw", tmp_path / "out", spec, days=frozenset({0, 1, 2})))
    (day,) = (tmp_path / "raw").glob("day_3*")
    drift = drift_of(tmp_path / "out", day)
    assert drift.flags == []
    kinds = {column.name: column.kind for column in drift.columns}
    assert kinds["user"] == "hashed"
    shared = [c for c in spec.categorical if len(spec.vocabularies[c.vocabulary_name]) > 1]
    assert shared
    for column in drift.columns:
        own = next((c for c in spec.categorical if c.name == column.name), None)
        if own is None:
            continue
        assert column.sampled == bool(own.hash_buckets or own in shared)
        assert (column.unseen is None) == bool(own.hash_buckets)
    again = drift_of(tmp_path / "out", day, workers=3)
    assert again == drift
    Page(page(drift))
