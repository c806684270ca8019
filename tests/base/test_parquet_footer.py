"""Footers of parquet files: the numbers that pyarrow reads, and no end of the process by damage."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.parquet.footer import CODEC, MISSING, list_leaf_columns, read_footer

CODECS = {"none": 0, "snappy": 1, "gzip": 2, "zstd": 6}


def write(path: Path, codec: str, columns: int = 0, **options: object) -> None:
    table = pa.table(
        {
            "a": pa.array(range(100), pa.int32()),
            "text": [None, "x", "y", "é"] * 25,
            "list": [[1, 2], None, [], [None]] * 25,
            "struct": [{"b": 1.5, "c": [{"d": "x"}]}] * 100,
            "time": pa.array(range(100), pa.timestamp("us", "UTC")),
            **{f"column {i}": range(100) for i in range(columns)},
        }
    )
    pq.write_table(table, path, 30, compression=codec, **options)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "options", [{}, {"use_dictionary": False, "write_statistics": False}, {"columns": 300}], ids=str
)
def test_what_pyarrow_reads(tmp_path: Path, codec: str, options: dict) -> None:
    write(tmp_path / "file", codec, **options)
    footer, expected = read_footer(tmp_path / "file"), pq.read_metadata(tmp_path / "file")
    assert footer.schema == expected.schema.to_arrow_schema()
    assert footer.rows.tolist() == [30, 30, 30, 10]
    leaves = list_leaf_columns(footer.schema)
    paths = [expected.schema.column(j).path for j in range(expected.num_columns)]
    assert leaves == [path.split(".")[0] for path in paths]
    for i in range(expected.num_row_groups):
        for j in range(expected.num_columns):
            chunk = expected.row_group(i).column(j)
            first = chunk.dictionary_page_offset
            assert footer.chunks[i, j].tolist() == [
                CODECS[codec],
                chunk.num_values,
                chunk.total_uncompressed_size,
                chunk.total_compressed_size,
                chunk.data_page_offset,
                MISSING if first is None else first,
            ]


def test_a_flipped_bit_ends_no_process(tmp_path: Path) -> None:
    """pyarrow's accessors end it at an unknown codec, or at histograms of another size."""
    path, codecs, refused = tmp_path / "file", set(), 0
    write(path, "snappy")
    whole = path.read_bytes()
    choose = random.Random(0)
    for at in range(len(whole) - 8 - int.from_bytes(whole[-8:-4], "little"), len(whole)):
        content = bytearray(whole)
        content[at] ^= 1 << choose.randrange(8)
        path.write_bytes(content)
        try:
            codecs.update(read_footer(path).chunks[:, :, CODEC].ravel().tolist())
        except BadInputError as error:
            refused += str(error).startswith(f"{path}: not a whole parquet file: ")
    assert len(codecs) > 3
    assert refused > 100


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "does not end"),
        (b"x" * 100, "does not end"),
        (b"\xff\xff\xff\x7fPAR1", "the file has 8"),
    ],
)
def test_what_is_no_footer(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(BadInputError, match=rf"not a whole parquet file: .*{what}.*\n.*restore it"):
        read_footer(tmp_path / "file", "restore it")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInputError, match="not a regular file"):
        read_footer(tmp_path / "pipe")
