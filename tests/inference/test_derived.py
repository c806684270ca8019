"""Scoring with derived columns: rows are given by the columns of the raw log, in every form."""

from __future__ import annotations

import csv
import datetime
import random
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.inference import convert_to_dicts
from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError
from nvt_torchrec.clicklog.readers.log_format import get_format
from nvt_torchrec.etl.run import run
from nvt_torchrec.inference.bulk import predict_file
from nvt_torchrec.inference.model.served_checkpoint import check_same_interface
from nvt_torchrec.inference.predictor import Predictor, make_input_spec
from tests.clicklog.reference_reader import as_lists, parse
from tests.etl.runs import settings
from tests.inference.test_export import random_bundle
from tests.spec_logs import spec_of

LABELS = ("click",), ("click",)
SPEC = """
[input]
format = "csv"
columns = ["id", "user", "when", "clicked", "seen", "price", "age", "tags"]
trim = true

[label]
name = "click"
from = "clicked"

[weight]
name = "id"

[[dense]]
names = "price"
raw = "float"
nulls = ["-1"]

[[dense]]
names = "age"
raw = "int32"
lenient = true
nulls = ["?"]

[[dense]]
names = "days"
from = "when"
derive = "age"
reference = "2015-01-01"
time_format = "%y%m%d%H"

[[categorical]]
names = "age_group"
from = "age"
derive = "bucket"
boundaries = [18, 40]
lenient = true
nulls = ["?"]

[[categorical]]
names = "hour"
from = "when"
derive = "hour"
time_format = "%y%m%d%H"

[[categorical]]
names = "seen_day"
from = "seen"
derive = "weekday"

[[categorical]]
names = "user"
raw = "string"

[[categorical]]
names = "user_age"
from = ["user", "age"]
derive = "cross"
nulls = ["?"]

[[categorical]]
names = "tags"
raw = "string"
multi_hot = true
"""
SOURCES = ["price", "age", "when", "seen", "user", "tags"]


def line_of(rng: random.Random) -> str:
    seen = datetime.datetime(2014, 10, 1) + datetime.timedelta(hours=rng.randrange(700))
    user, age = rng.choice(["a", " b", "", "été"]), rng.choice(["17", "18", " 64", "+5", "?", ""])
    price = rng.choice(["-1", "1200.5", "3.25", "0", ""])
    when = rng.choice([f"{seen:%y%m%d%H}", ""])
    tags = rng.choice(["", "x", "x|y", "y|y|z"])
    text = rng.choice([str(seen), seen.isoformat(), str(seen.date()), ""])
    return f"{rng.randrange(9)},{user},{when},{rng.randrange(2)},{text},{price},{age},{tags}"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("derived")
    rng = random.Random(3)
    (base / "raw").mkdir()
    for day in range(3):
        lines = [line_of(rng) for _ in range(120)]
        (base / "raw" / f"day_{day}.csv").write_text("".join(f"{line}\n" for line in lines))
    run(settings(base / "raw", base / "out", spec_of(SPEC, base)))
    random_bundle(base / "out" / "workflow", base / "bundle", 0)
    return base


@pytest.fixture(scope="module")
def predictor(log: Path) -> Predictor:
    return Predictor.load(log / "bundle")


@pytest.fixture(scope="module")
def day(log: Path) -> str:
    return str(log / "raw" / "day_2.csv")


@pytest.fixture(scope="module")
def texts(predictor: Predictor, day: str) -> list[dict]:
    """The rows of a day by source, as text; lists as lists."""
    (piece,) = get_format(predictor.spec).stream(day, 1 << 24)
    return convert_to_dicts(piece, 10**6)


def test_dicts_frames_and_files_score_alike(predictor, texts, day, tmp_path: Path) -> None:
    spec = predictor.spec
    expected = predictor.predict(day)
    assert len(np.unique(expected)) > 20
    assert list(texts[0]) == SOURCES
    assert predictor.predict(texts).tolist() == expected.tolist()
    alone = [predictor.predict([row])[0] for row in texts[:20]]
    np.testing.assert_allclose(alone, expected[:20], atol=1e-6)
    columns = {name: [row[name] for row in texts] for name in SOURCES}
    lists = pa.array(columns["tags"], pa.list_(pa.string()))
    table = pa.table({name: pa.array(columns[name]) for name in SOURCES[:-1]} | {"tags": lists})
    for given in (columns, table, pd.DataFrame(columns), table.to_pandas()):
        assert predictor.predict(given).tolist() == expected.tolist()
    pq.write_table(table, tmp_path / "rows.parquet")
    assert predictor.predict(str(tmp_path / "rows.parquet")).tolist() == expected.tolist()
    predict_file(predictor, day, tmp_path / "scores.parquet", id_columns=("id", "user"))
    scored = pd.read_parquet(tmp_path / "scores.parquet")
    assert scored.probability.tolist() == expected.tolist()
    lines = Path(day).read_text().splitlines()
    assert scored.id.tolist() == [line.split(",")[0] for line in lines]
    assert "label" in scored
    # the same without what only training reads
    short = tmp_path / "unlabelled.csv"
    keep = [i for i, name in enumerate(spec.input.columns) if name not in ("id", "clicked")]
    with open(day, newline="") as file, open(short, "w", newline="") as out:
        csv.writer(out).writerows([row[i] for i in keep] for row in csv.reader(file))
    assert predictor.predict(str(short)).tolist() == expected.tolist()


