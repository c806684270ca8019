"""Keys of the spec that would take lines or a header that do not fit it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.clicklog.text.first_lines import first_lines, header_names, split_line
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.spec.raw_types.base import FIELD_COUNT, OPEN_QUOTE

_DELIMITERS = (",", "\t", ";", "|", "::", ":", " ")
#: How many lines before a header are looked for.
_MOST_SKIPPED = 10


def line_remedy(line: bytes, spec: FeatureSpec, code: int, fields: int) -> str:
    """Return which key of the spec would take a malformed line; "" if none is known.

    Args:
        line: the line.
        spec: its ``[input]`` is what it does not fit.
        code: of the error, see :mod:`formats.spec.raw_types.base`.
        fields: how many fields a line should have.
    """
    if code == OPEN_QUOTE and not spec.input.quoted_newlines:
        return (
            "set quoted_newlines = true in [input] of the spec if its text goes on in the next one"
        )
    if code == FIELD_COUNT and not line.strip(b"\r\n") and not spec.input.skip_empty_lines:
        return "set skip_empty_lines = true in [input] of the spec if no row follows"
    if code == FIELD_COUNT:
        for keys, other in _with_delimiters(spec):
            if fields > 1 and len(split_line(line, other)) == fields:
                return f"set {keys} in [input] of the spec"
    return ""


def field_count_remedy(lines: Sequence[bytes], spec: FeatureSpec, fields: int) -> str:
    """Return, for a file none of whose first lines has the right number of fields, "; or set …".

    Args:
        lines: the first lines.
        spec: as :func:`line_remedy`.
        fields: how many fields a line should have.
    """
    for keys, other in _with_delimiters(spec):
        counts = [len(split_line(line, other)) for line in lines]
        if fields > 1 and 2 * sum(count in (fields, fields - 1) for count in counts) > len(lines):
            return f"; set {keys} in [input] of the spec"
    counts = [len(split_line(line, spec)) for line in lines]
    if not spec.input.columns and min(counts) == max(counts) > fields:
        return (
            f"; if the file has further columns, name its {counts[0]} fields with columns = […] in "
            '[input] of the spec, "" for those that nothing is read from'
        )
    return ""


def header_remedy(head: bytes, spec: FeatureSpec, columns: Iterable[str]) -> str:
    """Return which key of the spec would find some columns in a header; "" if none is known.

    Args:
        head: the file's first lines.
        spec: as :func:`line_remedy`.
        columns: the names that must be there.
    """
    wanted = list(columns)
    for keys, other in [("", spec), *_with_delimiters(spec)]:
        for skipped, line in zip(range(_MOST_SKIPPED + 1), first_lines(head, other), strict=False):
            names = header_names(line, other)
            if all(names.count(name) == 1 for name in wanted):
                more = spec.input.skip_lines + skipped
                both = [keys] * bool(keys) + [f"skip_lines = {more}"] * bool(skipped)
                return f"set {' and '.join(both)} in [input] of the spec" if both else ""
    names = header_names(head, spec)
    # the label may be among the names that are wanted, or not
    if 0 <= len(names) - len(wanted) <= 1 and not set(names) & set(wanted):
        return (
            f"it begins with {', '.join(names[:3])} …; name its columns in the spec as in the "
            "header, or, if it has none, set header = false in [input] of the spec"
        )
    return ""


def _with_delimiters(spec: FeatureSpec) -> Iterator[tuple[str, FeatureSpec]]:
    """Yield the spec with other delimiters, and the keys that are to be set for them."""
    for delimiter in _DELIMITERS:
        if delimiter == spec.input.delimiter:
            continue
        keys = [] if spec.input.format == "csv" else ['format = "csv"']
        if delimiter != "," or spec.input.format == "csv":
            keys.append(f"delimiter = {_toml(delimiter)}")
        if spec.input.format != "csv" and not spec.input.header:
            keys.append("header = false")
        try:
            text = dataclasses.replace(spec.input, format="csv", delimiter=delimiter)
            yield " and ".join(keys), dataclasses.replace(spec, input=text)
        except SettingsError:  # the list separator is the same
            continue


def _toml(text: str) -> str:
    return '"\\t"' if text == "\t" else f'"{text}"'
