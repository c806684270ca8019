"""Parquet input, against the values that were written."""

from __future__ import annotations

import dataclasses
import decimal
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvt_torchrec.base.errors import BadInputError, BadRowError
from nvt_torchrec.clicklog.readers.log_format import Block, get_format, read_block_chunks
from nvt_torchrec.formats.feature_spec import (
    CategoricalColumn,
    DenseColumn,
    FeatureSpec,
    InputFormat,
)
from nvt_torchrec.formats.feature_spec.derivations import Derivation
from nvt_torchrec.formats.feature_spec.read_plan import LabelRule, Reading
from nvt_torchrec.formats.rows import UNLIMITED
from tests.clicklog.reference_reader import LARGEST, as_lists
from tests.clicklog.test_text import CSV
from tests.logs import read_block
from tests.mutations import flip_bit
from tests.spec_logs import open_file, stream_rows

SPEC = FeatureSpec(CSV.label, CSV.dense, CSV.categorical[:-1], input=InputFormat("parquet"))
#: What each column may be held as, and with which values; None: missing.
HELD = {
    "click": {
        pa.int64(): st.integers(0, 1),
        pa.bool_(): st.booleans(),
        pa.float32(): st.sampled_from([0.0, 1.0]),
    },
    "n": {
        pa.int32(): st.integers(-(2**31), 2**31 - 1),
        pa.uint8(): st.integers(0, 255),
        pa.float64(): st.integers(-(2**31), 2**31 - 1).map(float),
    },
    "price": {
        pa.float64(): st.floats(-LARGEST, LARGEST),
        pa.float32(): st.floats(width=32, allow_nan=False, allow_infinity=False),
        pa.int16(): st.integers(-(2**15), 2**15 - 1),
        pa.decimal128(9, 2): st.integers(-(10**6), 10**6).map(lambda n: decimal.Decimal(n) / 100),
    },
    "hash": {
        pa.int64(): st.integers(0, 2**32 - 1),
        pa.uint32(): st.integers(0, 2**32 - 1),
        pa.string(): st.integers(0, 2**32 - 1).map("{:08x}".format),
        pa.dictionary(pa.int8(), pa.string()): st.sampled_from(["a", "ff", "12345678"]),
    },
    "brand": {
        pa.int64(): st.integers(-(2**53), 2**53),
        pa.uint64(): st.integers(0, 2**53),
        pa.int8(): st.integers(-128, 127),
        pa.decimal128(38, 0): st.integers(-(2**53), 2**53).map(decimal.Decimal),
    },
    "name": {
        pa.string(): st.text(min_size=1),
        pa.large_string(): st.text(min_size=1),
        pa.string_view(): st.text(min_size=1),
        pa.binary(): st.text(min_size=1).map(str.encode),
        pa.dictionary(pa.int32(), pa.string()): st.sampled_from(["x", "yy", "ü"]),
    },
    "tags": {
        pa.list_(pa.string()): st.lists(st.text(min_size=1), max_size=4),
        pa.large_list(pa.large_string()): st.lists(st.text(min_size=1), max_size=4),
        pa.string(): st.lists(st.sampled_from("xyü"), max_size=3).map("|".join),
    },
    "ids": {
        pa.list_(pa.int32()): st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4),
        pa.list_(pa.int16(), 2): st.lists(st.integers(0, 99), min_size=2, max_size=2),
    },
}


def _expected(name: str, value):
    if value is None or value == []:
        return None
    if name == "hash" and isinstance(value, str):
        return int(value, 16)
    if isinstance(value, bytes):
        return value.decode()
    if name == "tags" and isinstance(value, str):
        return value.split("|") if value else None
    if name == "brand":
        return int(value)
    return float(value) if name == "price" else value


@st.composite
def _tables(draw) -> pa.Table:
    rows = draw(st.integers(0, 12))
    columns = {}
    for name in draw(st.permutations(list(HELD))):
        kind = draw(st.sampled_from(list(HELD[name])))
        values = HELD[name][kind]
        values = values if name == "click" else st.none() | values
        columns[name] = pa.array(draw(st.lists(values, min_size=rows, max_size=rows)), kind)
    return pa.table(columns).append_column("other", pa.nulls(rows))


