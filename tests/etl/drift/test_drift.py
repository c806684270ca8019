"""A planted shift is flagged, a day without one is not; the numbers are those of the log."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from clicklog.errors import BadInputError, SchemaError, SettingsError
from clicklog.spec.feature_spec import InputFormat
from clicklog.spec.toml_file import load_spec
from clicklog.synthetic.log import synthesize
from clicklog.synthetic.model import SyntheticSettings
from etl.__main__ import main
from etl.drift import baseline
from etl.drift import tally as tally_module
from etl.drift.artifact import FORMAT, read_drift
from etl.drift.page import page
from etl.drift.table import table
from etl.drift.thresholds import Thresholds
from etl.extend.run import extend
from etl.run import run
from etl.settings import ExtendSettings
from tests.etl.drift.days import ROWS, changed, drift_of, make_log, read_rows, with_larger_int_2
from tests.etl.runs import settings
from tests.etl.test_report import Page
from tests.logs import CRITEO

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
    synthesize(tmp_path / "raw", SyntheticSettings(days=4, rows_per_day=2000), spec=spec)
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


def test_files_and_exit_status(
    log: Path, day: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["drift", str(log / "out"), "--input", str(day)]) == 0
    assert "no drift" in capsys.readouterr().out
    written = read_drift(log / "out" / "drift" / "day_3.json")
    assert written == drift_of(log / "out", day)
    text = (log / "out" / "drift" / "day_3.html").read_text()
    Page(text)
    assert "://" not in text

    other = with_larger_int_2(day, tmp_path / "day_3")
    results = tmp_path / "results"
    arguments = ["drift", str(log / "out"), "--input", str(other), "--output", str(results)]
    assert main(arguments) == 3
    out = capsys.readouterr().out
    assert re.search(r"int_2 .*<< PSI", out)
    assert "1 of 106 measures exceed" in out
    content = json.loads((results / "day_3.json").read_text())
    assert content["flags"] == ["int_2 PSI"]
    assert (content["format"], content["format_version"]) == (FORMAT.name, FORMAT.version)
    assert "<b>PSI</b>" in (results / "day_3.html").read_text()


def test_thresholds_of_a_file_decide(log: Path, day: Path, tmp_path: Path, capsys):
    other = with_larger_int_2(day, tmp_path / "day_3")
    arguments = ["drift", str(log / "out"), "--input", str(other), "--output", str(tmp_path / "r")]
    thresholds = tmp_path / "thresholds.toml"
    thresholds.write_text("[columns.int_2]\npsi = inf\n")
    assert main([*arguments, "--thresholds", str(thresholds)]) == 0
    thresholds.write_text("[columns.int_3]\npsi = inf\n")
    assert main([*arguments, "--thresholds", str(thresholds)]) == 3
    thresholds.write_text("[columns.int_99]\npsi = inf\n")
    assert main([*arguments, "--thresholds", str(thresholds)]) == 2
    assert "int_99" in capsys.readouterr().err


def test_a_file_of_another_name(log: Path, day: Path, tmp_path: Path):
    copy = tmp_path / "yesterday.tsv"
    copy.write_bytes(day.read_bytes())
    assert drift_of(log / "out", copy).name == "yesterday"


def test_values_of_the_log_are_escaped_on_the_page(tmp_path: Path):
    spec = dataclasses.replace(
        CRITEO,
        categorical=tuple(dataclasses.replace(c, raw="string") for c in CRITEO.categorical[:2]),
    )
    (tmp_path / "raw").mkdir()
    rng = np.random.default_rng(0)
    for d in range(3):
        rows = [
            [str(i % 2), *["1"] * 13, "<b>x</b>" if d == 2 else "y", str(rng.integers(4))]
            for i in range(500)
        ]
        (tmp_path / "raw" / f"day_{d}").write_text("".join("\t".join(row) + "\n" for row in rows))
    run(settings(tmp_path / "raw", tmp_path / "out", spec, days=frozenset({0, 1})))
    drift = drift_of(tmp_path / "out", tmp_path / "raw" / "day_2")
    assert drift.column("cat_0").new_values[0].value == "<b>x</b>"
    assert "<b>x" not in page(drift)


# errors


def test_no_such_day(log: Path):
    with pytest.raises(BadInputError, match=r"day_9: no such file(.|\n)*day_3"):
        drift_of(log / "out", log / "raw" / "day_9")
    with pytest.raises(SettingsError, match=r"directory of 4 days(.|\n)*day_3"):
        drift_of(log / "out", log / "raw")


def test_a_day_of_other_columns(log: Path, tmp_path: Path):
    (tmp_path / "day_3").write_text("1\t2\t3\n" * 10)
    with pytest.raises(BadInputError, match="day_3, line 1: 3 tab-separated fields"):
        drift_of(log / "out", tmp_path / "day_3")


def test_a_day_without_a_well_formed_row(log: Path, day: Path, tmp_path: Path):
    bad = changed(day, tmp_path / "day_3", "cat_0", lambda v, i: "not hex")
    with pytest.raises(BadInputError, match="no well-formed row; row 1: column cat_0"):
        drift_of(log / "out", bad)


def test_an_output_that_is_not_finished(log: Path, day: Path, tmp_path: Path):
    with pytest.raises(BadInputError, match=r"no manifest.json(.|\n)*etl run"):
        drift_of(tmp_path, day)


def test_an_interrupted_extension(log: Path, day: Path, tmp_path: Path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".switching.json").write_text("{}")
    assert main(["drift", str(out), "--input", str(day)]) == 2
    assert "--resume" in capsys.readouterr().err


def _copy(log: Path, to: Path) -> Path:
    shutil.copytree(log / "out", to)
    return to


def test_another_workflow_than_that_of_the_manifest(log: Path, day: Path, tmp_path: Path):
    out = _copy(log, tmp_path / "out")
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({**manifest, "workflow_digest": "0" * 64}))
    with pytest.raises(SchemaError, match="not the workflow of"):
        drift_of(out, day)
    (out / "manifest.json").write_text(json.dumps({**manifest, "workflow_digest": None}))
    with pytest.raises(BadInputError, match="imported without a workflow"):
        drift_of(out, day)


def test_a_workflow_of_another_version(log: Path, day: Path, tmp_path: Path):
    out = _copy(log, tmp_path / "out")
    file = out / "workflow" / "metadata.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format_version": 99}))
    with pytest.raises(SchemaError, match="format version 99"):
        drift_of(out, day)


def test_a_damaged_vocabulary(log: Path, day: Path, tmp_path: Path):
    out = _copy(log, tmp_path / "out")
    (file,) = (out / "workflow").rglob("unique.cat_6.parquet")
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(BadInputError, match=r"unique.cat_6.parquet"):
        drift_of(out, day)


# after an extension


@pytest.fixture(scope="module")
def extended(log: Path) -> Path:
    """Days 0 and 1, extended by day 2."""
    out = log / "extended"
    run(settings(log / "raw", out, days=frozenset({0, 1})))
    extend(ExtendSettings(out, str(log / "raw" / "day_2"), engine="cpu"))
    return out


def test_an_extension_measures_its_day_before_it_is_added(log: Path, extended: Path):
    before = log / "before"
    run(settings(log / "raw", before, days=frozenset({0, 1})))
    written = read_drift(extended / "drift" / "day_2.json")
    assert written == drift_of(before, log / "raw" / "day_2")
    assert (written.generation, written.baseline_days) == (0, [0, 1])
    assert (extended / "drift" / "day_2.html").is_file()


def test_after_an_extension_unseen_values_are_compared_with_those_of_the_new_day(
    log: Path, extended: Path, day: Path, tmp_path: Path
):
    """In its parquet they have ids already."""
    drift = drift_of(extended, day)
    assert (drift.flags, drift.generation, drift.baseline_days) == ([], 1, [0, 1, 2])
    was = read_drift(extended / "drift" / "day_2.json").column("cat_0").unseen
    now = drift.column("cat_0").unseen
    assert (now.then_count, now.then_total) == (was.count, was.total)
    assert was.count
    new = changed(day, tmp_path / "day_3", "cat_6", lambda v, i: v if i % 5 else "feedbeef")
    assert "cat_6 unseen share" in drift_of(extended, new).flags


def test_without_that_result_unseen_values_are_shown_only(
    extended: Path, day: Path, tmp_path: Path
):
    out = tmp_path / "out"
    shutil.copytree(extended, out)
    new = changed(day, tmp_path / "day_3", "cat_6", lambda v, i: v if i % 5 else "feedbeef")
    file = out / "drift" / "day_2.json"
    # of a comparison with another workflow than the one before the extension
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "workflow_digest": "0" * 64}))
    for _ in range(2):
        unseen = drift_of(out, new).column("cat_6").unseen
        assert (unseen.then_count, unseen.flagged) == (None, False)
        assert unseen.now > 0.2
        file.unlink(missing_ok=True)
    assert "? -> " in table(drift_of(out, new), all_columns=True)
    Page(page(drift_of(out, new)))


def test_a_day_that_was_added_is_not_compared_with_itself(
    log: Path, extended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    kept = (extended / "drift" / "day_2.json").read_bytes()
    arguments = ["drift", str(extended), "--input", str(log / "raw" / "day_2")]
    assert main(arguments) == 2
    assert "--output" in capsys.readouterr().err
    assert (extended / "drift" / "day_2.json").read_bytes() == kept
    assert main([*arguments, "--output", str(tmp_path / "other")]) == 0


def test_parts_of_other_statistics_are_not_compared():
    def part(split: str, number: int, generation: int) -> dict:
        return {
            "file": f"{split}/part.{number}.parquet", "rows": 1, "generation": generation,
        }  # fmt: skip

    files = [part("train", 0, 0), part("train", 1, 1), part("train", 2, 2), part("valid", 0, 3)]

    def chosen(*settings: dict) -> list[str]:
        extensions = [
            {"generation": i + 1, "day": i, "settings": one} for i, one in enumerate(settings)
        ]
        return baseline._comparable_parts({"files": files, "extensions": extensions})

    frozen = {"statistics": "frozen", "retire_after_days": None}
    assert chosen() == ["train/part.0.parquet", "train/part.1.parquet", "train/part.2.parquet"]
    assert chosen(frozen, frozen) == chosen()
    update = {"statistics": "update"}
    assert chosen(frozen, update, frozen) == ["train/part.2.parquet"]
    assert chosen({"retire_after_days": 3}, frozen) == chosen()[1:]
    assert chosen(frozen, frozen, update) == ["valid/part.0.parquet"]


def test_thresholds_are_in_the_result(log: Path, day: Path):
    thresholds = Thresholds(label_rate=float("inf"))
    assert drift_of(log / "out", day, thresholds=thresholds).thresholds["label_rate"] is None


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content | {"rows": "many"},
        lambda content: content | {"columns": [{}]},
        lambda content: {key: item for key, item in content.items() if key != "flags"},
        lambda content: content | {"format": "another"},
    ],
)
def test_a_damaged_result_is_an_error_with_a_remedy(
    extended: Path, day: Path, tmp_path: Path, change
):
    out = tmp_path / "out"
    shutil.copytree(extended, out)
    file = out / "drift" / "day_2.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(BadInputError, match=r"day_2.json(.|\n)*etl drift"):
        drift_of(out, day)
