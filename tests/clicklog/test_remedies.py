"""Errors name the key of the spec that would take a value, and it does take it."""

from __future__ import annotations

import dataclasses
import gzip
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvt_torchrec.base.errors import BadInputError, BadRowError
from nvt_torchrec.clicklog.readers.raw import find_days, open_day
from nvt_torchrec.clicklog.readers.stream import stream_rows
from nvt_torchrec.clicklog.text.convert import convert
from nvt_torchrec.clicklog.text.remedies import remedy
from nvt_torchrec.formats.spec.feature_spec import (
    CategoricalColumn,
    DenseColumn,
    FeatureSpec,
    InputFormat,
)
from nvt_torchrec.formats.spec.labels import LabelRule
from nvt_torchrec.formats.spec.reading import Read, Reading
from tests.clicklog.test_field_rules import _TEXTS, fields_of


def _remedy(text: str, read: Read) -> str:
    code = int(convert(fields_of([text]), read).code[0])
    assert code
    return remedy(text, read, code)


@pytest.mark.parametrize(
    ("text", "read", "keys"),
    [
        ("?", Read("x", "int32"), 'nulls = ["?"]'),
        (" NA", Read("x", "float"), 'nulls = ["NA"] and trim = true'),
        (" NA", Read("x", "float", trim=True), 'nulls = ["NA"]'),
        ("\\N", Read("x", "int"), r'nulls = ["\\N"]'),
        (" 62", Read("x", "int32"), "trim = true"),
        ("ff\t", Read("x", "hex32"), "trim = true"),
        ("+5", Read("x", "int32"), "lenient = true"),
        ("260.0", Read("x", "int"), "lenient = true"),
        (" 2.6e2", Read("x", "int"), "trim = true and lenient = true"),
        ("1,000", Read("x", "int32"), 'thousands = ","'),
        ("1'000.5", Read("x", "float"), 'thousands = "\'"'),
        ("1.234.567", Read("x", "float"), 'thousands = "."'),
        ("1 000", Read("x", "int"), 'thousands = " "'),
        ("1.5", Read("x", "int32"), 'raw = "float"'),
        ("2147483648", Read("x", "int32"), 'raw = "float"'),
        ("9007199254740993", Read("x", "int"), 'raw = "string"'),
        ("18446744073709551615", Read("x", "int"), 'raw = "string"'),
        ("123456789", Read("x", "hex32"), 'raw = "int"'),
        ("xyz", Read("x", "hex32"), 'raw = "string"'),
        ("2014-10-30 12:00", Read("x", "time", time_format="epoch_s"), "no time_format"),
        ("1414627200000", Read("x", "time", time_format="epoch_s"), 'time_format = "epoch_ms"'),
        ("1414627200", Read("x", "time"), 'time_format = "epoch_s"'),
        ("14103012", Read("x", "time"), 'time_format = "%y%m%d%H"'),
        (" 30/12/2014", Read("x", "time"), 'trim = true and time_format = "%d/%m/%Y"'),
    ],
)
def test_keys_that_take_a_value(text: str, read: Read, keys: str) -> None:
    assert _remedy(text, read) == f"set {keys} for column x in the spec"


@pytest.mark.parametrize(
    ("text", "raw", "own"),
    [
        ("1,5", "float", ""),
        ("1.234,56", "float", ', and thousands = "." for column x,'),
        (" 0,25", "float", ", and trim = true for column x,"),
        ("1,5", "int32", ', and raw = "float" for column x,'),
        ("0,5", "weight", ""),
    ],
)
def test_decimal_commas(text: str, raw: str, own: str) -> None:
    assert _remedy(text, Read("x", raw)) == f'set decimal = "," in [input]{own} of the spec'


@pytest.mark.parametrize(
    ("text", "rule", "start"),
    [
        ("yes", LabelRule("y"), 'set positive, the texts that are 1, such as positive = ["yes"]'),
        (
            "False",
            LabelRule("y"),
            'set positive, the texts that are 1, such as positive = ["True"]',
        ),
        ("N", LabelRule("y"), 'set positive, the texts that are 1, such as positive = ["Y"]'),
        ("4", LabelRule("y"), "set threshold, the least number that is 1"),
        (" 1", LabelRule("y"), "set trim = true in [label]"),
        ("no", LabelRule("y", positive=("a",), negative=("b",)), 'add "no" to positive or neg'),
        ("x", LabelRule("y", threshold=3), "set positive"),
    ],
)
def test_labels(text: str, rule: LabelRule, start: str) -> None:
    assert _remedy(text, Read("y", "label", trim=rule.trim, label=rule)).startswith(start)


def test_values_that_no_key_takes() -> None:
    assert _remedy("12x", Read("x", "int32")) == ""
    assert _remedy("-1", Read("w", "weight", trim=True)) == ""
    assert _remedy("2024-02-30", Read("t", "time")) == ""
    assert 'nulls = ["none yet"]' in _remedy("none yet", Read("x", "int32"))
    assert 'encoding = "latin-1"' in _remedy("\udcfc", Read("x", "string"))