@settings(deadline=None, max_examples=60)
@given(_tables(), st.integers(1, 13), st.data())
def test_parquet_is_what_was_written(tmp_path_factory, table, group_rows, data) -> None:
    path = str(tmp_path_factory.mktemp("parquet") / "day_0.parquet")
    pq.write_table(table, path, row_group_size=group_rows)
    begin = data.draw(st.integers(0, len(table)))
    end = data.draw(st.integers(begin, len(table)))
    expected = [
        [_expected(name, row[name]) for name in SPEC.columns]
        for row in table.slice(begin, end - begin).to_pylist()
    ]
    block = Block(path, begin, end, path)
    rows = read_block(block, SPEC)
    assert as_lists(rows, SPEC) == expected
    assert rows.lines == end - begin
    chunks = list(read_block_chunks(block, SPEC, chunk_bytes=data.draw(st.integers(1, 900))))
    assert [row for chunk in chunks for row in as_lists(chunk, SPEC)] == expected
    streamed = list(stream_rows(path, SPEC, block_bytes=100)) if len(table) else []
    assert [n for numbers, _ in streamed for n in numbers] == list(range(len(table)))


GOOD = {
    "click": [1, 0, 1],
    "n": [1, None, 3],
    "price": [0.5, math.nan, 2.0],
    "hash": [255, None, 1],
    "brand": [7, None, 8],
    "name": ["a", None, "b"],
    "tags": [["x"], None, ["y", "z"]],
    "ids": [[1], [], [2, 3]],
}


def _write(path: Path, **changed) -> str:
    pq.write_table(pa.table(GOOD | changed), path)
    return str(path)


def test_nan_and_empty_lists_are_missing(tmp_path: Path) -> None:
    path = _write(tmp_path / "day_0.parquet", name=["a", "", "b"], brand=[7.0, math.nan, 8.0])
    rows = read_block(Block(path, 0, 3, path), SPEC)
    assert as_lists(rows, SPEC)[1] == [0, *[None] * 7]
    assert as_lists(rows, SPEC)[2] == [1, 3, 2.0, 1, 8, "b", ["y", "z"], [2, 3]]


#: Text of which Python can show only the others.
NOT_UTF8 = pa.Array.from_buffers(pa.string(), 3, pa.array([b"a", b"\xff", b"b"]).buffers())


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"click": [1, 2, 0]}, "column click: 2: expected a label of 0 or 1"),
        ({"n": [1, 1.5, 0]}, "column n: 1.5: expected an integer"),
        ({"price": [1, math.inf, 0]}, "column price: inf: expected a finite number"),
        ({"hash": [1, -1, 0]}, "column hash: -1: expected an integer from 0 to 4294967295"),
        ({"hash": ["a", "xy", "0"]}, "column hash: 'xy': expected 1 to 8 hexadecimal digits"),
        ({"brand": [1, 2**53 + 1, 0]}, "column brand: 9007199254740993: expected an integer from"),
        ({"name": [b"a", b"\xff", b"b"]}, "column name: '�': expected UTF-8"),
        ({"tags": pa.ListArray.from_arrays([0, 1, 3, 3], NOT_UTF8)}, "column tags: '�': exp"),
        ({"tags": [["a"], ["b", ""], []]}, "column tags: '': a list must not hold an empty value"),
        ({"ids": [[1], [1, 2, 2**60], []]}, f"column ids: {2**60}: expected an integer from"),
    ],
)
def test_bad_values_are_named(tmp_path: Path, changed: dict, what: str) -> None:
    path = _write(tmp_path / "day_0.parquet", **changed)
    block = Block(path, 1, 3, "day_0.parquet")
    with pytest.raises(BadRowError) as error:
        read_block(block, SPEC)
    assert str(error.value).startswith(f"day_0.parquet, row 2: {what}")
    rows = read_block(block, SPEC, max_bad_rows=UNLIMITED)
    assert (len(rows), rows.bad_count, rows.line.tolist()) == (1, 1, [1])
    (name,) = changed
    assert f'"{name}": '.encode() in rows.bad[0].text
    assert (rows.bad[0].column, rows.bad[0].line) == (name, 0)
    with pytest.raises(BadRowError, match="row 2: column"):
        list(read_block_chunks(Block(path, 0, 3, path), SPEC, chunk_bytes=1))
    assert get_format(SPEC).first_line(block) == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tags": [1, 2, 3]}, "column tags is of type int64, not a list of raw type string"),
        ({"brand": [[1], [2], [3]]}, "column brand is of type list.*, not of raw type int"),
        ({"click": [[0], [1], [1]]}, "column click is of type list.*, not a label"),
    ],
)
def test_columns_of_another_type(tmp_path: Path, changed: dict, message: str) -> None:
    path = _write(tmp_path / "day_0.parquet", **changed)
    with pytest.raises(BadInputError, match=message):
        open_file(Path(path), SPEC)
    with pytest.raises(BadInputError, match=message):
        read_block(Block(path, 0, 3, path), SPEC)


