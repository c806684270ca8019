"""The positions of a spec's columns in the lines of a text file."""

from __future__ import annotations

import csv
import dataclasses
import difflib

from clicklog.errors import BadInputError, BadRowError
from clicklog.spec.feature_spec import FeatureSpec

#: How many lines decide whether there is a label, so that one malformed line does not.
_LABEL_LINES = 100
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True)
class LineLayout:
    """The positions of a spec's columns in the lines of a file.

    Attributes:
        slots: for each field of a line, the index of its column among those read (in spec order,
            the label first if there is one), or -1.
        label: whether the rows have a label.
        begin: byte of the file at which the first row begins: 0, or after the header.
    """

    slots: tuple[int, ...]
    label: bool
    begin: int = 0

    def without_label(self) -> LineLayout:
        """Return the layout without the label, whose field is then ignored."""
        if not self.label:
            return self
        return LineLayout(tuple(max(slot - 1, -1) for slot in self.slots), False, self.begin)


def plain_layout(spec: FeatureSpec, *, label: bool) -> LineLayout:
    """Return the layout of a file without a header: the columns in spec order."""
    return LineLayout(tuple(range(len(spec.columns) - (not label))), label)


def layout_of(head: bytes, source: str, spec: FeatureSpec) -> LineLayout:
    """Return the layout that a file's first lines show; a header may name further columns.

    Args:
        head: the file's first lines; the last one may be cut.
        source: names the file in errors.
        spec: the columns.

    Raises:
        BadInputError: the header lacks a column, or has it twice.
        BadRowError: there is no header, and no line has as many fields as the spec, or one less.
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
    return LineLayout(slots, spec.label in names, len(first) + 1)


def _where_else(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"is it {close[0]!r} there? " if close else ""
    listed = ", ".join(names[:20]) + (" …" if len(names) > 20 else "")
    return f"{hint}it has {len(names)} columns: {listed}; name them in the spec as in the header"


def split_line(line: bytes, spec: FeatureSpec) -> list[str]:
    """Split one line, with or without its line end, into fields."""
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
