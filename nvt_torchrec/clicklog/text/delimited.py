"""Parse delimited text of any spec, strictly: every row has all its fields.

A loop splits text without quotes. Other text is split by ``pyarrow.csv``, which knows quotes,
doubled quotes and line breaks in quotes. Before Arrow reads a text, rows that it would misread are
left out of it: those with a quote that is not closed, or text after one. A carriage return within a
line, which would end the line for Arrow, is replaced by a character that the text does not contain,
and so are delimiters of several characters.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from nvt_torchrec.base.arrays import mask_to_numpy, string_array
from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.clicklog.text.assemble import assemble
from nvt_torchrec.clicklog.text.convert import convert, convert_lists, describe_count
from nvt_torchrec.clicklog.text.fast_rows import count_newlines, row_begins
from nvt_torchrec.clicklog.text.line_layout import LineLayout
from nvt_torchrec.clicklog.text.remedies import line_remedy
from nvt_torchrec.formats.feature_spec import FeatureSpec, InputFormat
from nvt_torchrec.formats.feature_spec.raw_types import base as codes
from nvt_torchrec.formats.rows import DESCRIBED_BAD_ROWS, BadRow, RawRows, describes

_NEWLINE, _RETURN, _BYTE_ORDER_MARK = 10, 13, b"\xef\xbb\xbf"
_QUOTED = re.compile(rb'"[^"]*(?:""[^"]*)*"(?!")')
#: Characters that hardly any text contains.
_RARE = [bytes([code]) for code in (*range(31, 13, -1), *range(8, 0, -1), 11, 12, 127)]
#: About how much text Arrow parses at once, so that it stays in the processor's cache.
_ARROW_BYTES = 1 << 20
#: Positions within a block are 32-bit integers.
MAX_BLOCK_BYTES = 2**31 - 2


def parse_delimited(
    data: bytes | memoryview, spec: FeatureSpec, layout: LineLayout, *, reject: bool | int = False
) -> RawRows:
    """Parse delimited text of any spec, as :func:`parse_rows` does; it is UTF-8."""
    plan, names = spec.read_plan(label=layout.label), spec.sources(label=layout.label)
    places = {name: layout.fields.index(name) for name in names}
    wanted = sorted(places.values())
    split = split_rows(data, spec.input, len(layout.fields), wanted)
    columns = dict(zip(wanted, split.columns, strict=True))
    rows = assemble(
        spec,
        (
            convert_lists(columns[places[read.source]], read, spec.input.list_separator)
            if read.multi_hot
            else convert(columns[places[read.source]], read)
            for read in plan.reads
        ),
        lambda row: split.row(split.line[row]),
        rows=len(split.line),
        label=layout.label,
        reject=reject,
    )
    wrong = np.flatnonzero(split.code)
    bad = [row.move_to(int(split.line[row.line])) for row in rows.bad]
    all_described = describes(reject, rows.bad_count + len(wrong))
    for line in (wrong if all_described else wrong[:DESCRIBED_BAD_ROWS]).tolist():
        code, where, text = int(split.code[line]), int(split.where[line]), split.row(line)
        what = describe_count(where, len(layout.fields))
        if code != codes.FIELD_COUNT:
            what = f"field {where + 1}: {codes.MESSAGES[code]}"
        bad.append(BadRow(line, what, "", text, line_remedy(text, spec, code)))
    bad.sort(key=lambda row: row.line)
    return dataclasses.replace(
        rows,
        line=split.line[rows.line],
        bad=bad if all_described else bad[:DESCRIBED_BAD_ROWS],
        bad_count=rows.bad_count + len(wrong),
        lines=len(split),
    )


@dataclasses.dataclass(frozen=True)
class DelimitedRows:
    """The fields of some columns of a text of ``n`` rows.

    Attributes:
        columns: Binary arrays [well-formed rows].
        line: int64 [well-formed rows], which of the ``n`` rows each is.
        code: uint8 [n], 0 or what is wrong with a row as a whole.
        where: int32 [n], of these the place of the field or, for FIELD_COUNT, the number of fields.
        begins: int32 [n + 1], where each row begins in ``text``.
        text: The rows, with characters replaced.
        replaced: Which character stands for which bytes.
    """

    columns: list[pa.Array]
    line: np.ndarray
    code: np.ndarray
    where: np.ndarray
    begins: np.ndarray
    text: bytes
    replaced: dict[bytes, bytes]

    def __len__(self) -> int:
        return len(self.code)

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
        text: The rows, without a header.
        input_format: How they are written; what it says of the encoding is ignored.
        fields: How many fields a row has.
        wanted: The places of the fields that are returned, in ascending order.

    Raises:
        SettingsError: The text is too large.
    """
    if len(text) > MAX_BLOCK_BYTES:
        raise SettingsError(
            f"a block of {len(text):,} bytes", "use a smaller --block_mb: blocks are below 2 GiB"
        )
    whole, delimiter = bytes(text), input_format.delimiter.encode()
    if whole and not whole.endswith(b"\n"):
        whole += b"\n"
    replaced = {}
    if len(delimiter) > 1:
        character = _unused(whole)
        whole, replaced[character] = whole.replace(delimiter, character), delimiter
        delimiter = character
    if input_format.quoted and b'"' in whole:
        return _split_quoted(whole, delimiter, replaced, fields, wanted)
    buffer = np.frombuffer(whole, np.uint8)
    rows = count_newlines(buffer)
    slots = np.full(fields, -1)
    slots[list(wanted)] = range(len(wanted))
    starts, counts = np.zeros(rows + 1, np.int32), np.empty(rows, np.int32)
    begins, ends = np.zeros((2, len(wanted), rows), np.int32)
    _find_fields(buffer, delimiter[0], slots, starts, counts, begins, ends)
    code = np.where(counts == fields, 0, codes.FIELD_COUNT).astype(np.uint8)
    line = np.flatnonzero(code == 0)
    if len(line) < rows:
        begins, ends = begins[:, line], ends[:, line]
    columns = [
        string_array(*_gather(buffer, *place)).view(pa.binary())
        for place in zip(begins, ends, strict=True)
    ]
    return DelimitedRows(columns, line, code, counts, starts, whole, replaced)


