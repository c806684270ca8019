"""Detect how a text file is written: encoding, preamble, delimiter, quotes, header."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections import Counter

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.guess.values import NULLS

#: Delimiters, the rarest in ordinary text first: of two equally good ones, the first is chosen.
_DELIMITERS = ("\t", "::", "\x01", ";", ",", "|", "^", "~", " ")
#: The number of lines from which the delimiter is detected.
_NUM_TRIED = 20_000
#: Maximum number of lines of a preamble.
_MAX_PREAMBLE = 50
#: Minimum share of the rows with the same number of fields.
_MIN_SHARE = 0.9
#: A name of a column, but not a hash.
_NAME = re.compile(r"(?![0-9a-f]{8}$)[A-Za-z_#][\w .:/()-]{0,60}")
#: A number, a time or punctuation, but not a name of a column.
_VALUE = re.compile(r"[-+]?[\d.,:/ TZ-]*\d[\d.,:/ TZ-]*([eE][-+]?\d+)?|[\W_]+")
#: Bytes that are printable in Windows-1252, such as € and “, and control characters in Latin-1.
_WINDOWS = re.compile(rb"[\x80-\x9f]")
#: The remedy for line breaks in values.
AS_PARQUET = (
    "convert the log to parquet, in DuckDB COPY (FROM read_csv('LOG.csv')) TO 'LOG.parquet', or "
    "remove these line breaks"
)


@dataclasses.dataclass(frozen=True)
class Dialect:
    """The way in which the rows of a text are written.

    Attributes:
        delimiter: The delimiter between the fields of a row.
        fields: The most common number of fields in a row.
        quoted: Whether some fields are quoted.
        skip_lines: The number of lines before the first row.
        share: The share of the rows that have this number of fields.
        rank: A sort key: the best of several delimiters has the largest.
    """

    delimiter: str
    fields: int
    quoted: bool = False
    skip_lines: int = 0
    share: float = 1.0
    rank: tuple = ()


def decode(data: bytes, path: str) -> tuple[str, str]:
    """Decode text, without its byte order mark; return it and its encoding.

    Raises:
        BadInputError: The data are not text.
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
    """Detect how a text of whole lines is written.

    Args:
        text: The text.
        path: Names the file in errors.
        delimiter: The delimiter; "" to detect it.

    Raises:
        BadInputError: The rows have only one field, or no common number of fields.
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
            f"with delimiter {best.delimiter!r}, {best.share:.0%} of the lines have {best.fields} "
            "fields, and the others have different numbers of fields"
        )
    breaks = find_quoted_breaks(text, best.delimiter if best else ",")
    if breaks:
        raise BadInputError(
            f"{path}: line {breaks[0]} ends within quotes, and so do {len(breaks) - 1} others: "
            "values contain line breaks, but each line is read as a row",
            AS_PARQUET,
        )
    first_line = text.lstrip().split("\n", 1)[0]
    raise BadInputError(
        f"{path}: {problem}: {first_line:.60}",
        "a log has a label and at least one more column; set the delimiter with --delimiter, or "
        "write the spec by hand",
    )


def _try_delimiter(lines: list[str], delimiter: str, candidates: list[str]) -> Dialect:
    """Return the dialect of lines under one of several candidate delimiters, with its rank.

    The rank prefers, in this order: delimiters other than spaces, which occur in texts and times;
    no preamble; few columns that contain other candidates, which separate the items of lists; rows
    with a constant number of fields, and many fields.
    """
    rows = [_split_fields(line, delimiter) for line in lines[: _NUM_TRIED + _MAX_PREAMBLE]]
    counts = Counter(len(row) for row in rows if row not in ([], [""]))
    fields = max(counts, key=lambda fields: (counts[fields], fields))
    share = counts[fields] / counts.total()
    well_formed = [row for row in rows if len(row) == fields]
    others = set(candidates) - {delimiter, " "}
    num_mixed = 0  # columns whose fields contain other delimiters
    for column in zip(*well_formed[:100], strict=True):
        joined = "\0".join(column)
        num_mixed += any(other in joined for other in others)
    skip_lines = 0
    for i, row in enumerate(rows[:_MAX_PREAMBLE]):
        if len(row) == fields:
            skip_lines = i
            break
    rank = (delimiter != " ", skip_lines == 0, -num_mixed, share >= 0.99, fields, share)
    quoted = any(line.startswith('"') or f'{delimiter}"' in line for line in lines[:_NUM_TRIED])
    return Dialect(delimiter, fields, quoted, skip_lines, share, rank)


def split_rows(text: str, dialect: Dialect) -> list[list[str]]:
    """Return the unquoted fields of each row after the preamble, without empty lines."""
    lines = _split_lines(text)[dialect.skip_lines :]
    rows = [_split_fields(line, dialect.delimiter) for line in lines]
    return [row for row in rows if row not in ([], [""])]


def find_quoted_breaks(text: str, delimiter: str) -> list[int]:
    """Return the numbers, from 1, of the lines that end within a quoted value."""
    begin = re.compile(rf'(?:^|{re.escape(delimiter)})"(?:[^"]|"")*$')
    numbers = []
    is_open = False
    for number, line in enumerate(_split_lines(text), 1):
        if line.count('"') % 2:
            is_open = not is_open and begin.search(line) is not None
        if is_open:
            numbers.append(number)
    return numbers


def _split_lines(text: str) -> list[str]:
    return [line.removesuffix("\r") for line in text.split("\n")]


def has_header(rows: list[list[str]]) -> bool:
    """Return True if the first row names the columns.

    A word above a column of numbers is a name. If there are such words, the first row is a header
    unless more of its fields occur as values in the rows below. Otherwise all of its fields must be
    possible names, and none may occur below.
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
    """Split a line into its unquoted fields."""
    if '"' not in line or len(delimiter) > 1:  # csv.reader only takes a single character
        return line.split(delimiter)
    try:
        return next(csv.reader([line], delimiter=delimiter), [""])
    except csv.Error:  # a field is too long, mostly because of an unclosed quote
        return line.split(delimiter)
