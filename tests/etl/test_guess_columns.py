"""What ``python -m etl guess`` makes of times, warehouses' parquet, leaks and other columns."""

from __future__ import annotations

import datetime
import random
import uuid
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.__main__ import main
from nvt_torchrec.etl.commands.guess import guess
from nvt_torchrec.formats.splits import SPLITS
from tests.etl.runs import etl_run, read_split
from tests.etl.test_guess import guessed, guessed_with_text
from tests.etl.test_guess_logs import ROWS, bit


def test_times_are_cut_so_that_days_can_be_added(tmp_path: Path) -> None:
    rows = [f"{i % 2},{i % 7},2024-01-{1 + i // 10:02d} {i % 24:02d}:00:00" for i in range(300)]
    path = tmp_path / "log.csv"
    path.write_text("".join(f"{row}\n" for row in ["click,site,at", *rows]))
    spec, _ = guessed_with_text(path)
    assert "at_weekday" in spec.categorical_names
    assert (spec.split.valid_from, spec.split.test_from) == ("2024-01-25", "2024-01-28")
    week = [f"{i % 2},{i % 9},2024-01-0{1 + i // 30}" for i in range(210)]  # seven dates
    path.write_text("".join(f"{row}\n" for row in ["click,site,at", *week]))
    assert guessed_with_text(path)[0].split.by == "time"
    day = [row.replace("2024-01-01", "2024-01-02") for row in rows[:10]]  # all of one weekday
    path.write_text("".join(f"{row}\n" for row in ["click,site,at", *day]))
    spec, text = guessed_with_text(path)
    assert "at_hour" in spec.categorical_names
    assert "at_weekday" not in text


@pytest.mark.parametrize(
    ("name", "derived"),
    [("at", ["at_hour", "at_weekday"]), ("hour", ["hour_of_day", "hour_weekday"]),
     ("weekday", ["weekday_hour", "day_of_week"])],
)  # fmt: skip
def test_a_time_that_is_called_like_what_is_derived_of_it(
    tmp_path: Path, name: str, derived: list[str]
) -> None:
    rows = [f"{i % 2},{i % 7},2024-01-{1 + i // 10:02d} {i % 24:02d}:00:00" for i in range(300)]
    path = tmp_path / "log.csv"
    path.write_text("".join(f"{row}\n" for row in [f"click,site,{name}", *rows]))
    assert [column for column in guessed(path).categorical_names if column != "site"] == derived


def test_parquet_as_warehouses_write_it(tmp_path: Path) -> None:
    rng = random.Random(0)
    for part, country in enumerate(["DE", "FR"]):
        table = {
            "click": [bit(rng) for _ in range(ROWS)],
            "visitor": pa.array([rng.choice([None, 7.0, 8.0]) for _ in range(ROWS)], pa.float64()),
            "account": pa.array([rng.randint(1, 90) for _ in range(ROWS)], pa.decimal128(20, 0)),
            "material": pa.array([rng.randint(1, 5_000_000) for _ in range(ROWS)], pa.int64()),
            "spent": pa.array([rng.randint(1, 900) for _ in range(ROWS)], pa.float64()),
            "tags": [rng.choice(["a;b", "b", "a;c", "c", "b;a"]) for _ in range(ROWS)],
            "gaps": [[1, None]] * ROWS,
            "seen": [{"page": rng.choice(["x", "y"]), "position": i % 5} for i in range(ROWS)],
        }
        folder = tmp_path / "raw" / f"country={country}"
        folder.mkdir(parents=True)
        pq.write_table(
            pa.table(table), folder / f"part-0000{part}-{uuid.UUID(int=part)}-c000.snappy.parquet"
        )
        (folder / "_SUCCESS").touch()
    spec, text = guessed_with_text(tmp_path / "raw")
    raw = {c.name: f"{'lists of ' * c.multi_hot}{c.raw}" for c in spec.categorical}
    assert raw == {
        "visitor": "int",
        "account": "int",
        "material": "int",
        "tags": "lists of string",
        "seen_page": "string",
        "seen_position": "int",
        "country": "string",
    }
    assert spec.dense_names == ["spent"]
    assert "gaps: its lists hold nulls" in text
    spec_file = tmp_path / "spec.toml"
    assert etl_run(tmp_path / "raw", tmp_path / "out", "--spec", str(spec_file)) == 0
    assert main(["check", str(tmp_path / "out")]) == 0


