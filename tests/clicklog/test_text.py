"""Delimited text of any spec, against a reader in plain Python."""

from __future__ import annotations

import contextlib
import csv

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nvt_torchrec.base.errors import BadInputError, BadRowError
from nvt_torchrec.clicklog.text.delimited import split_rows
from nvt_torchrec.clicklog.text.line_layout import find_layout, make_plain_layout
from nvt_torchrec.clicklog.text.tokenizer import parse_delimited, parse_rows
from nvt_torchrec.formats.feature_spec import (
    CategoricalColumn,
    DenseColumn,
    FeatureSpec,
    InputFormat,
)
from nvt_torchrec.formats.rows import DESCRIBED_BAD_ROWS, UNLIMITED
from tests.clicklog.reference_reader import (
    BadFieldError,
    as_lists,
    split,
)

CSV = FeatureSpec(
    label="click",
    dense=(DenseColumn("n"), DenseColumn("price", raw="float")),
    categorical=(
        CategoricalColumn("hash"),
        CategoricalColumn("brand", raw="int"),
        CategoricalColumn("name", raw="string"),
        CategoricalColumn("tags", raw="string", multi_hot=True),
        CategoricalColumn("ids", raw="int", multi_hot=True),
        CategoricalColumn("hashes", raw="hex32", multi_hot=True),
    ),
    input=InputFormat("csv"),
)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.text(st.sampled_from('a,:"| '), max_size=12), min_size=1, max_size=5),
    st.sampled_from([",", "::", ":|:", ":", "||", ":::"]),
)
@example(['a:::"x::b'], "::")
def test_quotes_are_read_as_by_csv(lines: list[str], delimiter: str) -> None:
    """Fields of any number and any quotes: the same fields, or the same error."""
    text = InputFormat("csv", delimiter=delimiter, list_separator="/")
    spec = FeatureSpec("l", (), (CategoricalColumn("c"),), input=text)
    for line in lines:
        expected = None
        with contextlib.suppress(csv.Error, BadFieldError):
            expected = split(line, spec)
        check_split(line, text, expected)


def check_split(line: str, input_format: InputFormat, expected: list[str] | None) -> None:
    """Check the fields of a line; None: its quotes are wrong."""
    width = len(expected) if expected else 1
    actual = split_rows((line + "\n").encode(), input_format, width, range(width))
    assert bool(actual.code.any()) == (expected is None)
    if expected is not None:
        assert [column.to_pylist() for column in actual.columns] == [[f.encode()] for f in expected]


@pytest.mark.parametrize(
    ("column", "field", "what"),
    [
        ("click", "2", "column click: '2': expected a label of 0 or 1"),
        ("n", "1.5", "column n: '1.5': expected an integer or a missing value"),
        ("n", "2147483648", "column n: '2147483648': expected an integer from -2147483648 to"),
        ("price", "1e999", "column price: '1e999': expected a finite number"),
        ("hash", "xyz", "column hash: 'xyz': expected 1 to 8 hexadecimal digits"),
        ("brand", f"{2**53 + 1}", "column brand: '9007199254740993': expected an integer from"),
        ("name", b"\xff\xfe", "column name: '��': expected UTF-8"),
        ("tags", "a||b", "column tags: '': a list must not hold an empty value"),
        ("ids", "1|2|x|y", "column ids: 'x': expected an integer"),
        ("name", '"abc', "field 6: its quote is not closed on this line"),
        ("name", '"abc"d', "field 6: text after the closing quote"),
        ("name", "a,b", "10 fields instead of 9"),
    ],
)
def test_bad_fields_are_named(column: str, field: str | bytes, what: str) -> None:
    fields = [b"1", *[b""] * 8]
    fields[CSV.columns.index(column)] = field if isinstance(field, bytes) else field.encode()
    line = b",".join(fields)
    rows = parse_rows(
        b"0,,,,,,,,\r\n" + line + b"\r\n1,7,,,,x,,,\n",
        CSV,
        make_plain_layout(CSV, label=True),
        max_bad_rows=UNLIMITED,
    )
    (bad,) = rows.bad
    assert bad.what.startswith(what)
    assert bad.text == line
    assert bad.line == 1
    assert bad.column == (column if what.startswith("column") else "")
    assert rows.labels.tolist() == [[0, 1]]
    assert rows.categorical[2].tolist() == [None or "", "x"]


def test_only_the_first_bad_rows_are_described_without_reject() -> None:
    text = b"x\n" * (DESCRIBED_BAD_ROWS + 5)
    assert len(parse_rows(text, CSV, make_plain_layout(CSV, label=True)).bad) == DESCRIBED_BAD_ROWS
    rows = parse_rows(text, CSV, make_plain_layout(CSV, label=True), max_bad_rows=UNLIMITED)
    assert len(rows.bad) == DESCRIBED_BAD_ROWS + 5


def test_header_in_any_order_with_further_columns() -> None:
    head = b'extra,ids,hashes,"tags",name,brand,hash,price,n,click,more\r\n'
    layout = find_layout(head + b"...", "day_0.csv", CSV)
    assert layout.label
    assert layout.begin == len(head)
    rows = parse_delimited(b'?,1|2,ff,a|b,"x, y",-7,a0,2.5,3,1,?\r\n', CSV, layout)
    assert as_lists(rows, CSV) == [[1, 3, 2.5, 0xA0, -7, "x, y", ["a", "b"], [1, 2], [255]]]
    without = parse_delimited(b"?,1,ff,a,x,-7,a0,2.5,3,oh,?\n", CSV, layout.drop_label())
    assert len(without.labels) == 0
    assert without.dense.tolist() == [[3], [2.5]]
    unlabelled = find_layout(head.replace(b"click", b"klick"), "day_0.csv", CSV)
    assert not unlabelled.label


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("n,price,hash,brand,name,tags,id,hashes", "column ids is not in the header\n.*mean 'id'"),
        (
            "click,n,n,price,hash,brand,name,tags,ids,hashes",
            "column n is in the header twice\n.*"
            r'header = false, skip_lines = 1, columns = \["click", "", …\]',
        ),
        ("click,n\r1,5\r0,7", r"lines end with .r alone\n.*tr '.r' '.n' < day_0.csv"),
    ],
)
def test_headers_that_do_not_fit(header: str, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        find_layout(header.encode() + b"\n" * ("\r" not in header), "day_0.csv", CSV)


def test_label_told_by_the_fields_of_most_lines() -> None:
    spec = FeatureSpec(
        CSV.label, CSV.dense, CSV.categorical, input=InputFormat("csv", header=False)
    )
    assert find_layout(b'"a,b"\n' + b"1,,,,,,,,\n" * 3, "x", spec) == make_plain_layout(
        spec, label=True
    )
    assert find_layout(b'"a,b",,,,,,,\n', "x", spec) == make_plain_layout(spec, label=False)
    with pytest.raises(BadRowError, match="x, line 1: 2 comma-separated fields"):
        find_layout(b"a,b\n", "x", spec)


def test_criteos_format_has_at_most_64_columns_of_a_kind() -> None:
    """The bits of a word say which are missing; with more it is any delimited text."""
    dense = tuple(DenseColumn(f"n{j}") for j in range(65))
    categorical = tuple(CategoricalColumn(f"c{j}") for j in range(65))
    assert FeatureSpec("y", dense[1:], categorical[1:]).is_criteo_format
    assert not FeatureSpec("y", dense, categorical[1:]).is_criteo_format
    assert not FeatureSpec("y", dense[1:], categorical).is_criteo_format
