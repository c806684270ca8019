"""How a column's rules make values of fields, against plain Python."""

from __future__ import annotations

import dataclasses
import datetime
import itertools

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvt_torchrec.clicklog.text import convert as conversion
from nvt_torchrec.clicklog.text.convert import convert, convert_lists
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types.time import DIRECTIVES, EPOCHS
from nvt_torchrec.formats.feature_spec.read_plan import LabelRule, Read
from nvt_torchrec.formats.rows import Jagged
from tests.clicklog.reference_fields import BAD, EPOCH, KINDS, MICROSECOND, expected


def fields_of(texts: list[str]) -> pa.Array:
    """The fields, as a slice of an array with other ones."""
    encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
    return conversion.to_fields([b"5#", *encoded, b"x"]).slice(1, len(texts))


def as_list(column) -> list:
    """The values, None where missing and BAD where a code is set."""
    values = column.values
    if isinstance(values, Jagged):
        flat, offsets = values.values.tolist(), values.offsets.tolist()
        values = [flat[a:b] for a, b in itertools.pairwise(offsets)]
    else:
        values = values.tolist()
    return [
        BAD if code else None if missing else value
        for value, missing, code in zip(values, column.missing, column.code, strict=True)
    ]


def check(texts: list[str], read: Read) -> None:
    column = convert(fields_of(texts), read)
    actual, wanted = as_list(column), [expected(text, read) for text in texts]
    if read.raw in ("float", "weight"):
        assert list(map(repr, actual)) == list(map(repr, wanted))
    assert actual == wanted
    for row in range(len(texts)):
        if column.code[row] or column.missing[row]:
            assert column.values[row].__str__() in ("0", "0.0", "")


_NULLS = st.lists(st.sampled_from(["?", "NA", "\\N", " ?", "-1", "n/a", "é"]), max_size=3)
_SPACES = st.sampled_from(["", "", "", " ", "\t", "  \t "])
_NUMBERS = st.one_of(
    st.integers(-(2**33), 2**33).map(str),
    st.integers(-(2**54), 2**54).map("{:,}".format),
    st.integers(-5000, 5000).map("{:+_}".format),
    st.integers(-3000, 3000).map("{:.1f}".format),
    st.floats(allow_nan=False).map(repr),
    st.tuples(st.integers(0, 9999), st.integers(-9, 9)).map(lambda p: f"+{p[0]}e{p[1]}"),
    st.text(st.sampled_from("0123456789+-.,_ e"), max_size=9),
    st.sampled_from(["1000000000000000000000e-18", "0e999999999999", "9" * 25, "1e18", "1,000.5"]),
    st.sampled_from(["260.0", "2.6e2", "+5", "1,0", "0,123", "1,0000", "1.5", "+-5", ",", "1,,0"]),
    st.sampled_from(["1.234,5", "12.345,67", "0,5e3", "1,5,0"]),
    st.sampled_from(["$5", "5 $", "€1,5"]),
)
_BOOLEANS = st.sampled_from(
    ["TRUE", "True", "false", "F", "Yes", "n", "1", "0", "1.0", "tru", "on"]
)
_WRITTEN = [KINDS[raw].values.map(KINDS[raw].write) for raw in KINDS]
_TEXTS = st.one_of(
    _NUMBERS, _BOOLEANS, *_WRITTEN, st.sampled_from(["?", "NA", "\\N", "n/a", "", "a b", "ff"])
)


