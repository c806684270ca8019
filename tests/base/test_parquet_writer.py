"""Parquet files of our own pages: what other readers find in them is what was written."""

from __future__ import annotations

import importlib
import itertools
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.parquet import column_chunks
from nvt_torchrec.base.parquet.file_writer import ParquetFileWriter

#: How Arrow writes the same: the options that the ETL once gave it.
ARROW = {
    "compression": "none",
    "dictionary_pagesize_limit": 16 << 10,
    "write_page_checksum": True,
}
IDS = pa.list_(pa.field("element", pa.int32(), nullable=False))


def write(path: Path, table: pa.Table, group_rows: int) -> Path:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        writer = ParquetFileWriter(descriptor, table.schema)
        for first in range(0, len(table), group_rows):
            writer.write_row_group(table.slice(first, group_rows))
        writer.finish()
    finally:
        os.close(descriptor)
    assert writer.size == path.stat().st_size
    return path


def read(path: Path) -> pa.Table:
    return pq.ParquetFile(path, page_checksum_verification=True).read()


def make_table(columns: dict[str, Any]) -> pa.Table:
    arrays = {
        name: pa.array(column, IDS) if isinstance(column, list) else pa.array(column)
        for name, column in columns.items()
    }
    fields = [pa.field(name, array.type, nullable=False) for name, array in arrays.items()]
    return pa.table(arrays, schema=pa.schema(fields))


def make_random(rows: int, rng: np.random.Generator) -> pa.Table:
    """Integers of every width, in runs and not; floats; lists of every length."""
    columns: dict[str, Any] = {}
    for bits in range(32):
        low = int(rng.integers(-(2**31), 2**31 - 2**bits))
        values = low + rng.integers(2**bits, size=rows)
        columns[f"ids of {bits} bits"] = values.astype(np.int32)
    run = int(rng.integers(1, 100))
    runs = np.repeat(rng.integers(0, 1000, rows), run)[:rows]
    columns["runs"] = runs.astype(np.int32)
    mixed = np.where(rng.random(rows) < rng.random(), 7, rng.integers(0, 5000, rows))
    columns["mostly one value"] = mixed.astype(np.int32)
    columns["over the range"] = rng.choice([-(2**31), 2**31 - 1, 0], rows).astype(np.int32)
    columns["label"] = (rng.random(rows) < 0.03).astype(np.float32)
    columns["counts"] = np.log1p(rng.geometric(0.02, rows)).astype(np.float32)
    columns["normal"] = rng.normal(size=rows).astype(np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, 1.5], np.float32)
    columns["special"] = rng.choice(special, rows)
    columns["one special"] = np.full(rows, rng.choice(special), np.float32)
    length = int(rng.integers(1, 12))
    columns["lists"] = [
        rng.integers(0, 2**17, rng.integers(length)).astype(np.int32) for _ in range(rows)
    ]
    columns["short lists"] = [rng.integers(0, 5, rng.integers(2)) for _ in range(rows)]
    columns["empty lists"] = [[] for _ in range(rows)]
    return make_table(columns)


def describe(path: Path) -> list[Any]:
    """What pyarrow says of a file, but for where its bytes are and how they are encoded."""
    footer = pq.read_metadata(path)
    described: list[Any] = [footer.schema, footer.num_rows]
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        for column in map(group.column, range(group.num_columns)):
            found = column.statistics.to_dict()
            # -0.0 is equal to 0.0, and the statistics of zeros are not
            limits = [repr(found.pop(name)) for name in ("min", "max")]
            path_in_schema = column.path_in_schema, column.physical_type, column.compression
            described.append((path_in_schema, column.num_values, found, limits))
    return described


SIZES = [(1, 1), (7, 3), (100, 1000), (5000, 5000), (9000, 4096), (70_000, 50_000)]


@pytest.mark.parametrize(("rows", "group_rows"), SIZES)
def test_arrow_reads_what_was_written(tmp_path, monkeypatch, rows, group_rows):
    rng = np.random.default_rng(rows)
    for page_values in (16, 1000, column_chunks.PAGE_VALUES):
        monkeypatch.setattr(column_chunks, "PAGE_VALUES", page_values)
        table = make_random(min(rows, 50 * page_values), rng)
        path = write(tmp_path / "ours.parquet", table, group_rows)
        found = read(path)
        assert found.schema == table.schema
        for field in table.schema:
            if field.type == pa.float32():  # by their bits: 0.0 is equal to -0.0
                bits = [np.asarray(t[field.name]).view(np.int32) for t in (found, table)]
                assert np.array_equal(*bits), field.name
        assert found.equals(table)
        pq.write_table(table, tmp_path / "arrow.parquet", row_group_size=group_rows, **ARROW)
        assert describe(path) == describe(tmp_path / "arrow.parquet")


