"""Rows in memory: what each raw type takes, and how what it does not take is named."""

from __future__ import annotations

import dataclasses
import decimal
import math

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvt_torchrec.base.errors import BadRowError, SchemaError
from nvt_torchrec.clicklog.in_memory.frames import read_columns, read_dicts
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError
from nvt_torchrec.clicklog.text.line_layout import make_plain_layout
from nvt_torchrec.clicklog.text.tokenizer import parse_delimited
from nvt_torchrec.formats.feature_spec import (
    CategoricalColumn,
    DenseColumn,
    FeatureSpec,
    InputFormat,
)
from nvt_torchrec.formats.feature_spec.raw_types import CATEGORICAL_RAW_TYPES, DENSE_RAW_TYPES
from nvt_torchrec.formats.rows import Jagged, RawRows
from nvt_torchrec.inference.row_reader import RowReader
from tests.clicklog.reference_fields import KINDS

#: A column of each raw type, and one of lists of each category; names where they differ.
_NAMES = {"int32": "count", "float": "price", "hex32": "hex", "string": "text"}
RAW = {_NAMES.get(raw, raw): raw for raw in (*DENSE_RAW_TYPES, *CATEGORICAL_RAW_TYPES)}
LISTS = {f"{name}s": raw for name, raw in RAW.items() if raw in CATEGORICAL_RAW_TYPES}
SPEC = FeatureSpec(
    "label",
    tuple(DenseColumn(name, raw=raw) for name, raw in RAW.items() if raw in DENSE_RAW_TYPES),
    (
        *(CategoricalColumn(n, raw=raw) for n, raw in RAW.items() if raw in CATEGORICAL_RAW_TYPES),
        *(CategoricalColumn(name, raw=raw, multi_hot=True) for name, raw in LISTS.items()),
    ),
    input=InputFormat("csv", header=False),
)
GOOD = {name: KINDS[raw].good for name, raw in RAW.items()}
GOOD |= {name: [KINDS[raw].good] * 2 for name, raw in LISTS.items()}
GOOD |= {"hexs": ["1b", 2], "ints": [3, 3], "texts": ["a", "b"]}


def plain(rows: RawRows) -> list:
    """All there is in rows, as Python values."""

    def column(values):
        if isinstance(values, Jagged):
            return [values.offsets.tolist(), column(values.values)]
        return values.to_pylist() if isinstance(values, pa.Array) else values.tolist()

    return [
        rows.dense.tolist(),
        rows.dense_missing.tolist(),
        [column(values) for values in rows.categorical],
        rows.categorical_missing.tolist(),
    ]


def both(row: dict) -> list:
    """One row, as a dict and as columns of objects."""
    return [
        plain(RowReader(SPEC).read([row])),
        plain(read_columns({name: [value] for name, value in row.items()}, SPEC)),
    ]


_ROW = st.fixed_dictionaries(
    {name: st.none() | KINDS[raw].values for name, raw in RAW.items()}
    | {name: st.lists(KINDS[raw].values, max_size=3) for name, raw in LISTS.items()}
)


def _field(name: str, value) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return "|".join(map(KINDS[LISTS[name]].write, value))
    return KINDS[RAW[name]].write(value)


@settings(max_examples=75, deadline=None)
@given(rows=st.lists(_ROW, min_size=1, max_size=6), data=st.data())
def test_values_read_as_their_text_does(rows: list[dict], data: st.DataObject) -> None:
    text = "".join(
        ",".join(_field(name, row[name]) for name in SPEC.columns[1:]) + "\n" for row in rows
    )
    expected = plain(parse_delimited(text.encode(), SPEC, make_plain_layout(SPEC, label=False)))
    digits = st.booleans()
    for row in rows:  # hexadecimal columns may be numbers or digits, missing values many things
        if row["hex"] is not None and data.draw(digits):
            row["hex"] = f"{row['hex']:08X}"
        row["hexs"] = [f"{v:x}" if data.draw(digits) else v for v in row["hexs"]]
        for name, value in row.items():
            if value is None or value == []:
                missing = [None, math.nan, np.nan, pd.NA, pd.NaT, ""]
                row[name] = data.draw(st.sampled_from(missing))
        if isinstance(row["bool"], bool):
            forms = (row["bool"], np.bool_(row["bool"]), str(row["bool"]).upper(), +row["bool"])
            row["bool"] = data.draw(st.sampled_from(forms))
    assert plain(RowReader(SPEC).read(rows)) == expected
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    assert plain(read_columns(columns, SPEC)) == expected
    assert plain(read_dicts(rows, SPEC)) == expected
    assert plain(read_columns(pd.DataFrame(columns, dtype=object), SPEC)) == expected


