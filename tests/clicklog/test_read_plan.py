"""Logs of random specs become rows as in plain Python: rules, derived columns, labels, keys."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvt_torchrec.base.errors import BadInputError, BadRowError
from nvt_torchrec.clicklog.text.assemble import derive, hash_texts
from nvt_torchrec.clicklog.text.line_layout import (
    find_layout,
    list_plain_layouts,
    make_plain_layout,
)
from nvt_torchrec.clicklog.text.tokenizer import parse_rows
from nvt_torchrec.formats.feature_spec import (
    CategoricalColumn,
    DenseColumn,
    FeatureSpec,
    InputFormat,
)
from nvt_torchrec.formats.feature_spec.derivations import Derivation
from nvt_torchrec.formats.feature_spec.read_plan import LabelRule, Reading
from nvt_torchrec.formats.feature_spec.split import Split
from nvt_torchrec.formats.rows import UNLIMITED
from tests.clicklog.random_logs import OF_TIME, random_logs, random_rows
from tests.clicklog.reference_reader import as_lists, check_rows, derived, key_of


def line_of(fields: list[str], spec: FeatureSpec, *, quoted: bool = False) -> str:
    """A line of text; fields of csv are quoted where they must be, or all of them."""
    if spec.input.format == "csv":
        first = spec.input.delimiter[0]
        fields = [f'"{text}"' if first in text or quoted else text for text in fields]
    return spec.input.delimiter.join(fields)


def check(lines: list[str], spec: FeatureSpec, layout, *, label: bool, end: str = "\n") -> None:
    text = "".join(line + end for line in lines)
    if lines and lines[-1] and end == "\r\n":
        text = text.removesuffix(end)
    rows = parse_rows(text.encode(), spec, layout, max_bad_rows=UNLIMITED)
    check_rows(rows, lines, spec, list(layout.fields), label=label)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_text_is_read_as_the_spec_says(data) -> None:
    log = data.draw(random_logs())
    spec = log.spec
    rows = data.draw(random_rows(log))
    quoted, end = data.draw(st.booleans()), data.draw(st.sampled_from(["\n", "\r\n"]))
    lines = []
    for row in rows:
        fields = data.draw(st.sampled_from([row, row, row, row[:-1], [*row, "1"]]))
        lines.append(line_of(fields, spec, quoted=quoted))
    if not spec.input.header:
        layout = make_plain_layout(spec, label=True)
    else:
        head = line_of(log.names, spec).encode() + b"\n"
        layout = find_layout(head, "x", spec)
    assert layout.label
    check(lines, spec, layout, label=True, end=end)
    # the same without what only training reads, which is not checked either
    check(lines, spec, layout.drop_label(), label=False)
    if not spec.input.header:
        shorter = list_plain_layouts(spec)[-1]
        kept = [i for i, name in enumerate(log.names) if name in ("", *spec.sources(label=False))]
        lines = [line_of([row[i] for i in kept], spec) for row in rows]
        if not shorter.label:
            check(lines, spec, shorter, label=False)


_TIMES = st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(_TIMES, _TIMES, st.booleans()), max_size=20))
def test_parts_of_times_and_ages(rows) -> None:
    first, second = (np.array([row[i] for row in rows], np.int64) for i in (0, 1))
    missing = np.array([row[2] for row in rows], bool)
    for how in [
        *map(Derivation, OF_TIME),
        Derivation("age"),
        Derivation("age", reference="1969-12-31T23:59:59.5"),
    ]:
        sources = [first, second][: 1 if how.reference or how.kind != "age" else 2]
        values = derive(how, sources, missing)
        assert values.dtype == (np.float64 if how.kind == "age" else np.int64)
        given_values = zip(*(item.tolist() for item in sources), strict=True)
        expected = [
            0 if absent else derived(how, list(item))
            for item, absent in zip(given_values, missing, strict=True)
        ]
        assert values.tolist() == expected


def test_logarithms_of_small_numbers_as_the_benchmarks_have_them() -> None:
    numbers = np.array([-2.0, -0.5, 0, 1, 2, 2.5, 3, 4, 5, 100, 65_000])
    actual = derive(Derivation("log_square"), [numbers], np.zeros(len(numbers), bool))
    assert actual.tolist() == [-2, 0, 0, 1, 2, 0, 1, 1, 2, 21, 122]


def test_the_hash_of_a_key_stays() -> None:
    assert hash_texts(pa.array(["", "u1", "été"])).tolist() == [
        key_of(t) for t in ("", "u1", "été")
    ]
    assert key_of("u1") == 7185976944083972785  # a row must not change its split


SHOP = FeatureSpec(
    "click",
    (DenseColumn("age"),),
    (
        CategoricalColumn("user", raw="string"),
        CategoricalColumn(
            "hour", raw="int", reading=Reading(("time",)), derive=Derivation("hour", "epoch_s")
        ),
    ),
    input=InputFormat("csv", columns=("user", "", "time", "clicked", "age", "w", "session")),
    label_rules=(LabelRule("click", "clicked"),),
    weight="w",
    split=Split("column", column="session", valid=0.1, test=0.1),
)


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("u,x,7200,1,30,2,s", ("user", "", "time", "clicked", "age", "w", "session")),
        ("u,x,7200,30,2,s", ("user", "", "time", "age", "w", "session")),
        ("u,x,7200,30,s", ("user", "", "time", "age", "session")),
        ("u,x,7200,30", ("user", "", "time", "age")),
    ],
)
def test_positions_with_and_without_what_training_reads(line, fields) -> None:
    layout = find_layout(f"{line}\n{line}\n".encode(), "x", SHOP)
    assert layout.fields == fields
    assert layout.label == ("clicked" in fields)
    rows = parse_rows(f"{line}\n".encode(), SHOP, layout.drop_label())
    assert as_lists(rows, SHOP) == [[30, "u", 2]]
    if layout.label:
        rows = parse_rows(f"{line}\n".encode(), SHOP, layout)
        assert as_lists(rows, SHOP) == [[1, 2.0, key_of("s"), 30, "u", 2]]


def test_other_numbers_of_fields() -> None:
    with pytest.raises(BadRowError, match=r"x, line 1: 3 comma-separated fields") as error:
        find_layout(b"1,2,3\n", "x", SHOP)
    assert 'expected 7 (6 or 5 or 4 without the label): user, "" … session' in str(error.value)


@pytest.mark.parametrize(
    ("line", "column", "what"),
    [
        ("u,x,7200,1,30,2,", "session", "'': the column by which rows are split must not be"),
        ("u,x,7200,1,30,,s", "w", "'': expected a weight"),
        ("u,x,7200,,30,1,s", "clicked", "'': expected a label"),
        ("u,x,noon,1,30,1,s", "time", "'noon': expected a time"),
    ],
)
def test_what_a_training_row_must_have(line, column, what) -> None:
    rows = parse_rows(f"{line}\n".encode(), SHOP, make_plain_layout(SHOP, label=True))
    (bad,) = rows.bad
    assert bad.column == column
    assert f"column {column}: {what}" in bad.what


def test_a_header_lacks_a_source() -> None:
    spec = FeatureSpec(
        "click", SHOP.dense, SHOP.categorical, input=InputFormat("csv", header=True), weight="w"
    )
    with pytest.raises(BadInputError, match="x: column time is not in the header"):
        find_layout(b"user,age,click,hour\n", "x", spec)
    with pytest.raises(BadInputError, match="set encoding = "):
        find_layout("größe,age,click,w,user\n".encode("latin-1"), "x", spec)
    assert find_layout(b"age,time,click,w,user\n", "x", spec).label
    assert not find_layout(b"age,time,click,user\n", "x", spec).label  # without its weight
