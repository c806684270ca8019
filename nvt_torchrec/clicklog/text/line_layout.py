"""The fields of the lines of a text file, derived from its first lines."""

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
    suggest_column,
)
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import base as codes

#: The number of bytes at the beginning of a file that decide which columns it has and whether its
#: rows have a label. They are far more than a line, because JSON objects may lack keys of missing
#: values.
HEAD_BYTES = 1 << 20
#: The largest number of columns that an error lists.
_MAX_LISTED = 20
#: The number of lines that decide whether there is a label; one line could be malformed.
_MAX_LINES = 100
#: The first bytes of files that are not UTF-8 text.
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_ZIP = b"PK\x03\x04"
#: The ending of the name of a compressed file, and the file's first bytes.
_COMPRESSED = {
    ".gz": b"\x1f\x8b", ".bz2": b"BZh", ".xz": b"\xfd7zXZ", ".zst": b"\x28\xb5\x2f\xfd",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LineLayout:
    """The fields of the lines of a file.

    Attributes:
        fields: The name of each field of a line, "" for fields without a name; the spec's sources
            are among them. () for JSON lines.
        label: Whether the rows have the labels and the other fields that only training reads.
        begin: The byte offset of the first row in the file: 0, or after the header.
        source: The name of the file in errors; only for JSON lines.
    """

    fields: tuple[str, ...]
    label: bool
    begin: int = 0
    source: str = ""

    def drop_label(self) -> LineLayout:
        """Return the layout without labels, whose fields are then ignored."""
        return dataclasses.replace(self, label=False)


def list_plain_layouts(spec: FeatureSpec) -> list[LineLayout]:
    """Return the layouts that a file without a header can have, with different numbers of fields.

    The first one has all fields. The second one lacks the fields that only labels are read from.
    Each following one also lacks the weight, the column of the split, or the times.
    """
    plan = spec.read_plan(label=True)
    features = set(spec.sources(label=False))
    names = spec.file_columns(label=True)
    layouts: dict[int, LineLayout] = {}
    absent: set[str] = set()
    click_fields = (plan.label_time, *itertools.chain(*plan.label_keys))
    for dropped in ((), plan.labels, (plan.weight,), (plan.key,), plan.times, click_fields):
        sources = {plan.reads[index].source for index in dropped if index is not None}
        absent |= sources - features
        fields = tuple(name for name in names if name not in absent)
        layouts.setdefault(len(fields), LineLayout(fields, label=not absent))
    return list(layouts.values())


def make_plain_layout(spec: FeatureSpec, *, label: bool) -> LineLayout:
    """Return the layout of a file without a header, whose lines have all or no training fields."""
    return LineLayout(tuple(spec.file_columns(label=label)), label)


def find_layout(head: bytes, source: str, spec: FeatureSpec) -> LineLayout:
    """Derive the layout from a file's first lines; a header may name additional columns.

    Args:
        head: The file's first lines; the last one may be cut.
        source: The name of the file in errors.
        spec: The columns.

    Raises:
        BadInputError: The header lacks a column, or has it twice.
        BadRowError: There is no header, and no line has as many fields as one of the layouts of
            :func:`list_plain_layouts`.
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
                f"{source}: column {name} is in the header twice",
                f"name its {len(names)} fields by position in [input] of the spec: header = false, "
                f"skip_lines = {spec.input.skip_lines + 1}, columns = "
                f'["{columns[0]}", "", …], with "" for those that are not read',
            )
        if name not in names:
            listed = ", ".join(names[:_MAX_LISTED])
            if len(names) > _MAX_LISTED:
                listed += " …"
            is_misread = "\ufffd" in listed  # replaces bytes that do not fit the encoding
            hint = REMEDIES[codes.NOT_UTF8] if is_misread else HEADER
            raise BadInputError(
                f"{source}: column {name} is not in the header",
                f"{suggest_column(name, names, columns)}its columns are: {listed}; name them in "
                f"the spec as in the header; {hint}",
            )
    return LineLayout(tuple(names), label, len(first) + 1)


def _layout_by_count(head: bytes, source: str, spec: FeatureSpec) -> LineLayout:
    """Return the layout whose number of fields is the most common one among the lines.

    Raises:
        BadRowError: No line has as many fields as any layout.
    """
    layouts = list_plain_layouts(spec)
    lines = head.split(b"\n", _MAX_LINES)
    whole = lines[:-1] or lines  # the last line may be cut
    counts = [len(split_line(line, spec)) for line in whole]
    best = max(layouts, key=lambda layout: counts.count(len(layout.fields)))
    if len(best.fields) in counts:
        return best
    delimiter = {"\t": "tab", ",": "comma"}.get(spec.input.delimiter, repr(spec.input.delimiter))
    unit = "field" if counts[0] == 1 else "fields"
    expected = f"expected {len(layouts[0].fields)}"
    if len(layouts) > 1:
        fewer = " or ".join(str(len(layout.fields)) for layout in layouts[1:])
        expected += f" ({fewer} without the label)"
    names = [name or '""' for name in spec.file_columns(label=True)]
    remedy = ANOTHER_LOG.format(source) if spec.is_criteo_format else FIRST_LINES
    raise BadRowError(
        f"{source}, line 1: {counts[0]} {delimiter}-separated {unit}",
        f"{expected}: {', '.join(names[:2])} … {names[-1]}; {remedy}",
    )


def check_text(head: bytes, source: str) -> None:
    """Check that a file is delimited text.

    Args:
        head: The file's first lines.
        source: The name of the file in errors.

    Raises:
        BadInputError: The file is UTF-16, JSON, or compressed although its name does not say so; or
            its lines end with a carriage return only.
    """
    file = shlex.quote(source)
    if head.startswith(_UTF_16):
        remedy = f"convert it: iconv -f UTF-16 -t UTF-8 {file} > converted.csv"
        raise BadInputError(f"{source}: UTF-16", remedy)
    if head.startswith(_ZIP):
        remedy = f"unpack it: unzip {file}; or, if it is an Excel file, save it as CSV"
        raise BadInputError(f"{source}: a zip archive", remedy)
    for ending, magic in _COMPRESSED.items():
        if head.startswith(magic):
            what = f"{source}: compressed, but its name does not say so"
            raise BadInputError(what, f"name it {source}{ending}")
    if is_json(head):
        remedy = f"make a spec with `python -m etl guess {file}`, which sets format"
        raise BadInputError(f"{source}: JSON", remedy)
    if head.startswith(b'[{"'):
        remedy = f"write each object on a line: jq -c '.[]' {file} > converted.jsonl"
        raise BadInputError(f"{source}: a JSON list", remedy)
    has_bare_returns = b"\n" not in head and b"\r" in head.rstrip(b"\r")
    if has_bare_returns:
        remedy = f"convert it: tr '\\r' '\\n' < {file} > converted.csv"
        if source.endswith(tuple(_COMPRESSED)):
            remedy = f"unpack it and {remedy}"
        raise BadInputError(f"{source}: its lines end with \\r only", remedy)


def is_json(head: bytes) -> bool:
    """Return whether a text begins with an object in its first line."""
    try:
        return isinstance(json.loads(head.split(b"\n", 1)[0]), dict)
    except (ValueError, RecursionError):
        return False


def split_line(line: bytes, spec: FeatureSpec) -> list[str]:
    """Split one line, with or without its line break, into fields."""
    text = line.removesuffix(b"\n").removesuffix(b"\r").decode(spec.input.encoding, "replace")
    if not spec.input.quoted:
        return text.split(spec.input.delimiter)
    delimiter = re.escape(spec.input.delimiter)
    # groups: a quoted beginning, in which quotes are doubled; the rest; the end of the field
    field = re.compile(f'(?:"([^"]*(?:""[^"]*)*)"?)?(.*?)({delimiter}|$)', re.DOTALL)
    fields: list[str] = []
    offset = 0
    while True:
        match = field.match(text, offset)
        assert match is not None  # it matches anything
        quoted = (match[1] or "").replace('""', '"')
        fields.append(quoted + match[2])
        offset = match.end()
        if not match[3]:
            return fields
