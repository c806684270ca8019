"""The JSON lines format, with one object per line.

Lines become an Arrow table, whose columns are checked and converted like those of parquet.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import pyarrow as pa
import pyarrow.json as pj

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.validation import parse_strict_json
from nvt_torchrec.clicklog.readers.lines import BYTE_ORDER_MARK
from nvt_torchrec.clicklog.readers.log_format import Block, Sample
from nvt_torchrec.clicklog.readers.table_rows import (
    check_columns,
    find_type,
    parse_partition_values,
    table_to_rows,
)
from nvt_torchrec.clicklog.readers.text_rows import TextFormat
from nvt_torchrec.clicklog.text.line_layout import HEAD_BYTES, LineLayout, is_json
from nvt_torchrec.clicklog.text.remedies import suggest_column
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import BadRow, RawRows, add_bad_rows

#: NaN and infinity as values, which JSON does not have.
_CONSTANT = re.compile(rb"[:,\[]\s*-?(?:NaN|Inf)")
#: The largest numbers of keys, and of characters of a line, that an error shows.
_MAX_LISTED = 20
_MAX_SHOWN = 60


def find_json_layout(head: bytes, source: str, spec: FeatureSpec) -> LineLayout:
    """Derive from a file's first lines whether its rows have labels.

    Raises:
        BadInputError: No line is an object, or none of them has one of the spec's columns.
    """
    lines = head[:HEAD_BYTES].split(b"\n")
    lines = lines[:-1] or lines  # the last line may be cut
    table, bad = read_lines(lines)
    if len(bad) == len(lines):
        raise BadInputError(
            f"{source}, line 1: {bad[0].what}: {lines[0][:_MAX_SHOWN].decode('utf-8', 'replace')}",
            "write an object in each line (a list of objects by jq -c '.[]'), or correct format in "
            "[input] of the spec",
        )
    present = sorted({*table.schema.names, *parse_partition_values(source)})
    for name in spec.sources(label=False):
        if name not in present and find_type(table.schema, name) is None:
            hint = suggest_column(name, present, spec.sources(label=True))
            listed = ", ".join(present[:_MAX_LISTED])
            raise BadInputError(
                f"{source}: its first rows have no key {name}, but {listed}",
                f"{hint}name the columns as in the file; if the values are mostly missing, write "
                "null in one of these rows",
            )
    label = all(
        name in present or find_type(table.schema, name) for name in spec.sources(label=True)
    )
    return LineLayout((), label, source=source)


def parse_json(
    text: bytes | memoryview, spec: FeatureSpec, layout: LineLayout, *, max_bad_rows: int
) -> RawRows:
    """Parse whole lines; a missing key is a missing value.

    Raises:
        BadInputError: A column has another type than in the spec.
    """
    lines = bytes(text).removesuffix(b"\n").split(b"\n") if len(text) else []
    table, bad = read_lines(lines)
    partition = parse_partition_values(layout.source)
    for name in spec.sources(label=layout.label):
        if find_type(table.schema, name) is None and name not in partition:
            table = table.append_column(name, pa.nulls(len(lines) - len(bad)))
    check_columns(table.schema, layout.source, spec, label=layout.label)
    for row in reversed(bad):  # from the last one on, so that the other indices stay valid
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
    """Parse lines to a table of their objects, and the lines that are not objects.

    If Arrow cannot parse them, because a line is not an object or a key has values of several
    types, Python does. Values of several types, such as booleans and numbers, become text.
    """
    table = _read_with_arrow(b"\n".join(lines))
    if table is not None and len(table) == len(lines):
        return table, []
    objects: list[dict[str, Any]] = []
    bad: list[BadRow] = []
    for i, line in enumerate(lines):
        what = "expected a JSON object"
        try:
            value = parse_strict_json(line)
        except ValueError as error:
            value = None
            what = f"{what}: {error}"
        if isinstance(value, dict):
            objects.append(value)
        else:
            bad.append(BadRow(i, what, "", line, "correct the file"))
    columns: dict[str, pa.Array] = {}
    for value in objects:
        for name in value:
            if name not in columns:
                columns[name] = _make_array([other.get(name) for other in objects])
    return pa.table(columns), bad


def _read_with_arrow(text: bytes) -> pa.Table | None:
    """Parse lines to a table in which times are text; None if Arrow cannot parse them."""
    # Arrow would accept NaN and infinity. The pattern is slow, so it is tried only if needed.
    if (b"NaN" in text or b"Inf" in text) and _CONSTANT.search(text):
        return None
    reading = pj.ReadOptions(use_threads=False, block_size=len(text) + 1)
    schema = None  # Arrow infers it at first
    try:
        while True:
            parsing = pj.ParseOptions(explicit_schema=schema)
            table = pj.read_json(pa.BufferReader(text), reading, parsing)
            fields = [field.with_type(_replace_times(field.type)) for field in table.schema]
            schema = pa.schema(fields)
            if schema == table.schema:
                return table
    except ValueError:  # includes Arrow's errors, and keys that are not UTF-8
        return None


def _replace_times(held: pa.DataType) -> pa.DataType:
    """Return a type with strings instead of times, which Arrow infers from texts that look so."""
    if pa.types.is_timestamp(held):
        return pa.string()
    if pa.types.is_list(held):
        return pa.list_(_replace_times(held.value_type))
    if pa.types.is_struct(held):
        return pa.struct([field.with_type(_replace_times(field.type)) for field in held])
    return held


def _make_array(values: list[Any]) -> pa.Array:
    """Return the values of a key, as text if they have several types."""
    kinds = {type(value) for value in values} - {type(None)}
    has_mixed_booleans = bool in kinds and len(kinds) > 1  # Arrow would convert true to 1
    if not has_mixed_booleans:
        with contextlib.suppress(pa.ArrowException, OverflowError, UnicodeEncodeError):
            return pa.array(values)
    texts: list[bytes | None] = []
    for value in values:
        if value is None:
            texts.append(None)
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        texts.append(text.encode("utf-8", "surrogatepass"))  # a lone surrogate makes a bad row
    return pa.array(texts)


class JsonLines(TextFormat):
    """JSON lines."""

    find_layout = staticmethod(find_json_layout)
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
