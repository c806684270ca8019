"""What ``etl guess --tables`` proposes: keys by their values, versions, columns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.clicklog.synthetic.click_model import SyntheticSettings
from nvt_torchrec.clicklog.synthetic.log import synthesize
from nvt_torchrec.etl.commands.guess import guess
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.formats.feature_spec.vector_columns import VectorColumn


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of three days, users by another name of the key, and items with versions."""
    directory = tmp_path_factory.mktemp("log") / "raw"
    synthesize(directory, SyntheticSettings(days=3, rows_per_day=500, tables=True))
    return directory


def guess_spec_of(log: Path, *tables: Path) -> FeatureSpec:
    text, flags, _ = guess(str(log), tables=[*map(str, tables)])
    file = log.parent / "guessed.toml"
    file.write_text(text)
    given = [f"{table.stem}={table}" for table in tables]
    assert flags[flags.index("--table") + 1] == ",".join(given)
    return load_spec(file)


def test_keys_and_versions_are_found_by_their_values(raw: Path, tmp_path: Path) -> None:
    """The spec runs as it is."""
    spec = guess_spec_of(raw / "day_0.csv", raw / "items.csv", raw / "users.csv")
    items, users = spec.tables
    assert (items.name, items.path, items.key, items.file_key) == (
        "items",
        "items.csv",
        ("item",),
        ("item",),
    )
    assert (items.valid_from, items.log_time) == ("changed", "time")
    assert (users.key, users.file_key, users.valid_from) == (("user",), ("user_id",), "")
    assert [column.name for column in spec.table_columns("items")] == ["price", "brand", "category"]
    assert [column.name for column in spec.table_columns("users")] == ["segment"]
    manifest = run(EtlSettings(str(raw), tmp_path / "out", spec, engine="cpu"))
    assert manifest.splits["train"]["rows"] == 1000


def test_names_that_both_have(tmp_path: Path) -> None:
    """The table's column gets a name of its own, and is read from the one that it has."""
    log = ["clicked,item,price", *(f"{i % 3 == 0:d},i{i % 40},{i % 7}.5" for i in range(300))]
    (tmp_path / "log.csv").write_text("\n".join(log) + "\n")
    items = ["sku;price", *(f"i{i};{i}.25" for i in range(60))]
    (tmp_path / "items.csv").write_text("\n".join(items) + "\n")
    spec = guess_spec_of(tmp_path / "log.csv", tmp_path / "items.csv")
    (rule,) = spec.tables
    assert (rule.key, rule.file_key) == (("item",), ("sku",))
    assert rule.input is not None
    assert rule.input.delimiter == ";"
    (price,) = spec.table_columns("items")
    assert (price.name, price.reading.sources) == ("price_2", ("price",))
    run(EtlSettings(str(tmp_path / "log.csv"), tmp_path / "out", spec, engine="cpu"))


def test_a_table_without_a_key_of_the_log(raw: Path, tmp_path: Path) -> None:
    shops = tmp_path / "shops.csv"
    shops.write_text("shop,city\nx1,Wien\nx2,Graz\n")
    with pytest.raises(BadInputError, match=r"shops.csv: no column of it has the values"):
        guess(str(raw / "day_0.csv"), tables=[str(shops)])
    shops.write_text("1\t2\n3\t4\n")
    with pytest.raises(BadInputError, match="its columns have no names"):
        guess(str(raw / "day_0.csv"), tables=[str(shops)])


def test_row_numbers_are_no_key_of_a_quantity(tmp_path: Path) -> None:
    """An age from 20 on is also the number of a row of any table."""
    log = ["clicked,age,shop_id"]
    log += [f"{i % 3 == 0:d},{20 + i % 50},{i % 7 + 1}" for i in range(300)]
    (tmp_path / "log.csv").write_text("\n".join(log) + "\n")
    shops = ["number,city", *(f"{i},c{i % 9}" for i in range(1, 99))]
    (tmp_path / "shops.csv").write_text("\n".join(shops) + "\n")
    text, _, _ = guess(str(tmp_path / "log.csv"), tables=[str(tmp_path / "shops.csv")])
    assert 'key = {shop_id = "number"}' in text


def write_vector_log(directory: Path) -> Path:
    """Write a log whose items are 0 to 39."""
    log = ["clicked,item", *(f"{i % 3 == 0:d},{i % 40}" for i in range(300))]
    (directory / "log.csv").write_text("\n".join(log) + "\n")
    return directory / "log.csv"


def test_lists_of_numbers_of_one_length_are_vectors(tmp_path: Path) -> None:
    """Lists of integers, and of several lengths, are none; an empty list is a missing vector."""
    log = write_vector_log(tmp_path)
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(40, 5)).astype(np.float32)
    lists = [None if i == 3 else row.tolist() for i, row in enumerate(numbers)]
    columns = {
        "item": pa.array(range(40)),
        "text": pa.array(lists, pa.list_(pa.float32())),
        "clicked": pa.array(numbers[:, :2].tolist(), pa.list_(pa.float16(), 2)),
        "tags": pa.array([[i % 4, i % 5] for i in range(40)]),
        "weights": pa.array([[0.5] * (1 + i % 3) for i in range(40)]),
    }
    pq.write_table(pa.table(columns), tmp_path / "items.parquet")
    spec = guess_spec_of(log, tmp_path / "items.parquet")
    assert spec.vectors == (
        VectorColumn("text", "items", 5),
        VectorColumn("clicked_2", "items", 2, "float16", "clicked"),
    )
    assert [column.name for column in spec.table_columns("items")] == ["tags"]
    text = (tmp_path / "guessed.toml").read_text()
    assert "lists of 5 numbers, missing in 2.5% of the rows" in text
    assert "items: weights: columns of type list<" in text
    run(EtlSettings(str(log), tmp_path / "out", spec, engine="cpu"))


@pytest.mark.parametrize(("form", "separator"), [("[{}]", ", "), ("{}", "|"), ("[{}]", " ")])
def test_vectors_of_text_are_found(tmp_path: Path, form: str, separator: str) -> None:
    log = write_vector_log(tmp_path)
    items = ["item,text"]
    for i in range(40):
        listed = form.format(separator.join(map(repr, (i / 7, 1.0, -i))))
        items.append(f'{i},"{listed}"')
    (tmp_path / "items.csv").write_text("\n".join(items) + "\n")
    spec = guess_spec_of(log, tmp_path / "items.csv")
    assert spec.vectors == (VectorColumn("text", "items", 3),)
    run(EtlSettings(str(log), tmp_path / "out", spec, engine="cpu"))


def test_vectors_of_a_log_are_left_out(tmp_path: Path) -> None:
    """A log is read without them: they belong to a table."""
    log = [{"clicked": i % 3 % 2, "item": i % 40, "text": [i / 7, 1.5]} for i in range(300)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    text, _, _ = guess(str(tmp_path / "log.jsonl"))
    assert "text: lists of 2 numbers: put them into a table with a [[vector]]" in text
