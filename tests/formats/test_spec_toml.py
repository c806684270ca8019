"""The keys of a spec beyond plain columns: reading, deriving, labels, weight, split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.spec.toml_file import load_spec

CENSUS = """
[input]
format = "csv"
columns = ["age", "work", "fnl", "edu", "inc"]
nulls = ["?"]
trim = true
delimiter = "::"
[[label]]
name = "inc"
positive = [">50K", ">50K."]
[[label]]
name = "over_40"
from = "age"
threshold = 40
[weight]
name = "fnl"
[split]
by = "files"
train = "adult.data"
test = "adult.test"
valid = 0.1
[[dense]]
names = "age"
thousands = ","
transform = "log"
[[categorical]]
names = "age_group"
from = "age"
derive = "bucket"
boundaries = [18, 40]
[[categorical]]
names = ["work"]
raw = "string"
[[categorical]]
names = "work_by_edu"
from = ["work", "edu"]
derive = "cross"
hash_buckets = 100
"""


def _load(tmp_path: Path, text: str) -> FeatureSpec:
    (tmp_path / "spec.toml").write_text(text)
    return load_spec(tmp_path / "spec.toml")


def test_a_column_of_the_file_is_read_once_for_each_way_of_reading_it(tmp_path: Path) -> None:
    spec = _load(tmp_path, CENSUS)
    plan = spec.read_plan(label=True)
    assert [(read.source, read.raw) for read in plan.reads] == [
        ("inc", "label"),
        ("age", "label"),
        ("fnl", "weight"),
        ("age", "int32"),
        ("age", "float"),
        ("work", "string"),
        ("edu", "string"),
    ]
    assert (plan.labels, plan.weight, plan.key) == ((0, 1), 2, None)
    assert (plan.dense, plan.categorical) == (((3,),), ((4,), (5,), (5, 6)))
    assert plan.reads[5].nulls == ("?",)
    assert plan.reads[3].thousands == ","
    assert spec.columns == ["inc", "over_40", "fnl", "age", "age_group", "work", "work_by_edu"]
    assert spec.file_columns(label=True) == ["age", "work", "fnl", "edu", "inc"]
    assert [read.raw for read in spec.read_plan(label=False).reads] == [
        "int32",
        "float",
        "string",
        "string",
    ]
    assert not spec.is_plain
    assert not spec.is_criteo_format


def test_specs_survive_json(tmp_path: Path) -> None:
    spec = _load(tmp_path, CENSUS)
    assert FeatureSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize("name", ["criteo_1tb", "retail"])
def test_plain_specs_keep_their_json_and_so_their_digests(name: str) -> None:
    value = load_spec(name).to_dict()
    assert set(value) == {"label", "dense", "categorical", "dense_transform", "input"}
    assert set(value["dense"][0]) == {"name", "fill", "raw"}
    assert "reading" not in value["categorical"][0]
    assert "encoding" not in value["input"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('derive = "bucket"', 'derive = "buckets"', "age_group: derive = 'buckets'"),
        ("boundaries = [18, 40]", "boundaries = [40, 18]", "age_group: boundaries"),
        ("boundaries = [18, 40]", "", "boundaries belong to"),
        ('["work", "edu"]', '["work"]', "work_by_edu: derive = 'cross' from 1 columns"),
        ('derive = "cross"', 'raw = "string"', r"work_by_edu: from = \['work', 'edu'\]"),
        ('derive = "cross"', 'derive = "age"', r"work_by_edu: derive = 'age' in \[\[categorical"),
        ('thousands = ","', 'thousands = "x"', "column age: thousands = 'x'"),
        ('transform = "log"', 'transform = "sqrt"', "column age: transform = 'sqrt'"),
        ("threshold = 40", "threshold = nan", "over_40: threshold = nan"),
        ("threshold = 40", 'threshold = 40\npositive = ["4"]', "both positive and threshold"),
        ('name = "over_40"', 'name = "inc"', "names used twice: inc"),
        ("valid = 0.1", "", "split by files without"),
        ("valid = 0.1", "valid = 1.5", "valid = 1.5"),
        ('by = "files"', 'by = "file"', "split by 'file'"),
        ('by = "files"', 'by = "share"', "split by share with train"),
        ("trim = true", "trim = true\nskip_lines = -1", "skip_lines = -1"),
        ("trim = true", "trim = true\nheader = true", "both header = true and columns"),
        ("trim = true", 'trim = true\nencoding = "utf-16"', "encoding = 'utf-16'"),
        ("trim = true", 'trim = "yes"', "trim = 'yes'"),
    ],
)
def test_bad_keys_are_named_with_their_column(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in CENSUS
    with pytest.raises(SettingsError, match=message):
        _load(tmp_path, CENSUS.replace(old, new, 1))


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ('by = "share"\nvalid = 0.5\ntest = 0.5', "less than 1 together"),
        ('by = "column"\nvalid = 0.1\ntest = 0.1', "without column"),
        ('by = "time"\ncolumn = "t"\nvalid_from = "2024"\ntest_from = "x"', "valid_from = '2024'"),
        (
            'by = "time"\ncolumn = "t"\nvalid_from = "2024-01-02"\ntest_from = "2024-01-01"',
            "is not before test_from",
        ),
        ('by = "time"\ncolumn = "t"\ntime_format = "%Y %I"\nvalid = 0.1\ntest = 0.1', "%I with %p"),
        ('by = "time"\ncolumn = "t"\ntime_format = "%H"\nvalid = 0.1\ntest = 0.1', "time_format"),
        ('by = "time"\ncolumn = "t"', "two times or two shares"),
        ('by = "days"\nvalid = 0.1', "split by days with valid"),
        ('by = "column"\ncolumn = 1\nvalid = 0.1\ntest = 0.1', "column = 1"),
        ('by = "time"\ncolumn = [1]\nvalid = 0.1\ntest = 0.1', r"column = \[1\]"),
    ],
)
def test_bad_splits(tmp_path: Path, split: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        _load(tmp_path, f"[split]\n{split}\n[[categorical]]\nnames = 'x'\n")


@pytest.mark.parametrize("column", ['from = "stars"', 'from = ["u", "stars"]\nderive = "cross"'])
def test_no_feature_is_made_of_the_label(tmp_path: Path, column: str) -> None:
    labels = (
        '[[label]]\nname = "liked"\nfrom = "stars"\nthreshold = 4\n[[label]]\nname = "clicks"\n'
    )
    columns = f'[[categorical]]\nnames = "u"\n[[categorical]]\nnames = "x"\n{column}\n'
    with pytest.raises(SettingsError, match="column x is made of stars, from which"):
        _load(tmp_path, labels + columns)
