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
#: Lines by which the delimiter is found, and how many lines a preamble may have.
_TRIED, _PREAMBLE = 2000, 50
#: As many where some line has an odd number of quotes, as one in which a quoted field goes on.
_TRIED_QUOTES = 20_000
_ENOUGH = 0.9  # of the lines have the same number of fields
#: Names of columns, but no hashes.
_NAME = re.compile(r"(?![0-9a-f]{8}$)[A-Za-z_#][\w .:/()-]{0,60}")


@dataclasses.dataclass(frozen=True)
class Dialect:
    """How the rows of a text are written.

    Attributes:
        delimiter: between the fields of a row; "" if a row has one field.
        fields: how many fields most rows have.
        quoted: whether some fields are quoted.
        skip_lines: the number of lines before the first row.
        newlines: whether quoted fields contain line breaks.
    """

    delimiter: str
    fields: int
    quoted: bool = False
    skip_lines: int = 0
    newlines: bool = False


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """Lines divided by one delimiter.

    Attributes:
        dialect: What they are then.
        share: The share of the lines with as many fields as most.
        rows: The fields of some of these lines.
        first: Whether the first line, mostly the header, is one of these.
    """

    dialect: Dialect
    share: float
    rows: list[list[str]]
    first: bool

    @property
    def good(self) -> bool:
        """Whether this may be the delimiter."""
        return self.dialect.fields > 1 and self.share >= _ENOUGH

    def rank(self, others: list[_Attempt]) -> tuple:
        """Return what makes one delimiter better than another.

        Spaces are within texts and times more often than between fields. The header has as many
        fields as the rows, and the delimiter of a list is in fewer columns than that of the rows.
        """
        within = {other.dialect.delimiter for other in others} - {self.dialect.delimiter, " "}
        columns = zip(*self.rows, strict=True)
        mixed = sum(any(each in field for each in within for field in c) for c in columns)
        delimiter, fields = self.dialect.delimiter, self.dialect.fields
        return (delimiter != " ", self.first, -mixed, self.share >= 0.99, fields, self.share)


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
        return data.decode("latin-1"), "latin-1"


def find_dialect(text: str, path: str, delimiter: str = "") -> Dialect:
    """Return how a text of whole lines is written; ``delimiter`` is given, or found.

    Raises:
        BadInputError: The rows have one field only, or no common number of fields.
    """
    lines, joined = _lines(text), _lines(text, newlines=True)
    most = _TRIED if len(lines) == len(joined) else _TRIED_QUOTES
    tried_lines = [line for line in lines[: most + _PREAMBLE] if line][:most]
    candidates = [delimiter] if delimiter else [each for each in _DELIMITERS if each in text]
    tried = [_try(tried_lines, each) for each in candidates]
    rows = [line for line in joined[:most] if line and most == _TRIED_QUOTES]
    tried += [_try(rows, each, newlines=True) for each in candidates if rows and len(each) == 1]
    good = [attempt for attempt in tried if attempt.good]
    if good:
        dialect = max(good, key=lambda attempt: attempt.rank(good)).dialect
        start = joined if dialect.newlines else lines
        fields = [len(_split(line, dialect.delimiter)) for line in start[:_PREAMBLE]]
        skip_lines = fields.index(dialect.fields) if dialect.fields in fields else 0
        return dataclasses.replace(dialect, skip_lines=skip_lines)
    what, best = "one column", max(tried, key=lambda attempt: attempt.share, default=None)
    if best and best.dialect.fields > 1:
        what = f"delimiter {best.dialect.delimiter!r} gives {best.share:.0%} of the lines "
        what += f"{best.dialect.fields} fields, and others different numbers of fields"
    raise BadInputError(
        f"{path}: {what}: {tried_lines[0]:.60}",
        "a log has a label and at least one more column; give what separates them with "
        "--delimiter, or write the spec by hand",
    )


def split_rows(text: str, dialect: Dialect) -> list[list[str]]:
    """Return the fields of each row after the preamble, without quotes; empty lines are no rows."""
    lines = _lines(text, newlines=dialect.newlines)[dialect.skip_lines :]
    rows = [_split(line, dialect.delimiter) for line in lines]
    return [row for row in rows if row not in ([], [""])]


def _lines(text: str, *, newlines: bool = False) -> list[str]:
    """Return the lines of a text; with ``newlines``, those in which quoted fields go on as one."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if not newlines or '"' not in text:
        return lines
    joined, start, quotes = [], 0, 0
    for end, line in enumerate(lines, 1):
        quotes += line.count('"')
        if quotes % 2 == 0:
            joined.append("\n".join(lines[start:end]))
            start = end
    return joined  # without a last row whose end was not read


def has_header(rows: list[list[str]]) -> bool:
    """Whether the first row names the columns: its fields are unlike those below them.

    Words above columns of numbers are names, though other names may be numbers, unless more fields
    of the first row are values of their columns.
    """
    first, below = [field.strip() for field in rows[0]], rows[1:]
    columns = ({row[j].strip() for row in below if j < len(row)} for j in range(len(first)))
    pairs = [(name, seen - {"", *NULLS}) for name, seen in zip(first, columns, strict=True) if name]
    named = [name for name, _ in pairs if _NAME.fullmatch(name) and name not in NULLS]
    above = [name for name, seen in pairs if seen and name in named and all(map(_is_value, seen))]
    values = sum(name in seen for name, seen in pairs)
    if above:
        return len(above) > values
    return bool(pairs) and len(named) == len(pairs) and not values


def _is_value(text: str) -> bool:
    """Whether a text is a number, a time or a sign, but no name of a column."""
    return bool(re.fullmatch(r"[-+]?[\d.,:/ TZ-]*\d[\d.,:/ TZ-]*([eE][-+]?\d+)?", text)) or (
        text != "" and not any(character.isalnum() for character in text)
    )


def _try(lines: list[str], delimiter: str, *, newlines: bool = False) -> _Attempt:
    rows = [_split(line, delimiter) for line in lines]
    fields, often = max(Counter(map(len, rows)).items(), key=lambda item: (item[1], item[0]))
    quoted = any(line.startswith('"') or f'{delimiter}"' in line for line in lines)
    even = [row for row in rows if len(row) == fields]
    dialect = Dialect(delimiter, fields, quoted, newlines=newlines)
    return _Attempt(dialect, often / len(lines), even[:100], len(rows[0]) == fields)


def _split(line: str, delimiter: str) -> list[str]:
    if '"' not in line or len(delimiter) > 1:  # Python's csv module takes one character
        return line.split(delimiter)
    try:
        return next(csv.reader([line], delimiter=delimiter), [""])
    except csv.Error:  # a field longer than the module allows: an open quote, mostly
        return line.split(delimiter)
