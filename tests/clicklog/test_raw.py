from __future__ import annotations

import gzip
import os
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvt_torchrec.base.errors import BadInputError, BadRowError
from nvt_torchrec.clicklog.readers import lines
from nvt_torchrec.clicklog.readers.days import find_days
from nvt_torchrec.clicklog.readers.lines import cut_lines, read_bytes, read_into
from nvt_torchrec.clicklog.readers.log_format import Block, get_format
from nvt_torchrec.formats.feature_spec import CategoricalColumn, FeatureSpec, InputFormat
from tests.logs import CRITEO, random_rows, read_block, write_day, write_log
from tests.spec_logs import open_file, stream_rows


def test_empty_file_and_no_directory(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no files day_0"):
        find_days(str(tmp_path))
    (tmp_path / "day_0").touch()
    with pytest.raises(BadInputError, match="day_0: empty file"):
        find_days(str(tmp_path))
    (tmp_path / "day_0").unlink()
    os.mkfifo(tmp_path / "day_0")
    with pytest.raises(BadInputError, match="day_0: not a regular file"):
        find_days(str(tmp_path))
    with pytest.raises(BadInputError, match="no such file or directory"):
        find_days(str(tmp_path / "none"))


def test_linked_days_are_days(tmp_path: Path) -> None:
    write_log(tmp_path / "elsewhere", [1, 2])
    (tmp_path / "raw").mkdir()
    for day in range(2):
        (tmp_path / "raw" / f"day_{day}").symlink_to(tmp_path / "elsewhere" / f"day_{day}")
    days = find_days(str(tmp_path / "raw"))
    assert [day.size for day in days] == [
        (tmp_path / "elsewhere" / f"day_{day}").stat().st_size for day in range(2)
    ]


@given(
    lines=st.lists(st.integers(0, 40), min_size=1, max_size=40),
    block_bytes=st.integers(1, 200),
    last_newline=st.booleans(),
)
def test_blocks_are_whole_lines_and_cover_the_file(
    tmp_path_factory: pytest.TempPathFactory, lines, block_bytes, last_newline
) -> None:
    path = tmp_path_factory.mktemp("blocks") / "day_0"
    text = "\n".join("x" * (n + 1) for n in lines) + ("\n" if last_newline else "")
    path.write_text(text)
    blocks = cut_lines(str(path), 0, len(text), block_bytes)
    assert "".join(text[begin:end] for begin, end in blocks) == text
    assert all(text[end - 1] == "\n" for _, end in blocks[:-1])
    assert all(end - begin < block_bytes + 42 for begin, end in blocks)
    text_format = get_format(CRITEO)
    assert text_format.count_rows(str(path), 0, len(text)) == len(lines)
    offsets = [text_format.find_row(str(path), line, 0, len(text)) for line in range(len(lines))]
    assert [text[at:].split("\n")[0] for at in offsets] == ["x" * (n + 1) for n in lines]
    assert text_format.find_row(str(path), len(lines) + 1, 0, len(text)) == len(text)


def test_a_file_that_shrank(tmp_path: Path) -> None:
    write_log(tmp_path, [3])
    size = (tmp_path / "day_0").stat().st_size
    with pytest.raises(BadInputError, match="shrank while it was read"):
        read_bytes(str(tmp_path / "day_0"), 0, size + 1)
    with pytest.raises(BadInputError, match=f"{size} bytes instead of {size + 1}"):
        read_into(str(tmp_path / "day_0"), 2, size + 1, memoryview(bytearray(size)))
    with pytest.raises(BadInputError, match=f"{size} bytes instead of {size + 1}"):
        read_block(Block(str(tmp_path / "day_0"), 0, size + 1, "x"), CRITEO)
    with pytest.raises(BadInputError, match="cannot be read"):
        read_block(Block(str(tmp_path / "none"), 0, 1, "none"), CRITEO)


def test_label_or_not(tmp_path: Path) -> None:
    """Most of the first lines decide, not the first one alone."""
    rows = random_rows(5, 0)
    for name, cut, expected in (("day_0", 0, True), ("day_1", 1, False)):
        cut_rows = [row[cut:] for row in rows]
        for first in (cut_rows[0], cut_rows[0][1:], ["x"]):
            write_day(tmp_path / name, [first, *cut_rows[1:]])
            (day,) = find_days(str(tmp_path), {int(name[-1])})
            assert get_format(CRITEO).open(day).label is expected
    write_day(tmp_path / "c", [row[2:] for row in rows])
    with pytest.raises(BadRowError, match="line 1: 38 tab-separated fields"):
        list(stream_rows(str(tmp_path / "c"), CRITEO, block_bytes=100))


def test_stream_of_something_else(tmp_path: Path, monkeypatch) -> None:
    whole = gzip.compress(b"0" + b"\t" * 39 + b"\n")
    (tmp_path / "cut.gz").write_bytes(whole[:-6])
    (tmp_path / "no.gz").write_bytes(b"no gzip")
    (tmp_path / "empty").touch()
    flipped = bytearray(gzip.compress(bytes(range(256)) * 40))
    flipped[12] ^= 0xFF
    (tmp_path / "flipped.gz").write_bytes(flipped)
    for name, message in (
        ("flipped.gz", "flipped.gz: truncated, or not of the type in its name"),
        ("cut.gz", "cut.gz: truncated"),
        ("no.gz", "no.gz: truncated, or not of the type in its name"),
        ("empty", "empty: empty file"),
        ("none", "none: no such file"),
    ):
        with pytest.raises(BadInputError, match=message):
            list(stream_rows(str(tmp_path / name), CRITEO, block_bytes=10))
    # root may read all files; it was said to be truncated
    monkeypatch.setattr(lines, "open_input", Mock(side_effect=PermissionError(13, "denied")))
    with pytest.raises(BadInputError, match=r"cut\.gz: permission denied"):
        list(stream_rows(str(tmp_path / "cut.gz"), CRITEO, block_bytes=10))


SMALL_CSV = FeatureSpec(
    "y", (), (CategoricalColumn("c", raw="string"),), input=InputFormat("csv", header=True)
)


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("block_bytes", [3, 10, 1000])
def test_lines_of_csv_are_named_as_an_editor_counts_them(
    tmp_path: Path, ending: str, block_bytes: int
) -> None:
    lines = ["c,y", *(f"v{i},{i % 2}" for i in range(20))]
    lines[13] = "v,x"
    path = tmp_path / f"log.csv{ending}"
    kind = {"": None, ".gz": "gzip", ".zst": "zstd"}[ending]
    with pa.output_stream(path, compression=kind) as file:
        file.write("\n".join(lines).encode())
    with pytest.raises(BadRowError, match=r"line 14: column y: 'x': expected a label of 0 or 1"):
        list(stream_rows(str(path), SMALL_CSV, block_bytes=block_bytes))
    streamed = list(stream_rows(str(path), SMALL_CSV, block_bytes=block_bytes, reject=True))
    numbers = [int(n) for numbers, _ in streamed for n in numbers]
    assert numbers == [n for n in range(20) if n != 12]
    values = [value for _, rows in streamed for value in rows.categorical[0].to_pylist()]
    assert values == [f"v{n}" for n in numbers]
    assert [bad.text for _, rows in streamed for bad in rows.bad] == [b"v,x"]


def test_a_header_alone_and_a_long_one(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("c,y")
    assert list(stream_rows(str(tmp_path / "empty.csv"), SMALL_CSV, block_bytes=10)) == []
    names = ",".join(f"column_{i}" for i in range(20_000))
    (tmp_path / "day_0.csv").write_text(f"{names},c,y\n" + "," * 20_000 + "v,1\n")
    opened = open_file(tmp_path, SMALL_CSV)
    (block,) = opened.cut(opened.begin, opened.end, 1 << 20)
    rows = read_block(block, SMALL_CSV)
    assert (rows.labels.tolist(), rows.categorical[0].to_pylist()) == ([[1]], ["v"])
    assert len(read_block(block, SMALL_CSV, label=False).labels) == 0
