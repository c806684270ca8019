"""``python -m etl guess``: what it finds in files of many kinds, and that its specs load."""

from __future__ import annotations

import dataclasses
import datetime
import gzip
import random
import re
import tomllib
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.__main__ import main
from nvt_torchrec.etl.commands.guess import guess
from nvt_torchrec.etl.guess.sample import take_sample
from nvt_torchrec.formats.feature_spec import FeatureSpec, InputFormat
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from tests.etl.runs import etl_run
from tests.logs import pack
from tests.lookalikes.logs import LOGS


def guessed(path: Path, **options) -> FeatureSpec:
    """Return the spec of a file, as a user gets it: through a TOML file."""
    return guessed_with_text(path, **options)[0]


def guessed_with_text(path: Path, **options) -> tuple[FeatureSpec, str]:
    text, *others = guess(str(path), **options)
    assert (text, *others) == guess(str(path), **options)
    assert max(map(len, text.splitlines())) < 200
    spec = path.parent / "spec.toml"
    spec.write_text(text)
    return load_spec(spec), " ".join(text.replace("\n#", " ").split())


def write(path: Path, rows: list[list[str]], delimiter: str = ",") -> Path:
    path.write_text("".join(delimiter.join(row) + "\n" for row in rows))
    return path


def columns_of(spec: FeatureSpec) -> dict:
    return {column.name: column for column in (*spec.dense, *spec.categorical)}


def clicks(rows: int, seed: int = 0) -> list[list[str]]:
    """Rows with a header: label, a string, an integer, a price."""
    rng = random.Random(seed)
    made = [["clicked", "country", "visits", "price"]]
    for _ in range(rows):
        country = rng.choice(["de", "fr", "it"])
        made.append(
            [str(rng.randint(0, 1)), country, str(rng.randint(0, 40)), f"{rng.random():.3f}"]
        )
    return made


@pytest.mark.parametrize(("name", "skip_lines"), [("adult.data", 0), ("adult.test", 1)])
def test_census(name: str, skip_lines: int, tmp_path: Path) -> None:
    spec = guessed(LOGS["census"](tmp_path, 1000, 1).path / name)
    dot = "." if skip_lines else ""
    assert (spec.input.skip_lines, spec.input.skip_empty_lines) == (skip_lines, True)
    assert spec.label_rules[0].positive == (f">50K{dot}",)
    assert spec.label_rules[0].negative == (f"<=50K{dot}",)
    assert spec.label_rules[0].trim
    readings = [column.reading for column in spec.categorical]
    assert sum(reading.nulls == ("?",) for reading in readings) == 3
    assert all(reading.trim for reading in readings)


def test_compressed_files_and_parquet_are_read_like_text(tmp_path: Path) -> None:
    rows = clicks(300)
    plain = guessed(write(tmp_path / "log.csv", rows))
    for ending in ("gz", "bz2"):
        assert guessed(pack(write(tmp_path / "log.csv", rows), ending)) == plain
    table = {name: [row[j] for row in rows[1:]] for j, name in enumerate(rows[0])}
    table["clicked"] = [int(text) for text in table["clicked"]]
    table["visits"] = [int(text) for text in table["visits"]]
    table["price"] = [float(text) for text in table["price"]]
    pq.write_table(pa.table(table), tmp_path / "log.parquet")
    spec = guessed(tmp_path / "log.parquet")
    assert spec.input.format == "parquet"
    assert (spec.dense, spec.categorical) == (plain.dense, plain.categorical)


@pytest.mark.parametrize("group", [1 << 20, 3000])
def test_text_and_parquet_of_a_log_give_one_spec(group: int, tmp_path: Path) -> None:
    rng = random.Random(0)
    start = datetime.datetime(2024, 1, 1)
    rows = [
        {
            "click": rng.randint(0, 1),
            "customer_id": 7 * i,
            "at": start + datetime.timedelta(minutes=2 * i),
            "site": rng.choice("abc"),
            "visits": rng.randint(0, 300),
        }
        for i in range(25_756)
    ]
    table = pa.Table.from_pylist(rows)
    pacsv.write_csv(table, tmp_path / "log.csv")
    pq.write_table(table, tmp_path / "log.parquet", row_group_size=group)
    specs = {}
    for ending in ("csv", "parquet"):
        spec, text = guessed_with_text(tmp_path / f"log.{ending}")
        assert "made from all of its rows (25,756)" in text
        assert "customer_id: all values are distinct" in text
        specs[ending] = dataclasses.replace(spec, input=InputFormat())
    assert specs["csv"] == specs["parquet"]
    assert specs["csv"].split.test_from == "2024-02-02"


