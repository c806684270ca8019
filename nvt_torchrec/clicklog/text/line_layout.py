"""The first lines of a text file, and the positions of a spec's columns in its lines."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shlex

from nvt_torchrec.base.errors import BadInputError, BadRowError
from nvt_torchrec.clicklog.text.remedies import (
    ANOTHER_LOG,
    FIRST_LINES,
    HEADER,
    REMEDIES,
    similar_column,
)
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import base as codes

#: How much text tells which columns a file has and whether its rows have a label: of JSON, missing
#: values may have no key.
HEAD_BYTES = 1 << 20
#: How many lines decide whether there is a label, so that one malformed line does not.
_MAX_LINES = 100
#: With what files begin that are no text.
_UTF_16, _ZIP = (b"\xff\xfe", b"\xfe\xff"), b"PK\x03\x04"
_COMPRESSED = {
    ".gz": b"\x1f\x8b", ".bz2": b"BZh", ".xz": b"\xfd7zXZ", ".zst": b"\x28\xb5\x2f\xfd",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LineLayout:
    """What the fields of the lines of a file are.

    Attributes:
        fields: The name of each field of a line, "" for those without; the spec's sources are
            among them.
        label: Whether the rows have labels, and what else only training reads.
        begin: Byte of the file at which the first row begins: 0, or after the header.
        source: Names the file in errors; only of JSON lines, which have no fields.
    """

    fields: tuple[str, ...]
    label: bool
    begin: int = 0
    source: str = ""

    def drop_label(self) -> LineLayout:
        """Return the layout without labels, whose fields are then ignored."""
        return dataclasses.replace(self, label=False)


def plain_layouts(spec: FeatureSpec) -> list[LineLayout]:
    """Return the layouts that a file without a header may have, with different numbers of fields.

    The first one has all fields, the second one lacks those that only labels are read from; of a
    spec with a weight or a column for the split, further ones lack them as well.
    """
    plan = spec.read_plan(label=True)
    features = set(spec.sources(label=False))
    names = spec.file_columns(label=True)
    layouts: dict[int, LineLayout] = {}
    absent: set[str] = set()
    of_clicks = (plan.label_time, *itertools.chain(*plan.label_keys))
    for unread in ((), plan.labels, (plan.weight,), (plan.key,), plan.times, of_clicks):
        absent |= {plan.reads[index].source for index in unread if index is not None} - features
        fields = tuple(name for name in names if name not in absent)
        layouts.setdefault(len(fields), LineLayout(fields, label=not absent))
    return list(layouts.values())


def plain_layout(spec: FeatureSpec, *, label: bool) -> LineLayout:
    """Return the layout of a file without a header, as :meth:`FeatureSpec.file_columns` says.

    Without labels, it has none of the fields that only training reads.
    """
    return LineLayout(tuple(spec.file_columns(label=label)), label)


def layout_of(head: bytes, source: str, spec: FeatureSpec) -> LineLayout:
    """Return the layout that a file's first lines show; a header may name further columns.

    Args:
        head: The file's first lines; the last one may be cut.
        source: Names the file in errors.
        spec: The columns.

    Raises:
        BadInputError: The header lacks a column, or has it twice.
        BadRowError: There is no header, and no line has as many fields as the spec, or as many as
            without labels.
    """
    check_text(head, source)
    if not spec.input.header:
        return _layout_by_count(head, source, spec)
    first = head.split(b"\n", _MAX_LINES)[0]
    names = [name.strip() for name in split_line(first, spec)]
    label = set(spec.sources(label=True)) <= set(names)
    columns = spec.sources(label=label)
    for name in columns:
        if name in names and names.count(name) > 1:
            raise BadInputError(
                f"{source}: column {name} is twice in the header",
                f"name its {len(names)} fields by position in [input] of the spec: header = false, "
                f"skip_lines = {spec.input.skip_lines + 1}, columns = "
                f'["{columns[0]}", "", …], with "" for those that are not read',
            )
        if name not in names:
            listed = ", ".join(names[:20]) + (" …" if len(names) > 20 else "")
            others = REMEDIES[codes.NOT_UTF8] if "\ufffd" in listed else HEADER
            raise BadInputError(
                f"{source}: column {name} is not in the header",
                f"{similar_column(name, names, columns)}its columns are: {listed}; name them in "
                f"the spec as in the header; {others}",
            )
    return LineLayout(tuple(names), label, len(first) + 1)


def _layout_by_count(head: bytes, source: str, spec: FeatureSpec) -> LineLayout:
    """Return the layout whose number of fields most lines have."""
    layouts = plain_layouts(spec)
    lines = head.split(b"\n", _MAX_LINES)
    whole = lines[:-1] or lines  # the last one may be cut
    counts = [len(split_line(line, spec)) for line in whole]
    best = max(layouts, key=lambda layout: counts.count(len(layout.fields)))
    if len(best.fields) in counts:
        return best
    kind = {"\t": "tab-separated", ",": "comma-separated"}.get(
        spec.input.delimiter, f"{spec.input.delimiter!r}-separated"
    )
    needed, *others = (len(layout.fields) for layout in layouts)
    names = [name or '""' for name in spec.file_columns(label=True)]
    less = f" ({' or '.join(map(str, others))} without the label)" if others else ""
    remedy = ANOTHER_LOG.format(source) if spec.is_criteo_format else FIRST_LINES
    raise BadRowError(
        f"{source}, line 1: {counts[0]} {kind} field{'s' * (counts[0] != 1)}",
        f"{needed} are needed{less}: {', '.join(names[:2])} … {names[-1]}; {remedy}",
    )


def check_text(head: bytes, source: str) -> None:
    """Raise :class:`BadInputError` for what is no text in one of the encodings of a spec.

    That is UTF-16, a compressed file whose name does not say so, JSON, and lines that end with a
    carriage return alone.
    """
    packed = next((ending for ending, magic in _COMPRESSED.items() if head.startswith(magic)), "")
    bare_returns = b"\n" not in head and head.rstrip(b"\r").count(b"\r") > 0
    unpack = "unpack it and " * source.endswith(tuple(_COMPRESSED))
    file = shlex.quote(source)
    for is_so, what, remedy in (
        (
            head.startswith(_UTF_16),
            "UTF-16",
            f"convert it: iconv -f UTF-16 -t UTF-8 {file} > converted.csv",
        ),
        (head.startswith(_ZIP), "a zip archive", f"unpack it: unzip {file}; save Excel's as CSV"),
        (packed, "compressed, but its name does not say so", f"name it {source}{packed}"),
        (is_json(head), "JSON", f"make a spec by `python -m etl guess {file}`, which sets format"),
        (
            head.startswith(b'[{"'),
            "a JSON list",
            f"make a line of each object: jq -c '.[]' {file} > converted.jsonl",
        ),
        (
            bare_returns,
            "its lines end with \\r alone",
            f"{unpack}convert it: tr '\\r' '\\n' < {file} > converted.csv",
        ),
    ):
        if is_so:
            raise BadInputError(f"{source}: {what}", remedy)


def is_json(head: bytes) -> bool:
    """Return whether a text begins with an object in its first line."""
    try:
        return isinstance(json.loads(head.split(b"\n", 1)[0]), dict)
    except (ValueError, RecursionError):
        return False


def split_line(line: bytes, spec: FeatureSpec) -> list[str]:
    """Split one line, with or without its line end, into fields."""
    text = line.removesuffix(b"\n").removesuffix(b"\r").decode(spec.input.encoding, "replace")
    if not spec.input.quoted:
        return text.split(spec.input.delimiter)
    fields = re.compile(
        f'(?:"([^"]*(?:""[^"]*)*)"?)?(.*?)({re.escape(spec.input.delimiter)}|$)', re.DOTALL
    )
    fields_of_line, at = [], 0
    while True:
        match = fields.match(text, at)
        assert match is not None  # it matches anything
        fields_of_line.append((match[1] or "").replace('""', '"') + match[2])
        at = match.end()
        if not match[3]:
            return fields_of_line
