"""Typed columns are read as the text of their values would be."""

from __future__ import annotations

import datetime
import decimal
import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvt_torchrec.clicklog.readers.parquet_values import convert_array, fits, suggest_type_remedy
from nvt_torchrec.clicklog.text.convert import convert
from nvt_torchrec.formats.feature_spec.read_plan import LabelRule, Read
from tests.clicklog.test_field_rules import _TEXTS, BAD, as_list, fields_of

_UTC = datetime.UTC
_RAW = st.sampled_from(["int32", "int", "float", "hex32", "bool", "string", "weight"])
_TEXT_TYPES = [pa.string(), pa.large_string(), pa.binary(), pa.string_view(),
               pa.dictionary(pa.int8(), pa.string())]  # fmt: skip


def _micros(time: datetime.datetime) -> int:
    since = time.replace(tzinfo=_UTC) - datetime.datetime(1970, 1, 1, tzinfo=_UTC)
    return since // datetime.timedelta(microseconds=1)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.none() | _TEXTS, max_size=6),
    _RAW,
    st.booleans(),
    st.sampled_from([(), ("?",), ("NA", "-1")]),
    st.sampled_from(_TEXT_TYPES),
)
def test_text_is_read_as_in_text_files(texts, raw, rules, nulls, held) -> None:
    read = Read("x", raw, nulls=nulls, trim=rules, lenient=rules)
    array = pa.array(texts, pa.string()).cast(held)
    column = convert_array(array, read)
    expected = convert(fields_of([text or "" for text in texts]), read)
    assert as_list(column) == as_list(expected)
    for row in np.flatnonzero(column.code).tolist():
        assert column.show(row) == ("None" if texts[row] is None else repr(texts[row]))


_INT_TYPES = [pa.int8(), pa.uint16(), pa.int32(), pa.int64(), pa.uint64()]


@settings(deadline=None, max_examples=150)
@given(st.data(), _RAW.filter("hex32".__ne__), st.sampled_from([(), ("-1", "x"), ("7.0", "255")]))
def test_integers_are_read_as_their_digits(data, raw, nulls) -> None:
    held = data.draw(st.sampled_from(_INT_TYPES))
    bounds = np.iinfo(held.to_pandas_dtype())
    numbers = st.integers(int(bounds.min), int(bounds.max)) | st.integers(0, 9)
    values = data.draw(st.lists(st.none() | numbers, max_size=6))
    read = Read("x", raw, nulls=nulls)
    assert fits(held, read)
    column = convert_array(pa.array(values, held), read)
    as_text = Read("x", raw, nulls=tuple(text.removesuffix(".0") for text in nulls))
    if raw == "string":
        as_text = read
    texts = ["" if value is None else str(value) for value in values]
    assert as_list(column) == as_list(convert(fields_of(texts), as_text))


@pytest.mark.parametrize(
    ("values", "held", "rule", "expected"),
    [
        ([0, 1, 2, None], pa.int64(), LabelRule("y"), [0, 1, BAD, BAD]),
        ([0.0, 1.0, 0.5, float("nan")], pa.float32(), LabelRule("y"), [0, 1, BAD, BAD]),
        ([True, False, None], pa.bool_(), LabelRule("y"), [1, 0, BAD]),
        (["1", "0.0", " 1"], pa.string(), LabelRule("y"), [1, 0, BAD]),
        ([3, 4, 5, None], pa.int8(), LabelRule("y", threshold=4), [0, 1, 1, BAD]),
        ([3.5, 4.0, float("nan")], pa.float64(), LabelRule("y", threshold=4), [0, 1, BAD]),
        ([decimal.Decimal("3.9"), decimal.Decimal(4)], pa.decimal128(4, 1),
         LabelRule("y", threshold=4), [0, 1]),
        (["4", "x"], pa.string(), LabelRule("y", threshold=4), [1, BAD]),
        ([1, 2, 3], pa.int64(), LabelRule("y", positive=("2", "3.0")), [0, 1, 1]),
        ([1, 2, 3], pa.int64(), LabelRule("y", positive=("2",), negative=("1.0",)), [0, 1, BAD]),
        ([1.0, 2.5, None], pa.float64(), LabelRule("y", positive=("1", "2.5")), [1, 1, BAD]),
        ([float("nan"), 1e300], pa.float64(), LabelRule("y", positive=("1e300",)), [BAD, 1]),
        ([True, False], pa.bool_(), LabelRule("y", positive=("True",)), [1, 0]),
        ([True, False], pa.bool_(), LabelRule("y", positive=("1",), negative=("0",)), [1, 0]),
        ([">50K", "<=50K", None], pa.dictionary(pa.int8(), pa.string()),
         LabelRule("y", positive=(">50K",)), [1, 0, BAD]),
    ],
)  # fmt: skip
def test_labels(values, held, rule, expected) -> None:
    read = Read("y", "label", label=rule)
    array = pa.array(values, held)
    assert fits(held, read)
    assert as_list(convert_array(array, read)) == expected


