"""Errors name the keys of the spec that may take a value, a line or a header."""

from __future__ import annotations

import dataclasses
import gzip
import json
import struct
from pathlib import Path

import pyarrow as pa
import pytest

from nvt_torchrec.base.errors import BadInputError, BadRowError, ClickLogError, SchemaError
from nvt_torchrec.clicklog.in_memory.frames import read_columns
from nvt_torchrec.clicklog.readers.json_rows import find_json_layout
from nvt_torchrec.clicklog.readers.table_rows import check_columns
from nvt_torchrec.clicklog.text.line_layout import find_layout
from nvt_torchrec.formats.feature_spec import (
    CategoricalColumn,
    DenseColumn,
    FeatureSpec,
    InputFormat,
)
from nvt_torchrec.formats.feature_spec.read_plan import LabelRule
from tests.spec_logs import stream_rows

TEXTS = LabelRule("y", positive=("yes",), negative=("no",))


@pytest.mark.parametrize("names", [["y", "int_9", "a"], ["y", "int_9", "a", "Int_3"]])
def test_another_column_of_the_spec_is_no_suggestion(names: list[str]) -> None:
    """A log without int_3 has an int_9, which the spec reads as well."""
    dense = (DenseColumn("int_3"), DenseColumn("int_9"))
    spec = FeatureSpec("y", dense, (CategoricalColumn("a", raw="string"),))
    table = pa.table({name: [1] for name in names})
    csv = dataclasses.replace(spec, input=InputFormat("csv"))
    for check in (
        lambda: check_columns(table.schema, "x", spec, label=True),
        lambda: find_json_layout(json.dumps(dict.fromkeys(names, 1)).encode(), "x", spec),
        lambda: find_layout(",".join(names).encode() + b"\n", "x", csv),
        lambda: read_columns(table, spec),
    ):
        with pytest.raises(ClickLogError) as error:
            check()
        assert "int_3" in error.value.what
        assert ("'Int_3'" in error.value.remedy) == ("Int_3" in names)
        assert "'int_9'" not in error.value.remedy


def test_an_arrow_column_whose_offsets_lie() -> None:
    """The process would end when they are used."""
    offsets = pa.py_buffer(struct.pack("4i", 0, 2**30, 5, 3))
    lists = pa.Array.from_buffers(
        pa.list_(pa.int64()), 3, [None, offsets], children=[pa.array([1, 2, 3])]
    )
    spec = FeatureSpec("y", (), (CategoricalColumn("c", raw="int", multi_hot=True),))
    with pytest.raises(SchemaError, match="column c: not valid Arrow data"):
        read_columns(pa.table({"c": lists}), spec)


def _spec(raw: str = "int", **options) -> FeatureSpec:
    text = InputFormat(**{"format": "csv", **options})
    columns = (CategoricalColumn("a", raw=raw), CategoricalColumn("b", raw="string"))
    return FeatureSpec("y", (DenseColumn("n"),), columns, input=text)


@pytest.mark.parametrize(
    ("text", "spec", "message"),
    [
        (b"1,2,?,x\n", _spec(header=False), r'set nulls, trim, .* for column a in the spec, or'),
        (b'y,n,a,b\n1,2,3,"x\ny"\n', _spec(), "write the log as parquet"),
        (b"y,n,a,b\n1,2,3,\xfc\n", _spec(), r'set encoding = "latin-1" or "cp1252" in \[input\]'),
        (b"y,n,a,b\n,2,3,x\n", dataclasses.replace(_spec(), label_rules=(TEXTS,)),
         r'add "" to negative in \[label\]'),
        (b"y;n;a;b\n1;2;3;x\n", _spec(), r'header\n.*check delimiter, skip_lines and'),
        (b"a log\n\ny,n,a,b\n1,2,3,x\n", _spec(), r"check delimiter, skip_lines"),
        (b"y,n,a,b\n1,2,3,x\n\n", _spec(), "set skip_empty_lines = true in .* if no row follows"),
        ("y,n,a,b\n1,2,3,x\n".encode("utf-16"), _spec(), "UTF-16\n.*iconv"),
        (gzip.compress(b"y,n\n", mtime=0), _spec(), r"its name does not say so\n.*name it .*\.gz"),
        (b'{"y": 1, "n": 2}\n{"y": 0, "n": 3}\n', _spec(), r"JSON\n.*etl guess"),
        (b'[{"y": 1, "n": 2},{"y": 0}]', _spec(), r"a JSON list\n.*jq -c '\.\[\]' "),
        (b"PK\x03\x04\0\0", _spec(), "a zip archive\n.*unzip"),
        (b"1::2::3::x\n", _spec(header=False), r"line 1: 1 comma.*field\n.*delimiter"),
        (b"1,2,3,x,5,6\n" * 3, _spec(header=False), r"name its fields with columns = \["),
        (b"1\t1.5\tff\n", FeatureSpec("y", (DenseColumn("n"),), (CategoricalColumn("c"),)),
         r'column n: .*\n.*correct the file, or set nulls, .* or raw = "float" for column n'),
    ],
)  # fmt: skip
def test_files_that_another_input_would_take(tmp_path: Path, text, spec, message) -> None:
    path = tmp_path / "day_0.gz"
    path.write_bytes(gzip.compress(text))
    with pytest.raises((BadInputError, BadRowError), match=message):
        list(stream_rows(str(path), spec, block_bytes=1000))