class _CudfSeries(list):
    """As cuDF's: a NumPy dtype, Arrow on request, and no implicit copy to main memory."""

    dtype = np.dtype(np.int64)

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError("Implicit conversion to a host NumPy array via __array__ is not allowed")

    def to_arrow(self) -> pa.Array:
        return pa.array(self, pa.int64())


def test_series_of_a_gpu_are_read_by_arrow() -> None:
    columns = {name: [None] * 3 for name in SPEC.columns[1:]} | {"count": [3, None, -1]}
    on_gpu = columns | {"count": _CudfSeries(columns["count"])}
    assert plain(read_columns(on_gpu, SPEC)) == plain(read_columns(columns, SPEC))


@pytest.mark.parametrize(
    ("name", "value", "same"),
    [
        ("count", 7.0, 7),
        ("count", np.float32(7), 7),
        ("count", True, 1),
        ("price", 7, 7.0),
        ("hex", 27.0, 27),
        ("hex", b"1b", 27),
        ("hex", np.str_("1B"), 27),
        ("int", np.float64(2**53), 2**53),
        ("bool", b"TRUE", True),
        ("bool", 1.0, True),
        ("bool", "no", False),
        ("text", np.str_("é"), "é"),
        ("count", decimal.Decimal("7.00"), 7),  # as databases return numbers
        ("price", decimal.Decimal("0.25"), 0.25),
        ("price", decimal.Decimal("NaN"), None),
        ("ints", np.array([1, 2]), [1, 2]),
        ("texts", np.array(["a", "b"]), ["a", "b"]),
        ("hexs", np.array([]), None),
    ],
)
def test_other_types_that_hold_the_same(name: str, value, same) -> None:
    for got, expected in zip(both({**GOOD, name: value}), both({**GOOD, name: same}), strict=True):
        assert got == expected


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("count", "27", 27),
        ("count", b"-2147483648", -(2**31)),
        ("int", "0027", 27),
        ("ints", ["5", 6], [5, 6]),
        ("price", "1.5e3", 1500),
        ("price", "", None),
    ],
)
def test_numbers_as_text_are_read_as_in_a_file(name: str, text, value) -> None:
    """They were refused in dicts and requests; by few rows, by many, and by columns."""
    for got, wanted in zip(both({**GOOD, name: text}), both({**GOOD, name: value}), strict=True):
        assert got == wanted
    rows = [{**GOOD, name: text}, GOOD, {**GOOD, name: value}]
    assert plain(read_dicts(rows, SPEC)) == plain(RowReader(SPEC).read(rows))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("count", "7.0", "'7.0': expected an integer"),
        ("count", "+7", "'+7': expected an integer"),
        ("count", " 7", "' 7': expected an integer"),
        ("count", "2147483648", "'2147483648': expected an integer from -2147483648 to"),
        ("count", 2**31, "2147483648: expected an integer from -2147483648 to 2147483647"),
        ("count", math.inf, "inf: expected an integer"),
        ("price", "1,5", "'1,5': expected a number"),
        ("price", -math.inf, "-inf: expected a finite number"),
        ("price", 3.403e38, "3.403e+38: expected a finite number that fits float32"),
        ("hex", "0x1b", "'0x1b': expected 1 to 8 hexadecimal digits"),
        ("hex", "123456789", "1 to 8 hexadecimal digits"),
        ("hex", -1, "-1: expected an integer from 0 to 4294967295"),
        ("hex", np.float32(2**24 + 2), "float32 rounds integers above 16777216"),
        ("int", 2**53 + 1, "-9007199254740992 to 9007199254740992"),
        ("bool", 2, "2: expected true or false (also 1 or 0), or a missing value"),
        ("bool", "on", "'on': expected true or false"),
        ("text", 1, "1: expected a string"),
        ("text", True, "True: expected a string"),
        ("text", "\ud800", "expected UTF-8 text"),
        ("ints", "1", "'1': expected a list"),
        ("ints", {1: 2}, "expected a list"),
        ("ints", [1, None], "a list must not hold an empty value"),
        ("texts", ["a", 3], "expected a string"),
    ],
)
def test_wrong_values_are_named(name: str, value, reason: str) -> None:
    rows = [GOOD, GOOD, {**GOOD, name: value}]
    for read in (
        lambda: RowReader(SPEC).read(rows),
        lambda: read_dicts(rows, SPEC),
        lambda: read_columns({key: [row[key] for row in rows] for key in GOOD}, SPEC),
    ):
        with pytest.raises(InvalidRowError) as caught:
            read()
        assert isinstance(caught.value, BadRowError)
        assert (caught.value.row, caught.value.column) == (2, name)
        assert reason in caught.value.reason
        assert f"row 2, column {name}: " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("count", np.array([1.0, 2.5]), r"row 1, column count: 2.5: expected an integer"),
        ("int", np.array([1, 2**60]), r"column int: 1152921504606846976: expected an integer from"),
        ("hex", np.array([2**24 + 2, 1], np.float32), r"column hex: float rounds integers above"),
        ("text", np.array([1, 2]), r"column text is of type int64, not of raw type string"),
        (
            "text",
            np.array([True, False]),
            r"is of type bool, not of raw .*\n.*set raw = .bool. for",
        ),
        ("count", pa.array(["1", "x"]), r"row 1, column count: 'x': expected an integer"),
        ("ints", pa.array([1, 2]), r"column ints is of type int64, not a list of raw type int"),
        ("ints", pa.array([[1], [None]]), r"row 1, column ints: None: a list must not hold a null"),
        ("int", np.array(["2020"] * 2, "datetime64[D]"), r"expected an integer"),
    ],
)
def test_wrong_columns_are_named(name: str, values, message: str) -> None:
    columns = {key: [value, value] for key, value in GOOD.items()}
    with pytest.raises((InvalidRowError, SchemaError), match=message):
        read_columns({**columns, name: values}, SPEC)


