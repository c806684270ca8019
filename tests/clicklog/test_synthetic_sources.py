"""Synthetic logs of specs that say how columns are read: what was drawn is what is read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from clicklog.errors import SettingsError
from clicklog.missing import is_missing
from clicklog.readers.stream import stream_rows
from clicklog.rows import RawRows
from clicklog.spec.columns import InputFormat
from clicklog.spec.feature_spec import FeatureSpec
from clicklog.spec.toml_file import load_spec
from clicklog.synthetic.any_spec import SpecModel, plant_spec
from clicklog.synthetic.log import synthesize
from clicklog.synthetic.model import MISSING_COUNT, MISSING_VALUE, SyntheticSettings
from clicklog.synthetic.sources import HUNDREDTHS
from tests.clicklog.directories import contents

SETTINGS = SyntheticSettings(days=3, rows_per_day=700, seed=5)
TEXT = """
[input]
format = "csv"
delimiter = "::"
encoding = "latin-1"
skip_lines = 2
quoted_newlines = true
columns = ["user", "", "income", "time", "born", "price", "count", "site", "app", "w", "stars"]
trim = true
nulls = ["NA", "0"]

[[label]]
name = "rich"
from = "income"
positive = [">50K", ">50K."]
negative = ["<=50K", "<=50K."]

[[label]]
name = "liked"
from = "stars"
threshold = 4

[weight]
name = "w"

[split]
by = "column"
column = "user"
valid = 0.1
test = 0.1

[[dense]]
names = "price"
raw = "float"
thousands = ","

[[dense]]
names = "count"
lenient = true

[[dense]]
names = "age"
from = ["time", "born"]
derive = "age"
time_format = "%Y-%m-%d %H:%M:%S"

[[categorical]]
names = "count_value"
from = "count"
raw = "int"
lenient = true

[[categorical]]
names = "price_level"
from = "price"
derive = "bucket"
boundaries = [2, 10, 100]
thousands = ","

[[categorical]]
names = "count_log"
from = "count"
derive = "log_square"
lenient = true

[[categorical]]
names = "hour"
from = "time"
derive = "hour"
time_format = "%Y-%m-%d %H:%M:%S"

[[categorical]]
names = "birth_month"
from = "born"
derive = "month"
time_format = "%Y-%m-%d %H:%M:%S"

[[categorical]]
names = "site"
raw = "string"

[[categorical]]
names = "site_app"
from = ["site", "app"]
derive = "cross"
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    file = tmp_path_factory.mktemp("spec") / "spec.toml"
    file.write_text(TEXT)
    return load_spec(file)


def formats(spec: FeatureSpec) -> dict[str, FeatureSpec]:
    """The spec, with all that text can have, with a header, and as parquet."""
    header = InputFormat("csv", header=True, delimiter=";")
    return {
        "text": spec,
        "header": dataclasses.replace(spec, input=header),
        "parquet": dataclasses.replace(spec, input=InputFormat("parquet")),
    }


def check_rows(rows: RawRows, model: SpecModel, day: int) -> None:
    """The features that were read are those whose effects made the labels."""
    drawn, _ = model.draw(day, 0, len(rows))
    spec = model.spec
    assert rows.bad_count == 0
    assert rows.label.tolist() == drawn.label.tolist()
    assert rows.more_labels.tolist() == [drawn.further["liked"].tolist()]
    np.testing.assert_allclose(rows.weight, 0.5 + np.round(drawn.further["w"], 2), atol=1e-6)
    for j, (column, values) in enumerate(zip(spec.dense, drawn.dense, strict=True)):
        absent = is_missing(rows.dense_missing, j)
        assert (absent == (values == MISSING_COUNT)).all()
        factor = HUNDREDTHS if column.raw == "float" else 1
        found = np.round(rows.dense[j] * factor)
        assert found[~absent].tolist() == values[~absent].tolist()
    for j, (column, values) in enumerate(zip(spec.categorical, drawn.categorical, strict=True)):
        absent = is_missing(rows.categorical_missing, j)
        assert (absent == (values == MISSING_VALUE)).all()
        found = rows.categorical[j].tolist()
        if column.raw == "int":
            assert np.array(found)[~absent].tolist() == values[~absent].tolist()
        else:  # one text for one code
            pairs = {(a, b) for a, b, gone in zip(found, values.tolist(), absent, strict=True)
                     if not gone}  # fmt: skip
            assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


@pytest.mark.parametrize("name", ["text", "header", "parquet"])
def test_what_was_drawn_is_read(spec: FeatureSpec, name: str, tmp_path: Path) -> None:
    own = formats(spec)[name]
    summary = synthesize(tmp_path / "log", SETTINGS, spec=own, workers=2)
    model = plant_spec(own, SETTINGS)
    for day, file in enumerate(summary["files"]):
        ((_, rows),) = stream_rows(str(tmp_path / "log" / file["file"]), own, block_bytes=1 << 27)
        assert len(rows) == SETTINGS.rows_per_day
        check_rows(rows, model, day)
    assert summary["oracle"]["test"]["auroc"] > 0.7
    terms = {column for term in summary["model"]["terms"] for column in term["columns"]}
    assert terms == {*spec.dense_names, *spec.categorical_names}
    synthesize(tmp_path / "again", SETTINGS, spec=own, workers=1)
    assert contents(tmp_path / "again") == contents(tmp_path / "log")


def test_every_form_of_a_value_is_there(spec: FeatureSpec, tmp_path: Path) -> None:
    synthesize(tmp_path, SETTINGS, spec=spec)
    text = (tmp_path / "day_0.csv").read_bytes().decode("latin-1")
    assert text.startswith("synthetic log, line 1\nsynthetic log, line 2\n")
    for form in ("::+", ".0::", ",", '"site', "\n0", "::NA::", ":: ", "é", ">50K.", "<=50K."):
        assert form in text


def test_files_are_named_as_the_split_names_them(tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    file.write_text(
        '[split]\nby = "files"\ntrain = "part-*.tsv"\nvalid = 0.1\ntest = "test.tsv"\n'
        '[[categorical]]\nnames = "c"\nraw = "int"\n'
    )
    own = load_spec(file)
    synthesize(tmp_path / "log", SETTINGS, spec=own)
    summary = json.loads((tmp_path / "log" / "synthetic.json").read_text())
    assert [file["file"] for file in summary["files"]] == ["part-0.tsv", "part-1.tsv", "test.tsv"]
    rows = {name: summary["oracle"][name]["rows"] for name in ("train", "test")}
    assert rows == {"train": 1400, "test": 700}
    split = dataclasses.replace(own.split, train_files=("one.tsv",))
    with pytest.raises(SettingsError, match="names 2 files, for 3 days"):
        synthesize(tmp_path / "other", SETTINGS, spec=dataclasses.replace(own, split=split))


def test_a_label_that_is_a_feature(tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    file.write_text('[label]\nname = "l"\nfrom = "c"\n[[categorical]]\nnames = "c"\nraw = "int"\n')
    with pytest.raises(SettingsError, match="column c is both a label and a feature"):
        synthesize(tmp_path / "log", SETTINGS, spec=load_spec(file))
