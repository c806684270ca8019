"""Text is read in chunks of whole lines; a line that is longer than it may be is an error."""

from __future__ import annotations

import dataclasses
import gzip
import io
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvt_torchrec.base.errors import BadRowError
from nvt_torchrec.clicklog.readers.lines import split_chunks
from nvt_torchrec.clicklog.readers.log_format import get_format, read_block_chunks
from nvt_torchrec.formats.feature_spec import CategoricalColumn, FeatureSpec, InputFormat
from nvt_torchrec.formats.rows import UNLIMITED
from tests.logs import CRITEO, random_rows, write_day
from tests.spec_logs import open_file, stream_rows

MIB = 1 << 20


@given(
    sizes=st.lists(st.integers(0, 30), max_size=30),
    chunk=st.integers(1, 70),
    limit=st.integers(1, 35),
    begin=st.integers(0, 9),
    last_newline=st.booleans(),
    sized=st.booleans(),
)
def test_chunks_are_the_lines(sizes, chunk, limit, begin, last_newline, sized) -> None:
    text = b"\n".join(b"x" * n for n in sizes) + b"\n" * last_newline
    file = io.BytesIO(text + b"more" * sized)
    chunks = split_chunks(file, chunk, limit, begin=begin, size=len(text) if sized else None)
    long = next((i for i, size in enumerate(sizes) if size > limit), None)
    if long is not None:
        at = begin + sum(sizes[:long]) + long
        with pytest.raises(BadRowError, match=rf"at byte {at} does not end within {limit} bytes"):
            list(chunks)
        return
    actual = [bytes(chunk) for chunk in chunks]
    assert all(0 < len(each) <= chunk + 2 * limit + 2 for each in actual)
    assert b"".join(actual) == text
    assert all(each.endswith(b"\n") for each in actual[:-1])


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_zeros_at_the_end_are_an_error_that_needs_no_memory(tmp_path: Path, ending: str) -> None:
    """What a crash leaves, of a day and of a stream, which are read in chunks."""
    path = tmp_path / "day_0"
    write_day(path, random_rows(10, 0))
    size = path.stat().st_size
    with open(path, "ab") as file:
        file.truncate(size + 32 * MIB)
    if ending:
        path = tmp_path / f"day_0{ending}"
        path.write_bytes(gzip.compress((tmp_path / "day_0").read_bytes()))
    place = f"at byte {size:,} does not end within 1,048,576 bytes"
    tracemalloc.start()
    with pytest.raises(BadRowError, match=rf"day_0.*{place}\n.*max_line_kb"):
        list(stream_rows(str(path), CRITEO, block_bytes=MIB, reject=True))
    if not ending:
        day = open_file(tmp_path, CRITEO)
        blocks = day.cut(day.begin, day.end, 4 * MIB)
        with pytest.raises(BadRowError, match=place):
            [list(read_block_chunks(each, CRITEO, max_bad_rows=UNLIMITED)) for each in blocks]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 24 * MIB


TEXTS = FeatureSpec(
    "y", (), (CategoricalColumn("c", raw="string"), CategoricalColumn("d", raw="string"))
)


@pytest.mark.parametrize("size", [100, 100_000, MIB - 4])
def test_the_label_is_told_by_a_whole_first_line(tmp_path: Path, size: int) -> None:
    """Of its first 64 KiB alone, a longer line seemed to have one field less: no label."""
    path = tmp_path / "day_0"
    path.write_bytes(b"1\t" + b"x" * size + b"\tz\n0\ta\tb\n")
    assert open_file(tmp_path, TEXTS).label
    (unparsed,) = get_format(TEXTS).stream(str(path), 8 * MIB)
    assert unparsed.label
    assert unparsed.parse().labels.tolist() == [[1, 0]]


def test_a_header_has_the_limit_of_lines(tmp_path: Path) -> None:
    spec = dataclasses.replace(TEXTS, input=InputFormat("csv", max_line_kb=1))
    path = tmp_path / "day_0.csv"
    path.write_bytes(b"y,c,d,".ljust(1024, b"x") + b"\n1,a,b,\n")
    assert open_file(path, spec).begin == 1025
    path.write_bytes(b"y,c,d,".ljust(1025, b"x") + b"\n1,a,b,\n")
    with pytest.raises(BadRowError, match=r"day_0\.csv: the line at byte 0 does .*\n.*max_line_kb"):
        open_file(path, spec)
