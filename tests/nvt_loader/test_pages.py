"""Rows straight from the pages are Arrow's rows; what cannot be read so is left to Arrow."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nvt_torchrec.base.errors import ClickLogError, SchemaError
from nvt_torchrec.etl.units.part_files import PartWriter
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.nvt_loader.cpu.block_builder import CpuBuilder
from nvt_torchrec.nvt_loader.cpu.blocks import ShardRows
from nvt_torchrec.nvt_loader.parquet import pages
from nvt_torchrec.nvt_loader.parquet.checks import Checker
from nvt_torchrec.nvt_loader.parquet.dataset import read_dataset
from nvt_torchrec.nvt_loader.parquet.decoder import make_cpu_decoder
from nvt_torchrec.nvt_loader.parquet.page_reader import PageReader
from nvt_torchrec.nvt_loader.parquet.row_chunks import RowGroupSlice, ShardReader

SCHEMA = TableSchema(
    "label", ("int_0", "int_1"), ("cat_0", "cat_1", "cat_2", "cat_3"), (2, 300, 7000, 10**6)
)
ROWS = 5000


def make_table(rows: int, seed: int = 0, nullable: bool = False) -> pa.Table:
    """Columns of few values and of many, in runs and not."""
    rng = np.random.default_rng(seed)
    columns = {
        "label": (rng.random(rows) < 0.03).astype(np.float32),
        "int_0": rng.integers(0, 40, rows).astype(np.float32) / 8 - 2,
        "int_1": rng.normal(size=rows).astype(np.float32),
        "cat_0": np.repeat(rng.integers(0, 2, rows), 100)[:rows].astype(np.int32),
        "cat_1": np.minimum(rng.zipf(1.3, rows), 299).astype(np.int32),
        "cat_2": rng.integers(0, 7000, rows).astype(np.int32),
        "cat_3": rng.integers(0, 10**6, rows).astype(np.int32),
    }
    table = pa.table(columns)
    fields = [pa.field(field.name, field.type, nullable=nullable) for field in table.schema]
    return table.cast(pa.schema(fields))


def layout_of(path, table, **options):
    """Write a file as its only one and read its footer."""
    options = {"compression": "none", "write_page_checksum": True} | options
    pq.write_table(table, path / "part.0.parquet", **options)
    return read_dataset(path, SCHEMA)


def read_by_pages(dataset, row_group=0):
    """Names of the columns that are read without Arrow."""
    opened = PageReader(dataset.files, Checker(dataset)).open(row_group)
    numbers = [] if opened is None else opened.numbers.tolist()
    return [SCHEMA.columns[i] for i in numbers]


def as_chunks(dataset, rows, begin=0):
    """The first row group's columns from row ``begin`` on, taken ``rows`` at a time: as bits."""
    piece = RowGroupSlice(0, begin, dataset.source.row_counts[0])
    reader = ShardReader(make_cpu_decoder(dataset), [piece], rows, rows)
    found = []
    for first in range(begin, piece.end, rows):
        for part in reader.take(min(rows, piece.end - first)):
            for chunk in part.decode():
                columns = range(len(SCHEMA.columns))
                found.append([chunk.view_column(i, np.uint32).copy() for i in columns])
    return [np.concatenate(columns) for columns in zip(*found, strict=True)]


