"""The keys of a spec beyond plain columns: reading, deriving, labels, weight, split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.files.validation import parse
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.aggregates import AGGREGATES, Count
from tests.spec_logs import spec_of

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
nulls = ["0"]
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


def test_a_column_of_the_file_is_read_once_for_each_way_of_reading_it(tmp_path: Path) -> None:
    spec = spec_of(CENSUS, tmp_path)
    plan = spec.read_plan(label=True)
    reads = "inc label, age label, fnl weight, age int32, age float, work string, edu string"
    assert ", ".join(f"{read.source} {read.raw}" for read in plan.reads) == reads
    assert (plan.labels, plan.weight, plan.key) == ((0, 1), 2, None)
    assert (plan.dense, plan.categorical) == (((3,),), ((4,), (5,), (5, 6)))
    assert plan.reads[5].nulls == ("?",)
    assert plan.reads[3].nulls == ("0",)
    assert spec.columns == ["inc", "over_40", "fnl", "age", "age_group", "work", "work_by_edu"]
    assert spec.file_columns(label=True) == ["age", "work", "fnl", "edu", "inc"]
    raw = [read.raw for read in spec.read_plan(label=False).reads]
    assert raw == ["int32", "float", "string", "string"]
    assert not spec.is_criteo_format


def test_specs_survive_json(tmp_path: Path) -> None:
    spec = spec_of(CENSUS, tmp_path)
    value = json.loads(json.dumps(spec.to_dict()))
    value["dense"][0]["reading"] |= {"thousands": "", "unit": ""}  # of outputs of older versions
    assert parse(FeatureSpec, value, "a spec") == spec


EVENTS = """
[split]
by = "time"
column = "when"
time_format = "epoch_s"
valid = 0.1
test = 0.1
[events]
time = "when"
[[aggregate]]
of = "user"
[[categorical]]
names = "item"
"""


def test_the_time_of_events_is_read_as_that_of_the_split(tmp_path: Path) -> None:
    """Where it is the same column; it need not be said twice, and is read once."""
    spec = spec_of(EVENTS, tmp_path)
    assert spec.events is not None
    assert spec.events.time_format == "epoch_s"
    plan = spec.read_plan(label=True)
    assert plan.times == (plan.key,)
    other = spec_of(EVENTS.replace('time = "when"', 'time = "arrived"'), tmp_path)
    assert other.events is not None
    assert other.events.time_format == ""
    own = 'time = "when"\ntime_format = "epoch_ms"'
    own_format = spec_of(EVENTS.replace('time = "when"', own), tmp_path).events
    assert own_format is not None
    assert own_format.time_format == "epoch_ms"


def test_a_new_value_of_aggregates_adds_no_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spec without ``values`` would else have another column with the next version."""
    before = spec_of(EVENTS, tmp_path).dense_names
    monkeypatch.setitem(AGGREGATES, "median", Count())
    assert spec_of(EVENTS, tmp_path).dense_names == before
    assert before == ["user_count", "user_label_rate", "user_since"]