ROW = {
    "price": 1200.5, "age": 18, "when": "14102313", "seen": "2014-10-23", "user": "a",
    "tags": ["x"],
}  # fmt: skip
WHEN = datetime.datetime(2014, 10, 23, 13, tzinfo=datetime.UTC)
EAST = datetime.timezone(datetime.timedelta(hours=2))
#: Values that mean the same as those of ROW.
SAME = [
    ("price", "1200.5"), ("price", np.float64(1200.5)), ("age", "+18"), ("age", "18.0"),
    ("age", np.int8(18)), ("age", b" 18"), ("when", 14102313), ("when", WHEN.replace(tzinfo=None)),
    ("when", WHEN.astimezone(EAST)), ("when", pd.Timestamp(WHEN)),
    ("when", np.datetime64("2014-10-23T13")), ("seen", datetime.date(2014, 10, 23)),
    ("seen", "2014-10-23T00:30:00Z"), ("seen", np.datetime64("2014-10-23T12", "ns")),
    ("user", b"a"), ("user", np.str_(" a")), ("tags", ("x",)), ("tags", [" x "]),
]  # fmt: skip


def values(predictor: Predictor, row: dict) -> list:
    (by_row,) = as_lists(predictor.read([row]), predictor.spec)
    (by_column,) = as_lists(predictor.read({k: [v] for k, v in row.items()}), predictor.spec)
    assert by_row == by_column
    return by_row


def test_what_a_row_means(predictor: Predictor) -> None:
    days = (datetime.datetime(2015, 1, 1, tzinfo=datetime.UTC) - WHEN) / datetime.timedelta(1)
    assert values(predictor, ROW) == [1200.5, 18, days, 1, 13, 3, "a", "a\x1f18", ["x"]]


@pytest.mark.parametrize(("name", "value"), SAME)
def test_values_that_mean_the_same(predictor: Predictor, name: str, value) -> None:
    expected = values(predictor, ROW)
    read = values(predictor, {**ROW, name: value})
    if name == "age":  # as text it is another string: the file's text is what counts
        expected[7] = read[7]
    assert read == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("price", None), ("price", -1), ("price", "-1"), ("price", float("nan")), ("age", "?"),
     ("age", pd.NA), ("when", pd.NaT), ("when", ""), ("seen", np.datetime64("NaT")),
     ("user", None), ("user", "  "), ("tags", []), ("tags", None)],
)  # fmt: skip
def test_missing_values(predictor: Predictor, name: str, value) -> None:
    places = {"price": "0", "age": "137", "when": "24", "seen": "5", "user": "67", "tags": "8"}
    expected = values(predictor, ROW)
    for place in places[name]:
        expected[int(place)] = None
    assert values(predictor, {**ROW, name: value}) == expected


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("price", "much", "'much': expected a number"),
        ("age", "18.5", "'18.5': expected an integer"),
        ("when", "2014-10-23", "'2014-10-23': expected a time"),
        ("seen", "2014-02-30", "'2014-02-30': expected a time"),
        ("user", 1.5, "1.5: expected a string"),
        ("tags", "x", "'x': expected a list"),
        ("tags", ["x", None], "a list must not hold"),
    ],
)
def test_wrong_values_are_named(predictor: Predictor, name: str, value, reason: str) -> None:
    with pytest.raises(InvalidRowError) as error:
        predictor.read([ROW, {**ROW, name: value}])
    assert (error.value.row, error.value.column) == (1, name)
    assert reason in error.value.reason


def test_times_of_frames(predictor: Predictor) -> None:
    frame = pd.DataFrame([ROW] * 3)
    expected = as_lists(predictor.read(frame), predictor.spec)
    assert as_lists(predictor.read(frame.astype({"age": float})), predictor.spec) == expected
    times = pd.Series([WHEN] * 3)
    for given in (times, times.dt.tz_localize(None), times.dt.tz_convert("Asia/Tokyo")):
        assert as_lists(predictor.read(frame.assign(when=given)), predictor.spec) == expected
    some = frame.assign(when=pd.Series([WHEN, None, WHEN]))
    assert as_lists(predictor.read(some), predictor.spec)[1][4] is None


def test_another_format_keeps_what_makes_sense(predictor: Predictor) -> None:
    spec = predictor.spec
    assert make_input_spec(spec, "x.csv") == spec
    tsv = make_input_spec(spec, "x", "tsv").input
    assert (tsv.delimiter, tsv.columns, tsv.header) == ("\t", spec.input.columns, False)
    parquet = make_input_spec(spec, "x.parquet").input
    assert (parquet.format, parquet.columns) == ("parquet", ())


def test_a_successor_reads_the_same(predictor: Predictor, tmp_path: Path) -> None:
    check_same_interface(predictor.spec, predictor.spec, LABELS, "new")
    for change in (('"%y%m%d%H"', '"%Y%m%d%H"'), ('from = "seen"', 'from = "saw"')):
        other = SPEC.replace(*change).replace('"seen", "p', '"saw", "p')
        with pytest.raises(SchemaError, match="differ from the served bundle's"):
            check_same_interface(predictor.spec, spec_of(other, tmp_path), LABELS, "new")
    other = SPEC.replace("[18, 40]", "[20, 30, 50]")
    check_same_interface(predictor.spec, spec_of(other, tmp_path), LABELS, "new")


def test_rows_against_plain_python(predictor: Predictor, texts: list[dict]) -> None:
    spec = predictor.spec
    expected = [
        parse([{**row, "tags": "|".join(row["tags"])}[name] or "" for name in SOURCES], spec,
              SOURCES, label=False)
        for row in texts
    ]  # fmt: skip
    assert as_lists(predictor.read(texts), spec) == expected