@compiled()
def _find_fields(text, delimiter, slots, starts, counts, begins, ends):
    """Find the fields of rows without quotes.

    Args:
        text: uint8, whole rows.
        delimiter: The byte between fields.
        slots: [fields], the index in ``begins`` and ``ends`` of each field of a row, or -1.
        starts: [n + 1], filled with where each row begins.
        counts: [n], filled with the number of its fields.
        begins: [slots, n], filled with where the fields begin in the text.
        ends: Likewise where they end; ``\\r\\n`` ends a row too.
    """
    at = 0
    for row in range(len(counts)):
        field = 0
        byte = delimiter
        while byte != _NEWLINE:
            first = at
            byte = text[at]
            while byte != delimiter and byte != _NEWLINE:
                at += 1
                byte = text[at]
            if field < len(slots) and slots[field] >= 0:
                last = at
                if byte == _NEWLINE and last > first and text[last - 1] == _RETURN:
                    last -= 1
                begins[slots[field], row] = first
                ends[slots[field], row] = last
            field += 1
            at += 1
        counts[row] = field
        starts[row + 1] = at


@compiled()
def _gather(text, begins, ends):
    """Copy fields one after the other: their offsets [n + 1] and bytes."""
    offsets = np.zeros(len(begins) + 1, np.int32)
    for i in range(len(begins)):
        offsets[i + 1] = offsets[i] + ends[i] - begins[i]
    data = np.empty(offsets[-1], np.uint8)
    to = np.uint64(0)  # an index without a sign need not be compared with 0
    for i in range(len(begins)):
        at, end = np.uint64(begins[i]), np.uint64(ends[i])
        while at < end:
            data[to] = text[at]
            at += np.uint64(1)
            to += np.uint64(1)
    return offsets, data


