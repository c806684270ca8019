"""How a file of text is written: encoding, preamble, delimiter, quotes, header."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import re
from collections import Counter

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.guess.values import NULLS

#: Delimiters, the more special first: of two that divide the lines equally well, the first is it.
_DELIMITERS = ("\t", "::", "||", "\x01", ";", ",", "|", "^", "~", " ")
_COMMENTS = "#|%!*"
#: Lines by which the delimiter is found, and how many lines a preamble may have.
_TRIED, _PREAMBLE = 2000, 50
#: Stands for a delimiter of several characters: Python's csv module takes one.
_STAND_IN = "\x1e"
_ENOUGH = 0.9  # of the lines have the same number of fields
#: Names of columns, but no hashes.
_NAME = re.compile(r"(?![0-9a-f]{8}$)[A-Za-z_#][\w .:/()-]{0,60}")
#: Formats whose fields say themselves which they are, by their lines.
_OTHER_FORMATS = {
    "libsvm": re.compile(r"[-+]?\d+(\.\d+)?( (qid:)?\d+:[-+\d.eE]+)+\s*"),
    "libffm": re.compile(r"[-+]?\d+(\.\d+)?([ \t]\d+:\d+:[-+\d.eE]+)+\s*"),
    "Vowpal Wabbit": re.compile(r"([-+\d.]+ [-+\d. ]*)?('\S+ ?)?(\|\w+ [^|]*)+"),
}


@dataclasses.dataclass(frozen=True)
class Dialect:
    """How the rows of a text are written.

    Attributes:
        delimiter: between the fields of a row; "" if a row has one field.
        fields: how many fields most rows have.
        quoted: whether some fields are quoted.
        quoted_newlines: whether quoted fields contain line breaks.
        comment: the character that the lines before the first row begin with; "" for none.
        skip_lines: the number of lines before the first row that begin otherwise.
    """

    delimiter: str
    fields: int
    quoted: bool = False
    quoted_newlines: bool = False
    comment: str = ""
    skip_lines: int = 0


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
        return (delimiter != " ", self.first, -mixed, self.share >= 0.99, fields)


def decode(data: bytes, path: str) -> tuple[str, str, tuple[str, ...]]:
    """Return a text, its encoding, and what to say of it; a byte order mark is removed.

    Raises:
        BadInputError: It is not a text.
    """
    if b"\0" in data:
        raise BadInputError(
            f"{path}: not text: it contains NUL bytes",
            "pass text, compressed text (.gz, .bz2, .xz, .zst) or parquet",
        )
    data = data.removeprefix(b"\xef\xbb\xbf")
    with contextlib.suppress(UnicodeDecodeError):
        return data.decode("utf-8"), "utf-8", ()
    lines = [line for line in data.split(b"\n") if not line.isascii()]
    mixed = sum(line.decode("utf-8", "ignore").encode() == line for line in lines)
    notes = [f"{len(lines) - mixed} lines are not UTF-8, so the file is read as latin-1."]
    if mixed:
        notes.append(
            f"Mixed encodings: {mixed} lines are UTF-8, and their letters beyond ASCII become "
            'two. Convert the file, or set encoding = "utf-8" and reject the others.'
        )
    return data.decode("latin-1"), "latin-1", tuple(notes)


def find_dialect(text: str, path: str, delimiter: str = "") -> Dialect:
    """Return how a text of whole lines is written; ``delimiter`` is given, or found.

    Raises:
        BadInputError: The rows have one field only, or no common number of fields, or are of
            another format.
    """
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    lines = [line for line in lines[: _TRIED + _PREAMBLE] if line][:_TRIED]
    for name, pattern in _OTHER_FORMATS.items():
        if all(map(pattern.fullmatch, lines[:20])):
            raise BadInputError(
                f"{path}: {name}: {lines[0]:.60}",
                "convert it to CSV or parquet, with a column for each field",
            )
    candidates = _candidates(text, delimiter)
    tried = [_try_lines(lines, each) for each in candidates]
    if '"' in text and not any(attempt.good for attempt in tried):  # lines amid a field
        tried = [_try_whole(text, each) for each in candidates if len(each) == 1]
    good = [attempt for attempt in tried if attempt.good]
    if good:
        return _with_preamble(max(good, key=lambda attempt: attempt.rank(good)).dialect, text)
    what, best = "one column", max(tried, key=lambda attempt: attempt.share, default=None)
    if best and best.dialect.fields > 1:
        what = f"delimiter {best.dialect.delimiter!r} gives {best.share:.0%} of the lines "
        what += f"{best.dialect.fields} fields, and others different numbers of fields"
    raise BadInputError(
        f"{path}: {what}: {lines[0]:.60}",
        "a log has a label and at least one more column; give what separates them with --delimiter",
    )


def split_rows(text: str, dialect: Dialect) -> list[list[str]]:
    """Return the fields of each row after the preamble, without quotes; empty lines are no rows."""
    if dialect.skip_lines:
        text = text.split("\n", dialect.skip_lines)[-1]
    while dialect.comment and text.startswith(dialect.comment):
        text = text.partition("\n")[2]
    if dialect.quoted_newlines:
        rows = _read(text, dialect.delimiter)
    else:
        rows = [_split(line.removesuffix("\r"), dialect.delimiter) for line in text.split("\n")]
    return [row for row in rows if row not in ([], [""])]


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


def _candidates(text: str, delimiter: str) -> list[str]:
    if delimiter:
        return [delimiter]
    runs = {len(run) for run in re.findall(r"\|+", text)}
    without = {"|"} if runs == {2} else {"||"}
    return [each for each in _DELIMITERS if each in text and each not in without]


def _try_lines(lines: list[str], delimiter: str) -> _Attempt:
    begins = [line.startswith('"') or f'{delimiter}"' in line for line in lines]
    rows = [
        _split(line, delimiter)
        for line, quoted in zip(lines, begins, strict=True)
        if not quoted or line.count('"') % 2 == 0  # otherwise a field goes on in the next line
    ]
    return _attempt(rows, len(lines), Dialect(delimiter, 0, any(begins)))


def _try_whole(text: str, delimiter: str) -> _Attempt:
    rows = [row for row in _read(text, delimiter)[:_TRIED] if row not in ([], [""])]
    broken = any("\n" in field for row in rows for field in row)
    return _attempt(rows, len(rows), Dialect(delimiter, 0, True, broken))


def _attempt(rows: list[list[str]], lines: int, dialect: Dialect) -> _Attempt:
    counts = Counter(map(len, rows)) or Counter({1: 0})
    fields, often = max(counts.items(), key=lambda item: (item[1], item[0]))
    even = [row for row in rows if len(row) == fields]
    first = bool(rows) and len(rows[0]) == fields
    return _Attempt(dataclasses.replace(dialect, fields=fields), often / lines, even[:100], first)


def _with_preamble(dialect: Dialect, text: str) -> Dialect:
    lines = [line.removesuffix("\r") for line in text.split("\n", _PREAMBLE + 1)]
    fields = [len(_split(line, dialect.delimiter)) for line in lines[:_PREAMBLE]]
    before = fields.index(dialect.fields) if dialect.fields in fields else 0
    if not before or dialect.quoted_newlines:
        return dialect
    begin = lines[0][:1]
    same = begin and begin in _COMMENTS and all(line.startswith(begin) for line in lines[:before])
    if same and not lines[before].startswith(begin):
        return dataclasses.replace(dialect, comment=begin)
    return dataclasses.replace(dialect, skip_lines=before)


def _split(line: str, delimiter: str) -> list[str]:
    if '"' not in line:
        return line.split(delimiter)
    return next(iter(_read(line, delimiter)), [""])


def _read(text: str, delimiter: str) -> list[list[str]]:
    single = delimiter if len(delimiter) == 1 else _STAND_IN
    text = text.replace(delimiter, single)
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=single))
    except csv.Error:  # a field longer than the module allows: an open quote, mostly
        return [line.split(single) for line in text.split("\n")]
    if single != delimiter:
        rows = [[field.replace(single, delimiter) for field in row] for row in rows]
    return rows
