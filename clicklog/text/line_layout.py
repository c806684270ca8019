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
    """What the fields of the lines of a file are.

    Attributes:
        fields: for each field of a line, the name of the spec's source that it is, or "".
        label: whether the rows have labels, and what else only training reads.
        begin: byte of the file at which the first row begins: 0, or after the header.
    """

    fields: tuple[str, ...]
    label: bool
    begin: int = 0

    def without_label(self) -> LineLayout:
        """Return the layout without labels, whose fields are then ignored."""
        return dataclasses.replace(self, label=False)


def plain_layouts(spec: FeatureSpec) -> list[LineLayout]:
    """Return the layouts that a file without a header may have, with different numbers of fields.

    The first one has all fields, the second one lacks those that only labels are read from; of a
    spec with a weight or a column for the split, further ones lack them as well.
    """
    plan = spec.read_plan(label=True)
    read, features = (set(spec.sources(label=label)) for label in (True, False))
    names = spec.file_columns(label=True)
    found = {}
    absent: set[str] = set()
    for unread in ((), plan.labels, (plan.weight,), (plan.key,)):
        absent |= {plan.reads[index].source for index in unread if index is not None} - features
        left = (name for name in names if name not in absent)
        fields = tuple(name if name in read else "" for name in left)
        found.setdefault(len(fields), LineLayout(fields, label=not absent))
    return list(found.values())


def plain_layout(spec: FeatureSpec, *, label: bool) -> LineLayout:
    """Return the layout of a file without a header, as :meth:`FeatureSpec.file_columns` says.

    Without labels, it has none of the fields that only training reads.
    """
    read = set(spec.sources(label=label))
    names = spec.file_columns(label=label)
    return LineLayout(tuple(name if name in read else "" for name in names), label)


def layout_of(head: bytes, source: str, spec: FeatureSpec) -> LineLayout:
    """Return the layout that a file's first lines show; a header may name further columns.

    Args:
        head: the file's first lines; the last one may be cut.
        source: names the file in errors.
        spec: the columns.

    Raises:
        BadInputError: the header lacks a column, or has it twice.
        BadRowError: there is no header, and no line has as many fields as the spec, or as many as
            without labels.
    """
    if not spec.input.header:
        return _layout_by_count(head, source, spec)
    first = head.split(b"\n", 1)[0]
    names = split_line(first.removeprefix(_BYTE_ORDER_MARK), spec)
    label = set(spec.sources(label=True)) <= set(names)
    columns = spec.sources(label=label)
    for name in columns:
        if names.count(name) != 1:
            problem = "twice" if name in names else "not"
            raise BadInputError(
                f"{source}: column {name} is {problem} in the header", _where_else(name, names)
            )
    fields = tuple(name if name in columns else "" for name in names)
    return LineLayout(fields, label, len(first) + 1)


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


def _layout_by_count(head: bytes, source: str, spec: FeatureSpec) -> LineLayout:
    """Return the layout whose number of fields most lines have."""
    layouts = plain_layouts(spec)
    lines = head.split(b"\n", _LABEL_LINES)
    whole = lines[:-1] or lines  # the last one may be cut
    counts = [len(split_line(line, spec)) for line in whole]
    best = max(layouts, key=lambda layout: counts.count(len(layout.fields)))
    if len(best.fields) in counts:
        return best
    kind = {"\t": "tab-separated", ",": "comma-separated"}.get(
        spec.input.delimiter, f"{spec.input.delimiter!r}-separated"
    )
    needed, *others = (str(len(layout.fields)) for layout in layouts)
    names = [name or '""' for name in spec.file_columns(label=True)]
    less = f" ({' or '.join(others)} without the label)" if others else ""
    raise BadRowError(
        f"{source}, line 1: {counts[0]} {kind} fields",
        f"{needed} are needed{less}: {', '.join(names[:2])} … {names[-1]}",
    )