def test_columns_that_give_the_label_away_are_left_out(tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = ["is_attributed,app,near_id,click_time,attributed_time,margin,profit,state"]
    for i in range(3000):
        label = int(rng.random() < 0.05)
        at = f"2017-11-{6 + i // 1000:02d} {i // 60 % 24:02d}:{i % 60:02d}"
        fields = [
            label,
            rng.randint(1, 90),
            f"x{rng.randint(1, 50_000)}",  # few of them twice: nothing is learned by heart
            f"{at}:00",
            f"{at}:{rng.randint(10, 59)}" * label,
            f"{rng.random() + 2 * label:.4f}",
            f"{rng.random() + label * (rng.random() < 0.5):.4f}",  # a good feature, no leak
            "won" if label and rng.random() < 0.99 else "open",
        ]
        rows.append(",".join(map(str, fields)))
    path = tmp_path / "log.csv"
    path.write_text("".join(f"{row}\n" for row in rows))
    spec, text = guessed_with_text(path)
    away = "is_attributed away (AUROC alone"
    assert f"attributed_time: whether it is missing gives {away} 1.000)" in text
    assert f"margin: its numbers give {away} " in text
    assert f"state: its values give {away} 0.9" in text
    assert spec.dense_names == ["profit"]
    assert spec.categorical_names == ["app", "near_id", "click_time_hour"]
    assert "no weekday, because they span less than three weeks" in text
    assert spec.split.column == "click_time"


def test_booleans_have_one_id_however_they_are_written(tmp_path: Path) -> None:
    rng = random.Random(0)
    values = [rng.choice([True, True, True, False, None]) for _ in range(ROWS)]
    clicks, sites = ([rng.randint(0, maximum) for _ in range(ROWS)] for maximum in (1, 9))
    table = pa.table({"click": clicks, "premium": values, "site_id": sites})

    def written_as(true: object, false: object) -> list:
        return [{True: true, False: false}.get(value) for value in values]

    read = {}
    for number, texts in enumerate([values, written_as("TRUE", "FALSE"), written_as("true", "0")]):
        path = tmp_path / str(number) / f"log.{'csv' if number else 'parquet'}"
        path.parent.mkdir()
        written = table.set_column(1, "premium", [texts])
        (pacsv.write_csv if number else pq.write_table)(written, path)
        read[path] = {column.name: column.raw for column in guessed(path).categorical}
        out = tmp_path / f"out{number}"
        assert etl_run(path, out, "--spec", str(path.parent / "spec.toml")) == 0
        assert read[path]["premium"] == "bool"
        ids = pd.concat([read_split(out, split) for split in SPLITS])
        assert sorted(ids["premium"].value_counts().items()) == [
            (1, values.count(None)),
            (3, values.count(True)),
            (4, values.count(False)),
        ]


def test_a_log_of_events_alone_has_no_label(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    rows = [f"{i % 9},{i % 8},{1_300_000_000 + i}\n" for i in range(50)]
    path.write_text("".join(["user,item,timestamp\n", *rows]))
    with pytest.raises(BadInputError, match="no column looks like a label") as error:
        guess(str(path))
    assert (
        "the columns are user, item, timestamp; a log of clicks alone has no label"
        in error.value.remedy
    )


def test_customers(tmp_path: Path) -> None:
    rng = random.Random(0)
    header = ["ID", "Year_Birth", "Dt_Customer", "MntWines", "ip", "LIMIT_BAL", "price"]
    header += ["PAY_0", "PAY_5"]  # of eleven values, and of ten
    rows = [[*header, "Response"]]
    visitors = rng.sample(range(360_000), 1200)
    for i in range(2400):
        joined = datetime.date(2012, 7, 30) + datetime.timedelta(days=rng.randint(0, 700))
        row = [1000 + 3 * i, rng.randint(1940, 1996), f"{joined:%d-%m-%Y}"]
        row += [
            int(rng.expovariate(0.03)),
            rng.choice(visitors),
            rng.randint(1, 80) * 10_000,
            50 + i % 850,
            i % 11 - 2,
            i % 10 - 2,
        ]
        rows.append([*row, bit(rng)])
    path = tmp_path / "log.csv"
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    spec, text = guessed_with_text(path)
    dense = ["Dt_Customer_age", "MntWines", "LIMIT_BAL", "price", "PAY_0", "PAY_5"]
    assert set(spec.dense_names) - {"Year_Birth"} == set(dense)
    assert spec.categorical_names == ["ip", "PAY_0_category", "PAY_5_category"]
    assert spec.split.by == "share"
    assert '"price", # numbers from 50' in text
    assert '"MntWines", # numbers from 0' in text
