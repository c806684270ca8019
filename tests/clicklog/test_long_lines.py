"""Lines that are longer than they may be: read over in one go, and bad rows with their place."""

from __future__ import annotations

import dataclasses
import gzip
import io
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvt_torchrec.base.errors import BadInputError, BadRowError
from nvt_torchrec.clicklog.readers import lines
from nvt_torchrec.clicklog.readers.line_chunks import LongLine, split_chunks
from nvt_torchrec.clicklog.readers.log_format import format_of, read_block, read_block_chunks
from nvt_torchrec.formats.feature_spec import CategoricalColumn, FeatureSpec, InputFormat
from tests.logs import CRITEO, random_rows, write_day
from tests.spec_logs import open_file, stream_rows

SHORT = dataclasses.replace(CRITEO, input=InputFormat(max_line_kb=1))
MIB = 1 << 20


def _naive(text: bytes, limit: int, begin: int) -> list[bytes | LongLine]:
    actual: list[bytes | LongLine] = []
    for line in text.splitlines(keepends=True):
        whole = line.removesuffix(b"\n")
        long = LongLine(begin, len(whole), whole[:limit], limit)
        actual.append(long if len(whole) > limit else line)
        begin += len(line)
    return actual


@given(
    sizes=st.lists(st.integers(0, 30), max_size=30),
    chunk=st.integers(1, 70),
    limit=st.integers(1, 25),
    begin=st.integers(0, 9),
    last_newline=st.booleans(),
    sized=st.booleans(),
)
def test_chunks_are_the_lines(sizes, chunk, limit, begin, last_newline, sized) -> None:
    text = b"\n".join(b"x" * n for n in sizes) + b"\n" * last_newline
    file = io.BytesIO(text + b"more" * sized)
    chunks = split_chunks(file, chunk, limit, begin=begin, size=len(text) if sized else None)
    actual: list[bytes | LongLine] = []
    for item in chunks:
        if isinstance(item, LongLine):
            actual.append(dataclasses.replace(item, head=item.head[:limit]))
        else:
            assert 0 < len(item) <= chunk + 2 * limit + 2
            actual += bytes(item).splitlines(keepends=True)
    assert actual == _naive(text, limit, begin)


class _Counted(io.FileIO):
    """A file whose reads are counted."""

    opened = bytes = 0

    def __init__(self, path: str, mode: str) -> None:
        super().__init__(path, mode)
        _Counted.opened += 1

    def read(self, size: int) -> bytes:
        data = super().read(size)
        _Counted.bytes += len(data)
        return data

    def readinto(self, view: memoryview) -> int:
        got = super().readinto(view)
        _Counted.bytes += got
        return got


def _rows_and_zeros(path: Path, zeros: int, after: int = 0) -> bytes:
    """Ten rows, zeros without a line break (a hole, so no disk is used), and rows behind them."""
    write_day(path, random_rows(10, 0))
    head = path.read_bytes()
    with open(path, "ab") as file:
        file.truncate(len(head) + zeros)
        if after:
            file.write(b"\n" + head)
    return head


@pytest.mark.parametrize("after", [0, 1])
def test_zeros_at_the_end_are_read_a_few_times_not_hundreds(
    tmp_path: Path, monkeypatch, after: int
) -> None:
    """1 GiB took 512 GiB of reading and a file opened 16,384 times for every 2 MiB of it."""
    head = _rows_and_zeros(tmp_path / "day_0", 64 * MIB, after)
    day = open_file(tmp_path, CRITEO)
    counted, _Counted.opened, _Counted.bytes = _Counted, 0, 0
    monkeypatch.setattr(lines, "open_input", lambda path: counted(path, "rb"))
    blocks = day.cut(day.begin, day.end, 4 * MIB)
    assert counted.bytes < 66 * MIB
    tracemalloc.start()
    read = [
        rows
        for block in blocks
        for rows in read_block_chunks(block, CRITEO, reject=True, chunk_bytes=2 * MIB)
    ]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert counted.bytes < 2.1 * day.file.size
    assert counted.opened <= 1 + len(blocks) <= 4
    assert peak < 16 * MIB
    assert sum(map(len, read)) == 10 * (1 + after)
    (bad,) = [bad for rows in read for bad in rows.bad]
    assert f"a line of 67,108,864 bytes from byte {len(head):,} on" in bad.what
    assert bad.text == bytes(1024)
    with pytest.raises(BadRowError, match=r"day_0, line 11: a line of 67,.*\n.*--max_line_kb"):
        [list(read_block_chunks(block, CRITEO)) for block in blocks]