@settings(deadline=None, max_examples=150)
@given(_TEXTS, st.sampled_from(["int32", "int", "float", "hex32"]), st.booleans())
def test_the_keys_really_take_the_value(text: str, raw: str, trim: bool) -> None:
    read = Read("x", raw, trim=trim)
    code = int(convert(fields_of([text]), read).code[0])
    found = remedy(text, read, code) if code else ""
    if found and "if it means" not in found and "decimal" not in found:
        keys = found.removeprefix("set ").removesuffix(" for column x in the spec")
        parts = tomllib.loads(keys.replace(" and ", "\n"))
        parts = {key: tuple(v) if isinstance(v, list) else v for key, v in parts.items()}
        assert not convert(fields_of([text]), dataclasses.replace(read, **parts)).code[0]


def _spec(raw: str = "int", **options) -> FeatureSpec:
    text = InputFormat(**{"format": "csv", **options})
    columns = (CategoricalColumn("a", raw=raw), CategoricalColumn("b", raw="string"))
    return FeatureSpec("y", (DenseColumn("n"),), columns, input=text)


@pytest.mark.parametrize(
    ("text", "spec", "message"),
    [
        (b"1,2,?,x\n", _spec(header=False), r'set nulls = \["\?"\] for column a in the spec, or'),
        (b'y,n,a,b\n1,2,3,"x\ny"\n', _spec(), r"set quoted_newlines = true in \[input\]"),
        (b"y,n,a,b\n1,2,3,\xfc\n", _spec(), r'set encoding = "latin-1" in \[input\]'),
        (b"y;n;a;b\n1;2;3;x\n", _spec(), r'header\n.*set delimiter = ";" in \[input\]'),
        (b"a log\n\ny,n,a,b\n1,2,3,x\n", _spec(), r"set skip_lines = 2 in \[input\]"),
        (b"x\ny::n::a::b\n", _spec(), r'set delimiter = "::" and skip_lines = 1 in'),
        (b"1,2,3,x\n0,2,3,y\n", _spec(), r"set header = false"),
        (b"y,n,a,b\n1,2,3,x\n\n", _spec(), "set skip_empty_lines = true in .* if no row follows"),
        ("y,n,a,b\n1,2,3,x\n".encode("utf-16"), _spec(), "UTF-16\n.*iconv"),
        (gzip.compress(b"y,n,a,b\n"), _spec(), r"its name does not say so\n.*name it .*\.gz"),
        (b'{"y": 1, "n": 2}\n{"y": 0, "n": 3}\n', _spec(), r"JSON\n.*convert it to parquet"),
        (b"PK\x03\x04\0\0", _spec(), "a zip archive\n.*unzip"),
        (b"1::2::3::x\n", _spec(header=False), r'set delimiter = "::" in'),
        (b"1,2,3,x\n", _spec(format="tsv"), r'set format = "csv" and header = false in'),
        (b"1,2,3,x,5,6\n" * 3, _spec(header=False), r"name its 6 fields with columns = \["),
        (b"1,2,3,x\n1;2;3;x\n", _spec(header=False), r'line 2: .*\n.*set delimiter = ";" in'),
        (b"1\t1.5\tff\n", FeatureSpec("y", (DenseColumn("n"),), (CategoricalColumn("c"),)),
         r'column n: .*\n.*correct the file, or set raw = "float" for column n in the spec, or'),
    ],
)  # fmt: skip
def test_files_that_another_input_would_take(tmp_path: Path, text, spec, message) -> None:
    path = tmp_path / "day_0.gz"
    path.write_bytes(gzip.compress(text))
    with pytest.raises((BadInputError, BadRowError), match=message):
        list(stream_rows(str(path), spec, block_bytes=1000))


def test_the_spec_with_the_key_takes_the_file(tmp_path: Path) -> None:
    """A file of many quirks, read after its errors have been followed one by one."""
    path = tmp_path / "day_0.csv"
    path.write_bytes('a log\ny;n ;a;b\n 1; 62;?;"ü\n"\n0;+3;7;\n'.encode("latin-1"))
    spec = _spec()
    rules = Reading(nulls=("?",), trim=True, lenient=True)
    steps = [
        (r'delimiter = ";" and skip_lines = 1', {"delimiter": ";", "skip_lines": 1}),
        (r"quoted_newlines = true", {"quoted_newlines": True}),
        (r"trim = true in \[label\]", {"label": LabelRule("y", trim=True)}),
        (r"trim = true for column n", {"n": rules}),
        (r"nulls = .* for column a", {"a": rules}),
        (r"latin-1", {"encoding": "latin-1"}),
    ]
    for message, change in steps:
        with pytest.raises((BadInputError, BadRowError), match=message):
            list(stream_rows(str(path), spec, block_bytes=1000))
        if "label" in change:
            spec = dataclasses.replace(spec, label_rules=(change["label"],))
        elif "n" in change:
            spec = dataclasses.replace(spec, dense=(DenseColumn("n", reading=rules),))
        elif "a" in change:
            first = CategoricalColumn("a", raw="int", reading=rules)
            spec = dataclasses.replace(spec, categorical=(first, spec.categorical[1]))
        else:
            spec = dataclasses.replace(spec, input=dataclasses.replace(spec.input, **change))
    ((_, rows),) = stream_rows(str(path), spec, block_bytes=1000)
    assert rows.dense.tolist() == [[62, 3]]
    assert rows.categorical[1].to_pylist() == ["ü\n", ""]
    day = open_day(find_days(str(path))[0], spec)
    assert day.count_rows(day.end) == 2
