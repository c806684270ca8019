"""Criteo's format: the fast way to parse common rows gives what the general parser gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nvt_torchrec.clicklog.text.delimited import parse_delimited
from nvt_torchrec.clicklog.text.line_layout import make_plain_layout
from nvt_torchrec.clicklog.text.tokenizer import parse_criteo
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.rows import UNLIMITED, RawRows

_FIELDS = {
    "label": st.sampled_from(["0", "1"] * 9 + ["", "2", "01", "/"]),
    "dense": st.one_of(
        st.integers(-99, 999).map(str),
        st.just(""),
        st.integers(-(10**8), 10**9).map(str),
        st.sampled_from(["-", "00000012", "2147483647", "2147483648", "+1", "1-", "1 ", "1.5"]),
    ),
    "categorical": st.one_of(
        st.integers(0, 2**32 - 1).map("{:08x}".format),
        st.just(""),
        st.integers(0, 2**32 - 1).map("{:08X}".format),
        st.integers(0, 2**36).map("{:x}".format),
        st.sampled_from(["0123456g", "-0000001", "G1234567", "12345 78", "é123456", ":1234567"]),
    ),
}


def _spec(dense: int, categorical: int) -> FeatureSpec:
    return FeatureSpec(
        "label",
        tuple(DenseColumn(f"d{j}") for j in range(dense)),
        tuple(CategoricalColumn(f"c{j}") for j in range(categorical)),
    )


def _assert_same(text: bytes, spec: FeatureSpec, *, label: bool = True) -> RawRows:
    fast = parse_criteo(text, spec, label=label, max_bad_rows=UNLIMITED)
    slow = parse_delimited(text, spec, make_plain_layout(spec, label=label), max_bad_rows=UNLIMITED)
    for field in ("labels", "dense", "dense_missing", "categorical", "categorical_missing", "line"):
        np.testing.assert_array_equal(
            getattr(fast, field), getattr(slow, field), field, strict=True
        )
    assert (fast.bad, fast.bad_count, fast.lines) == (slow.bad, slow.bad_count, slow.lines)
    return fast


@settings(max_examples=150, deadline=None)
@given(data=st.data(), dense=st.integers(0, 3), categorical=st.integers(1, 3), label=st.booleans())
def test_rows_of_any_kind(data: st.DataObject, dense: int, categorical: int, label: bool) -> None:
    spec = _spec(dense, categorical)
    kinds = ["label"] * label + ["dense"] * dense + ["categorical"] * categorical
    lines = []
    for _ in range(data.draw(st.integers(1, 12))):
        fields = [data.draw(_FIELDS[kind]) for kind in kinds]
        if data.draw(st.integers(0, 9)) == 0:  # another number of fields
            fields = fields[:-1] if data.draw(st.booleans()) else [*fields, "0"]
        lines.append("\t".join(fields) + data.draw(st.sampled_from(["\n"] * 4 + ["\r\n", "\r"])))
    _assert_same("".join(lines).encode(), spec, label=label)


def test_every_byte_at_every_place() -> None:
    """A field of eight bytes of which one may be anything; and each length of a number."""
    spec = _spec(1, 1)
    rows = []
    for place in range(8):
        for byte in set(range(256)) - {10}:
            for text in (b"01234567", b"aBcDeF90"):
                field = bytearray(text)
                field[place] = byte
                rows.append(b"1\t5\t" + bytes(field))
                rows.append(b"0\t" + bytes(field) + b"\tabcdef09")
    for digits in range(12):
        for sign in (b"", b"-"):
            rows.append(b"0\t" + sign + b"9876543210123"[:digits] + b"\t00000000")
    fast = _assert_same(b"\n".join(rows) + b"\n" + b"1\t\t\n" * 20, spec)
    assert len(fast) > 400
    assert fast.bad_count > 7000
