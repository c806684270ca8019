"""What to do about text that does not fit the spec: one sentence, and the keys of the spec.

One table for what can be wrong; what depends on the raw type is ``RawType.keys`` and ``wider``.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types import base as codes
from nvt_torchrec.formats.feature_spec.raw_types.time import make_example
from nvt_torchrec.formats.feature_spec.read_plan import Read

#: By code. ``{keys}`` are those of the raw type, ``{wider}`` is the raw type of larger numbers.
REMEDIES = {
    codes.SYNTAX: "set {keys} for column {source} in the spec",
    codes.RANGE: 'set raw = "{wider}" for column {source} in the spec',
    codes.NOT_UTF8: 'set encoding = "latin-1" or "cp1252" in [input] of the spec, if it is that',
    codes.EMPTY_ITEM: "check list_separator in [input] of the spec",
    codes.NULL_ITEM: "leave missing values out of the lists of column {source}, in SQL "
    "filter({source}, x -> x is not null)",
    codes.OTHER_LABEL: "add it to positive or negative in [label] of the spec",
    codes.LABEL_NUMBER: "set positive instead of threshold in [label] of the spec",
    codes.WRONG_WIDTH: "set width in [[vector]] of the spec",
    codes.BEYOND_FLOAT16: 'set dtype = "float32" in [[vector]] of the spec',
    codes.OPEN_QUOTE: "write the log as parquet, for instance with DuckDB, if its text goes on in "
    "the next one",
}
#: Of a label that is missing.
MISSING_LABEL = (
    'set positive = ["1"] and negative = ["0", ""] in [label] of the spec if a missing label is 0'
)
#: Of a label that is a number other than 0 and 1.
NUMBER_LABEL = (
    "set threshold in [label] of the spec: with threshold = 4, numbers from 4 on are 1, others 0"
)
ADD_MISSING_LABEL = 'add "" to negative in [label] of the spec if a missing label is 0'
#: Of an empty line, which has one field.
EMPTY_LINE = "set skip_empty_lines = true in [input] of the spec if no row follows"
#: Of a file that is not in Criteo's format, where no other spec was given.
ANOTHER_LOG = (
    "for another log than Criteo's make a spec, `python -m etl guess {} --output spec.toml`, and "
    "pass it as --spec"
)
#: Of a file none of whose first lines has as many fields as the spec, and of its header.
FIRST_LINES = (
    'check delimiter in [input] of the spec, or name its fields with columns = […], "" for those '
    "that are not read"
)
HEADER = "check delimiter, skip_lines and header in [input] of the spec"


def suggest_value_remedy(read: Read, code: int, *, missing: bool = False) -> str:
    """Return what to do about a wrong value besides correcting it; "" if there is nothing."""
    kind = RAW_TYPES[read.raw]
    if missing and read.raw == "label":
        return ADD_MISSING_LABEL if read.label.positive else MISSING_LABEL
    if read.raw == "label" and code == codes.RANGE:
        return NUMBER_LABEL
    if code == codes.RANGE and not kind.wider:
        return ""
    if read.width and code == codes.NULL_ITEM:
        return "leave the whole list out where a vector is missing"
    remedy = REMEDIES[code].format(keys=kind.keys, wider=kind.wider, source=read.source)
    if read.raw == "time" and code == codes.SYNTAX:
        remedy += f"; it reads {read.time_format or 'ISO 8601'}, such as {make_example(read)}"
    return remedy


def suggest_column(name: str, present: Iterable[str], read: Collection[str]) -> str:
    """Ask whether another column of a log is meant by one that it lacks.

    Args:
        name: The column that is missing.
        present: The columns of the log.
        read: The columns that the spec reads, which are excluded.

    Returns:
        A question with a space behind it; "" if no column has a similar name.
    """
    others = {other.lower(): other for other in map(str, present) if other not in read}
    close = difflib.get_close_matches(name.lower(), others, n=1)
    return f"did you mean {others[close[0]]!r}? " if close else ""


def suggest_line_remedy(line: bytes, spec: FeatureSpec, code: int) -> str:
    """Return what to do about a line that is malformed as a whole: correct it, or what else."""
    hint = REMEDIES.get(code, "")
    if code == codes.FIELD_COUNT and not line and not spec.input.skip_empty_lines:
        hint = EMPTY_LINE
    return suggest_correction(hint)


def suggest_correction(hint: str) -> str:
    """Return the remedy to correct a file or to do what a hint says; "" without a hint."""
    return f"correct the file, or {hint}" if hint else ""


def may_leave_out(remedy: str) -> bool:
    """Tell whether rows may be left out instead of what a remedy or reason says.

    Not if labels are ratings: then the spec is wrong and not the rows, of which only those with
    ratings of 0 and 1 would be kept.
    """
    return not remedy.endswith(NUMBER_LABEL)
