"""Parse delimited text of any spec, strictly: every row must have all its fields.

A field may be quoted as a whole, and quotes within it are doubled. Delimiters of several characters
are replaced by a single character that the text does not contain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import string_array
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.clicklog.text.assemble import assemble
from nvt_torchrec.clicklog.text.convert import (
    Converted,
    convert,
    convert_lists,
    describe_count,
    make_missing_column,
)
from nvt_torchrec.clicklog.text.fast_rows import count_newlines
from nvt_torchrec.clicklog.text.line_layout import LineLayout
from nvt_torchrec.clicklog.text.remedies import suggest_line_remedy
from nvt_torchrec.formats.feature_spec import FeatureSpec, InputFormat
from nvt_torchrec.formats.feature_spec.raw_types import base as codes
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.formats.rows import DESCRIBED_BAD_ROWS, BadRow, RawRows

_NEWLINE = 10
_RETURN = 13
_QUOTE = 34
# Numba treats globals of this module as constants, but not attributes of another module.
_OPEN_QUOTE = codes.OPEN_QUOTE
_AFTER_QUOTE = codes.AFTER_QUOTE
_ONE = np.uint64(1)
#: Control characters that hardly any text contains, without NUL, tab and line ends; the separators
#: among them come first.
_RARE = [bytes([code]) for code in (*range(31, 13, -1), *range(8, 0, -1), 11, 12, 127)]


def parse_delimited(
    data: bytes | memoryview, spec: FeatureSpec, layout: LineLayout, *, max_bad_rows: int = 0
) -> RawRows:
    """Parse delimited text of any spec in UTF-8; see :func:`.tokenizer.parse_rows`."""
    plan = spec.read_plan(label=layout.label)
    names = {read.source for read in plan.reads}
    if spec.optional_time not in layout.fields:
        names.discard(spec.optional_time)
    indices = {name: layout.fields.index(name) for name in names}
    wanted = sorted(indices.values())
    split = split_rows(data, spec.input, len(layout.fields), wanted)
    columns = dict(zip(wanted, split.columns, strict=True))

    def convert_read(read: Read) -> Converted:
        if read.source not in indices:
            return make_missing_column(read, len(split.line))
        fields = columns[indices[read.source]]
        if read.multi_hot:
            return convert_lists(fields, read, spec.input.list_separator)
        return convert(fields, read)

    rows = assemble(
        spec,
        map(convert_read, plan.reads),
        lambda row: split.row(split.line[row]),
        rows=len(split.line),
        label=layout.label,
        max_bad_rows=max_bad_rows,
    )
    malformed = np.flatnonzero(split.code)
    bad_count = rows.bad_count + len(malformed)
    if bad_count > max_bad_rows:
        malformed = malformed[:DESCRIBED_BAD_ROWS]
    # assembled rows are numbered by the lines that could be split, so renumber them
    bad = [row.move_to(int(split.line[row.line])) for row in rows.bad]
    for line in malformed.tolist():
        bad.append(_describe_malformed(split, line, spec, len(layout.fields)))
    bad.sort(key=lambda row: row.line)
    if bad_count > max_bad_rows:
        bad = bad[:DESCRIBED_BAD_ROWS]
    return dataclasses.replace(
        rows,
        line=split.line[rows.line],
        bad=bad,
        bad_count=bad_count,
        lines=len(split),
    )


def _describe_malformed(split: DelimitedRows, line: int, spec: FeatureSpec, fields: int) -> BadRow:
    """Describe a line with another number of fields than ``fields``, or a misplaced quote."""
    code = int(split.code[line])
    where = int(split.where[line])
    text = split.row(line)
    if code == codes.FIELD_COUNT:
        what = describe_count(where, fields)
    else:
        what = f"field {where + 1}: {codes.MESSAGES[code]}"
    return BadRow(line, what, "", text, suggest_line_remedy(text, spec, code))


@dataclasses.dataclass(frozen=True)
class DelimitedRows:
    """The fields of the wanted columns of a text of ``n`` rows.

    Attributes:
        columns: A binary array [well-formed rows] for each wanted column.
        line: int64 [well-formed rows], the index of each well-formed row among the ``n`` rows.
        code: uint8 [n], 0, or the code of an error of a row as a whole.
        where: int32 [n], for rows with a code: the number of fields if the code is FIELD_COUNT,
            else the index of the wrong field.
        begins: int32 [n + 1], the offset of each row in ``text``, and the end of the last one.
        text: The rows.
        delimiter: The delimiter in ``text``, and the original delimiter that it replaces.
    """

    columns: list[pa.Array]
    line: np.ndarray
    code: np.ndarray
    where: np.ndarray
    begins: np.ndarray
    text: bytes
    delimiter: tuple[bytes, bytes]

    def __len__(self) -> int:
        return len(self.code)

    def row(self, line: int) -> bytes:
        """Return the text of a row without its line break."""
        text = self.text[self.begins[line] : self.begins[line + 1]]
        return text.removesuffix(b"\n").removesuffix(b"\r").replace(*self.delimiter)


def split_rows(
    text: bytes | memoryview, input_format: InputFormat, fields: int, wanted: Sequence[int]
) -> DelimitedRows:
    """Split whole rows; the last one may lack its newline, and ``\\r\\n`` ends a row, too.

    Args:
        text: The rows in UTF-8, without a header.
        input_format: The delimiter and whether fields may be quoted.
        fields: The number of fields of a row.
        wanted: The indices of the fields to return, in ascending order.
    """
    whole = bytes(text)
    delimiter = original = input_format.delimiter.encode()
    if whole and not whole.endswith(b"\n"):
        whole += b"\n"
    if len(original) > 1:
        delimiter = _find_unused_character(whole)
        whole = whole.replace(original, delimiter)
    buffer = np.frombuffer(whole, np.uint8)
    quoted = input_format.quoted and b'"' in whole
    rows = count_newlines(buffer)
    slots = np.full(fields, -1)
    slots[list(wanted)] = range(len(wanted))
    starts = np.zeros(rows + 1, np.int32)
    counts = np.empty(rows, np.int32)
    code = np.zeros(rows, np.uint8)
    begins = np.zeros((len(wanted), rows), np.int32)
    ends = np.zeros((len(wanted), rows), np.int32)
    doubled = np.zeros((len(wanted), rows), np.int32) if quoted else None
    _find_fields(buffer, delimiter[0], slots, starts, counts, code, begins, ends, doubled)
    code[(code == 0) & (counts != fields)] = codes.FIELD_COUNT
    line = np.flatnonzero(code == 0)
    if len(line) < rows:
        begins = begins[:, line]
        ends = ends[:, line]
        doubled = doubled[:, line] if doubled is not None else None
    columns = []
    for i in range(len(wanted)):
        doubled_in_column = None if doubled is None else doubled[i]
        offsets, gathered = _gather(buffer, begins[i], ends[i], doubled_in_column)
        column = string_array(offsets, gathered).view(pa.binary())
        if quoted and len(original) > 1:  # a quoted field may contain the delimiter
            column = pc.replace_substring(column, delimiter, original)
        columns.append(column)
    return DelimitedRows(columns, line, code, counts, starts, whole, (delimiter, original))


@compiled()
def _find_fields(text, delimiter, slots, starts, counts, code, begins, ends, doubled):
    """Find the fields of rows, in one pass over the bytes.

    Quotes within a quoted field are doubled. So the first quote that is not doubled ends the field,
    and must be followed by a delimiter or the end of the row.

    Args:
        text: uint8, whole rows.
        delimiter: The byte between fields.
        slots: [fields], the index in ``begins`` and ``ends`` of each field of a row, or -1.
        starts: The result, [n + 1], the offset of each row.
        counts: The result, [n], the number of fields, or the index of the first wrongly quoted
            field.
        code: The result, [n], OPEN_QUOTE or AFTER_QUOTE for a row with a wrongly quoted field;
            initially 0.
        begins: The result, [slots, n], the offset of each field in the text, after a quote.
        ends: The result, [slots, n], the end of each field.
        doubled: The result, [slots, n], the number of doubled quotes in each field; None if no
            field is quoted.
    """
    at = np.uint64(0)  # unsigned, see _gather
    for row in range(len(counts)):
        field = 0
        byte = delimiter
        while byte != _NEWLINE:
            first = at
            last = at
            is_quoted = False
            pairs = 0
            byte = text[at]
            if doubled is not None and byte == _QUOTE:
                is_quoted = True
                at += _ONE
                first = at
                byte = text[at]
                while byte != _NEWLINE and (byte != _QUOTE or text[at + _ONE] == _QUOTE):
                    if byte == _QUOTE:
                        pairs += 1
                        at += _ONE
                    at += _ONE
                    byte = text[at]
                last = at
                wrong = _OPEN_QUOTE
                if byte == _QUOTE:
                    at += _ONE
                    byte = text[at]
                    at_end = byte == _NEWLINE or (byte == _RETURN and text[at + _ONE] == _NEWLINE)
                    wrong = 0 if at_end or byte == delimiter else _AFTER_QUOTE
                if wrong and not code[row]:
                    code[row] = wrong
                    counts[row] = field
            # an unquoted field, or the rest of a wrongly quoted field
            while byte != delimiter and byte != _NEWLINE:
                at += _ONE
                byte = text[at]
            if field < len(slots) and slots[field] >= 0:
                if not is_quoted:
                    last = at
                    if byte == _NEWLINE and last > first and text[last - _ONE] == _RETURN:
                        last -= _ONE
                begins[slots[field], row] = first
                ends[slots[field], row] = last
                if doubled is not None:
                    doubled[slots[field], row] = pairs
            field += 1
            at += _ONE
        if not code[row]:
            counts[row] = field
        starts[row + 1] = at


@compiled()
def _gather(text, begins, ends, doubled):
    """Copy fields one after the other, replacing doubled quotes by single ones.

    Returns:
        The offsets of the fields, int32 [n + 1], and their bytes, uint8.
    """
    offsets = np.zeros(len(begins) + 1, np.int32)
    for i in range(len(begins)):
        offsets[i + 1] = offsets[i] + ends[i] - begins[i]
        if doubled is not None:
            offsets[i + 1] -= doubled[i]
    data = np.empty(offsets[-1], np.uint8)
    # Unsigned indices: Numba compares signed ones with 0, because negative ones count from the end.
    to = np.uint64(0)
    for i in range(len(begins)):
        at = np.uint64(begins[i])
        end = np.uint64(ends[i])
        if doubled is not None and doubled[i]:
            while at < end:
                data[to] = text[at]
                at += np.uint64(2 if text[at] == _QUOTE else 1)
                to += _ONE
        while at < end:
            data[to] = text[at]
            at += _ONE
            to += _ONE
    return offsets, data


def _find_unused_character(text: bytes) -> bytes:
    """Return a character that a text does not contain. Raises BadInputError if it has all."""
    for character in _RARE:
        if character not in text:
            return character
    raise BadInputError("a text with every control character", "check that it is the right file")