def test_of_large_parquet_the_first_rows_are_read(tmp_path: Path) -> None:
    rows = 120_000
    path = tmp_path / "log.parquet"
    table = pa.table({"click": [0, 1] * (rows // 2), "n": range(rows)})
    pq.write_table(table, path, row_group_size=30_000)
    sample = take_sample(str(path), 1 << 20)
    (_, numbers) = sample.columns
    assert not sample.whole
    assert sorted(map(int, numbers.counts)) == list(range(50_000))


def test_text_that_is_not_utf_8_and_columns_of_one_name(tmp_path: Path) -> None:
    """They were tracebacks."""
    n = 60
    texts = pa.array([b"a\xff", b"b", b"c"] * (n // 3), pa.binary()).buffers()
    columns = {
        "y": pa.array([0, 1, 0, 0] * (n // 4)),
        "text": pa.Array.from_buffers(pa.string(), n, texts),
        "twice": pa.array(range(n)),
    }
    names, arrays = [*columns, "twice"], [*columns.values(), columns["y"]]
    pq.write_table(pa.Table.from_arrays(arrays, names), tmp_path / "log.parquet")
    spec, text = guessed_with_text(tmp_path / "log.parquet")
    assert spec.categorical_names == ["text"]
    assert "twice: several columns have this name" in text


def test_types_of_parquet(tmp_path: Path) -> None:
    rows = 200
    table = pa.table(
        {
            "label": pa.array([i % 2 == 0 for i in range(rows)]),
            "at": pa.array(
                [i * 3_600_000_000 for i in range(rows)], pa.timestamp("us", "Asia/Tokyo")
            ),
            "tags": pa.array([["a", "b"][: i % 3] for i in range(rows)]),
            "big": pa.array([2**60 + i % 7 for i in range(rows)], pa.int64()),
            "ratio": pa.array([i / rows for i in range(rows)], pa.float32()),
            "digits": pa.array([str(i % 9) for i in range(rows)]),
            "nothing": pa.nulls(rows),
            "nested": pa.array([[[1]]] * rows),
            "digest": pa.array([b"ab"] * rows, pa.binary(2)),  # no reader takes it
        }
    )
    pq.write_table(table, tmp_path / "log.parquet")
    spec, text = guessed_with_text(tmp_path / "log.parquet")
    columns = columns_of(spec)
    assert spec.label == "label"
    assert columns["tags"].multi_hot
    assert columns["tags"].raw == "string"
    assert columns["big"].raw == columns["digits"].raw == "string"
    assert columns["ratio"].raw == "float"
    assert columns["at_hour"].derive.time_format == ""
    assert (spec.split.by, spec.split.column) == ("time", "at")
    assert not {"nothing", "nested", "digest"} & columns.keys()
    assert re.search("nested: columns of type list.* are not read", text)


def test_values_that_need_a_key(tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = [["id", "y", "amount", "gain", "code", "when", "user_id", "zip", "tags", "note"]]
    for i in range(400):
        rows.append(
            [
                f"row{i}",
                rng.choice(["yes", "no"]),
                f'"{rng.randint(1, 9)},{rng.randint(0, 999):03d}"',
                rng.choice(["NA", "1.5", "+2.25", "-7.0"]),
                f"{rng.randint(1, 9)}.0",
                f"{rng.randint(1, 28):02d}.{rng.randint(1, 12):02d}.2021",
                str(2**60 + rng.randint(0, 50)),
                f"0{rng.randint(1000, 1040)}",
                rng.choice(["a|b", "b|c", "c", "a", "a|c", "b|a", "c|a|b"]),
                "",
            ]
        )
    spec = guessed(write(tmp_path / "log.csv", rows))
    columns = columns_of(spec)
    assert spec.label_rules[0].positive == ("yes",)
    assert "amount" not in columns  # 1,234 is no list of two
    assert columns["gain"].reading.nulls == ("NA",)
    assert columns["gain"].reading.lenient
    assert (columns["code"].raw, columns["code"].reading.lenient) == ("int", True)
    assert columns["when_weekday"].derive.time_format == "%d.%m.%Y"
    assert columns["user_id"].raw == "string"  # more than 53 bits
    assert columns["zip"].raw == "string"  # 01000 is not 1000
    assert columns["tags"].multi_hot
    assert "id" not in columns
    assert "note" not in columns


def test_lines_that_end_with_carriage_returns(tmp_path: Path) -> None:
    path = write(tmp_path / "a log.csv", clicks(50))
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r"))
    with pytest.raises(BadInputError, match=r"lines end with .r only\n.*tr .* '.*/a log.csv' >"):
        guess(str(path))


def test_numbers_alone(tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = [["y", "a", "b"]]
    rows += [[str(i % 2), f"{rng.random():.4f}", f"{rng.random()}"] for i in range(80)]
    path = write(tmp_path / "log.csv", rows)
    spec = guessed(path)
    assert [column.name for column in spec.categorical] == ["a_bucket"]
    assert len(spec.categorical[0].derive.boundaries) == 3
    assert etl_run(path, tmp_path / "out", "--spec", str(tmp_path / "spec.toml")) == 0


def test_decimal_commas_are_no_lists(tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = [["Kunde", "Umsatz", "Rabatt", "gekauft"]]
    for _ in range(300):
        euros, discount = rng.randint(1, 3000), rng.randint(0, 99)
        rows.append(
            [
                f"{rng.randint(1, 90):08d}",
                f"{euros:,}".replace(",", ".") + f",{rng.randint(0, 99):02d}",
                rng.choice([f"{discount},5", f"{discount}", "n/a"]),
                rng.choice(["ja", "nein"]),
            ]
        )
    path = write(tmp_path / "log.csv", rows, ";")
    spec, text = guessed_with_text(path)
    assert text.count("reads a decimal comma") == 2
    assert spec.categorical_names == ["Kunde"]
    assert etl_run(path, tmp_path / "out", "--spec", str(tmp_path / "spec.toml")) == 0


def test_latin_1_byte_order_mark_and_preamble(tmp_path: Path) -> None:
    rows = clicks(50)
    text = "".join(";".join(row) + "\r\n" for row in rows)
    path = tmp_path / "log.csv"
    path.write_bytes(("Export of 2024;\r\n\r\n" + text.replace("fr", "Orléans")).encode("latin-1"))
    spec = guessed(path)
    assert (spec.input.encoding, spec.input.delimiter) == ("latin-1", ";")
    assert spec.input.skip_lines == 2
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert guessed(path).label == "clicked"
    path.write_bytes(text.replace("fr", "10 €").encode("cp1252"))  # in Latin-1 a control character
    spec = guessed(path)
    assert spec.input.encoding == "cp1252"
    assert etl_run(path, tmp_path / "out", "--spec", str(tmp_path / "spec.toml")) == 0
    (file,) = (tmp_path / "out" / "workflow").rglob("unique.country.parquet")
    assert "10 €" in pq.read_table(file)["country"].to_pylist()
    path.write_bytes(text.encode("utf-16"))
    with pytest.raises(BadInputError, match="UTF-16"):
        guess(str(path))


def test_a_word_among_numbers_is_a_missing_one(tmp_path: Path) -> None:
    """One typing error made a category of a column of prices."""
    rows = clicks(400)
    rows[7][3] = "cheap"
    path = write(tmp_path / "log.csv", rows)
    assert columns_of(guessed(path))["price"].reading.nulls == ("cheap",)
    for row in rows[1:40]:
        row[3] = "cheap"  # so often it is a value
    assert columns_of(guessed(write(path, rows)))["price"].raw == "string"


def test_columns_named_twice_are_named_by_position(tmp_path: Path) -> None:
    rows = [["y", "a", "a"], *([str(i % 2), str(i % 3 / 2), f"x{i % 5}"] for i in range(40))]
    spec = guessed(write(tmp_path / "log.csv", rows))
    assert (spec.input.header, spec.input.skip_lines) == (False, 1)
    assert spec.file_columns(label=True) == ["y", "a", "a_2"]
    assert columns_of(spec)["a_2"].raw == "string"


def test_all_null_constant_and_nameless_columns_are_not_read(tmp_path: Path) -> None:
    rows = clicks(40)
    rows = [[*row, "", "one", "7"] for row in rows]
    rows[0][-3:] = ["empty", "constant", ""]
    spec, text = guessed_with_text(write(tmp_path / "log.csv", rows))
    assert set(columns_of(spec)) == {"country", "visits", "price"}
    for reason in ("empty: no values", "constant: always 'one'", "column 7: it has no name"):
        assert reason in text


def test_names_that_a_spec_cannot_have(tmp_path: Path) -> None:
    rows = [["click/rate", ".hidden", "a b", "label"]]
    rows += [[f"{i / 7:.2f}", f"v{i % 3}", f"w{i % 4}", str(i * i % 7 % 2)] for i in range(50)]
    columns = columns_of(guessed(write(tmp_path / "log.csv", rows)))
    assert columns["click_rate"].reading.sources == ("click/rate",)
    assert columns["_hidden"].reading.sources == (".hidden",)
    assert columns["a b"].reading.sources == ()


def test_one_row(tmp_path: Path) -> None:
    spec = guessed(write(tmp_path / "log.csv", clicks(1)))
    assert spec.label == "clicked"
    assert {"country", "visits", "price"} == set(columns_of(spec))


def test_numbers_only_still_give_a_category(tmp_path: Path) -> None:
    rows = [["y", "a", "b"], *([str(i % 2), str(i % 9), str(i * 7 % 50)] for i in range(60))]
    spec = guessed(write(tmp_path / "log.csv", rows))
    assert [column.name for column in spec.categorical] == ["a_bucket"]
    assert [column.name for column in spec.dense] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty file"),
        (b"\n\n", "empty file"),
        (b"y,a,b\n", "a header and no rows"),
        (b"one\ntwo\nthree\n", "one column"),
        (b"a,b\n1,2\n" * 3 + b"\0", "not text"),
        (b"name,city\nann,rome\nbob,oslo\ncyd,bonn\n", "looks like a label"),
        (gzip.compress(b"a,b\n1,2\n", mtime=0), "compressed, but its name does not say so"),
        (b"PAR1 and no more", "cannot be read as parquet"),
    ],
)
def test_what_cannot_be_guessed_is_an_error(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=message) as error:
        guess(str(path))
    assert error.value.remedy
    assert str(path) in error.value.what


def test_label_and_delimiter_can_be_given(tmp_path: Path) -> None:
    rows = [[str(i % 3), f"c{i % 25}", "yn"[i % 2]] for i in range(30)]
    path = write(tmp_path / "log.csv", rows, "%")
    with pytest.raises(BadInputError, match="--delimiter"):
        guess(str(path))
    assert guessed(path, delimiter="%").label_rules[0].positive == ("y",)
    assert guessed(path, delimiter="%", label="1").label_rules[0].threshold == 2
    assert guessed(path, delimiter="%", label="3,1").labels == ["label", "int_0"]
    with pytest.raises(BadInputError, match="no column '4'"):
        guess(str(path), delimiter="%", label="4")
    with pytest.raises(BadInputError, match="cannot be a label"):
        guess(str(path), delimiter="%", label="2")


def test_the_head_of_a_large_file(tmp_path: Path) -> None:
    rows = clicks(45_000)
    for number, row in enumerate(rows):
        row[1] = row[1].ljust(40, "x")
        row[2] += ".5" * (number >= 40_000)  # integers in the head
    path = write(tmp_path / "log.csv", rows)
    for head_mb, some, raw in ((1, "some", "int32"), (8, "all", "float")):
        spec, text = guessed_with_text(path, head_mb=head_mb)
        assert f"made from {some} of its" in text
        assert columns_of(spec)["visits"].raw == raw


def test_the_command_writes_a_file_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, spec = write(tmp_path / "log.csv", clicks(40)), tmp_path / "spec.toml"
    assert main(["guess", str(path)]) in (0, None)
    printed = capsys.readouterr().out
    assert main(["guess", str(path), "--output", str(spec)]) in (0, None)
    assert spec.read_text() == printed
    assert tomllib.loads(printed)["label"]["name"] == "clicked"
    assert main(["guess", str(path), "--output", str(spec)]) == 2
    assert "exists already" in capsys.readouterr().err