def _split_quoted(
    text: bytes,
    delimiter: bytes,
    replaced: dict[bytes, bytes],
    fields: int,
    wanted: Sequence[int],
) -> DelimitedRows:
    """Split text with quotes."""
    if b"\r" in text and text.count(b"\r") != text.count(b"\r\n"):
        character = _unused(text)
        text, replaced[character] = re.sub(rb"\r(?!\n)", character, text), b"\r"
    begins = row_begins(text)
    code, where = np.zeros(len(begins) - 1, np.uint8), np.ones(len(begins) - 1, np.int32)
    if fields > 1:  # Arrow takes an empty line as a row of empty fields
        size = np.diff(begins)
        returns = (size == 2) & (np.frombuffer(text, np.uint8)[begins[:-1]] == _RETURN)
        code[(size < 2) | returns] = codes.FIELD_COUNT
    for row in np.flatnonzero(~_well_quoted(text, begins, delimiter)).tolist():
        code[row], where[row] = _quote_error(text[begins[row] : begins[row + 1]], delimiter)
    names = [str(place) for place in wanted]
    table = _read(text, begins, code, where, delimiter, fields, names)
    line = np.flatnonzero(code == 0)
    if len(table) != len(line):
        raise AssertionError(f"{len(table)} rows were read, and {len(line)} are there")
    columns = [_restored(table.column(name), replaced) for name in names]
    return DelimitedRows(columns, line, code, where, begins, text, replaced)


def _unused(text: bytes) -> bytes:
    for character in _RARE:
        if character not in text:
            return character
    raise BadInputError("a text with every control character", "check that it is the right file")


def _well_quoted(text: bytes, begins: np.ndarray, delimiter: bytes) -> np.ndarray:
    """Return which rows consist of fields that are quoted as a whole or not at all, bool [n]."""
    mark = f"\\x{delimiter.hex()}"
    field = f'(?:"(?:[^"\\n]|"")*"|[^"{mark}\\n][^{mark}\\n]*|)'
    buffers = [None, pa.py_buffer(begins), pa.py_buffer(text)]
    rows = pa.Array.from_buffers(pa.binary(), len(begins) - 1, buffers)
    pattern = f"^{field}(?:{mark}{field})*\\r?\\n$"
    return mask_to_numpy(pc.match_substring_regex(rows, pattern=pattern))


def _quote_error(row: bytes, delimiter: bytes) -> tuple[int, int]:
    """Return the code of the first quote that is wrong, and the place of its field."""
    row = row.removesuffix(b"\n").removesuffix(b"\r")
    at = field = 0
    while True:
        if row.startswith(b'"', at):
            match = _QUOTED.match(row, at)
            if match is None:
                return codes.OPEN_QUOTE, field
            at = match.end()
            if at < len(row) and not row.startswith(delimiter, at):
                return codes.AFTER_QUOTE, field
        else:
            at = row.index(delimiter, at)
        at, field = at + len(delimiter), field + 1


def _read(
    text: bytes,
    begins: np.ndarray,
    code: np.ndarray,
    where: np.ndarray,
    delimiter: bytes,
    fields: int,
    names: list[str],
) -> pa.Table:
    """Return the wanted columns of the rows without a code; note other numbers of fields."""
    lines = np.flatnonzero(code == 0)
    if len(lines) < len(code):
        kept = np.repeat(code == 0, np.diff(begins))
        text = np.frombuffer(text, np.uint8)[kept].tobytes()

    def skip(row: pyarrow.csv.InvalidRow) -> str:
        line = lines[row.number - 1]
        code[line], where[line] = codes.FIELD_COUNT, row.actual_columns
        return "skip"

    if not text:  # Arrow takes no empty file
        nothing = pa.array([], pa.binary())
        return pa.table([nothing] * len(names), names)
    if text.startswith(_BYTE_ORDER_MARK):
        text = _BYTE_ORDER_MARK + text  # Arrow skips one
    every = [str(place) for place in range(fields)]
    return pyarrow.csv.read_csv(
        pa.BufferReader(text),
        read_options=pyarrow.csv.ReadOptions(
            column_names=every,
            use_threads=False,
            block_size=max(_ARROW_BYTES, int(np.diff(begins).max()) + 4),
        ),
        parse_options=pyarrow.csv.ParseOptions(
            delimiter=delimiter.decode(),
            ignore_empty_lines=False,
            invalid_row_handler=skip,
        ),
        convert_options=pyarrow.csv.ConvertOptions(
            include_columns=names,
            column_types=dict.fromkeys(names, pa.binary()),
            strings_can_be_null=False,
            check_utf8=False,
        ),
    )


def _restored(column: pa.ChunkedArray, replaced: dict[bytes, bytes]) -> pa.Array:
    """Return a column as one array, with the characters that were replaced."""
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    for character, original in replaced.items():
        data = array.buffers()[2]
        if data is not None and character in data.to_pybytes():
            array = pc.replace_substring(array, pattern=character, replacement=original)
    return array
