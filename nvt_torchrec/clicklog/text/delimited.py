"""Parse delimited text of any spec, strictly: every row has all its fields.

A field may be quoted as a whole, and a quote within is doubled. Delimiters of several characters
are replaced by a character that the text does not contain.
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
    missing_column,
)
from nvt_torchrec.clicklog.text.fast_rows import count_newlines
from nvt_torchrec.clicklog.text.line_layout import LineLayout
from nvt_torchrec.clicklog.text.remedies import line_remedy
from nvt_torchrec.formats.feature_spec import FeatureSpec, InputFormat
from nvt_torchrec.formats.feature_spec.raw_types import base as codes
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.formats.rows import DESCRIBED_BAD_ROWS, BadRow, RawRows

_NEWLINE, _RETURN, _QUOTE = 10, 13, 34
_OPEN_QUOTE, _AFTER_QUOTE = codes.OPEN_QUOTE, codes.AFTER_QUOTE
#: Characters that hardly any text contains.
_RARE = [bytes([code]) for code in (*range(31, 13, -1), *range(8, 0, -1), 11, 12, 127)]


def parse_delimited(
    data: bytes | memoryview, spec: FeatureSpec, layout: LineLayout, *, max_bad_rows: int = 0
) -> RawRows:
    """Parse delimited text of any spec, as :func:`parse_rows` does; it is UTF-8."""
    plan = spec.read_plan(label=layout.label)
    names = {read.source for read in plan.reads} - ({spec.optional_time} - {*layout.fields})
    places = {name: layout.fields.index(name) for name in names}
    wanted = sorted(places.values())
    split = split_rows(data, spec.input, len(layout.fields), wanted)
    columns = dict(zip(wanted, split.columns, strict=True))

    def convert_read(read: Read) -> Converted:
        if read.source not in places:
            return missing_column(read, len(split.line))
        fields = columns[places[read.source]]
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
    wrong = np.flatnonzero(split.code)
    bad = [row.move_to(int(split.line[row.line])) for row in rows.bad]
    all_described = rows.bad_count + len(wrong) <= max_bad_rows
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
        text: The rows.
        delimiter: What separates their fields, the bytes that it stands for.
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
        """Return the text of a row without its end."""
        text = self.text[self.begins[line] : self.begins[line + 1]]
        return text.removesuffix(b"\n").removesuffix(b"\r").replace(*self.delimiter)


def split_rows(
    text: bytes | memoryview, input_format: InputFormat, fields: int, wanted: Sequence[int]
) -> DelimitedRows:
    """Split whole rows; the last one may lack its newline, and ``\\r\\n`` ends one too.

    Args:
        text: The rows, without a header.
        input_format: How they are written; what it says of the encoding is ignored.
        fields: How many fields a row has.
        wanted: The places of the fields that are returned, in ascending order.
    """
    whole = bytes(text)
    delimiter = original = input_format.delimiter.encode()
    if whole and not whole.endswith(b"\n"):
        whole += b"\n"
    if len(original) > 1:
        delimiter = _unused(whole)
        whole = whole.replace(original, delimiter)
    buffer, quoted = np.frombuffer(whole, np.uint8), input_format.quoted and b'"' in whole
    rows = count_newlines(buffer)
    slots = np.full(fields, -1)
    slots[list(wanted)] = range(len(wanted))
    starts, counts = np.zeros(rows + 1, np.int32), np.empty(rows, np.int32)
    code = np.zeros(rows, np.uint8)
    begins, ends = np.zeros((2, len(wanted), rows), np.int32)
    doubled = np.zeros((len(wanted), rows), np.int32) if quoted else None
    _find_fields(buffer, delimiter[0], slots, starts, counts, code, begins, ends, doubled)
    code[(code == 0) & (counts != fields)] = codes.FIELD_COUNT
    line = np.flatnonzero(code == 0)
    if len(line) < rows:
        begins, ends = begins[:, line], ends[:, line]
        doubled = doubled[:, line] if doubled is not None else None
    columns = [
        string_array(*_gather(buffer, begins[i], ends[i], None if doubled is None else doubled[i]))
        for i in range(len(wanted))
    ]
    columns = [column.view(pa.binary()) for column in columns]
    if quoted and len(original) > 1:  # a quoted field may contain the delimiter
        columns = [pc.replace_substring(column, delimiter, original) for column in columns]
    return DelimitedRows(columns, line, code, counts, starts, whole, (delimiter, original))


@compiled()
def _find_fields(text, delimiter, slots, starts, counts, code, begins, ends, doubled):
    """Find the fields of rows.

    Args:
        text: uint8, whole rows.
        delimiter: The byte between fields.
        slots: [fields], the index in ``begins`` and ``ends`` of each field of a row, or -1.
        starts: [n + 1], filled with where each row begins.
        counts: [n], filled with the number of its fields, or of its first that is quoted wrongly.
        code: [n], 0, filled with OPEN_QUOTE or AFTER_QUOTE for such a row.
        begins: [slots, n], filled with where the fields begin in the text, behind the quote.
        ends: Likewise where they end; ``\\r\\n`` ends a row too.
        doubled: [slots, n], filled with the number of doubled quotes in them; None if no field is
            quoted.
    """
    at = 0
    for row in range(len(counts)):
        field = 0
        byte = delimiter
        while byte != _NEWLINE:
            first, last, pairs = at, -1, 0
            byte = text[at]
            if doubled is not None and byte == _QUOTE:
                at += 1
                first = at
                byte = text[at]
                while byte != _NEWLINE and (byte != _QUOTE or text[at + 1] == _QUOTE):
                    if byte == _QUOTE:
                        pairs += 1
                        at += 1
                    at += 1
                    byte = text[at]
                last = at
                wrong = _OPEN_QUOTE
                if byte == _QUOTE:
                    at += 1
                    byte = text[at]
                    at_end = byte == _NEWLINE or (byte == _RETURN and text[at + 1] == _NEWLINE)
                    wrong = 0 if at_end or byte == delimiter else _AFTER_QUOTE
                if wrong and not code[row]:
                    code[row] = wrong
                    counts[row] = field
            while byte != delimiter and byte != _NEWLINE:
                at += 1
                byte = text[at]
            if field < len(slots) and slots[field] >= 0:
                if last < 0:
                    last = at
                    if byte == _NEWLINE and last > first and text[last - 1] == _RETURN:
                        last -= 1
                begins[slots[field], row] = first
                ends[slots[field], row] = last
                if doubled is not None:
                    doubled[slots[field], row] = pairs
            field += 1
            at += 1
        if not code[row]:
            counts[row] = field
        starts[row + 1] = at


@compiled()
def _gather(text, begins, ends, doubled):
    """Copy fields one after the other, of doubled quotes one: their offsets [n + 1] and bytes."""
    offsets = np.zeros(len(begins) + 1, np.int32)
    for i in range(len(begins)):
        offsets[i + 1] = offsets[i] + ends[i] - begins[i]
        if doubled is not None:
            offsets[i + 1] -= doubled[i]
    data = np.empty(offsets[-1], np.uint8)
    to = np.uint64(0)  # an index without a sign need not be compared with 0
    for i in range(len(begins)):
        at, end = np.uint64(begins[i]), np.uint64(ends[i])
        if doubled is not None and doubled[i]:
            while at < end:
                data[to] = text[at]
                at += np.uint64(2 if text[at] == _QUOTE else 1)
                to += np.uint64(1)
        while at < end:
            data[to] = text[at]
            at += np.uint64(1)
            to += np.uint64(1)
    return offsets, data


def _unused(text: bytes) -> bytes:
    for character in _RARE:
        if character not in text:
            return character
    raise BadInputError("a text with every control character", "check that it is the right file")
