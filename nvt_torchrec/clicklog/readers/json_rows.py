"""Read JSON lines, an object in each line, as columns of a feature spec.

Lines become an Arrow table, whose columns are checked and converted as those of parquet are.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pyarrow as pa
import pyarrow.json as pj

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.validation import strict_json
from nvt_torchrec.clicklog.readers.lines import BYTE_ORDER_MARK
from nvt_torchrec.clicklog.readers.log_format import Block, Sample
from nvt_torchrec.clicklog.readers.table_rows import (
    check_columns,
    find_type,
    partition_values,
    table_to_rows,
)
from nvt_torchrec.clicklog.readers.text_rows import TextFormat
from nvt_torchrec.clicklog.text.line_layout import HEAD_BYTES, LineLayout, is_json
from nvt_torchrec.clicklog.text.remedies import suggest_column
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import BadRow, RawRows, add_bad_rows

_CONSTANT = re.compile(rb"[:,\[]\s*-?(?:NaN|Inf)")


def json_layout(head: bytes, source: str, spec: FeatureSpec) -> LineLayout:
    """Return whether the rows of a file have labels, by its first lines.

    Raises:
        BadInputError: None of the lines is an object, or none has a column of the spec.
    """
    lines = head[:HEAD_BYTES].split(b"\n")
    lines = lines[:-1] or lines  # the last one may be cut
    table, bad = read_lines(lines)
    if len(bad) == len(lines):
        raise BadInputError(
            f"{source}, line 1: {bad[0].what}: {lines[0][:60].decode('utf-8', 'replace')}",
            "write an object in each line (a list of objects by jq -c '.[]'), or correct format in "
            "[input] of the spec",
        )
    there = sorted({*table.schema.names, *partition_values(source)})
    for name in spec.sources(label=False):
        if name not in there and find_type(table.schema, name) is None:
            hint = suggest_column(name, there, spec.sources(label=True))
            raise BadInputError(
                f"{source}: no key {name} in its first rows, which have {', '.join(there[:20])}",
                f"{hint}name the columns as in the file; where a value is mostly missing, write "
                "null in one of these rows",
            )
    label = all(name in there or find_type(table.schema, name) for name in spec.sources(label=True))
    return LineLayout((), label, source=source)


def parse_json(
    text: bytes | memoryview, spec: FeatureSpec, layout: LineLayout, *, max_bad_rows: int
) -> RawRows:
    """Parse whole lines; a key that is not there has no value.

    Raises:
        BadInputError: A column is of another type than the spec says.
    """
    lines = bytes(text).removesuffix(b"\n").split(b"\n") if len(text) else []
    table, bad = read_lines(lines)
    partition = partition_values(layout.source)
    for name in spec.sources(label=layout.label):
        if find_type(table.schema, name) is None and name not in partition:
            table = table.append_column(name, pa.nulls(len(lines) - len(bad)))
    check_columns(table.schema, layout.source, spec, label=layout.label)
    for row in reversed(bad):
        del lines[row.line]
    rows = table_to_rows(
        table,
        layout.source,
        spec,
        label=layout.label,
        max_bad_rows=max_bad_rows,
        text=lines.__getitem__,
    )
    return add_bad_rows(rows, bad) if bad else rows


def read_lines(lines: list[bytes]) -> tuple[pa.Table, list[BadRow]]:
    """Return the objects of lines as a table, and the lines that are none.

    Where Arrow cannot parse them, because a line is no object or a key has values of several types,
    Python does; values of several types, such as booleans and numbers, are texts then.
    """
    table = _read_with_arrow(b"\n".join(lines))
    if table is not None and len(table) == len(lines):
        return table, []
    objects, bad = [], []
    for i, line in enumerate(lines):
        what = "expected a JSON object"
        try:
            value = strict_json(line)
        except ValueError as error:
            value, what = None, f"{what}: {error}"
        if isinstance(value, dict):
            objects.append(value)
        else:
            bad.append(BadRow(i, what, "", line, "correct the file"))
    names = dict.fromkeys(name for value in objects for name in value)
    return pa.table({name: _array([o.get(name) for o in objects]) for name in names}), bad


def _read_with_arrow(text: bytes) -> pa.Table | None:
    """Return lines as a table in which times are texts; None if Arrow cannot parse them."""
    if (b"NaN" in text or b"Inf" in text) and _CONSTANT.search(text):  # Arrow takes them
        return None
    reading = pj.ReadOptions(use_threads=False, block_size=len(text) + 1)
    schema = None
    try:
        while True:
            parsing = pj.ParseOptions(explicit_schema=schema)
            table = pj.read_json(pa.BufferReader(text), reading, parsing)
            schema = pa.schema([field.with_type(_texts(field.type)) for field in table.schema])
            if schema == table.schema:
                return table
    except ValueError:  # Arrow's own, or a key that is not UTF-8
        return None


def _texts(held: pa.DataType) -> pa.DataType:
    """Return a type with texts instead of times, which Arrow takes some texts for."""
    if pa.types.is_timestamp(held):
        return pa.string()
    if pa.types.is_list(held):
        return pa.list_(_texts(held.value_type))
    if pa.types.is_struct(held):
        return pa.struct([field.with_type(_texts(field.type)) for field in held])
    return held


def _array(values: list[Any]) -> pa.Array:
    try:
        if bool in (kinds := set(map(type, values))) and kinds - {bool, type(None)}:
            raise pa.ArrowInvalid("booleans and others")  # Arrow takes some booleans for 1
        return pa.array(values)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        texts = [v if isinstance(v, str) else None if v is None else json.dumps(v) for v in values]
        return pa.array([t if t is None else t.encode("utf-8", "surrogatepass") for t in texts])


class JsonLines(TextFormat):
    """An object in each line."""

    layout_of = staticmethod(json_layout)
    parse = staticmethod(parse_json)  # type: ignore[assignment]

    @classmethod
    def recognizes(cls, path: str, head: bytes) -> bool:
        """See :meth:`LogFormat.recognizes`."""
        return is_json(head)

    @classmethod
    def sample(cls, path: str, head: bytes, maximum: int) -> Sample:
        """See :meth:`LogFormat.sample`."""
        lines = head.removeprefix(BYTE_ORDER_MARK).rstrip(b"\r\n").split(b"\n")
        table, bad = read_lines(lines[:maximum])
        return Sample(table, len(lines) <= maximum, len(bad))

    def block_layout(self, block: Block, label: bool) -> LineLayout:
        """See :meth:`TextFormat.block_layout`."""
        return LineLayout((), label, source=block.source)