def test_a_block_in_one_chunk_counts_its_long_lines(tmp_path: Path) -> None:
    """Line numbers, with malformed and too long rows between good ones, as chunks have them."""
    rows = random_rows(12, 1)
    rows[3] = ["x"]
    for i in (0, 4, 5, 11):
        rows[i] = [*rows[i], "y" * 1024]
    write_day(tmp_path / "day_0", rows)
    day = open_file(tmp_path, SHORT)
    (block,) = day.cut(day.begin, day.end, MIB)
    whole = read_block(block, SHORT, reject=True)
    assert whole.line.tolist() == [1, 2, 6, 7, 8, 9, 10]
    assert whole.labels[0].tolist() == [int(rows[i][0]) for i in whole.line]
    assert [bad.line for bad in whole.bad] == [0, 3, 4, 5, 11]
    assert (whole.bad_count, whole.lines) == (5, 12)
    before, actual = 0, []
    for chunk in read_block_chunks(block, SHORT, reject=True, chunk_bytes=300):
        actual += [(before + bad.line, bad.what, bad.text) for bad in chunk.bad]
        before += chunk.lines
    assert actual == [(bad.line, bad.what, bad.text) for bad in whole.bad]
    with pytest.raises(BadRowError, match="line 1: a line of 1,"):
        read_block(block, SHORT)
    assert read_block(block, CRITEO, reject=True).bad_count == 5  # of too many fields, then


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_stream_with_zeros_needs_no_memory_for_them(tmp_path: Path, ending: str) -> None:
    head = _rows_and_zeros(tmp_path / "log", 32 * MIB, after=1)
    path = tmp_path / f"log{ending}"
    if ending:
        path.write_bytes(gzip.compress((tmp_path / "log").read_bytes()))
    tracemalloc.start()
    streamed = list(stream_rows(str(path), CRITEO, block_bytes=MIB, reject=True))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 * MIB
    assert [int(n) for numbers, _ in streamed for n in numbers] == [*range(10), *range(11, 21)]
    with pytest.raises(BadRowError, match=rf"line 11: a line of 33,554,432 bytes .*{len(head):,}"):
        list(stream_rows(str(path), CRITEO, block_bytes=MIB))


TEXTS = FeatureSpec(
    "y", (), (CategoricalColumn("c", raw="string"), CategoricalColumn("d", raw="string"))
)


@pytest.mark.parametrize("size", [100, 100_000, MIB - 4])
def test_the_label_is_told_by_a_whole_first_line(tmp_path: Path, size: int) -> None:
    """Of its first 64 KiB alone, a longer line seemed to have one field less: no label."""
    path = tmp_path / "day_0"
    path.write_bytes(b"1\t" + b"x" * size + b"\tz\n0\ta\tb\n")
    assert open_file(tmp_path, TEXTS).label
    (unparsed,) = format_of(TEXTS).stream(str(path), 8 * MIB)
    assert unparsed.label
    assert unparsed.parse().labels.tolist() == [[1, 0]]


@pytest.mark.parametrize("labels", [True, False])
def test_too_long_lines_do_not_tell_the_label(tmp_path: Path, labels: bool) -> None:
    spec = dataclasses.replace(TEXTS, input=InputFormat(max_line_kb=1))
    path = tmp_path / "day_0"
    row = b"1\ta\tb\n" if labels else b"a\tb\n"
    path.write_bytes(b"1\t" + b"x" * 200_000 + b"\n" + b"2" * 5000 + b"\n" + row * 3)
    assert open_file(tmp_path, spec).label == labels
    long, again, rest = format_of(spec).stream(str(path), MIB)
    assert [item.label for item in (long, again, rest)] == [labels] * 3
    assert [item.first for item in (long, again, rest)] == [0, 1, 2]
    assert (long.parse(reject=True).bad_count, len(rest.parse())) == (1, 3)


@pytest.mark.parametrize(("size", "fits"), [(1024, True), (1025, False), (200_000, False)])
def test_a_header_has_the_limit_of_lines(tmp_path: Path, size: int, fits: bool) -> None:
    spec = dataclasses.replace(TEXTS, input=InputFormat("csv", max_line_kb=1))
    path = tmp_path / "day_0.csv"
    path.write_bytes(b"y,c,d,".ljust(size, b"x") + b"\n1,a,b,\n")
    if fits:
        assert open_file(path, spec).begin == size + 1
        ((_, rows),) = stream_rows(str(path), spec, block_bytes=MIB)
        assert rows.labels.tolist() == [[1]]
        return
    for read in (
        lambda: open_file(path, spec),
        lambda: list(stream_rows(str(path), spec, block_bytes=MIB)),
    ):
        with pytest.raises(BadInputError, match=r"header has more than 1,024 bytes\n.*max_line_kb"):
            read()
