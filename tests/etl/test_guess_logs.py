"""What ``python -m etl guess`` makes of logs as they are published, and that its specs run."""

from __future__ import annotations

import dataclasses
import datetime
import random
import shlex
import uuid
from collections.abc import Callable
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
from nvt_torchrec.workflows.store import load
from tests.etl.runs import etl_run, read_split
from tests.etl.test_guess import guessed, guessed_with_text

ROWS = 300
Row = Callable[[random.Random, int], list[object]]


@dataclasses.dataclass(frozen=True)
class Sample:
    """A log and what its spec must say.

    Attributes:
        header: The names of its columns; "" for none.
        row: Makes the fields of a row.
        labels: The labels, the main one first.
        dense: The dense columns.
        raw: The raw types of categorical columns, "lists of" before those with lists.
        comments: What the spec says in comments.
        delimiter: Between the fields.
        split: By what rows are split.
    """

    header: str
    row: Row
    labels: str
    dense: str = ""
    raw: dict[str, str] = dataclasses.field(default_factory=dict)
    comments: tuple[str, ...] = ()
    delimiter: str = ","
    split: str = "share"

    def write(self, path: Path, rows: int = ROWS) -> Path:
        rng = random.Random(0)
        lines = [self.header] if self.header else []
        lines += [self.delimiter.join(map(str, self.row(rng, i))) for i in range(rows)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines))
        return path


def bit(rng: random.Random) -> int:
    return int(rng.random() < 0.3)


