"""Delimited text of any feature spec → rows; for Criteo's own form see the tokenizer."""

from __future__ import annotations

import csv
import dataclasses
import difflib

import numpy as np

from clicklog.assemble import assemble
from clicklog.complaints import EXPECTED, FIELD_COUNT
from clicklog.convert import Converted, Fields, convert, convert_lists
from clicklog.errors import BadInputError, BadRowError, SettingsError
from clicklog.fields import Lines, split_lines
from clicklog.rows import RawRows
from clicklog.spec import FeatureSpec

#: Lines by whose fields the presence of a label is told: one broken line must not decide.
_LABEL_LINES = 100
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the columns of a spec stand in the lines of a file.

    Attributes:
        slots: for each field of a line, the index of its column among those read (in spec order,
            the label first if there is one), or -1.
        label: whether the rows have a label.
        begin: byte of the file at which the first row begins: 0, or behind the header.
    """

    slots: tuple[int, ...]
    label: bool
    begin: int = 0

    def without_label(self) -> Layout:
        """The same, but for the label, which is ignored where it is there."""
        if not self.label:
            return self
        return Layout(tuple(max(slot - 1, -1) for slot in self.slots), False, self.begin)


def plain_layout(spec: FeatureSpec, *, label: bool) -> Layout:
    """Of a file without a header: the columns in spec order."""
    return Layout(tuple(range(len(spec.columns) - (not label))), label)


def layout_of(head: bytes, source: str, spec: FeatureSpec) -> Layout:
    """What the first lines of a file say; further columns of a file with a header are ignored.

    Args:
        head: the file's first lines, the last one perhaps cut.
        source: names the file in errors.
        spec: the columns.

    Raises:
        BadInputError: the header lacks a column, or has it twice.
        BadRowError: without a header: no line has as many fields as the spec, or one less.
    """
    if not spec.input.header:
        return plain_layout(spec, label=_begins_with_label(head, source, spec))
    first = head.split(b"\n", 1)[0]
    names = split_line(first.removeprefix(_BYTE_ORDER_MARK), spec)
    columns = spec.columns if spec.label in names else spec.columns[1:]
    for name in columns:
        if names.count(name) != 1:
            problem = "twice" if name in names else "not"
            raise BadInputError(
                f"{source}: column {name} is {problem} in the header", _where_else(name, names)
            )
    slots = tuple(columns.index(name) if name in columns else -1 for name in names)
    return Layout(slots, spec.label in names, len(first) + 1)


def _where_else(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"is it {close[0]!r} there? " if close else ""
    listed = ", ".join(names[:20]) + (" …" if len(names) > 20 else "")
    return f"{hint}it has {len(names)} columns: {listed}; the spec must name them so"


def split_line(line: bytes, spec: FeatureSpec) -> list[str]:
    """The fields of one line, with or without its line end."""
    text = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", "replace")
    if spec.input.format == "csv":
        try:
            return next(csv.reader([text], delimiter=spec.input.delimiter), []) or [""]
        except csv.Error:  # longer than Python's csv module allows
            return [text]
    return text.split(spec.input.delimiter)


def _begins_with_label(head: bytes, source: str, spec: FeatureSpec) -> bool:
    columns = len(spec.columns)
    lines = head.split(b"\n", _LABEL_LINES)
    whole = lines[:-1] or lines  # the last one may be cut
    fields = [len(split_line(line, spec)) for line in whole]
    with_label, without = fields.count(columns), fields.count(columns - 1)
    if not with_label and not without:
        kind = {"\t": "tab-separated", ",": "comma-separated"}.get(
            spec.input.delimiter, f"{spec.input.delimiter!r}-separated"
        )
        raise BadRowError(
            f"{source}, line 1: {fields[0]} {kind} fields",
            f"{columns} are needed ({columns - 1} without the label): {spec.columns[0]}, "
            f"{spec.columns[1]} … {spec.columns[-1]}",
        )
    return with_label >= without


def parse_text(
    data: bytes | memoryview, spec: FeatureSpec, layout: Layout, *, reject: bool = False
) -> RawRows:
    """Parse whole lines of delimited text, without a header line.

    Args:
        data: lines, the last one with or without its newline; ``\\r\\n`` ends a line too.
        spec: the columns; their raw types say what may stand in a field. An empty field is missing
            (a label may not be), an empty value in a list an error.
        layout: which fields they are.
        reject: describe every bad row, not only the first ones.

    Raises:
        SettingsError: the spec is one of parquet, or there are 2 GiB of text or more.
    """
    if spec.input.format == "parquet":
        raise SettingsError("the spec describes parquet, not text", "set format in its [input]")
    lines = split_lines(
        data,
        np.array(layout.slots, np.int32),
        delimiter=spec.input.delimiter,
        quoted=spec.input.format == "csv",
    )
    view = memoryview(data).cast("B")

    def text(line: int) -> bytes:
        whole = bytes(view[lines.line_begin[line] : lines.line_begin[line + 1]])
        return whole.removesuffix(b"\n").removesuffix(b"\r")

    wrong = {line: _whole_line(lines, line, layout) for line in np.flatnonzero(lines.code).tolist()}
    return assemble(
        spec,
        (_convert(lines, index, spec, layout) for index in range(len(lines.begin))),
        wrong,
        text,
        rows=len(lines),
        label=layout.label,
        reject=reject,
    )


def _whole_line(lines: Lines, line: int, layout: Layout) -> str:
    code, where = int(lines.code[line]), int(lines.where[line])
    if code == FIELD_COUNT:
        return f"{where} fields instead of {len(layout.slots)}"
    return f"field {where + 1}: {EXPECTED[code]}"


def _convert(lines: Lines, index: int, spec: FeatureSpec, layout: Layout) -> Converted:
    begin, end = lines.begin[index], lines.end[index]
    if len(lines.code) and lines.code.any():  # of a bad line no field is looked at
        end = np.where(lines.code == 0, end, begin)
    fields = Fields(lines.data, begin, end)
    index -= layout.label
    if index < 0:
        return convert(fields, "label")
    if index < len(spec.dense):
        return convert(fields, spec.dense[index].raw)
    column = spec.categorical[index - len(spec.dense)]
    if column.multi_hot:
        return convert_lists(fields, column.raw, spec.input.list_separator)
    return convert(fields, column.raw)