@pytest.mark.parametrize("column", ["NaN", "some NaN", "NaN of both signs"])
def test_statistics_leave_nan_out(tmp_path, column):
    values = np.array([np.nan, 2, -3] if column == "some NaN" else [np.nan] * 3, np.float32)
    values[2:] *= -1
    table = make_table({"a": values})
    ours = write(tmp_path / "ours.parquet", table, 10)
    pq.write_table(table, tmp_path / "arrow.parquet", **ARROW)
    assert describe(ours) == describe(tmp_path / "arrow.parquet")
    assert np.isnan(read(ours)["a"][0].as_py())


def test_bytes_do_not_depend_on_the_pieces_of_a_table(tmp_path):
    table = make_random(9000, np.random.default_rng(0))
    expected = write(tmp_path / "whole.parquet", table, 4096).read_bytes()
    cuts = [0, 1, 17, 4000, 4096, 4097, 8999, 9000]
    pieces = [table.slice(a, b - a) for a, b in itertools.pairwise(cuts)]
    copied = [pa.Table.from_batches(piece.combine_chunks().to_batches()) for piece in pieces]
    path = write(tmp_path / "pieces.parquet", pa.concat_tables(copied), 4096)
    assert path.read_bytes() == expected


def test_files_are_about_as_large_as_those_of_arrow(tmp_path):
    table = make_random(131_072, np.random.default_rng(1))
    ours = write(tmp_path / "ours.parquet", table, 131_072)
    pq.write_table(table, tmp_path / "arrow.parquet", row_group_size=131_072, **ARROW)
    for number, name in enumerate(table.column_names):
        sizes = [
            pq.read_metadata(path).row_group(0).column(number).total_compressed_size
            for path in (ours, tmp_path / "arrow.parquet")
        ]
        assert sizes[0] < 1.1 * sizes[1] + 100, name


def test_a_flipped_bit_is_found(tmp_path):
    """In a page; what does not count in a page's header may change without an error."""
    table = make_random(700, np.random.default_rng(2))
    path = write(tmp_path / "ours.parquet", table, 500)
    whole = path.read_bytes()
    end = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    choose = random.Random(0)
    found = 0
    for _ in range(400):
        content = bytearray(whole)
        content[choose.randrange(4, end)] ^= 1 << choose.randrange(8)
        path.write_bytes(content)
        try:
            assert read(path).equals(table)
        except (OSError, pa.ArrowException):
            found += 1
    assert found > 350


def test_a_file_without_rows(tmp_path):
    table = make_random(0, np.random.default_rng(0))
    found = read(write(tmp_path / "ours.parquet", table, 10))
    assert found.schema == table.schema
    assert len(found) == 0


def test_metadata_of_several_files_is_merged(tmp_path):
    table = make_random(100, np.random.default_rng(3))
    pq.write_metadata(table.schema, tmp_path / "_metadata")
    merged = pq.read_metadata(tmp_path / "_metadata")
    for name in ("a.parquet", "b.parquet"):
        footer = pq.read_metadata(write(tmp_path / name, table, 60))
        footer.set_file_path(name)
        merged.append_row_groups(footer)
    assert merged.num_rows == 200
    assert merged.row_group(3).column(0).file_path == "b.parquet"


@pytest.mark.parametrize(
    "field",
    [
        pa.field("a", pa.int32()),
        pa.field("a", pa.int64(), nullable=False),
        pa.field("a", pa.list_(pa.int32()), nullable=False),
    ],
    ids=str,
)
def test_other_columns_are_refused(tmp_path, field):
    with open(tmp_path / "ours.parquet", "wb") as file, pytest.raises(ValueError, match="column a"):
        ParquetFileWriter(file.fileno(), pa.schema([field]))


def test_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / "read_only").touch()
    descriptor = os.open(tmp_path / "read_only", os.O_RDONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        ParquetFileWriter(descriptor, pa.schema([]))
    os.close(descriptor)


PEERS = {
    "polars": lambda peer, path: peer.read_parquet(path).to_arrow(),
    "duckdb": lambda peer, path: peer.sql(f"from '{path}'").to_arrow_table(),
    "fastparquet": lambda peer, path: pa.table(peer.ParquetFile(str(path)).to_pandas()),
}


@pytest.mark.parametrize("peer", PEERS)
def test_other_readers_find_the_same(tmp_path, peer):
    """Those that are installed."""
    pytest.importorskip(peer)
    table = make_random(20_000, np.random.default_rng(4))
    if peer == "fastparquet":  # reads lists that may be null
        table = table.drop_columns(["lists", "short lists", "empty lists"])
    path = write(tmp_path / "ours.parquet", table, 15_000)
    found = PEERS[peer](importlib.import_module(peer), path)
    for name in table.column_names:
        assert found[name].to_pylist() == table[name].to_pylist(), name