def test_what_warehouses_write(tmp_path: Path) -> None:
    """Values in the names of directories, fields of structs, decimals as ids, missing labels."""
    path = tmp_path / "date=2024-10-30" / "shop=a%2Fb" / "lang=__HIVE_DEFAULT_PARTITION__"
    path.mkdir(parents=True)
    path /= "part-00000-0e3a1c5e-7a7b-4a5e-8f6d-1d9f1c2b3a4d-c000.snappy.parquet"
    table = pa.table(
        {
            "y": pa.array([1, None, 0], pa.int8()),
            "s": [{"c": "u", "deep": {"n": 1}}, None, {"c": None, "deep": {"n": 3}}],
            "id": pa.array([decimal.Decimal(10**30), None, 7], pa.decimal128(38, 0)),
        }
    )
    pq.write_table(table, path)
    spec = FeatureSpec(
        "y",
        (DenseColumn("n", reading=Reading(sources=("s.deep.n",))),),
        (
            CategoricalColumn("c", raw="string", reading=Reading(sources=("s.c",))),
            CategoricalColumn("id", raw="string"),
            CategoricalColumn("shop", raw="string"),
            CategoricalColumn("lang", raw="string"),
            CategoricalColumn(
                "weekday",
                raw="int",
                reading=Reading(sources=("date",)),
                derive=Derivation("weekday", time_format="%Y-%m-%d"),
            ),
        ),
        input=InputFormat("parquet"),
        label_rules=(LabelRule("y", positive=("1",), negative=("0", "")),),
    )
    ((_, rows),) = stream_rows(str(path), spec, block_bytes=10**6)
    assert as_lists(rows, spec) == [
        [1, 1, "u", str(10**30), "a/b", None, 2],
        [0, None, None, None, "a/b", None, 2],
        [0, 3, None, "7", "a/b", None, 2],
    ]
    block = Block(str(path), 0, 3, str(path))
    plain = dataclasses.replace(spec, label_rules=())
    with pytest.raises(BadRowError, match=r'set positive = \["1"\] and negative = \["0", ""\]'):
        read_block(block, plain)
    other = dataclasses.replace(spec, dense=(DenseColumn("s.other"),))
    with pytest.raises(
        BadInputError, match=r"column s.other is missing\n.*the file has y, s, id, date"
    ):
        read_block(block, other)


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "day_0.parquet"
    pq.write_table(pa.table(GOOD).drop_columns(["brand"]), path)
    with pytest.raises(BadInputError, match="column brand is missing"):
        open_file(path, SPEC)
    pq.write_table(pa.table(GOOD).drop_columns(["click"]), path)
    day = open_file(path, SPEC)
    assert not day.label
    assert read_block(Block(str(path), 0, 3, "x"), SPEC, label=False).labels.shape == (0, 3)
    with pytest.raises(BadInputError, match="3 rows instead of 4"):
        read_block(Block(str(path), 0, 4, "x"), SPEC, label=False)
    path.write_text("click,n\n1,2\n")
    with pytest.raises(BadInputError, match="cannot be read as parquet"):
        open_file(path, SPEC)
    with pytest.raises(BadInputError, match="No such file"):
        list(stream_rows(str(tmp_path / "none"), SPEC, block_bytes=10))


def test_a_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "day_0.parquet"
    pq.write_table(pa.table(GOOD), path, write_page_checksum=True, compression="none")
    flip_bit(path, path.read_bytes().index(b"\x07\0\0\0\0\0\0\0\x08\0"))
    with pytest.raises(BadInputError, match=r"(?i)crc|checksum"):
        read_block(Block(str(path), 0, 3, "x"), SPEC)
