"""Split delimited text into fields with ``pyarrow.csv``, strictly: every row has all its fields.

Arrow knows quotes, doubled quotes, line breaks in quotes and delimiters of one character. Before it
reads a text, rows that it would misread are left out of it: those with a quote that is not closed,
or text after one. Delimiters of several characters are replaced by one that the text does not
contain, as is a carriage return within a line, which would end the line.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from nvt_torchrec.base.arrays import mask_to_numpy, to_numpy
from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.formats.spec.columns import InputFormat
from nvt_torchrec.formats.spec.raw_types.base import AFTER_QUOTE, FIELD_COUNT, OPEN_QUOTE

_NEWLINE, _BYTE_ORDER_MARK = 10, b"\xef\xbb\xbf"
_QUOTED = re.compile(rb'"[^"]*(?:""[^"]*)*"(?!")')
#: Characters that hardly any text contains.
_RARE = [bytes([code]) for code in (*range(31, 13, -1), *range(8, 0, -1), 11, 12, 127)]
#: About how much text Arrow parses at once, so that it stays in the processor's cache.
_ARROW_BYTES = 1 << 20
#: Positions within a block are 32-bit integers.
MAX_BLOCK_BYTES = 2**31 - 2


@dataclasses.dataclass(frozen=True)
class DelimitedRows:
    """The fields of some columns of a text of ``n`` rows.

    Attributes:
        columns: binary arrays [well-formed rows].
        line: int64 [well-formed rows], which of the ``n`` rows each is.
        errors: by row, what is wrong with it as a whole: the code, and the place of the field or,
            for FIELD_COUNT, the number of fields.
        begins: int32 [n + 1], where each row begins in ``text``.
        text: the rows, with characters replaced.
        replaced: which character stands for which bytes.
    """

    columns: list[pa.Array]
    line: np.ndarray
    errors: dict[int, tuple[int, int]]
    begins: np.ndarray
    text: bytes
    replaced: dict[bytes, bytes]

    def __len__(self) -> int:
        return len(self.begins) - 1

    def row(self, line: int) -> bytes:
        """Return the text of a row without its end."""
        text = self.text[self.begins[line] : self.begins[line + 1]]
        text = text.removesuffix(b"\n").removesuffix(b"\r")
        for character, original in self.replaced.items():
            text = text.replace(character, original)
        return text


def split_rows(
    text: bytes | memoryview, input_format: InputFormat, fields: int, wanted: Sequence[int]
) -> DelimitedRows:
    """Split whole rows; the last one may lack its newline, and ``\\r\\n`` ends one too.

    Args:
        text: the rows, without a header.
        input_format: how they are written; what it says of the encoding is ignored.
        fields: how many fields a row has.
        wanted: the places of the fields that are returned, in ascending order.

    Raises:
        SettingsError: the text is too large.
    """
    if len(text) > MAX_BLOCK_BYTES:
        raise SettingsError(
            f"a block of {len(text):,} bytes", "use a smaller --block_mb: blocks are below 2 GiB"
        )
    newlines = input_format.quoted_newlines
    whole, delimiter, replaced = _for_arrow(bytes(text), input_format.delimiter.encode())
    quoted = input_format.format == "csv" and b'"' in whole
    begins = _row_begins(whole, delimiter if quoted and newlines else b"")
    errors: dict[int, tuple[int, int]] = {}
    if fields > 1:  # Arrow takes an empty line as a row of empty fields
        empty = np.diff(begins) < 2
        short = np.flatnonzero(np.diff(begins) == 2)
        empty[short] = np.frombuffer(whole, np.uint8)[begins[short]] == 13
        errors |= dict.fromkeys(np.flatnonzero(empty).tolist(), (FIELD_COUNT, 1))
    if quoted:
        for line in np.flatnonzero(~_well_quoted(whole, begins, delimiter)).tolist():
            errors[line] = _quote_error(whole[begins[line] : begins[line + 1]], delimiter)
    names = [str(place) for place in wanted]
    how = delimiter, quoted, newlines, fields, names
    try:
        table, line = _read(whole, begins, errors, *how)
    except pa.ArrowInvalid:  # a row has another number of fields
        counts = _count_fields(whole, begins, delimiter, quoted)
        for row in np.flatnonzero(counts != fields).tolist():
            errors.setdefault(row, (FIELD_COUNT, int(counts[row])))
        table, line = _read(whole, begins, errors, *how)
    if len(table) != len(line):
        raise AssertionError(f"{len(table)} rows were read, and {len(line)} are there")
    columns = [_restored(table.column(name), replaced) for name in names]
    return DelimitedRows(columns, line, errors, begins, whole, replaced)


def _for_arrow(text: bytes, delimiter: bytes) -> tuple[bytes, bytes, dict[bytes, bytes]]:
    """Return text that ends with a newline, its delimiter, and what characters of it stand for."""
    if text and not text.endswith(b"\n"):
        text += b"\n"
    replaced = {}
    if len(delimiter) > 1 or delimiter == b"\0":
        character = _unused(text)
        text, replaced[character] = text.replace(delimiter, character), delimiter
        delimiter = character
    if b"\r" in text and text.count(b"\r") != text.count(b"\r\n"):
        character = _unused(text)
        text, replaced[character] = re.sub(rb"\r(?!\n)", character, text), b"\r"
    return text, delimiter, replaced


def _unused(text: bytes) -> bytes:
    for character in _RARE:
        if character not in text:
            return character
    raise BadInputError("a text with every control character", "check that it is the right file")


def _row_begins(text: bytes, delimiter: bytes) -> np.ndarray:
    """Return int32 [n + 1]; with a delimiter, quoted fields may contain line breaks."""
    buffer = np.frombuffer(text, np.uint8)
    if delimiter:
        from nvt_torchrec.clicklog.text.row_ends import delimiter_bytes, row_ends

        ends = row_ends(buffer, delimiter_bytes(delimiter.decode()))
    else:
        ends = np.flatnonzero(buffer == _NEWLINE).astype(np.int32)
    return np.concatenate([np.zeros(1, np.int32), ends + np.int32(1)])


def _rows_of(text: bytes, begins: np.ndarray) -> pa.Array:
    buffers = [None, pa.py_buffer(begins), pa.py_buffer(text)]
    return pa.Array.from_buffers(pa.binary(), len(begins) - 1, buffers)


def _field(delimiter: bytes) -> str:
    """Return the regular expression of a field, quoted or not."""
    mark = f"\\x{delimiter.hex()}"
    return f'(?:"(?:[^"]|"")*"|[^"{mark}\\n][^{mark}\\n]*|)'


def _well_quoted(text: bytes, begins: np.ndarray, delimiter: bytes) -> np.ndarray:
    """Return which rows consist of fields that are quoted as a whole or not at all, bool [n]."""
    field = _field(delimiter)
    pattern = f"^{field}(?:\\x{delimiter.hex()}{field})*\\r?\\n$"
    return mask_to_numpy(pc.match_substring_regex(_rows_of(text, begins), pattern=pattern))


def _count_fields(text: bytes, begins: np.ndarray, delimiter: bytes, quoted: bool) -> np.ndarray:
    """Return how many fields each row has; rows with an error of a quote do not matter."""
    rows = _rows_of(text, begins)
    if not quoted:
        return to_numpy(pc.count_substring(rows, pattern=delimiter)) + 1
    pattern = f"{_field(delimiter)}\\x{delimiter.hex()}"
    return to_numpy(pc.count_substring_regex(rows, pattern=pattern)) + 1


def _quote_error(row: bytes, delimiter: bytes) -> tuple[int, int]:
    """Return the code of the first quote that is wrong, and the place of its field."""
    row = row.removesuffix(b"\n").removesuffix(b"\r")
    at = field = 0
    while True:
        if row.startswith(b'"', at):
            match = _QUOTED.match(row, at)
            if match is None:
                return OPEN_QUOTE, field
            at = match.end()
            if at < len(row) and not row.startswith(delimiter, at):
                return AFTER_QUOTE, field
        else:
            at = row.index(delimiter, at)
        at, field = at + len(delimiter), field + 1


def _read(
    text: bytes,
    begins: np.ndarray,
    errors: dict[int, tuple[int, int]],
    delimiter: bytes,
    quoted: bool,
    newlines: bool,
    fields: int,
    names: list[str],
) -> tuple[pa.Table, np.ndarray]:
    """Read the rows without errors; return the wanted columns, and which rows they are."""
    good = np.ones(len(begins) - 1, bool)
    good[list(errors)] = False
    line = np.flatnonzero(good)
    if errors:
        kept = np.repeat(good, np.diff(begins))
        text = np.frombuffer(text, np.uint8)[kept].tobytes()
    if not len(line):  # Arrow takes no empty file
        nothing = pa.array([], pa.binary())
        return pa.table([nothing] * len(names), names), line
    if text.startswith(_BYTE_ORDER_MARK):
        text = _BYTE_ORDER_MARK + text  # Arrow skips one
    every = [str(place) for place in range(fields)]
    table = pyarrow.csv.read_csv(
        pa.BufferReader(text),
        read_options=pyarrow.csv.ReadOptions(
            column_names=every,
            use_threads=False,
            block_size=max(_ARROW_BYTES, int(np.diff(begins).max()) + 4),
        ),
        parse_options=pyarrow.csv.ParseOptions(
            delimiter=delimiter.decode(),
            quote_char='"' if quoted else False,
            newlines_in_values=newlines,
            ignore_empty_lines=False,
        ),
        convert_options=pyarrow.csv.ConvertOptions(
            include_columns=names,
            column_types=dict.fromkeys(names, pa.binary()),
            strings_can_be_null=False,
            check_utf8=False,
        ),
    )
    return table, line


def _restored(column: pa.ChunkedArray, replaced: dict[bytes, bytes]) -> pa.Array:
    """Return a column as one array, with the characters that were replaced."""
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    for character, original in replaced.items():
        data = array.buffers()[2]
        if data is not None and character in data.to_pybytes():
            array = pc.replace_substring(array, pattern=character, replacement=original)
    return array
