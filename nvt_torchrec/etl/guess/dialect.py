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
#: Rows by which the delimiter is found.
_NUM_TRIED = 20_000
#: The most lines that a preamble has.
_MAX_PREAMBLE = 50
#: The share of the rows that must have the same number of fields.
_MIN_SHARE = 0.9
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
        delimiter: What is between the fields of a row.
        fields: How many fields most rows have.
        quoted: Whether some fields are quoted.
        skip_lines: The number of lines before the first row.
        share: The share of the rows with as many fields as most.
        rank: What makes one delimiter better than another.
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
    candidates = [delimiter]
    if not delimiter:
        candidates = [candidate for candidate in _DELIMITERS if candidate in text]
    lines = _split_lines(text)
    tried = [_try_delimiter(lines, candidate, candidates) for candidate in candidates]
    good = [dialect for dialect in tried if dialect.fields > 1 and dialect.share >= _MIN_SHARE]
    if good:
        return max(good, key=lambda dialect: dialect.rank)
    best = max(tried, key=lambda dialect: dialect.share, default=None)
    problem = "one column"
    if best and best.fields > 1:
        problem = (
            f"delimiter {best.delimiter!r} gives {best.share:.0%} of the lines {best.fields} "
            "fields, and others different numbers of fields"
        )
    breaks = find_quoted_breaks(text, best.delimiter if best else ",")
    if breaks:
        raise BadInputError(
            f"{path}: line {breaks[0]} ends within quotes, and so do {len(breaks) - 1} others: "
            "line breaks in values, where a line is a row",
            AS_PARQUET,
        )
    first_line = text.lstrip().split("\n", 1)[0]
    raise BadInputError(
        f"{path}: {problem}: {first_line:.60}",
        "a log has a label and at least one more column; give what separates them with "
        "--delimiter, or write the spec by hand",
    )


def _try_delimiter(lines: list[str], delimiter: str, candidates: list[str]) -> Dialect:
    """Return how lines are written if they are divided by one of several delimiters.

    Spaces are within texts and times more often than between fields. The header has as many fields
    as the rows, and the delimiter of a list is in fewer columns than that of the rows.
    """
    rows = [_split_fields(line, delimiter) for line in lines[: _NUM_TRIED + _MAX_PREAMBLE]]
    counts = Counter(len(row) for row in rows if row not in ([], [""]))
    fields = max(counts, key=lambda fields: (counts[fields], fields))
    share = counts[fields] / counts.total()
    even = [row for row in rows if len(row) == fields]
    others = set(candidates) - {delimiter, " "}
    num_mixed = 0  # columns in whose fields there are other delimiters
    for column in zip(*even[:100], strict=True):
        joined = "\0".join(column)
        num_mixed += any(other in joined for other in others)
    skip_lines = 0
    for k, row in enumerate(rows[:_MAX_PREAMBLE]):
        if len(row) == fields:
            skip_lines = k
            break
    rank = (delimiter != " ", skip_lines == 0, -num_mixed, share >= 0.99, fields, share)
    quoted = any(line.startswith('"') or f'{delimiter}"' in line for line in lines[:_NUM_TRIED])
    return Dialect(delimiter, fields, quoted, skip_lines, share, rank)


def split_rows(text: str, dialect: Dialect) -> list[list[str]]:
    """Return the fields of each row after the preamble, without quotes; empty lines are no rows."""
    lines = _split_lines(text)[dialect.skip_lines :]
    rows = [_split_fields(line, dialect.delimiter) for line in lines]
    return [row for row in rows if row not in ([], [""])]


def find_quoted_breaks(text: str, delimiter: str) -> list[int]:
    """Return the numbers, from 1 on, of the lines that end within a value in quotes."""
    begin = re.compile(rf'(?:^|{re.escape(delimiter)})"(?:[^"]|"")*$')
    numbers, is_open = [], False
    for number, line in enumerate(_split_lines(text), 1):
        if line.count('"') % 2:
            is_open = not is_open and begin.search(line) is not None
        if is_open:
            numbers.append(number)
    return numbers


def _split_lines(text: str) -> list[str]:
    return [line.removesuffix("\r") for line in text.split("\n")]


def has_header(rows: list[list[str]]) -> bool:
    """Return whether the first row names the columns: its fields are unlike those below them.

    Words above columns of numbers are names, though other names may be numbers, unless more fields
    of the first row are values of their columns.
    """
    num_fields = num_names = num_above_values = num_values = 0
    for j, field in enumerate(rows[0]):
        name = field.strip()
        if not name:
            continue
        below = {row[j].strip() for row in rows[1:] if j < len(row)} - {"", *NULLS}
        is_name = _NAME.fullmatch(name) is not None and name not in NULLS
        num_fields += 1
        num_names += is_name
        num_values += name in below
        if is_name and below and all(map(_VALUE.fullmatch, below)):
            num_above_values += 1
    if num_above_values:
        return num_above_values > num_values
    return num_fields > 0 and num_names == num_fields and num_values == 0


def _split_fields(line: str, delimiter: str) -> list[str]:
    if '"' not in line or len(delimiter) > 1:  # Python's csv module takes one character
        return line.split(delimiter)
    try:
        return next(csv.reader([line], delimiter=delimiter), [""])
    except csv.Error:  # a field longer than the module allows: an open quote, mostly
        return line.split(delimiter)