def test_weights() -> None:
    read = Read("w", "weight", trim=True)
    for values in ([1, 0, -1, None], [1.5, 0.0, -0.5, float("nan")], [" 1", "0", "-1", ""]):
        first, *rest = as_list(convert_array(pa.array(values), read))
        assert float(first) == float(values[0])
        assert rest == [0.0, BAD, BAD]
    assert as_list(convert_array(pa.array([True, False]), read)) == [1.0, 0.0]


_TIMES = st.datetimes(datetime.datetime(1700, 1, 1), datetime.datetime(2200, 1, 1))


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.none() | _TIMES.map(lambda time: time.replace(microsecond=0)), max_size=5),
    st.sampled_from(["s", "ms", "us", "ns"]),
    st.sampled_from([None, "UTC", "Asia/Kolkata"]),
)
def test_timestamps_and_their_numbers(times, unit, zone) -> None:
    expected = [None if time is None else _micros(time) for time in times]
    array = pa.array(times, pa.timestamp("us")).cast(pa.timestamp(unit))
    read = Read("t", "time", time_format="%Y")
    zoned = pa.Array.from_buffers(pa.timestamp(unit, zone), len(array), array.buffers())
    assert as_list(convert_array(zoned, read)) == expected
    if unit != "ns":
        numbers = array.view(pa.int64())
        read = Read("t", "time", time_format=f"epoch_{unit}")
        assert as_list(convert_array(numbers, read)) == expected
        text = convert(fields_of(["" if n is None else str(n) for n in numbers.to_pylist()]), read)
        assert as_list(text) == expected
        floats = pa.array([None if n is None else float(n) for n in numbers.to_pylist()])
        if unit == "s":
            assert as_list(convert_array(floats.cast(pa.float64()), read)) == expected


def test_other_times() -> None:
    day = datetime.date(2024, 2, 29)
    expected = [_micros(datetime.datetime(2024, 2, 29)), None]
    for held in (pa.date32(), pa.date64()):
        assert as_list(convert_array(pa.array([day, None], held), Read("t", "time"))) == expected
    hours = Read("t", "time", time_format="%y%m%d%H")
    actual = as_list(convert_array(pa.array([14102123, 9010203, None, 1], pa.int32()), hours))
    wanted = [datetime.datetime(2014, 10, 21, 23), datetime.datetime(2009, 1, 2, 3)]
    assert actual == [*map(_micros, wanted), None, BAD]
    seconds = Read("t", "time", time_format="epoch_s")
    far = pa.array([2.0**62, 1.5e18, -1e300, 0.25])
    assert as_list(convert_array(far, seconds)) == [BAD, BAD, BAD, 250_000]
    far = pa.array([2**62, -(2**62)], pa.timestamp("s"))
    assert as_list(convert_array(far, Read("t", "time"))) == [BAD, BAD]


@pytest.mark.parametrize(
    ("held", "read", "remedy"),
    [
        (pa.float64(), Read("x", "string"), "change raw"),
        (pa.int64(), Read("x", "time"), "change raw, .*time_format of column x"),
        (pa.bool_(), Read("x", "string"), 'set raw = "bool" for column x'),
        (pa.timestamp("us"), Read("x", "string"), "change raw"),
        (pa.list_(pa.string()), Read("x", "string"), "change raw, multi_hot"),
        (pa.struct([]), Read("x", "int"), "change raw"),
        (pa.time32("s"), Read("x", "int"), "change raw"),
    ],
)
def test_what_would_lose_information_is_refused(held, read, remedy) -> None:
    assert not fits(held, read)
    assert re.match(remedy, suggest_type_remedy(held, read))
