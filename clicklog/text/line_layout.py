"""The positions of a spec's columns in the lines of a text file."""

from __future__ import annotations

import dataclasses
import difflib

from clicklog.errors import BadInputError, BadRowError
from clicklog.spec.feature_spec import FeatureSpec
from clicklog.text.first_lines import first_line_of, first_lines, header_names, split_line
from clicklog.text.line_remedies import field_count_remedy, header_remedy


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
    names = header_names(head, spec)
    columns = spec.columns if spec.label in names else spec.columns[1:]
    for name in columns:
        if names.count(name) != 1:
            problem = "twice" if name in names else "not"
            raise BadInputError(
                f"{source}: column {name} is {problem} in the header",
                header_remedy(head, spec, columns) or _where_else(name, names),
            )
    slots = tuple(columns.index(name) if name in columns else -1 for name in names)
    return LineLayout(slots, spec.label in names, len(first_line_of(head, spec)) + 1)


def _where_else(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"is it {close[0]!r} there? " if close else ""
    listed = ", ".join(names[:20]) + (" …" if len(names) > 20 else "")
    return f"{hint}it has {len(names)} columns: {listed}; name them in the spec as in the header"


def _begins_with_label(head: bytes, source: str, spec: FeatureSpec) -> bool:
    columns = len(spec.columns)
    lines = list(first_lines(head, spec))
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
            f"{spec.columns[1]} … {spec.columns[-1]}{field_count_remedy(whole, spec, columns)}",
        )
    return with_label >= without
