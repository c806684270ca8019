"""The tokenizer of the card accepts the texts that the CPU's accepts, with the same columns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvt_torchrec.clicklog.text.device import pad_text, parse_on_device
from nvt_torchrec.clicklog.text.tokenizer import parse_criteo
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from tests.logs import CRITEO
from tests.simulator.device import SimulatedDevice

LIMIT = 60
SPEC = FeatureSpec(
    "label",
    (DenseColumn("d0"), DenseColumn("d1", fill=-3)),
    tuple(CategoricalColumn(f"c{j}") for j in range(3)),
    "log_normalize",
)
NO_DENSE = FeatureSpec("label", (), (CategoricalColumn("c0"),), "log_normalize")


def on_device(text: bytes, spec: FeatureSpec = SPEC, limit: int = LIMIT):
    """Parse as the ETL does, beside what happens to lie in the buffer behind the text."""
    device = SimulatedDevice()
    buffer = device.allocate_pinned(len(text) + 1)
    buffer[: len(text)] = np.frombuffer(text, np.uint8)
    rows = parse_on_device(device, device.upload(pad_text(buffer, len(text))), spec, limit)
    return None if rows.malformed[0] else rows


def check(text: bytes, spec: FeatureSpec = SPEC) -> None:
    """The device takes a text if the CPU finds nothing wrong with it, and makes the same of it."""
    expected = parse_criteo(text, spec, label=True)
    lines = text.removesuffix(b"\n").split(b"\n")
    rows = on_device(text, spec)
    if expected.bad_count or max(map(len, lines)) > LIMIT:
        assert rows is None
        return
    assert rows is not None
    assert len(rows) == len(expected)
    np.testing.assert_array_equal(rows.label, expected.labels[0])
    np.testing.assert_array_equal(rows.dense, expected.dense)
    np.testing.assert_array_equal(rows.categorical, expected.categorical)
    np.testing.assert_array_equal(rows.missing[0], expected.dense_missing[0])
    np.testing.assert_array_equal(rows.missing[1], expected.categorical_missing[0])
    found = np.flatnonzero(np.frombuffer(text, np.uint8) == 10)
    np.testing.assert_array_equal(rows.ends[: len(found)], found)


integers = st.one_of(
    st.integers(-(2**31), 2**31 - 1).map(str),
    st.sampled_from(["", "0", "-0", "007", "-00012", "2147483647", "-2147483648", "0" * 20 + "5"]),
)
categories = st.one_of(
    st.integers(0, 2**32 - 1).map("{:08x}".format),
    st.sampled_from(["", "0", "aBcDeF09", "FFFFFFFF", "1f", "00000000"]),
)
fields = st.tuples(st.sampled_from("01"), integers, integers, *[categories] * 3)
#: What a line may have in it that no rule allows, or that the other kind of column allows.
odd = st.sampled_from(
    ["2", "-", "--1", "+1", "1-", "2147483648", "-2147483649", "9" * 30, "1 ", " 1", "1.0",
     "g", "0x1", "123456789", "abcdefghi", "\0", "1\0", "é", "\r", "a\r", "@", "`", "G", "/", ":",
     "12345678\r", "1\t", "", "1" * LIMIT]
)  # fmt: skip
ends = st.sampled_from(["\n", "\n", "\n", "\r\n", "\r\r\n"])


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """A line, mostly well-formed."""
    row = list(draw(fields))
    kind = draw(st.integers(0, 7))
    if kind == 0:
        row[draw(st.integers(0, len(row) - 1))] = draw(odd)
    elif kind == 1:
        row = row[: draw(st.integers(0, len(row)))]
    elif kind == 2:
        row.append(draw(categories))
    tabs = ["\t"] * len(row)
    if kind == 3:
        tabs[draw(st.integers(0, len(row) - 1))] = draw(st.sampled_from(" ,\0\x0b|"))
    together = "".join(field + tab for field, tab in zip(row, tabs, strict=True))
    return (together.removesuffix("\t") + draw(ends)).encode()


@settings(max_examples=80, deadline=None)
@given(st.lists(lines(), min_size=1, max_size=3), st.booleans())
def test_as_the_cpu(several: list[bytes], last_newline: bool) -> None:
    text = b"".join(several)
    check(text if last_newline else text.removesuffix(b"\n") or b"x")


GOOD = "1\t5\t\t0000000a\tb\t"


@pytest.mark.parametrize(
    "text",
    [
        "",
        GOOD,
        GOOD + "\n",
        GOOD + "\r\n",
        GOOD + "\r",
        GOOD + "\n\n",
        GOOD + "\n\r\n",
        "\n" + GOOD,
        "\n",
        GOOD + "\t\n",
        GOOD + "c\0\n",
        "3" + GOOD[1:] + "\n",
        "/" + GOOD[1:] + "\n",
        GOOD[1:] + "\n",
        *(GOOD.replace("\t", " ", i) + "\n" for i in range(1, 6)),
        *(" ".join(GOOD.rsplit("\t", i)) + "\n" for i in range(1, 6)),
        "10" + GOOD[1:] + "\n",
        GOOD.replace("5", "-") + "\n",
        GOOD.replace("5", "2147483648") + "\n",
        GOOD.replace("5", "-2147483648") + "\n",
        GOOD.replace("5", "-2147483649") + "\n",
        GOOD.replace("5", "18446744073709551617") + "\n",
        GOOD.replace("0000000a", "00000000a") + "\n",
        GOOD.replace("\tb", "\r\n\tb") + "\n",
        GOOD + "x" * 5,
        GOOD + "0" * (LIMIT - len(GOOD)) + "\n",
        GOOD + "0" * (LIMIT - len(GOOD) + 1) + "\n",
        GOOD.replace("5", "0" * (LIMIT - len(GOOD)) + "5") + "\n",
        GOOD.replace("5", "0" * (LIMIT - len(GOOD)) + "55") + "\n",
        GOOD.replace("5", "0" * (LIMIT - len(GOOD) - 1) + "5") + "\r\n",
        GOOD.replace("5", "0" * (LIMIT - len(GOOD)) + "5") + "\r\n",
    ],
)
def test_ends_of_lines_and_of_ranges(text: str) -> None:
    check(text.encode() * 3 if text.endswith("\n") else text.encode())


def test_fields_of_a_long_number_of_columns() -> None:
    row = "\t".join(["1", *map(str, range(-6, 7)), *(f"{j:08x}" for j in range(26))])
    text = (row + "\n").encode() * 2
    rows = on_device(text, CRITEO, 1 << 20)
    expected = parse_criteo(text, CRITEO, label=True)
    np.testing.assert_array_equal(rows.dense, expected.dense)
    np.testing.assert_array_equal(rows.categorical, expected.categorical)
    assert on_device(text.replace(b"\t00000003", b"", 1), CRITEO, 1 << 20) is None


@pytest.mark.parametrize("line", ["1\t7", "0\t", "1", "1\t7\t", "1\t7\r", "1\tg"])
def test_a_spec_without_dense_columns(line: str) -> None:
    check((line + "\n").encode(), NO_DENSE)
