"""Lines that are no rows: ``comment`` before the first row, ``skip_empty_lines`` at the end."""

from __future__ import annotations

import collections
import gzip
import io
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvt_torchrec.base.errors import BadRowError
from nvt_torchrec.clicklog.readers import lines
from nvt_torchrec.clicklog.readers.lines import drop_empty_lines, find_text_end, skip_preamble
from nvt_torchrec.clicklog.readers.log_format import get_format
from nvt_torchrec.formats.feature_spec import FeatureSpec
from tests.logs import read_block
from tests.spec_logs import open_file, spec_of, stream_rows

SPEC = """
[input]
format = "csv"
%s

[label]
name = "y"

[[categorical]]
names = "a"
raw = "string"
"""


def values(path: Path, log_spec: FeatureSpec, block_bytes: int) -> list[str]:
    """Read a file in blocks, and as a stream; both must give the same."""
    day = open_file(path, log_spec)
    blocks = day.cut(day.begin, day.end, block_bytes)
    read = [
        text for block in blocks for text in read_block(block, log_spec).categorical[0].to_pylist()
    ]
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for file in (path, packed):
        streamed = stream_rows(str(file), log_spec, block_bytes=block_bytes)
        assert read == [text for _, rows in streamed for text in rows.categorical[0].to_pylist()]
    return read


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_rows_between_comments_and_empty_lines(tmp_path, header: bool, end: str, mark: str) -> None:
    keys = f'comment = "#!"\nskip_empty_lines = true\nheader = {str(header).lower()}'
    lines = ["#! one", "#!", *(["y,a"] if header else []), "1,#!x", "0,y", "", "1,z"]
    log_spec = spec_of(SPEC % keys, tmp_path)
    path = tmp_path / "log.csv"
    path.write_bytes((mark + end.join([*lines[:-2], lines[-1], "", "", ""])).encode())
    for block_bytes in (1, 5, 1 << 20):
        assert values(path, log_spec, block_bytes) == ["#!x", "y", "z"]


def test_an_empty_line_between_rows_is_a_malformed_row(tmp_path: Path) -> None:
    keys = 'comment = "|"\nskip_empty_lines = true\nheader = false'
    log_spec = spec_of(SPEC % keys, tmp_path)
    path = tmp_path / "log.csv"
    path.write_text("|x\n1,a\n\n0,b\n\n")
    with pytest.raises(BadRowError, match="line 3"):
        list(stream_rows(str(path), log_spec, block_bytes=1 << 20))
    with pytest.raises(BadRowError, match="line 3"):
        list(stream_rows(str(path), log_spec, block_bytes=2))
    day = open_file(path, log_spec)
    with pytest.raises(BadRowError, match="line 3"):
        read_block(day.cut(day.begin, day.end, 1 << 20)[0], log_spec)


def test_many_empty_lines_take_no_memory(tmp_path: Path) -> None:
    """At the end they are no rows, between rows they are malformed ones, in their number."""
    log_spec = spec_of(SPEC % "header = false\nskip_empty_lines = true", tmp_path)
    path = tmp_path / "log.csv.gz"
    for empty, end, last in ((1 << 25, b"", 0), (1 << 20, b"0,b\n", (1 << 20) + 1)):
        path.write_bytes(gzip.compress(b"1,a\n" + b"\n" * empty + end, 1))
        tracemalloc.start()
        pieces = collections.deque(get_format(log_spec).stream(str(path), 1 << 20), maxlen=1)
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
        tracemalloc.stop()
        (piece,) = pieces
        assert piece.first + piece.parse(reject=True).lines == 1 + last


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["", "#", "#x", "a", "##"]), max_size=8), st.integers(0, 4))
def test_preambles_are_those_of_plain_python(lines: list[str], skip: int) -> None:
    text = "".join(f"{line}\n" for line in lines)
    left = lines[skip:]
    while left and left[0].startswith("#"):
        left = left[1:]
    file = io.BytesIO(text.encode())
    rest, begin, count = skip_preamble(file, skip, "#")
    wanted = "".join(f"{line}\n" for line in left).encode()
    assert rest + file.read() == wanted == text.encode()[begin:]
    assert count == len(lines) - len(left)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["", "a", "b\r"]), max_size=8), st.sampled_from(["\n", "\r\n"]))
def test_empty_ends_are_those_of_plain_python(lines: list[str], end: str) -> None:
    text = "".join(line + end for line in lines)
    while lines and not lines[-1]:
        lines = lines[:-1]
    assert drop_empty_lines(text.encode()) == len("".join(line + end for line in lines))


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("empty", [0, 1, 70_000])
@pytest.mark.parametrize("row", [b"1,a", b"1," + b"a" * 200_000])
def test_long_ends(tmp_path: Path, monkeypatch, end: bytes, empty: int, row: bytes) -> None:
    monkeypatch.setattr(lines, "_SCAN_BYTES", 150_000)
    path = tmp_path / "log.csv"
    path.write_bytes(row + end + empty * end)
    size = path.stat().st_size
    assert find_text_end(str(path), 0, size) == len(row + end)
    assert find_text_end(str(path), size, size) == size
