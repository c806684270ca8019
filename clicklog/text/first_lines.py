"""The first lines of a text file: its header, and the fields of some rows."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.clicklog.text.row_ends import NO_LIMIT, skip_rows
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec

#: How many lines decide whether there is a label, so that one malformed line does not.
MOST_LINES = 100
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
#: With what files begin that are no text.
_UTF_16, _ZIP = (b"\xff\xfe", b"\xfe\xff"), b"PK\x03\x04"
_COMPRESSED = {b"\x1f\x8b": "gz", b"BZh": "bz2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zst"}


def first_line_of(head: bytes, spec: FeatureSpec) -> bytes:
    """Return the first line (or row with quoted line breaks) of a text, without its newline."""
    return next(first_lines(head, spec), b"")


def check_text(head: bytes, source: str) -> None:
    """Raise :class:`BadInputError` for what is no text in one of the encodings of a spec.

    That is UTF-16, a compressed file whose name does not say so, JSON, and lines that end with a
    carriage return alone.
    """
    file = shlex.quote(source)
    if head.startswith(_UTF_16):
        raise BadInputError(
            f"{source}: UTF-16", f"convert it: iconv -f UTF-16 -t UTF-8 {file} > converted.csv"
        )
    if head.startswith(_ZIP):
        raise BadInputError(f"{source}: a zip archive", f"unpack it: unzip {file}")
    for magic, ending in _COMPRESSED.items():
        if head.startswith(magic):
            raise BadInputError(
                f"{source}: compressed, but its name does not say so", f"name it {source}.{ending}"
            )
    if _is_json(head):
        raise BadInputError(
            f"{source}: JSON",
            "convert it to parquet, rows in lines for example with pyarrow.json.read_json and "
            "pyarrow.parquet.write_table",
        )
    if b"\n" not in head and head.rstrip(b"\r").count(b"\r"):
        packed = source.endswith(tuple(_COMPRESSED.values()))
        raise BadInputError(
            f"{source}: its lines end with \\r alone",
            f"{'unpack it and ' * packed}convert it: tr '\\r' '\\n' < {file} > converted.csv",
        )


def _is_json(head: bytes) -> bool:
    """Whether a text begins with an object in its first line, or with a list of objects."""
    if head.startswith(b'[{"'):
        return True
    if not head.startswith(b"{"):
        return False
    try:
        return isinstance(json.loads(head.split(b"\n", 1)[0]), dict)
    except (ValueError, RecursionError):
        return False


def header_names(head: bytes, spec: FeatureSpec) -> list[str]:
    """Return the names in the header with which a text begins, without spaces around them."""
    first = first_line_of(head, spec).removeprefix(_BYTE_ORDER_MARK)
    return [name.strip() for name in split_line(first, spec)]


def first_lines(head: bytes, spec: FeatureSpec) -> Iterator[bytes]:
    """Yield the first :data:`MOST_LINES` lines of a text, then what follows them."""
    if not spec.input.quoted_newlines:
        yield from head.split(b"\n", MOST_LINES)
        return
    text, delimiter = np.frombuffer(head, np.uint8), ord(spec.input.delimiter)
    begin = len(_BYTE_ORDER_MARK) * head.startswith(_BYTE_ORDER_MARK)
    first = 0
    for _ in range(MOST_LINES):
        limit = spec.input.max_line_kb << 10
        at, rows, _ = skip_rows(text, begin, len(text), True, limit, delimiter, 1, NO_LIMIT)
        if not rows:  # too long, or a quote that is not closed
            at = head.find(b"\n", begin) + 1 or len(head)
        whole = head[first:at]
        yield whole.removesuffix(b"\n")
        first = begin = at
        if not whole.endswith(b"\n"):
            return
    yield head[first:]


def split_line(line: bytes, spec: FeatureSpec) -> list[str]:
    """Split one line, with or without its line end, into fields."""
    text = line.removesuffix(b"\n").removesuffix(b"\r").decode(spec.input.encoding, "replace")
    if spec.input.format != "csv":
        return text.split(spec.input.delimiter)
    fields = re.compile(
        f'(?:"([^"]*(?:""[^"]*)*)"?)?(.*?)({re.escape(spec.input.delimiter)}|$)', re.DOTALL
    )
    found, at = [], 0
    while True:
        match = fields.match(text, at)
        assert match is not None  # it matches anything
        found.append((match[1] or "").replace('""', '"') + match[2])
        at = match.end()
        if not match[3]:
            return found