SAMPLES = {
    "census": Sample(
        "age, class of worker, detailed industry code, wage per hour, sex, instance weight, income",
        lambda rng, i: [
            rng.randint(17, 90),
            rng.randint(0, 8),
            rng.randint(0, 51),
            rng.choice([0, 0, 500, 700, 1250]),
            rng.choice(["Male", "Female"]),
            f"{rng.random() * 3000:.2f}",
            rng.choice(["- 50000.", "50000+."]),
        ],
        "income",
        "age|wage per hour",
        {"class of worker": "int", "detailed industry code": "int", "sex": "string"},
        ("also possible: sex", "instance weight: looks like the weight of a row"),
        delimiter=", ",
    ),
    "bank marketing": Sample(
        "age,job,default,housing,balance,subscription",
        lambda rng, i: [
            rng.randint(18, 90),
            rng.choice(["admin", "services", "retired"]),
            rng.choice(["yes", "no"]),
            rng.choice(["yes", "no"]),
            rng.randint(-900, 9000),
            rng.choice(["yes", "no", "no"]),
        ],
        "subscription",
        "age|balance",
        {"job": "string", "default": "string", "housing": "string"},
        ("also possible: default, housing",),
    ),
    "clicks and conversions": Sample(
        "customer,categorical_2,age_level,feat_10,propensity,conversion_timestamp,click,conversion",
        lambda rng, i: [
            rng.randint(1, 80),
            rng.randint(0, 9),
            rng.randint(0, 6),
            rng.randint(0, 40),
            f"{rng.random():.4f}",
            rng.choice([-1, 500]),
            bit(rng),
            bit(rng) * bit(rng),
        ],
        "click|conversion",
        "",
        dict.fromkeys(("customer", "categorical_2", "age_level", "feat_10"), "int"),
        ("propensity: looks like the weight", "conversion_timestamp: known only with the label"),
        split="column",
    ),
    "Tenrec": Sample(
        "user_id,item_id,click,follow,like,share,video_category,watching_times,gender,age",
        lambda rng, i: [
            rng.randint(0, 60),
            rng.randint(0, 40),
            *(bit(rng), bit(rng), bit(rng), bit(rng)),
            rng.randint(0, 1),
            rng.randint(0, 30),
            rng.randint(0, 2),
            rng.randint(0, 7),
        ],
        "click|follow|like|share",
        "age",
        dict.fromkeys(("user_id", "item_id", "video_category", "gender"), "int"),
        ("watching_times: looks like a label, or is known only with it",),
        split="column",
    ),
    "KuaiRec": Sample(
        "user_id,video_id,play_duration,video_duration,watch_ratio",
        lambda rng, i: [
            rng.randint(0, 60),
            rng.randint(0, 90),
            rng.randint(0, 90000),
            rng.randint(5000, 60000),
            f"{rng.random() * 3:.4f}",
        ],
        "watch_ratio",
        "video_duration",
        {"user_id": "int", "video_id": "int"},
        ("choose the threshold", "play_duration: looks like a label"),
        split="column",
    ),
    "RecBole": Sample(
        "user_id:token\titem_id:token\trating:float",
        lambda rng, i: [rng.randint(1, 60), rng.randint(1, 90), float(rng.randint(1, 5))],
        "rating:float",
        "",
        {"user_id:token": "int", "item_id:token": "int"},
        ("choose the threshold",),
        "\t",
        split="column",
    ),
    "Ali-CCP": Sample(  # names that are numbers
        "click,purchase,101,121,205,206",
        lambda rng, i: [
            *(bit(rng), bit(rng) * bit(rng)),
            *(rng.randint(1, most) for most in (60, 90, 13, 110)),
        ],
        "click|purchase",
        "",
        dict.fromkeys(("101", "121", "205", "206"), "int"),
    ),
    "padded lists, and lists with a separator at the end": Sample(
        "user,label,clicked_items,tags,site",
        lambda rng, i: [
            rng.randint(1, 50),
            bit(rng),
            "|".join(str(rng.randint(0, 30)) for _ in range(10)),
            f"{rng.randint(1, 9)}|{rng.randint(1, 9)}|",
            rng.choice("abc"),
        ],
        "label",
        "",
        {"user": "int", "clicked_items": "lists of int", "tags": "lists of int", "site": "string"},
        split="column",
    ),
    "some rows with a field too many, and times with a space": Sample(
        "click,at,site",
        lambda rng, i: [
            bit(rng),
            f"2024-01-{1 + i % 28:02d} 10:11:12",
            *(rng.choice("abc") for _ in range(1 + (i % 50 == 7))),
        ],
        "click",
        "",
        {"site": "string"},
        split="time",
    ),
    "spaces around tabs": Sample(
        "click\t site\t price",
        lambda rng, i: [bit(rng), rng.choice(["a b", "c d"]), f"{rng.random():.3f}"],
        "click",
        "price",
        {"site": "string"},
        delimiter=" \t ",
    ),
    "lists by commas in quotes, and one number too large": Sample(
        "click,genres,history,price",
        lambda rng, i: [
            bit(rng),
            '"' + ",".join(rng.sample(["a", "b", "c"], rng.randint(1, 3))) + '"',
            f'"[{rng.randint(1, 9)}, {rng.randint(1, 9)}]"',
            "1e400" if i == 7 else f"{rng.random():.3f}",
        ],
        "click",
        "price",
        {"genres": "lists of string", "history": "lists of int"},
    ),
    "lists by spaces": Sample(
        "click;words;ids;history",
        lambda rng, i: [
            bit(rng),
            rng.choice(["red shoes", "blue shoes", "socks"]),
            " ".join(str(rng.randint(1, 40)) for _ in range(i % 4)),
            " ".join(f"N{rng.randint(1, 99_999)}" for _ in range(i % 5)),
        ],
        "click",
        "",
        {"words": "string", "ids": "lists of int", "history": "lists of string"},
        delimiter=";",
    ),
    "numbers behind texts, without a header": Sample(
        "",
        lambda rng, i: [bit(rng), rng.choice("abc"), f"{rng.random():.3f}"],
        "label",
        "float_0",
        {"cat_0": "string"},
    ),
    "KAG": Sample(  # a report of an advertiser
        "ad_id,campaign_id,age,interest,Impressions,Clicks,Spent,Total_Conversion,Approved_Conversion",
        lambda rng, i: [
            700_000 + i,
            rng.randint(900, 940),
            rng.choice(["30-34", "35-39"]),
            rng.randint(2, 66),
            rng.randint(90, 90_000),
            rng.choice([0, 0, 0, 1, 2, 9]),
            f"{rng.random() * 90:.2f}",
            rng.randint(0, 5),
            rng.randint(0, 2),
        ],
        "Clicks",
        "interest",
        {"campaign_id": "int", "age": "string"},
        (
            "Spent: looks like what the label costs",
            "Total_Conversion: looks like a label, or is known only",
            "Approved_Conversion: looks like a label, or is known only",
        ),
    ),
    "Book-Crossing": Sample(
        '"User-ID";"ISBN";"Book-Rating"',
        lambda rng, i: [
            f'"{rng.randint(1, 60)}"',
            f'"{rng.randint(1, 90):010d}"',
            f'"{rng.choice([0, 0, 0, 5, 7, 8, 10])}"',
        ],
        "Book-Rating",
        "",
        {"User-ID": "int", "ISBN": "string"},
        ("at least 8: choose the threshold",),
        ";",
        split="column",
    ),
    "Last.fm": Sample(
        "userID\tartistID\tweight",
        lambda rng, i: [rng.randint(1, 60), rng.randint(1, 90), int(rng.paretovariate(0.7))],
        "weight",
        "",
        {"userID": "int", "artistID": "int"},
        ("choose the threshold",),
        "\t",
        split="column",
    ),
    "several classes": Sample(
        "height,gear,Class",
        lambda rng, i: [
            f"{rng.random():.3f}",
            rng.choice(["manual", "automatic"]),
            ["good", "good", "fair", "bad", "good", "fair"][i % 6],
        ],
        "Class",
        "height",
        {"gear": "string"},
        ("3 values: bad, the rarest with 16.7%, is 1", "choose: good 50.0%, fair 33.3%"),
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples(name: str, tmp_path: Path) -> None:
    sample = SAMPLES[name]
    path = sample.write(tmp_path / "raw" / "log.csv")
    spec, text = guessed_with_text(path)
    raw = {c.name: f"{'lists of ' * c.multi_hot}{c.raw}" for c in spec.categorical if not c.derive}
    assert list(spec.labels) == sample.labels.split("|")
    assert raw == sample.raw
    assert "|".join(column.name for column in spec.dense) == sample.dense
    assert spec.split.by == sample.split
    for comment in sample.comments:
        assert comment in text
    flags = ["--on_bad_rows", "quarantine", "--max_bad_fraction", "0.03"]
    spec_file = path.parent / "spec.toml"
    assert etl_run(path, tmp_path / "out", "--spec", str(spec_file), *flags) == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 3:1 17:0.5", "libsvm"),
        ("1 0:3:1 1:17:0.5", "libffm"),
        ("-1 |user age:20 |item a b", "Vowpal Wabbit"),
        ("1,2,3\n1,2\n1\n1,2,3", "delimiter ',' gives 50% of the lines 3 fields"),
    ],
)
def test_what_is_no_table_is_refused_by_name(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(f"{line}\n" * 5)
    with pytest.raises(BadInputError, match=message) as error:
        guess(str(path))
    assert error.value.remedy


@pytest.mark.parametrize("form", ["file", "directory", "glob"])
def test_files_of_days_are_split_by_days(form: str, tmp_path: Path) -> None:
    for day in ("2024-10-30", "2024-10-31"):
        SAMPLES["bank marketing"].write(tmp_path / "raw" / f"clicks-{day}.csv")
    raw = tmp_path / "raw"
    given = {"file": raw / "clicks-2024-10-31.csv", "directory": raw, "glob": raw / "clicks-*"}
    spec, text = guessed_with_text(given[form])
    assert spec.split.by == "days"
    days = text.partition(": pass ")[2].partition(" as --input_path")[0]
    spec_file = given[form].parent / "spec.toml"
    assert etl_run(days, tmp_path / "out", "--spec", str(spec_file)) == 0


def test_parts_of_one_table_are_no_days(tmp_path: Path) -> None:
    for part in range(2):
        SAMPLES["bank marketing"].write(tmp_path / "raw" / f"part-0000{part}.csv")
    assert guessed(tmp_path / "raw").split.by == "share"


def test_times_are_cut_so_that_days_can_be_added(tmp_path: Path) -> None:
    rows = [f"{i % 2},{i % 7},2024-01-{1 + i // 10:02d} {i % 24:02d}:00:00" for i in range(300)]
    path = tmp_path / "log.csv"
    path.write_text("".join(f"{row}\n" for row in ["click,site,at", *rows]))
    spec, _ = guessed_with_text(path)
    assert "at_weekday" in spec.categorical_names
    assert (spec.split.valid_from, spec.split.test_from) == ("2024-01-25", "2024-01-28")
    day = [row.replace("2024-01-01", "2024-01-02") for row in rows[:10]]  # all of one weekday
    path.write_text("".join(f"{row}\n" for row in ["click,site,at", *day]))
    spec, text = guessed_with_text(path)
    assert "at_hour" in spec.categorical_names
    assert "at_weekday" not in text


def test_mixed_encodings_are_mentioned(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(
        b"click,city\n" + "1,Köln\n0,Bonn\n".encode() * 9 + "1,Köln\n".encode("latin-1")
    )
    spec, text = guessed_with_text(path)
    assert spec.input.encoding == "latin-1"
    assert "1 lines are not UTF-8" in text
    assert "Mixed encodings: 9 lines are UTF-8" in text


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
    clicks, sites = ([rng.randint(0, most) for _ in range(ROWS)] for most in (1, 9))
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
    workflow = load(out / "workflow", label=False)
    expected = [{True: 3, False: 4, None: 1}[value] for value in values]
    for form in (
        values,
        pd.array(values, "boolean"),
        written_as("True", "False"),
        written_as(1, 0),
    ):
        frame = pd.DataFrame({"premium": form, "site_id": sites})
        assert workflow.transform(frame)["premium"].tolist() == expected


def test_a_log_of_events_alone_has_no_label(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    rows = [f"{i % 9},{i % 8},{1_300_000_000 + i}\n" for i in range(50)]
    path.write_text("".join(["user,item,timestamp\n", *rows]))
    with pytest.raises(BadInputError, match="no column looks like a label") as error:
        guess(str(path))
    assert "it has user, item, timestamp; a log of what was clicked alone" in error.value.remedy


def test_customers_and_the_families_of_their_columns(tmp_path: Path) -> None:
    rng = random.Random(0)
    products = [f"Mnt{name}" for name in ("Wines", "Fruits", "Meat", "Fish")]
    channels = [f"Num{name}Purchases" for name in ("Deals", "Web", "Catalog", "Store")]
    months = [f"PAY_{month}" for month in (0, 2, 3, 4, 5)]
    header = [
        "ID",
        "Year_Birth",
        "Dt_Customer",
        *products,
        *channels,
        *months,
        "ip",
        "LIMIT_BAL",
        "price",
    ]
    rows = [[*header, "Response"]]
    visitors = rng.sample(range(360_000), 1200)
    for i in range(2400):
        joined = datetime.date(2012, 7, 30) + datetime.timedelta(days=rng.randint(0, 700))
        row = [1000 + 3 * i, rng.randint(1940, 1996), f"{joined:%d-%m-%Y}"]
        row += [rng.randint(0, 1400), *(int(rng.expovariate(0.03)) for _ in products[1:])]
        row += [rng.randint(0, 13) for _ in channels]
        row += [rng.randint(-2, 7 if month == "PAY_5" else 8) for month in months]
        row += [rng.choice(visitors), rng.randint(1, 80) * 10_000, 50 + i % 850]
        rows.append([*row, bit(rng)])
    path = tmp_path / "log.csv"
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    spec, text = guessed_with_text(path)
    dense = ["Dt_Customer_age", *products, *channels, *months, "LIMIT_BAL", "price"]
    assert set(spec.dense_names) - {"Year_Birth"} == set(dense)
    assert {c.name: c.raw for c in spec.categorical if c.name != "Year_Birth"} == {"ip": "int"}
    assert spec.split.by == "share"
    assert '"price", # numbers from 50' in text
    assert '"PAY_0", # numbers from -2' in text
    assert '"MntFruits", # counts from 0' in text


def test_lists_of_impressions_are_named(tmp_path: Path) -> None:
    rows = [f"{i}\tU{i % 70}\tN{i % 9}-{i % 2} N{i % 30}-0 N{i % 8}-1\n" for i in range(200)]
    path = tmp_path / "behaviors.tsv"
    path.write_text("".join(rows))
    with pytest.raises(BadInputError) as error:
        guess(str(path))
    assert "columns 1 to 3; " in error.value.remedy
    assert "column 3: pairs of an item and its label, as N1-1 N2-0" in error.value.remedy
    with pytest.raises(
        BadInputError, match="column 2 cannot be a label: it has 70 values, such as"
    ):
        guess(str(path), label="2")


@pytest.mark.parametrize("rows", [300, 150_000])  # all of them, and some of a large file
def test_a_cut_last_line_is_left_out_by_the_command(
    rows: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, spec = tmp_path / "log.csv", tmp_path / "spec.toml"
    lines = [f"{i * i % 7 % 2},s{i % 5},{i * i % 97}\n" for i in range(rows)]
    path.write_text("".join(["click,site,visits\n", *lines, "1,s3"]))
    assert main(["guess", str(path), "--head_mb", "1", "--output", str(spec)]) in (0, None)
    command = shlex.split(caplog.messages[-1].replace("OUT", str(tmp_path / "out")))
    assert command[:4] == ["python", "-m", "etl", "run"]
    assert command[-2:] == ["--on_bad_rows", "quarantine"]
    if rows == 300:
        assert main(command[3:]) in (0, None)


def test_the_file_that_was_read_is_named(tmp_path: Path) -> None:
    for part in range(2):
        SAMPLES["bank marketing"].write(tmp_path / "raw" / f"part-0000{part}.csv")
    _, text = guessed_with_text(tmp_path / "raw")
    assert "for raw, made from some of the rows of part-00000.csv (300)" in text
    with pytest.raises(BadInputError, match=r"none\.csv: no such file or directory"):
        guess(str(tmp_path / "none.csv"))