@st.composite
def _reads(draw) -> Read:
    raw = draw(st.sampled_from([name for name in RAW_TYPES if name not in ("label", "time")]))
    decimal = draw(st.sampled_from([".", ","]))
    return Read(
        "x",
        raw,
        nulls=tuple(draw(_NULLS)),
        trim=draw(st.booleans()),
        lenient=raw != "weight" and draw(st.booleans()),
        decimal=decimal,
    )


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(_SPACES, _TEXTS, _SPACES).map("".join), max_size=6), _reads())
def test_values_are_what_plain_python_reads(texts: list[str], read: Read) -> None:
    check(texts, read)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(["0", "1", "0.0", "1.0", "1.00", "01", "", "2", ">50K", "<=50K", " "]),
            st.sampled_from(["yes", "true", "4", "3.99", "4.0", "-1e3", "+4", "nan", "1e39"]),
            st.sampled_from(["4,5", "1,0", "0,0", "3,5"]),
        ).flatmap(lambda text: st.sampled_from([text, f" {text}", f"{text}\t"])),
        max_size=6,
    ),
    st.one_of(
        st.just(LabelRule("y")),
        st.just(LabelRule("y", threshold=4)),
        st.just(LabelRule("y", positive=(">50K", "true", " 1"))),
        st.just(LabelRule("y", positive=("yes",), negative=("<=50K", "0"))),
    ),
    st.booleans(),
    st.sampled_from([".", ","]),
)
def test_labels_are_what_plain_python_reads(
    texts: list[str], rule: LabelRule, trim: bool, decimal: str
) -> None:
    rule = dataclasses.replace(rule, trim=trim)
    check(texts, Read("y", "label", trim=trim, label=rule, decimal=decimal))


_TIMES = st.datetimes(datetime.datetime(1, 1, 2), datetime.datetime(9999, 12, 30))
_ISO = st.one_of(
    _TIMES.map(lambda time: time.isoformat(" ")),
    _TIMES.map(lambda time: time.isoformat(timespec="minutes") + "+05:30"),
    _TIMES.map(lambda time: time.isoformat(timespec="milliseconds") + "Z"),
    st.tuples(
        _TIMES.map(lambda time: time.isoformat(" ")),
        st.sampled_from(["+0000", "-0530", "+02", " UTC", "UTC", "+2", "+020", "+24", "-00:0"]),
    ).map("".join),
    st.dates().map(str),
    st.tuples(st.integers(0, 2100), st.integers(0, 13), st.integers(0, 32)).map(
        lambda parts: "{:04}-{:02}-{:02}".format(*parts)
    ),
    st.sampled_from(
        ["2023-02-29", "2024-02-29", "1900-02-29", "2000-02-29", "2024-01-01T24:00", "2024-1-1"]
        + ["2024-01-01 10:60", "2024-01-01 10:00:60", "2024-01-01T10:00:00.1234567890-23:59", ""]
        + ["2024-01-01 ", "2024-01-01T10", "0001-01-01T00:00+01:00", "2024-01-01x10:00", "x" * 10]
        + ["2024-01-01 10:00.5", "2024-01-01 10:00:00.", "2024-01-01Z", "2024-01-01T10:00+01:60"]
    ),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(_ISO, max_size=6))
def test_iso_times_are_what_python_reads(texts: list[str]) -> None:
    check(texts, Read("t", "time"))


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.one_of(_NUMBERS, st.integers(-(2**62), 2**62).map(str)), max_size=6),
    st.sampled_from(list(EPOCHS)),
)
def test_numbers_since_1970_are_what_python_reads(texts: list[str], time_format: str) -> None:
    check(texts, Read("t", "time", time_format=time_format))


_OFFSETS = st.sampled_from(["Z", "+0000", "-0530", "+02:00", "+2400", "+02:60", "+2", "-12:3"])


