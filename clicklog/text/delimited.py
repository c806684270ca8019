"""Parse delimited text of any feature spec; :mod:`.tokenizer` is faster for Criteo's format."""

from __future__ import annotations

import dataclasses

import numpy as np

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.clicklog.text.assemble import assemble
from nvt_torchrec.clicklog.text.convert import Converted, convert, convert_lists
from nvt_torchrec.clicklog.text.fields import Lines, gather, split_lines
from nvt_torchrec.clicklog.text.line_layout import LineLayout
from nvt_torchrec.clicklog.text.line_remedies import line_remedy
from nvt_torchrec.formats.rows import DESCRIBED_BAD_ROWS, RawRows
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.spec.raw_types.base import FIELD_COUNT, MESSAGES
from nvt_torchrec.formats.spec.reading import Read


def parse_delimited(
    data: bytes | memoryview, spec: FeatureSpec, layout: LineLayout, *, reject: bool = False
) -> RawRows:
    """Parse whole lines of delimited text, without a header line.

    Args:
        data: lines, the last one with or without its newline; ``\\r\\n`` ends a line too.
        spec: the columns; their raw types say what a field may hold. An empty field is a missing
            value, which a label may not be; an empty value in a list is an error.
        layout: which columns the fields of a line are. A column may be read in several ways.
        reject: describe every bad row, not only the first ones.

    Raises:
        SettingsError: the spec is one of parquet, or there are 2 GiB of text or more.
    """
    if spec.input.format == "parquet":
        raise SettingsError("the spec describes parquet, not text", "set format in its [input]")
    plan = spec.read_plan(label=layout.label)
    slots = {name: slot for slot, name in enumerate(spec.sources(label=layout.label))}
    lines = split_lines(
        data,
        np.array([slots.get(name, -1) for name in layout.fields], np.int32),
        delimiter=spec.input.delimiter,
        quoted=spec.input.format == "csv",
        quoted_newlines=spec.input.quoted_newlines,
    )
    view = memoryview(data).cast("B")

    def text(line: int) -> bytes:
        whole = bytes(view[lines.line_begin[line] : lines.line_begin[line + 1]])
        return whole.removesuffix(b"\n").removesuffix(b"\r")

    wrong = {
        line: _describe_line(lines, line, layout) for line in np.flatnonzero(lines.code).tolist()
    }
    found = assemble(
        spec,
        (_convert(lines, slots[read.source], read, spec) for read in plan.reads),
        wrong,
        text,
        rows=len(lines),
        label=layout.label,
        reject=reject,
    )
    for index, bad in enumerate(found.bad[:DESCRIBED_BAD_ROWS]):
        if code := int(lines.code[bad.line]):
            hint = line_remedy(bad.text, spec, code, len(layout.fields))
            if hint:
                found.bad[index] = dataclasses.replace(bad, remedy=f"correct the file, or {hint}")
    return found


def _describe_line(lines: Lines, line: int, layout: LineLayout) -> str:
    code, where = int(lines.code[line]), int(lines.where[line])
    if code == FIELD_COUNT:
        return f"{where} fields instead of {len(layout.fields)}"
    return f"field {where + 1}: {MESSAGES[code]}"


def _convert(lines: Lines, slot: int, read: Read, spec: FeatureSpec) -> Converted:
    begin, end = lines.begin[slot], lines.end[slot]
    if len(lines.code) and lines.code.any():  # the fields of a bad line are not checked
        end = np.where(lines.code == 0, end, begin)
    fields = gather(lines.data, begin, end)
    if read.multi_hot:
        return convert_lists(fields, read, spec.input.list_separator)
    return convert(fields, read)
