"""Remedies for values and lines that do not fit the spec, which name the keys of the spec.

The remedies of errors that depend on the raw type use ``RawType.keys`` and ``RawType.wider``.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types import base as codes
from nvt_torchrec.formats.feature_spec.raw_types.time import make_example
from nvt_torchrec.formats.feature_spec.read_plan import Read

#: The remedies by code. ``{keys}`` and ``{wider}`` are the attributes of the raw type.
REMEDIES = {
    codes.SYNTAX: "set {keys} for column {source} in the spec",
    codes.RANGE: 'set raw = "{wider}" for column {source} in the spec',
    codes.NOT_UTF8: 'set encoding = "latin-1" or "cp1252" in [input] of the spec, if that is right',
    codes.EMPTY_ITEM: "check list_separator in [input] of the spec",
    codes.NULL_ITEM: "remove missing values from the lists of column {source}, in SQL by "
    "filter({source}, x -> x is not null)",
    codes.OTHER_LABEL: "add it to positive or negative in [label] of the spec",
    codes.LABEL_NUMBER: "set positive instead of threshold in [label] of the spec",
    codes.WRONG_WIDTH: "set width in [[vector]] of the spec",
    codes.BEYOND_FLOAT16: 'set dtype = "float32" in [[vector]] of the spec',
    codes.OPEN_QUOTE: "write the log as parquet, for instance with DuckDB, if its text continues "
    "on the next line",
}
#: For a missing label.
MISSING_LABEL = (
    'set positive = ["1"] and negative = ["0", ""] in [label] of the spec if a missing label is 0'
)
#: For a label that is a number other than 0 and 1.
NUMBER_LABEL = (
    "set threshold in [label] of the spec: with threshold = 4, numbers of at least 4 are 1, others "
    "0"
)
#: For a missing label of a rule with ``positive``.
ADD_MISSING_LABEL = 'add "" to negative in [label] of the spec if a missing label is 0'
#: For an empty line, which has one field.
EMPTY_LINE = "set skip_empty_lines = true in [input] of the spec if no row follows"
#: For a file that is not in Criteo's format, if no other spec was given.
ANOTHER_LOG = (
    "for a log other than Criteo's, make a spec with `python -m etl guess {} --output spec.toml`, "
    "and pass it as --spec"
)
#: For a file none of whose first lines has the number of fields of the spec.
FIRST_LINES = (
    'check delimiter in [input] of the spec, or name its fields with columns = […], "" for those '
    "that are not read"
)
#: For a header that lacks a column.
HEADER = "check delimiter, skip_lines and header in [input] of the spec"


def suggest_value_remedy(read: Read, code: int, *, missing: bool = False) -> str:
    """Return the remedy for a wrong value, other than correcting it; "" if there is none."""
    kind = RAW_TYPES[read.raw]
    if missing and read.raw == "label":
        return ADD_MISSING_LABEL if read.label.positive else MISSING_LABEL
    if read.raw == "label" and code == codes.RANGE:
        return NUMBER_LABEL
    if code == codes.RANGE and not kind.wider:
        return ""
    if read.width and code == codes.NULL_ITEM:
        return "write a null instead of the list if a vector is missing"
    remedy = REMEDIES[code].format(keys=kind.keys, wider=kind.wider, source=read.source)
    if read.raw == "time" and code == codes.SYNTAX:
        remedy += f"; it reads {read.time_format or 'ISO 8601'}, such as {make_example(read)}"
    return remedy


def suggest_column(name: str, present: Iterable[str], read: Collection[str]) -> str:
    """Suggest a column of a log with a name similar to that of a missing column.

    Args:
        name: The missing column.
        present: The columns of the log.
        read: The columns that the spec reads, which are not suggested.

    Returns:
        A question followed by a space; "" if no column has a similar name.
    """
    others = {other.lower(): other for other in map(str, present) if other not in read}
    close = difflib.get_close_matches(name.lower(), others, n=1)
    return f"did you mean {others[close[0]]!r}? " if close else ""


def suggest_line_remedy(line: bytes, spec: FeatureSpec, code: int) -> str:
    """Return the remedy for a line that is malformed as a whole."""
    hint = REMEDIES.get(code, "")
    if code == codes.FIELD_COUNT and not line and not spec.input.skip_empty_lines:
        hint = EMPTY_LINE
    return suggest_correction(hint)


def suggest_correction(hint: str) -> str:
    """Return the remedy to correct the file or follow a hint; "" without a hint."""
    return f"correct the file, or {hint}" if hint else ""


def may_leave_out(remedy: str) -> bool:
    """Return whether leaving bad rows out is an alternative to a remedy.

    It is not if labels are ratings: then the spec is wrong, and only the rows with ratings of 0 and
    1 would be kept.
    """
    return not remedy.endswith(NUMBER_LABEL)