@st.composite
def _patterns(draw) -> tuple[str, list[str]]:
    """A pattern and times: written by it, with other digits, or of another form."""
    year = draw(st.sampled_from("Yy"))
    others = draw(st.lists(st.sampled_from("mdHMSfz"), unique=True))
    if "m" in others and draw(st.booleans()):
        others[others.index("m")] = "b"
    order = draw(st.permutations([year, *others]))
    separators = st.sampled_from(["-", "/", ".", ":", "T", " um ", "é"])
    pattern = "%" + "%".join(
        f"{name}{draw(separators)}" if name != order[-1] else name for name in order
    )
    texts = []
    for time in draw(st.lists(_TIMES, max_size=5)):
        text = pattern
        for name in order:
            if not DIRECTIVES[name]:
                word = draw(_OFFSETS) if name == "z" else time.strftime(f"%{name}")
                word = draw(st.sampled_from([word, word, word.upper(), word.lower(), "may", "x"]))
                text = text.replace(f"%{name}", word)
                continue
            number = {"Y": time.year, "y": time.year % 100, "f": time.microsecond}.get(name)
            if number is None:
                number = int(time.strftime(f"%{name}"))
            number += draw(st.sampled_from([0, 0, 0, 0, 1, 30]))
            width = DIRECTIVES[name] if name in "Yy" else draw(st.integers(1, DIRECTIVES[name]))
            text = text.replace(f"%{name}", f"{number:0{width}}")
        texts.append(text)
    return pattern, [*texts, *draw(st.lists(st.sampled_from(["", "x", "2024"])))]


@settings(deadline=None, max_examples=150)
@given(_patterns())
def test_patterns_are_what_strptime_reads(given_pattern: tuple[str, list[str]]) -> None:
    pattern, texts = given_pattern
    check(texts, Read("t", "time", time_format=pattern))


@pytest.mark.parametrize(
    ("pattern", "text", "iso"),
    [
        ("%y%m%d%H", "14102123", "2014-10-21 23:00"),
        ("%d.%m.%Y", "1.3.2024", "2024-03-01"),
        ("%Y%m%d", "20240230", None),
        ("%y%m%d%H", "1410212", "2014-10-21 02:00"),
        ("%y%m%d%H", "14102124", None),
        ("%Y-%m-%d", "2024-02-03 ", None),
        ("%d/%b/%Y:%H:%M:%S %z", "10/Oct/2000:13:55:36 -0700", "2000-10-10 20:55:36"),
        ("%b %d, %Y", "SEP 30, 2024", "2024-09-30"),
        ("%Y%z", "0001+01:00", None),  # before the year 1
    ],
)
def test_patterns_without_separators_and_the_calendar(pattern, text, iso) -> None:
    column = convert(fields_of([text]), Read("t", "time", time_format=pattern))
    if iso is None:
        assert column.code[0]
    else:
        time = datetime.datetime.fromisoformat(iso).replace(tzinfo=datetime.UTC)
        assert column.values[0] == (time - EPOCH) // MICROSECOND


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.lists(
                    st.sampled_from([" 1", "+2", "3.0", "?", "", "1,000", "x "]), max_size=4
                ).map("|".join),
                st.sampled_from(["%s", "%s|", "[%s]"]),
            ).map(lambda pair: pair[1] % pair[0]),
            st.sampled_from(["NA", " NA ", "", " "]),
        ),
        max_size=5,
    ),
    st.booleans(),
    st.booleans(),
)
def test_lists_follow_the_rules_of_their_values(texts, trim, lenient) -> None:
    read = Read("x", "int", True, ("NA", "?"), trim, lenient=lenient)

    def bare(text: str) -> str | None:
        text = text.strip(" \t") if trim else text
        return None if text in ("", *read.nulls) else text

    def wanted(text: str):
        rest = bare(text)
        if rest and rest[0] == "[" and rest[-1] == "]":
            rest = rest[1:-1]
        if rest and len(rest) > 1:
            rest = rest.removesuffix("|")
        if rest is None or bare(rest) is None:
            return None
        values = [expected(item, read) for item in bare(rest).split("|")]
        return BAD if None in values or BAD in values else values

    actual = as_list(convert_lists(fields_of(texts), read, "|"))
    assert actual == [wanted(text) for text in texts]


def test_a_wrong_string_among_rules() -> None:
    read = Read("x", "string", nulls=("?",), trim=True)
    column = convert(fields_of([" a ", "\udcff", "? ", "é\t"]), read)
    assert as_list(column) == ["a", BAD, None, "é"]
