"""Each thing that can be wrong with the data gets an error that names place, value and remedy."""

from __future__ import annotations

import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clicklog.errors import BadInputError, SchemaError
from nvt_loader import KJTLoader
from tests.nvt_loader.data import WRITER, write_split


@pytest.fixture
def train(tmp_path):
    write_split(tmp_path, {"train": [100, 100], "valid": [10]})
    return tmp_path / "train"


def read(path) -> None:
    for _ in KJTLoader(path, 8, device="cpu"):
        pass


def rewrite(path, change) -> None:
    """Write the file again with its table changed, newer than ``_metadata``."""
    pq.write_table(change(pq.read_table(path)), path, row_group_size=64, **WRITER)
    os.utime(path, ns=((path.parent / "_metadata").stat().st_mtime_ns + 10**9,) * 2)


def set_value(table, column, row, value):
    values = table[column].to_pylist()
    values[row] = value
    array = pa.array(values, table.schema.field(column).type)
    return table.set_column(table.schema.get_field_index(column), column, array)


def test_no_such_directory(tmp_path):
    with pytest.raises(BadInputError, match=r"nowhere: no such directory[\s\S]*etl run"):
        read(tmp_path / "nowhere")


def test_validation_for_valid(train):
    with pytest.raises(BadInputError, match=r"did you mean .*/valid\?"):
        read(train.parent / "validation")
    with pytest.raises(BadInputError, match=r"did you mean .*/train\?"):
        read(train.parent / "training")


def test_the_directory_of_all_splits(train):
    with pytest.raises(
        BadInputError, match=r"no parquet file in it[\s\S]*name one split, as .*/train"
    ):
        read(train.parent)


def test_no_parquet(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / ".part.0.parquet.77.tmp").touch()
    with pytest.raises(BadInputError, match="no parquet file in it"):
        read(tmp_path / "train")


def test_no_schema(train):
    shutil.rmtree(train / ".merlin")
    with pytest.raises(BadInputError, match=r"schema\.json: no such file[\s\S]*the ETL writes"):
        read(train)


@pytest.mark.parametrize("column", ["label", "int_1", "cat_2"])
def test_a_missing_column(train, column):
    rewrite(train / "part.1.parquet", lambda table: table.drop_columns([column]))
    with pytest.raises(SchemaError, match=rf"part\.1\.parquet: column {column} is missing"):
        read(train)


def test_a_renamed_column(train):
    rewrite(train / "part.1.parquet", lambda table: table.rename_columns({"cat_1": "cat1"}))
    with pytest.raises(SchemaError, match=r"cat_1 is missing \(there is cat1\)"):
        read(train)


@pytest.mark.parametrize(
    ("column", "kind", "message"),
    [
        ("cat_1", pa.int64(), "cat_1 is int64, not int32"),
        ("int_0", pa.float64(), "int_0 is double, not float"),
        ("label", pa.int32(), "label is int32, not float"),
    ],
)
def test_a_retyped_column(train, column, kind, message):
    def change(table):
        index = table.schema.get_field_index(column)
        return table.set_column(index, column, table[column].cast(kind, safe=False))

    rewrite(train / "part.1.parquet", change)
    with pytest.raises(SchemaError, match=rf"part\.1\.parquet: column {message}"):
        read(train)


@pytest.mark.parametrize("column", ["label", "int_1", "cat_2"])
def test_a_null(train, column):
    rewrite(train / "part.1.parquet", lambda table: set_value(table, column, 90, None))
    with pytest.raises(SchemaError, match=rf"part\.1\.parquet: column {column} holds 1 null"):
        read(train)


@pytest.mark.parametrize("value", [50, 2**31 - 1, -1])
def test_an_id_outside_its_table(train, value):
    rewrite(train / "part.1.parquet", lambda table: set_value(table, "cat_1", 70, value))
    with pytest.raises(
        SchemaError, match=rf"part\.1\.parquet: column cat_1 holds id {value}, .* table of 50 rows"
    ):
        read(train)


def test_the_largest_id(train):
    rewrite(train / "part.1.parquet", lambda table: set_value(table, "cat_1", 70, 49))
    read(train)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("column", ["int_2", "label"])
def test_a_dense_feature_that_is_no_number(train, column, value):
    rewrite(train / "part.1.parquet", lambda table: set_value(table, column, 70, value))
    with pytest.raises(SchemaError, match=rf"part\.1\.parquet: column {column} holds {value}"):
        read(train)


def test_a_truncated_file(train):
    path = train / "part.1.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInputError, match=r"part\.1\.parquet: not a whole parquet file"):
        read(train)
    path.write_bytes(b"")
    with pytest.raises(BadInputError, match=r"part\.1\.parquet: not a whole parquet file"):
        read(train)


def test_a_truncated_file_that_metadata_knows(train):
    path = train / "part.1.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    os.utime(path, ns=((train / "_metadata").stat().st_mtime_ns - 1,) * 2)
    with pytest.raises(BadInputError, match=r"part\.1\.parquet: row group . cannot be decoded"):
        read(train)


def test_a_flipped_byte(train):
    path = train / "part.0.parquet"
    content = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(0).column(5)
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 0x10
    written = path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(written, written))
    with pytest.raises(BadInputError, match=r"part\.0\.parquet: row group 0 cannot be decoded"):
        read(train)


def test_metadata_that_names_a_missing_file(train):
    (train / "part.1.parquet").unlink()
    with pytest.raises(
        BadInputError, match=r"_metadata names part\.1\.parquet, which is not there"
    ):
        read(train)


def test_metadata_that_is_no_parquet(train):
    (train / "_metadata").write_bytes(b"PAR1")
    os.utime(train / "_metadata", ns=(2**61, 2**61))
    with pytest.raises(BadInputError, match="_metadata: not a whole parquet file"):
        read(train)


def test_a_file_rewritten_behind_the_loader(train):
    loader = KJTLoader(train, 8, device="cpu")
    rewrite(train / "part.0.parquet", lambda table: table.slice(0, 50))
    with pytest.raises(BadInputError, match=r"row group 0 has no longer 64 rows"):
        list(loader)


def test_an_error_ends_the_epoch_and_stays(train):
    rewrite(train / "part.1.parquet", lambda table: set_value(table, "cat_1", 99, 50))
    loader = KJTLoader(train, 8, virtual_shards=1, device="cpu")
    iterator = iter(loader)
    with pytest.raises(SchemaError) as first:
        list(iterator)
    with pytest.raises(SchemaError) as second:
        next(iterator)
    assert second.value is first.value
