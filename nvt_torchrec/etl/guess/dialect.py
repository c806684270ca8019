"""How a file of text is written: encoding, preamble, delimiter, quotes, header."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections import Counter

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.guess.values import NULLS

#: Delimiters, the more special first: of two that divide the lines equally well, the first is it.
_DELIMITERS = ("\t", "::", "\x01", ";", ",", "|", "^", "~", " ")
#: Rows by which the delimiter is found, and how many lines a preamble may have.
_TRIED, _PREAMBLE = 20_000, 50
_ENOUGH = 0.9  # of the rows have the same number of fields
#: Names of columns, but no hashes.
_NAME = re.compile(r"(?![0-9a-f]{8}$)[A-Za-z_#][\w .:/()-]{0,60}")
#: A number, a time or signs, but no name of a column.
_VALUE = re.compile(r"[-+]?[\d.,:/ TZ-]*\d[\d.,:/ TZ-]*([eE][-+]?\d+)?|[\W_]+")
#: Bytes that are signs such as € and “ in Windows' encoding, and control characters in Latin-1.
_WINDOWS = re.compile(rb"[\x80-\x9f]")
#: What to do with line breaks in values.
AS_PARQUET = (
    "write the log as parquet, in DuckDB COPY (FROM read_csv('LOG.csv')) TO 'LOG.parquet', or "
    "without these line breaks"
)


@dataclasses.dataclass(frozen=True)
class Dialect:
    """How the rows of a text are written.

    Attributes:
        delimiter: between the fields of a row.
        fields: how many fields most rows have.
        quoted: whether some fields are quoted.
        skip_lines: the number of lines before the first row.
        share: the share of the rows with as many fields as most.
        rank: what makes one delimiter better than another.
    """

    delimiter: str
    fields: int
    quoted: bool = False
    skip_lines: int = 0
    share: float = 1.0
    rank: tuple = ()


def decode(data: bytes, path: str) -> tuple[str, str]:
    """Return a text and its encoding; a byte order mark is removed.

    Raises:
        BadInputError: It is not a text.
    """
    if b"\0" in data:
        raise BadInputError(
            f"{path}: not text: it contains NUL bytes",
            "pass text, compressed text (.gz, .bz2, .xz, .zst) or parquet",
        )
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        return data.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        encoding = "cp1252" if _WINDOWS.search(data) else "latin-1"
        return data.decode(encoding, "replace"), encoding


def find_dialect(text: str, path: str, delimiter: str = "") -> Dialect:
    """Return how a text of whole lines is written; ``delimiter`` is given, or found.

    Raises:
        BadInputError: The rows have one field only, or no common number of fields.
    """
    candidates = [delimiter] if delimiter else [each for each in _DELIMITERS if each in text]
    lines = _lines(text)
    tried = [_try(lines, each, candidates) for each in candidates]
    good = [dialect for dialect in tried if dialect.fields > 1 and dialect.share >= _ENOUGH]
    if good:
        return max(good, key=lambda dialect: dialect.rank)
    what, best = "one column", max(tried, key=lambda dialect: dialect.share, default=None)
    if best and best.fields > 1:
        what = f"delimiter {best.delimiter!r} gives {best.share:.0%} of the lines "
        what += f"{best.fields} fields, and others different numbers of fields"
    if breaks := find_quoted_breaks(text, best.delimiter if best else ","):
        raise BadInputError(
            f"{path}: line {breaks[0]} ends within quotes, and so do {len(breaks) - 1} others: "
            "line breaks in values, where a line is a row",
            AS_PARQUET,
        )
    raise BadInputError(
        f"{path}: {what}: {text.lstrip().split(chr(10), 1)[0]:.60}",
        "a log has a label and at least one more column; give what separates them with "
        "--delimiter, or write the spec by hand",
    )


def _try(lines: list[str], delimiter: str, candidates: list[str]) -> Dialect:
    """Return how lines are written if they are divided by one of several delimiters.

    Spaces are within texts and times more often than between fields. The header has as many fields
    as the rows, and the delimiter of a list is in fewer columns than that of the rows.
    """
    rows = [_split(line, delimiter) for line in lines[: _TRIED + _PREAMBLE]]
    counts = Counter(len(row) for row in rows if row not in ([], [""]))
    fields = max(counts, key=lambda fields: (counts[fields], fields))
    share = counts[fields] / counts.total()
    even = [row for row in rows if len(row) == fields]
    within = set(candidates) - {delimiter, " "}
    columns = zip(*even[:100], strict=True)
    mixed = sum(any(each in field for each in within for field in c) for c in columns)
    skip_lines = next((k for k, row in enumerate(rows[:_PREAMBLE]) if len(row) == fields), 0)
    rank = (delimiter != " ", skip_lines == 0, -mixed, share >= 0.99, fields, share)
    quoted = any(line.startswith('"') or f'{delimiter}"' in line for line in lines[:_TRIED])
    return Dialect(delimiter, fields, quoted, skip_lines, share, rank)


def split_rows(text: str, dialect: Dialect) -> list[list[str]]:
    """Return the fields of each row after the preamble, without quotes; empty lines are no rows."""
    lines = _lines(text)[dialect.skip_lines :]
    rows = [_split(line, dialect.delimiter) for line in lines]
    return [row for row in rows if row not in ([], [""])]


def find_quoted_breaks(text: str, delimiter: str) -> list[int]:
    """Return the numbers, from 1 on, of the lines that end within a value in quotes."""
    begin = re.compile(rf'(?:^|{re.escape(delimiter)})"(?:[^"]|"")*$')
    numbers, is_open = [], False
    for number, line in enumerate(_lines(text), 1):
        if line.count('"') % 2:
            is_open = not is_open and begin.search(line) is not None
        if is_open:
            numbers.append(number)
    return numbers


def _lines(text: str) -> list[str]:
    return [line.removesuffix("\r") for line in text.split("\n")]


def has_header(rows: list[list[str]]) -> bool:
    """Whether the first row names the columns: its fields are unlike those below them.

    Words above columns of numbers are names, though other names may be numbers, unless more fields
    of the first row are values of their columns.
    """
    first, below = [field.strip() for field in rows[0]], rows[1:]
    columns = ({row[j].strip() for row in below if j < len(row)} for j in range(len(first)))
    pairs = [(name, seen - {"", *NULLS}) for name, seen in zip(first, columns, strict=True) if name]
    named = [name for name, _ in pairs if _NAME.fullmatch(name) and name not in NULLS]
    above = [
        name for name, seen in pairs if seen and name in named and all(map(_VALUE.fullmatch, seen))
    ]
    values = sum(name in seen for name, seen in pairs)
    if above:
        return len(above) > values
    return bool(pairs) and len(named) == len(pairs) and not values


def _split(line: str, delimiter: str) -> list[str]:
    if '"' not in line or len(delimiter) > 1:  # Python's csv module takes one character
        return line.split(delimiter)
    try:
        return next(csv.reader([line], delimiter=delimiter), [""])
    except csv.Error:  # a field longer than the module allows: an open quote, mostly
        return line.split(delimiter)
