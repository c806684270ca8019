"""A few rows are read one by one, of every spec, to what columns of the same values become."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.inference import read_first_rows
from nvt_torchrec.clicklog.in_memory import frames, python_values
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError
from nvt_torchrec.etl.run import EtlSettings, run
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.formats.flat_columns import FlatColumns
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.inference import encoder
from nvt_torchrec.inference.encoder import Encoder
from nvt_torchrec.inference.row_reader import RowReader
from tests.inference.test_values import plain
from tests.spec_logs import write_spec_log

#: Every kind of rule, derivation and key.
SPEC = """
[input]
format = "csv"
delimiter = ";"
decimal = "{decimal}"
[label]
name = "label"
[events]
time = "time"
time_format = "epoch_s"
[[aggregate]]
of = ["user", "shop"]
values = ["count"]
[[dense]]
names = ["price", "plain"]
raw = "float"
nulls = ["-1", "n/a"]
trim = true
[[dense]]
names = ["count"]
lenient = true
[[dense]]
names = "age"
from = "day"
derive = "age"
reference = "2026-09-30"
raw = "float"
[[categorical]]
names = ["user", "city"]
raw = "string"
nulls = [" none ", "-"]
trim = true
[[categorical]]
names = "shop"
raw = "int"
nulls = ["0"]
[[categorical]]
names = "code"
raw = "hex32"
nulls = ["ff"]
[[categorical]]
names = "flag"
raw = "bool"
trim = true
[[categorical]]
names = ["tags", "numbers"]
multi_hot = true
raw = "string"
nulls = ["-"]
[[categorical]]
names = "bin"
from = "plain"
derive = "bucket"
boundaries = [0, 1, 2]
raw = "int"
[[categorical]]
names = "hour"
from = "time"
derive = "hour"
raw = "int"
time_format = "epoch_s"
[[categorical]]
names = "weekday"
from = "day"
derive = "weekday"
raw = "int"
[[categorical]]
names = "pair"
from = ["user", "city"]
derive = "cross"
raw = "string"
"""
GOOD: dict[str, Any] = {
    "price": 1.5, "plain": 2.0, "count": 3, "user": "u1", "city": "Ulm", "shop": 7, "code": "1b",
    "flag": True, "tags": ["a", "b"], "numbers": ["1"], "time": 1_789_948_800,
    "day": "2026-09-21T10:00:00",
}  # fmt: skip
#: Usual and unusual values, right and wrong.
VALUES: list[Any] = [
    None, "", " ", math.nan, "none", " none ", "-", "n/a", " n/a", "-1", -1, -1.0, 0, "0", "ff",
    255, "FF", 1, 2.5, "2.5", "2,5", " 7 ", "+7", "7.0", "1e3", "12345678901234567890", 2**60,
    "é", "\ud800", b"x", b"\xff", True, "true", "T", ["a"], ["-"], [None], [], "a|b", [1],
    {"a": 1}, 1_789_948_800, "1789948800", "1789948800.5", -1e30, datetime.date(2026, 9, 21),
    np.datetime64("2026-09-21"), np.float32(0.1), np.int64(5), "2026-02-30",
    "2026-09-21", " 2026-09-21 10:00", "2026-09-21T10:00:59.25", "2026-09-21 24:00", "0000-01-01",
    "9999-12-31 23:59:59.999999", "2026-09-21 10:00+02:00", "2026-09-21\n", "20260921",
]  # fmt: skip


@pytest.fixture(scope="module", params=[".", ","])
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    file = tmp_path_factory.mktemp("spec") / "spec.toml"
    file.write_text(SPEC.format(decimal=request.param))
    return load_spec(file)


def outcome(read: Callable[[list[dict]], RawRows], rows: list[dict]) -> Any:
    """What is read, or what is wrong."""
    try:
        got = read(rows)
    except InvalidRowError as error:
        return error.row, error.column, error.reason
    assert got.groups is not None
    return [*plain(got), got.dense.dtype, got.groups.tolist()]


@settings(max_examples=300, deadline=None)
@given(
    values=st.lists(
        st.tuples(st.sampled_from([*GOOD]), st.sampled_from(VALUES)), min_size=1, max_size=3
    )
)
def test_rows_read_as_columns_do(spec: FeatureSpec, values: list[tuple[str, Any]]) -> None:
    assert isinstance(outcome(RowReader(spec).read, [GOOD]), list)
    rows = [{**GOOD, name: value} for name, value in values]
    for some in (rows[:1], rows):
        expected = outcome(lambda rows: frames.read_dicts(rows, spec), some)
        got = outcome(RowReader(spec).read, some)
        if isinstance(expected, tuple) and len(some) > 1:  # another wrong value may be the first
            assert isinstance(got, tuple)
        else:
            assert got == expected


@pytest.fixture(scope="module")
def retail(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    """Texts, integers, lists, a shared vocabulary and hashed values."""
    base = tmp_path_factory.mktemp("retail")
    spec = load_spec("retail")
    write_spec_log(base / "raw", spec, rows=400)
    run(EtlSettings(str(base / "raw"), base / "out", spec, engine="cpu"))
    return Encoder.load(base / "out" / "workflow")


def test_flat_columns_are_encoded_as_columns_are(retail: Encoder) -> None:
    spec = retail.spec
    file = next((retail.workflow.path.parents[1] / "raw").iterdir())
    rows = read_first_rows(str(file), spec, 40)
    unseen = dict.fromkeys(rows[0]) | {"country": "Atlantis", "user": 5, "recent_products": ["x"]}
    rows += [dict.fromkeys(rows[0]), unseen]
    for some in (rows, rows[:1], rows[-2:], []):
        flat = RowReader(spec).read(some)
        assert isinstance(flat.categorical, FlatColumns)
        got = retail.workflow.transform(flat)
        expected = retail.workflow.transform(frames.read_columns(to_columns(some, rows), spec))
        for name in ("dense", "null", "oov"):
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
        np.testing.assert_array_equal(got.ids.values, expected.ids.values)
        np.testing.assert_array_equal(got.ids.offsets, expected.ids.offsets)


def to_columns(rows: list[dict], named: list[dict]) -> dict[str, list]:
    return {name: [row[name] for row in rows] for name in named[0]}


def test_few_rows_take_no_detour(
    retail: Encoder, spec: FeatureSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns of Arrow cost a row of text or rules several times what a loop does."""

    def fail(*_: Any) -> None:
        raise AssertionError("read by columns")

    for module, name in (
        (encoder, "read_rows"), (python_values, "to_fields"), (frames, "find_columns"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, fail)
    assert len(retail.read([dict.fromkeys(retail.spec.sources(label=False))])) == 1
    texts = {"price": " 2", "count": 3, "shop": "7", "time": "1789948800", "day": "2026-09-21"}
    usual = {**GOOD, **texts}
    if spec.input.decimal == ",":
        usual["price"] = 2
    assert RowReader(spec).read([usual]).dense[:, 0].tolist()[:2] == [2.0, 2.0]