TIMES = "[split]\nby = 'time'\ncolumn = 't'"
#: Texts of a spec, beside a categorical column x, and what is said of them.
WRONG = {
    "nonsense": "not a feature spec",
    "label = 'x'": "not a feature spec",
    "[label]\nnam = 'click'": "unknown key 'nam'.*\n.*did you mean 'name'",
    "dense_transform = 'sqrt'": "dense_transform = 'sqrt'\n.*log_normalize",
    "[input]\nkind = 'csv'": "unknown key 'kind'",
    "[input]\nheaders = true": "did you mean 'header'",
    "[input]\nformat = 'xml'": "format = 'xml': nothing is registered.*\n.*tsv, csv, json, parquet",
    "[input]\ndelimiter = ';'": "delimiter = ';'\n.*set format = .csv",
    "[input]\nformat = 'csv'\ndelimiter = ':a'": "delimiter = ':a'",
    "[input]\nformat = 'csv'\ndelimiter = '|'": "list_separator = '|'\n.*than the delimiter",
    "[input]\nformat = 'csv'\ndelimiter = 5": "delimiter: expected text, got 5",
    "[input]\nformat = 'parquet'\nlist_separator = 'ab'": "list_separator = 'ab'\n.*one ASCII",
    "[input]\nlist_separator = '-'": "list_separator = '-'\n.*one ASCII character",
    "[input]\nformat = 'parquet'\nheader = true": "header = true\n.*parquet names its columns",
    "[input]\nformat = 'parquet'\nskip_lines = 1": "skip_lines = 1\n.*only text has it",
    "[input]\nformat = 'csv'\nheader = 'false'": "header: expected true or false, got 'false'",
    "[input]\nskip_lines = -1": "skip_lines = -1",
    "[input]\nmax_line_kb = 0": "max_line_kb = 0",
    "[input]\nmax_line_kb = 1.5": "max_line_kb: expected an integer, got 1.5",
    "[input]\nmax_line_kb = 2097152": "max_line_kb = 2097152\n.*from 1 to 1048576",
    "[input]\nheader = true\ncolumns = ['x']": "columns = .*\n.*the header names them",
    "[input]\ncolumns = ['x', 'x']": "columns = .*\n.*list each name once",
    "[input]\nencoding = 'utf-16'": "encoding = 'utf-16'",
    "[input]\ncomment = 'ä'": "comment = 'ä'",
    "[dense]\nnames = 'd'": r"write \[\[dense\]\]",
    "[[dense]]\nnames = 'd'\nraw = 'int64'": "raw = 'int64'\n.*int32, float",
    "[[dense]]\nnames = 'd'\nfill = 0.5": "fill = 0.5\n.*32-bit integer",
    "[[dense]]\nnames = 'd'\nfill = 3000000000": "fill = 3000000000",
    "[[dense]]\nnames = 'd'\nraw = 'float'\nfill = inf": "fill: expected a finite number, got inf",
    "[[dense]]\nnames = 'd'\ntransform = 'sqrt'": "column d: transform = 'sqrt'",
    f"[[dense]]\nnames = 'd'\nnulls = {['x'] * 1001}": r"column d: nulls = .*\n.*at most 1000",
    "[[dense]]\nnames = 'd{0..999}'\n[[dense]]\nnames = 'e'": "has 1001 dense columns",
    # each of these would leave out a column, or the label's name, without a word
    "[[dense]]\nnames = 'd_{12..0}'": r"'d_\{12\.\.0\}' is not a range of names",
    "[[dense]]\nnames = 'x_{0,3}'": r"'x_\{0,3\}' is not a range of names",
    "[[dense]]\nnames = 'x{0..1}y{0..1}'": "is not a range of names\n.*into a list",
    "[[dense]]\nraw = 'float'": "without names: {'raw': 'float'}",
    "[[dense]]\nnames = []": "without names",
    "[[categorical]]\nname = 'y'": "unknown key 'name'.*\n.*did you mean 'names'",
    "[[categorical]]\nnames = 'x'": "used twice: x",
    "[[categorical]]\nnames = 'a/b'": "'a/b' cannot be the name",
    "[[categorical]]\nnames = '.a'": "'.a' cannot be the name",
    "[[categorical]]\nnames = 'y'\nvocabulary = \"a\\u0001b\"": "cannot be the name of a column",
    "[[categorical]]\nnames = 'y'\nraw = 'utf8'": "raw = 'utf8'",
    "[[categorical]]\nnames = 'y'\nnum_buckets = 4": "num_buckets = 4\n.*spreads the rare",
    "[[categorical]]\nnames = 'y'\nmax_table_size = 2": "max_table_size = 2\n.*3 ids are reserved",
    "[[categorical]]\nnames = 'y'\nfreq_threshold = -1": "freq_threshold = -1\n.*from 0",
    "[[categorical]]\nnames = 'y'\nfreq_threshold = 1\nmax_table_size = 9": "Categorify takes only",
    "[[categorical]]\nnames = 'y'\nhash_buckets = 9\nfreq_threshold = 2": "have no vocab",
    "[[categorical]]\nnames = 'y'\nhash_buckets = 9\nvocabulary = 'v'": "have no vocab",
    "[[categorical]]\nnames = 'y'\nhash_buckets = 2147483647": "from 0 to 2147483645",
    "[[categorical]]\nnames = 'y'\nvocabulary = 'x'\nraw = 'int'": "y and x share the vocabulary",
    "[[categorical]]\nnames = 'y'\nvocabulary = 'label'": "has the name of another column",
    "[[label]]\nname = 'y'\nthreshold = nan": "label y: threshold: expected a finite number",
    "[[label]]\nname = 'y'\nthreshold = 4\npositive = ['4']": "threshold = 4\n.*remove it or",
    "[[label]]\nname = 'y'\nnegative = ['4']": "negative = .*\n.*add positive",
    "[[label]]\nname = 'y'\n[[label]]\nname = 'y'": "names used twice: y",
    "[split]\nby = 'file'": "split by 'file'",
    "[split]\nby = 'days'\nvalid = 0.1": "split by days: valid = 0.1",
    "[split]\nby = 'share'\nvalid = 0.5\ntest = 0.5": "sum is less than 1",
    "[split]\nby = 'share'\nvalid = 1.5\ntest = 0.1": "valid = 1.5",
    "[split]\nby = 'share'\ntrain = 'a'": "split by share: train = ",
    "[split]\nby = 'column'\nvalid = 0.1\ntest = 0.1": "column = ''\n.*name a column",
    "[split]\nby = 'files'\ntrain = 'a'\ntest = 'b'": "train = .*\n.*or a share",
    "[split]\nby = 'time'": "column = ''",
    TIMES: "valid = 0\n.*or valid_from =",
    f"{TIMES}\nvalid_from = '2024'\ntest_from = 'x'": "valid_from = '2024'",
    f"{TIMES}\nvalid_from = '2024-01-02'\ntest_from = '2024-01-01'": "a later time as test_from",
    f"{TIMES}\ntime_format = '%Y %m %b'\nvalid = 0.1\ntest = 0.1": "%m or %b",
    f"{TIMES}\ntime_format = '%H'\nvalid = 0.1\ntest = 0.1": "time_format",
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), WRONG.items())
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        spec_of(f"{text}\n[[categorical]]\nnames = 'x'\n", tmp_path)
    assert str(tmp_path / "spec.toml") in caught.value.what


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('derive = "bucket"', 'derive = "buckets"', "age_group: derive = 'buckets'"),
        ("[18, 40]", "[40, 18]", "age_group: derive = 'bucket' with boundaries"),
        ("boundaries = [18, 40]", "", "with boundaries = "),
        ('["work", "edu"]', '["work"]', "work_by_edu: derive = 'cross'\n.*not 1 columns"),
        ('derive = "cross"', 'raw = "string"', r"work_by_edu: from = \['work', 'edu'\]"),
        ('derive = "cross"', 'derive = "age"', r"derive = 'age'\n.*write \[\[dense\]\]"),
    ],
)
def test_derivations_that_cannot_be(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in CENSUS
    with pytest.raises(SettingsError, match=message):
        spec_of(CENSUS.replace(old, new, 1), tmp_path)


@pytest.mark.parametrize("column", ['from = "stars"', 'from = ["u", "stars"]\nderive = "cross"'])
def test_no_feature_is_made_of_the_label(tmp_path: Path, column: str) -> None:
    labels = (
        '[[label]]\nname = "liked"\nfrom = "stars"\nthreshold = 4\n[[label]]\nname = "clicks"\n'
    )
    columns = f'[[categorical]]\nnames = "u"\n[[categorical]]\nnames = "x"\n{column}\n'
    with pytest.raises(SettingsError, match="column x is read from stars, as the label"):
        spec_of(labels + columns, tmp_path)
