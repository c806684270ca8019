from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvt_torchrec.clicklog.text.tokenizer import parse_criteo
from nvt_torchrec.formats.missing import is_missing
from nvt_torchrec.formats.rows import DESCRIBED_BAD_ROWS
from nvt_torchrec.formats.spec.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec

SPEC = FeatureSpec(
    label="label",
    dense=(DenseColumn("d0"), DenseColumn("d1")),
    categorical=(CategoricalColumn("c0"), CategoricalColumn("c1")),
)
INTEGERS = st.none() | st.integers(-(2**31), 2**31 - 1)
CATEGORIES = st.none() | st.integers(0, 2**32 - 1)
ROWS = st.lists(
    st.tuples(st.integers(0, 1), INTEGERS, INTEGERS, CATEGORIES, CATEGORIES), max_size=30
)


def _text(row, digits: int, upper: bool) -> str:
    label, *rest = row
    dense = ["" if value is None else str(value) for value in rest[:2]]
    form = f"0{digits}{'X' if upper else 'x'}"
    categorical = ["" if value is None else format(value, form) for value in rest[2:]]
    return "\t".join([str(label), *dense, *categorical])


@settings(deadline=None)  # the first call compiles
@given(ROWS, st.integers(1, 8), st.booleans(), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_values_come_back(rows, digits, upper, newline, last_newline) -> None:
    text = newline.join(_text(row, digits, upper) for row in rows)
    if last_newline and rows:
        text += newline
    parsed = parse_criteo(text.encode(), SPEC, label=True)
    assert parsed.bad_count == 0
    assert len(parsed) == len(rows)
    assert parsed.line.tolist() == list(range(len(rows)))
    assert parsed.label.tolist() == [row[0] for row in rows]
    for values, missing, first in (
        (parsed.dense, parsed.dense_missing, 1),
        (parsed.categorical, parsed.categorical_missing, 3),
    ):
        for j in range(2):
            absent = is_missing(missing, j)
            expected = [row[first + j] for row in rows]
            assert absent.tolist() == [value is None for value in expected]
            assert values[j].tolist() == [value or 0 for value in expected]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("0\t1\t2\ta", "4 fields instead of 5"),
        ("", "1 field instead of 5"),
        ("2\t1\t2\ta\tb", "column label: '2': expected a label of 0 or 1"),
        (
            "0\t2147483648\t2\ta\tb",
            "column d0: '2147483648': expected an integer from -2147483648 to 2147483647",
        ),
        ("0\t1\t-99999999999999999999\ta\tb", "column d1: '-9999999999999999999"),
        ("0\t1\t2\ta\t123456789", "column c1: '123456789': expected 1 to 8 hexadecimal digits"),
        ("0\t1\t2\ta\tb\rc", "column c1: 'b\\rc'"),
    ],
)
def test_bad_rows_are_described_and_left_out(row: str, what: str) -> None:
    text = f"1\t7\t8\tAa\tbB\n{row}\n0\t\t\t\t\n"
    parsed = parse_criteo(text.encode(), SPEC, label=True)
    assert parsed.bad_count == 1
    assert what in parsed.bad[0].what
    assert parsed.bad[0].line == 1
    assert parsed.bad[0].text == row.encode()
    assert parsed.bad[0].column == (what.split(":")[0].split()[1] if "column" in what else "")
    assert parsed.line.tolist() == [0, 2]
    assert parsed.label.tolist() == [1, 0]
    assert parsed.categorical[:, 0].tolist() == [0xAA, 0xBB]
    assert parsed.dense_missing.tolist() == [[0, 3]]


def test_without_a_label() -> None:
    parsed = parse_criteo(b"5\t\tff\t1\n", SPEC, label=False)
    assert parsed.label is None
    assert parsed.dense[0].tolist() == [5]
    assert parsed.categorical[:, 0].tolist() == [255, 1]


def test_rejecting_describes_every_bad_row() -> None:
    lines = [f"x{i}" if i % 3 else f"0\t{i}\t\tff\t" for i in range(3 * DESCRIBED_BAD_ROWS)]
    parsed = parse_criteo("\r\n".join(lines).encode(), SPEC, label=True, reject=True)
    assert parsed.bad_count == len(parsed.bad) == 2 * DESCRIBED_BAD_ROWS
    assert [(bad.line, bad.text.decode()) for bad in parsed.bad] == [
        (i, line) for i, line in enumerate(lines) if i % 3
    ]
    assert parsed.dense[0].tolist() == list(range(0, 3 * DESCRIBED_BAD_ROWS, 3))


def test_leading_zeros() -> None:
    parsed = parse_criteo(b"1\t00000000000000000007\t-0000000000000000\ta\tb\n", SPEC, label=True)
    assert parsed.dense.tolist() == [[7], [0]]
