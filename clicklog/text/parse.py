"""Lines of text → rows, by the parser that suits the spec."""

from __future__ import annotations

from nvt_torchrec.clicklog.text.delimited import parse_delimited
from nvt_torchrec.clicklog.text.line_layout import LineLayout
from nvt_torchrec.clicklog.text.tokenizer import parse_criteo
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec


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
        return parse_criteo(data, spec, label=layout.label, reject=reject)
    return parse_delimited(data, spec, layout, reject=reject)


def as_utf8(text: bytes | memoryview, encoding: str) -> bytes | memoryview:
    """Return text in one of the encodings of a spec as UTF-8, which is not checked."""
    return text if encoding == "utf-8" else bytes(text).decode(encoding).encode()
