"""Delimiters, encodings and preambles, against Python's csv module."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvt_torchrec.base.errors import BadInputError, BadRowError
from nvt_torchrec.clicklog.readers.log_format import Block, get_format, read_block_chunks
from nvt_torchrec.formats.feature_spec import CategoricalColumn, FeatureSpec, InputFormat
from tests.clicklog.reference_reader import as_lists
from tests.logs import read_block
from tests.spec_logs import open_file, stream_rows

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ODD = st.text(st.sampled_from('a":,\r|'), max_size=8)


def _spec(**options) -> FeatureSpec:
    text = InputFormat("csv", **options)
    columns = (CategoricalColumn("a", raw="string"), CategoricalColumn("b", raw="string"))
    return FeatureSpec("y", (), columns, input=text)


def _values(rows) -> list[tuple]:
    return list(
        zip(rows.labels[0].tolist(), *(c.to_pylist() for c in rows.categorical), strict=True)
    )


# -- Encodings, byte order marks, lines to skip ----------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
@pytest.mark.parametrize("skipped", [0, 2])
@pytest.mark.parametrize("mark", [b"", BYTE_ORDER_MARK])
@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_every_beginning_of_a_file(tmp_path: Path, encoding, skipped, mark, header, packed) -> None:
    """Names and values in an encoding, after a mark and lines with stray quotes."""
    lists = CategoricalColumn("l", raw="string", multi_hot=True)
    how = {"header": header, "encoding": encoding, "skip_lines": skipped}
    text = InputFormat("csv", **how)
    spec = FeatureSpec("y", (), (CategoricalColumn("ärger", raw="string"), lists), input=text)
    lines = ['# a stray " quote', "# ü"][:skipped]
    lines += [' y ,"ärger " , l'.replace(" ,", ",")] if header else []
    rows = [[i % 2, f"ü{i}", [f"é{i}", "z"]] for i in range(7)]
    lines += [f'{y},"{a}",{"|".join(items)}' for y, a, items in rows]
    path = tmp_path / ("day_0.csv.gz" if packed else "day_0.csv")
    whole = mark + "\n".join(lines).encode(encoding)
    path.write_bytes(gzip.compress(whole) if packed else whole)

    def all_of(parts) -> list:
        return [row for part in parts for row in as_lists(part, spec)]

    if not packed:
        day = open_file(path, spec)
        assert day.count_rows(day.end) == 7
        assert day.find_row(6, day.end) == len(whole) - len(lines[-1].encode(encoding))
        blocks = day.cut(day.begin, day.end, 25)
        assert len(blocks) > 2
        assert all_of(read_block(block, spec) for block in blocks) == rows
        assert day.format.first_line(blocks[0]) == 1 + skipped + header
    for size in (10, 1000):
        streamed = list(stream_rows(str(path), spec, block_bytes=size))
        assert all_of(part for _, part in streamed) == rows
        assert [n for numbers, _ in streamed for n in numbers] == list(range(7))


def test_latin_1_in_errors_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "day_0.csv"
    path.write_bytes("y,a,b\nü,é,x\n".encode("latin-1"))
    spec = _spec(encoding="latin-1")
    with pytest.raises(BadRowError, match="line 2: column y: 'ü': expected a label"):
        list(stream_rows(str(path), spec, block_bytes=100))
    ((_, rows),) = stream_rows(str(path), spec, block_bytes=100, reject=True)
    assert rows.bad[0].text.decode() == "ü,é,x"


def test_skipping_more_lines_than_there_are(tmp_path: Path) -> None:
    path = tmp_path / "day_0.csv"
    path.write_bytes(b"a\nb\n")
    with pytest.raises(BadInputError, match="empty file"):
        list(stream_rows(str(path), _spec(skip_lines=3), block_bytes=100))
    with pytest.raises(BadInputError, match=r"column a|empty file"):
        open_file(path, _spec(skip_lines=3))


# -- Quotes ---------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 1, 1]), _ODD, _ODD), min_size=1, max_size=12),
    st.integers(1, 60),
    st.booleans(),
    st.sampled_from([b"", BYTE_ORDER_MARK]),
    st.data(),
)
def test_any_block_size_gives_the_rows_that_were_written(
    tmp_path_factory, rows, block_bytes, header, mark, data
) -> None:
    spec = _spec(header=header)
    buffer = io.StringIO()
    writer = csv.writer(buffer, quoting=csv.QUOTE_ALL, lineterminator="\n")
    if header:
        buffer.write('"y","a"," b"\n')
    for row in rows:
        writer.writerow(row)
    path = tmp_path_factory.mktemp("quoted") / "day_0.csv"
    path.write_bytes(mark + buffer.getvalue().encode())
    day = open_file(path, spec)
    assert day.count_rows(day.end) == len(rows)
    blocks = day.cut(day.begin, day.end, block_bytes)
    actual, numbers = [], []
    for block in blocks:
        first = day.format.first_line(block)
        read = read_block(block, spec)
        actual += _values(read)
        numbers += [first + n for n in range(read.lines)]
        chunks = list(read_block_chunks(block, spec, chunk_bytes=data.draw(st.integers(1, 50))))
        assert [row for chunk in chunks for row in _values(chunk)] == _values(read)
    assert actual == rows
    assert numbers == [1 + header + n for n in range(len(rows))]
    row = data.draw(st.integers(0, len(rows)))
    rest = Block(day.file.path, day.find_row(row, day.end), day.end, "x")
    assert rest.end == rest.begin or _values(read_block(rest, spec)) == rows[row:]
    assert (rest.end == rest.begin) == (row == len(rows))
    streamed = list(stream_rows(str(path), spec, block_bytes=block_bytes))
    assert [row for _, part in streamed for row in _values(part)] == rows
    assert [n for ns, _ in streamed for n in ns] == list(range(len(rows)))
    pieces = get_format(spec).stream(str(path), block_bytes)
    assert sum(piece.parse().lines for piece in pieces) == len(rows)