def as_blocks(dataset, rows, begin=0):
    """The same by way of blocks of ``rows`` rows, in batches of 64 where that is possible."""
    piece = RowGroupSlice(0, begin, dataset.source.row_counts[0])
    blocks = CpuBuilder(dataset, torch.device("cpu"))
    reader = ShardReader(blocks.decode, [piece], rows, rows)
    found = []
    for first in range(begin, piece.end, rows):
        count = min(rows, piece.end - first)
        batch = 64 if count % 64 == 0 else count
        block = blocks.build(count // batch, batch, [ShardRows(reader, batch, 0, batch, 0)])
        columns = [block.labels, *block.dense.unbind(2), *block.ids.unbind(1)]
        found.append([column.flatten().numpy() for column in columns])
    columns = [np.concatenate(parts) for parts in zip(*found, strict=True)]
    return [column.view(f"u{column.itemsize}") for column in columns]


def assert_rows(dataset, rows, begin, table):
    for found in (as_chunks(dataset, rows, begin), as_blocks(dataset, rows, begin)):
        assert len(found) == len(SCHEMA.columns)
        for name, column in zip(SCHEMA.columns, found, strict=True):
            expected = np.asarray(table[name].slice(begin)).view(column.dtype)
            assert np.array_equal(column, expected), name


OPTIONS = [
    {},
    {"dictionary_pagesize_limit": 16 << 10},  # as the ETL writes
    {"dictionary_pagesize_limit": 64},
    {"use_dictionary": False},
    {"data_page_size": 500, "write_batch_size": 100},
    {"write_page_checksum": False, "write_statistics": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rows_of_every_kind_of_page(tmp_path, options):
    table = make_table(ROWS)
    dataset = layout_of(tmp_path, table, **options)
    assert read_by_pages(dataset) == list(SCHEMA.columns)
    for rows, begin in itertools.product([7, 1024, ROWS], [0, 1, 2500, ROWS - 1]):
        assert_rows(dataset, rows, begin, table)


@pytest.mark.parametrize("values", [1, 2, 3, 9, 100, 300, 5000, 20_000, 70_000])
def test_indices_of_every_width(tmp_path, values):
    table = make_table(70_000)
    column = np.random.default_rng(1).permutation(70_000) % values
    table = table.set_column(6, table.schema.field(6), pa.array(column, pa.int32()))
    dataset = layout_of(tmp_path, table, max_rows_per_page=70_000)
    encodings = pq.read_metadata(dataset.files.paths[0]).row_group(0).column(6).encodings
    assert "RLE_DICTIONARY" in encodings
    assert read_by_pages(dataset) == list(SCHEMA.columns)
    for rows in (100, 999, 70_000):
        assert_rows(dataset, rows, 0, table)


def test_files_of_the_etl(tmp_path):
    """All of their pages are read here, and their rows are the table's."""
    table = make_table(20_000)
    for row_group_rows in (700, 20_000):
        with PartWriter(tmp_path / "part.0.parquet", row_group_rows) as part:
            part.write(table)
        dataset = read_dataset(tmp_path, SCHEMA)
        assert read_by_pages(dataset) == list(SCHEMA.columns)
        group = table.slice(0, row_group_rows)
        for rows, begin in itertools.product([7, 999, row_group_rows], [0, row_group_rows // 3]):
            assert_rows(dataset, rows, begin, group)


UNKNOWN = {
    "pages of version 2": {"data_page_version": "2.0"},
    "a codec": {"compression": "snappy"},
    "dictionaries of version 1": {"version": "1.0"},
    "an encoding": {"use_dictionary": False, "column_encoding": {"cat_3": "DELTA_BINARY_PACKED"}},
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_only_arrow_reads(tmp_path, what):
    table = make_table(ROWS)
    dataset = layout_of(tmp_path, table, **UNKNOWN[what])
    assert read_by_pages(dataset) == []
    for rows, begin in [(700, 0), (700, 2500), (ROWS, 0)]:
        assert_rows(dataset, rows, begin, table)


def test_columns_of_other_types_beside(tmp_path):
    table = make_table(ROWS)
    wide = table.set_column(4, "cat_1", table["cat_1"].cast(pa.int64()))
    wide = wide.set_column(1, "int_0", table["int_0"].cast(pa.float64()))
    dataset = layout_of(tmp_path, wide.select(wide.column_names[::-1]))
    assert read_by_pages(dataset) == ["cat_3", "cat_2", "cat_0", "int_1", "label"]
    for rows, begin in [(700, 0), (700, 2500)]:
        assert_rows(dataset, rows, begin, table)


def test_further_columns_are_not_read(tmp_path):
    table = make_table(ROWS)
    further = table.add_column(3, "further", pa.array(["text"] * ROWS))
    dataset = layout_of(tmp_path, further)
    assert read_by_pages(dataset) == list(SCHEMA.columns)
    assert_rows(dataset, 700, 0, table)


def test_columns_that_may_have_nulls(tmp_path):
    """Their pages begin with levels, which only Arrow reads."""
    table = make_table(ROWS, nullable=True)
    dataset = layout_of(tmp_path, table)
    assert read_by_pages(dataset) == []
    assert_rows(dataset, 700, 0, table)
    values = table["cat_2"].to_pylist()
    values[4321] = None
    table = table.set_column(5, "cat_2", pa.array(values, pa.int32()))
    dataset = layout_of(tmp_path, table)
    with pytest.raises(SchemaError, match="column cat_2 holds 1 null values, in row group 0"):
        as_chunks(dataset, 700)


@pytest.mark.parametrize("coded", [True, False])
@pytest.mark.parametrize("row", [0, ROWS - 1])
@pytest.mark.parametrize(
    ("column", "value"),
    [("int_0", np.inf), ("label", np.nan), ("cat_1", 300), ("cat_1", -1), ("cat_3", 10**6)],
)
def test_a_number_beyond_its_limit(tmp_path, coded, row, column, value):
    table = make_table(ROWS)
    index = table.schema.get_field_index(column)
    values = np.asarray(table[column]).copy()
    values[row] = value
    table = table.set_column(index, table.schema.field(index), pa.array(values))
    dataset = layout_of(tmp_path, table, use_dictionary=coded, write_statistics=False)
    assert read_by_pages(dataset) == list(SCHEMA.columns)
    for read in (as_chunks, as_blocks):
        with pytest.raises(SchemaError, match=rf"column {column} holds (id )?{value}.*group 0"):
            read(dataset, 700)


def page(kind, values, size=400, encoding=0):
    """A page of zeros whose header says what it is told, in Thrift's compact protocol."""

    def number(value):
        value = value << 1 if value >= 0 else ~(value << 1)
        groups = [value >> 7 * i & 127 for i in range(max((value.bit_length() + 6) // 7, 1))]
        return bytes([0x15, *(group | 128 for group in groups[:-1]), groups[-1]])

    inner = number(values) + number(encoding) + bytes([0])
    struct = {0: 0x2C, 2: 0x4C}[kind]
    header = number(kind) + number(size) + number(size) + bytes([struct]) + inner + bytes([0])
    return header + bytes(size)


def find(content, values):
    memory = np.frombuffer(content, np.uint8)
    chunk = memory.ctypes.data, len(memory), values, 0
    table, first = np.empty(9, pages.PAGE), np.empty(2, np.int64)
    return pages.find_pages(table, first, np.array([chunk], pages.CHUNK)), table


def test_a_header_is_read():
    count, table = find(page(2, 100) + page(0, 60) + page(0, 40, size=160), 100)
    assert count == 3
    assert table["count"][:3].tolist() == [100, 60, 40]
    assert table["bytes"][:3].tolist() == [400, 400, 160]


@pytest.mark.parametrize("values", [-1, 2**31, 2**32 + 100, 2**62, 2**63 - 1, -(2**40)])
def test_numbers_that_are_too_large_for_a_header(values):
    assert find(page(2, values) + page(0, 100), 100)[0] == -1
    assert find(page(0, 1) + page(0, values) + page(0, values) + page(0, 101), 100)[0] == -1
    assert find(page(0, 100, encoding=values), 100)[0] == -1


def outcome(read, dataset):
    try:
        return read(dataset, 70)
    except ClickLogError:
        return None


@pytest.mark.parametrize("read", [as_chunks, as_blocks])
@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_damage_that_no_checksum_shows(tmp_path, options, read, monkeypatch):
    """Whatever the bytes are: no crash, and what Arrow reads is read."""
    table = make_table(300)
    dataset = layout_of(tmp_path, table, **options | {"write_page_checksum": False})
    whole = dataset.files.paths[0].read_bytes()
    end = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    choose = random.Random(str(options))
    alike = 0
    for _ in range(100):
        content = bytearray(whole)
        at = choose.randrange(4, end)
        size = min(choose.choice([1, 1, 4, 40]), end - at)
        content[at : at + size] = choose.choice([bytes(size), choose.randbytes(size)])
        dataset.files.paths[0].write_bytes(content)
        found = outcome(read, dataset)
        with monkeypatch.context() as patch:
            patch.setattr(PageReader, "open", lambda *_: None)
            expected = outcome(read, dataset)
        if expected is not None:
            assert found is not None
            assert all(map(np.array_equal, found, expected))
        alike += (found is None) == (expected is None)
    assert alike >= 96  # Arrow looks at more of a header
