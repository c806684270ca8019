"""Lines of text → rows, by the parser that suits the spec."""

from __future__ import annotations

import dataclasses

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.clicklog.text.assemble import assemble
from nvt_torchrec.clicklog.text.convert import convert, convert_lists, describe_count
from nvt_torchrec.clicklog.text.delimited import split_rows
from nvt_torchrec.clicklog.text.line_layout import LineLayout
from nvt_torchrec.clicklog.text.remedies import line_remedy
from nvt_torchrec.formats.rows import DESCRIBED_BAD_ROWS, BadRow, RawRows, describes, with_bad_rows
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.spec.raw_types.base import FIELD_COUNT, MESSAGES


def parse_rows(
    data: bytes | memoryview, spec: FeatureSpec, layout: LineLayout, *, reject: bool | int = False
) -> RawRows:
    """Parse whole lines of text, without a header line.

    Args:
        data: lines, in the spec's encoding; the last one with or without its newline; ``\\r\\n``
            ends a line too. What bad rows quote is UTF-8.
        spec: the columns; their raw types say what a field may hold.
        layout: which columns the fields of a line are.
        reject: describe every bad row in ``RawRows.bad``, not only the first ones.

    Raises:
        SettingsError: the spec is one of parquet, or there are 2 GiB of text or more.
    """
    data = as_utf8(data, spec.input.encoding)
    if spec.is_criteo_format:
        from nvt_torchrec.clicklog.text.tokenizer import parse_criteo  # imports Numba

        return parse_criteo(data, spec, label=layout.label, reject=reject)
    return parse_delimited(data, spec, layout, reject=reject)


def as_utf8(text: bytes | memoryview, encoding: str) -> bytes | memoryview:
    """Return text in one of the encodings of a spec as UTF-8, which is not checked."""
    return text if encoding == "utf-8" else bytes(text).decode(encoding).encode()


def parse_delimited(
    data: bytes | memoryview, spec: FeatureSpec, layout: LineLayout, *, reject: bool | int = False
) -> RawRows:
    """Parse delimited text of any spec, as :func:`parse_rows` does; it is UTF-8."""
    if spec.input.format == "parquet":
        raise SettingsError("the spec describes parquet, not text", "set format in its [input]")
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
    bad = []
    count = len(split.errors)
    described = count if describes(reject, count) else DESCRIBED_BAD_ROWS
    for line, (code, where) in sorted(split.errors.items()):
        if len(bad) >= described:
            bad.append(BadRow(line, "", "", b"", ""))
            continue
        what = describe_count(where, len(layout.fields))
        if code != FIELD_COUNT:
            what = f"field {where + 1}: {MESSAGES[code]}"
        text = split.row(line)
        bad.append(BadRow(line, what, "", text, line_remedy(text, spec, code)))
    rows = with_bad_rows(rows, bad) if bad else rows
    return rows if reject else dataclasses.replace(rows, bad=rows.bad[:DESCRIBED_BAD_ROWS])