def test_strings_with_decimal_commas() -> None:
    """A string means what it does in the log; a number is one."""
    spec = dataclasses.replace(
        SPEC, input=InputFormat("csv", delimiter=";", header=False, decimal=",")
    )
    frame = pd.DataFrame([GOOD, GOOD, GOOD]).assign(price=["1,5", "-0,25", None])
    assert read_columns(frame, spec).dense[1].tolist() == [1.5, -0.25, 0]
    for read in (RowReader(spec).read, lambda rows: read_dicts(rows, spec)):
        assert read([{**GOOD, "price": 1.5}]).dense[1].tolist() == [1.5]
        assert read([{**GOOD, "price": "-1,5"}]).dense[1].tolist() == [-1.5]
        with pytest.raises(InvalidRowError, match=r"row 0, column price: '1\.5'"):
            read([{**GOOD, "price": "1.5"}])


def test_columns_of_arrays() -> None:
    """Types that hold missing values in ways of their own."""
    expected = plain(
        RowReader(SPEC).read([GOOD, {**GOOD, "count": None, "int": None, "ints": None}])
    )
    columns = {key: [value, value] for key, value in GOOD.items()}
    for count, ints in (
        (np.array([1, np.nan]), pa.array([[3, 3], []])),
        (np.array([1, np.nan], np.float32), pa.chunked_array([[[3, 3]], [None]])),
        (np.ma.array([1, 5], mask=[False, True]), [np.array([3, 3]), None]),
        (pd.Series([1, None], dtype="Int64"), pd.Series([[3, 3], None])),
        (pa.array([1, None], pa.int16()), pa.array([[3, 3], None], pa.large_list(pa.int8()))),
        (pa.array([1.0, None], pa.float32()), np.array([[3, 3], None], object)),
    ):
        number = np.array([-7, np.nan])
        got = read_columns({**columns, "count": count, "int": number, "ints": ints}, SPEC)
        assert plain(got) == expected
