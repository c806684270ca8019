"""What ``etl guess --tables`` proposes: keys by their values, versions, columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.clicklog.synthetic.click_model import SyntheticSettings
from nvt_torchrec.clicklog.synthetic.log import synthesize
from nvt_torchrec.etl.commands.guess import guess
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.toml_file import load_spec


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
    assert (items.name, items.path, items.key, items.own_key) == (
        "items",
        "items.csv",
        ("item",),
        ("item",),
    )
    assert (items.valid_from, items.log_time) == ("changed", "time")
    assert (users.key, users.own_key, users.valid_from) == (("user",), ("user_id",), "")
    assert [column.name for column in spec.columns_of("items")] == ["price", "brand", "category"]
    assert [column.name for column in spec.columns_of("users")] == ["segment"]
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
    assert (rule.key, rule.own_key) == (("item",), ("sku",))
    assert rule.input is not None
    assert rule.input.delimiter == ";"
    (price,) = spec.columns_of("items")
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
