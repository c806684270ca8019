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

from clicklog.errors import BadRowError, SettingsError
from clicklog.readers import lines
from clicklog.readers.pieces import EndedEarlyError, LongLine, split_pieces
from clicklog.readers.raw import find_days, open_day, read_block, read_pieces, stream_rows
from clicklog.spec.feature_spec import InputFormat
from tests.logs import CRITEO, random_rows, write_day

SHORT = dataclasses.replace(CRITEO, input=InputFormat(max_line_kb=1))
MIB = 1 << 20


def _naive(text: bytes, limit: int, begin: int) -> list[bytes | LongLine]:
    found: list[bytes | LongLine] = []
    for line in text.splitlines(keepends=True):
        whole = line.removesuffix(b"\n")
        long = LongLine(begin, len(whole), whole[:limit], limit)
        found.append(long if len(whole) > limit else line)
        begin += len(line)
    return found


@given(
    sizes=st.lists(st.integers(0, 30), max_size=30),
    piece=st.integers(1, 70),
    limit=st.integers(1, 25),
    begin=st.integers(0, 9),
    last_newline=st.booleans(),
    sized=st.booleans(),
)
def test_pieces_are_the_lines(sizes, piece, limit, begin, last_newline, sized) -> None:
    text = b"\n".join(b"x" * n for n in sizes) + b"\n" * last_newline
    file = io.BytesIO(text + b"more" * sized)
    pieces = split_pieces(file, piece, limit, begin=begin, size=len(text) if sized else None)
    found: list[bytes | LongLine] = []
    for one in pieces:
        if isinstance(one, LongLine):
            found.append(dataclasses.replace(one, head=one.head[:limit]))
        else:
            assert 0 < len(one) <= piece + 2 * limit + 2
            found += bytes(one).splitlines(keepends=True)
    assert found == _naive(text, limit, begin)


def test_a_file_that_ends_early() -> None:
    with pytest.raises(EndedEarlyError) as caught:
        list(split_pieces(io.BytesIO(b"a\nb"), 2, 9, begin=5, size=4))
    assert caught.value.args == (8,)


class _Counted:
    """A file system whose reads are counted."""

    def __init__(self, filesystem) -> None:
        self._filesystem = filesystem
        self.opened = self.bytes = 0

    def open(self, path: str, mode: str):
        self.opened += 1
        return _CountedFile(self._filesystem.open(path, mode), self)


class _CountedFile:
    def __init__(self, file, counts: _Counted) -> None:
        self._file, self._counts = file, counts

    def __enter__(self) -> _CountedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def seek(self, at: int) -> int:
        return self._file.seek(at)

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._counts.bytes += len(data)
        return data

    def readinto(self, view: memoryview) -> int:
        got = self._file.readinto(view)
        self._counts.bytes += got
        return got


def _rows_and_zeros(path: Path, zeros: int, after: int = 0) -> bytes:
    """Ten rows, zeros without a line break (a hole, so no disk is used), and rows behind them."""
    write_day(path, random_rows(10, 0))
    head = path.read_bytes()
    with open(path, "ab") as file:
        file.truncate(len(head) + zeros)
    if after:
        with open(path, "ab") as file:
            file.write(b"\n" + head)
    return head


@pytest.mark.parametrize("after", [0, 1])
def test_zeros_at_the_end_are_read_a_few_times_not_hundreds(
    tmp_path: Path, monkeypatch, after: int
) -> None:
    """1 GiB took 512 GiB of reading and a file opened 16,384 times for every 2 MiB of it."""
    head = _rows_and_zeros(tmp_path / "day_0", 64 * MIB, after)
    (file,) = find_days(str(tmp_path))
    day = open_day(file, CRITEO)
    counted = _Counted(lines.filesystem_of(file.path)[0])
    monkeypatch.setattr(lines, "filesystem_of", lambda path: (counted, path))
    blocks = day.cut(day.begin, day.end, 4 * MIB)
    assert counted.bytes < 66 * MIB
    tracemalloc.start()
    read = [
        rows
        for block in blocks
        for rows in read_pieces(block, CRITEO, reject=True, piece_bytes=2 * MIB)
    ]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert counted.bytes < 2.1 * file.size
    assert counted.opened <= 1 + len(blocks) <= 4
    assert peak < 16 * MIB
    assert sum(map(len, read)) == 10 * (1 + after)
    (bad,) = [bad for rows in read for bad in rows.bad]
    assert f"a line of 67,108,864 bytes from byte {len(head):,} on" in bad.what
    assert bad.text == bytes(1024)
    with pytest.raises(BadRowError, match=r"day_0, line 11: a line of 67,.*\n.*--max_line_kb"):
        [list(read_pieces(block, CRITEO)) for block in blocks]


def test_a_block_in_one_piece_counts_its_long_lines(tmp_path: Path) -> None:
    """Line numbers, with malformed and too long rows between good ones, as pieces have them."""
    rows = random_rows(12, 1)
    rows[3] = ["x"]
    for i in (0, 4, 5, 11):
        rows[i] = [*rows[i], "y" * 1024]
    write_day(tmp_path / "day_0", rows)
    (file,) = find_days(str(tmp_path))
    day = open_day(file, SHORT)
    (block,) = day.cut(day.begin, day.end, MIB)
    whole = read_block(block, SHORT, reject=True)
    assert whole.line.tolist() == [1, 2, 6, 7, 8, 9, 10]
    assert whole.label.tolist() == [int(rows[i][0]) for i in whole.line]
    assert [bad.line for bad in whole.bad] == [0, 3, 4, 5, 11]
    assert (whole.bad_count, whole.lines) == (5, 12)
    before, found = 0, []
    for piece in read_pieces(block, SHORT, reject=True, piece_bytes=300):
        found += [(before + bad.line, bad.what, bad.text) for bad in piece.bad]
        before += piece.lines
    assert found == [(bad.line, bad.what, bad.text) for bad in whole.bad]
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


@pytest.mark.parametrize("value", [0, -1, 1.5, "1", 1 << 21])
def test_limits_that_make_no_sense(value) -> None:
    with pytest.raises(SettingsError, match="max_line_kb"):
        InputFormat(max_line_kb=value)
