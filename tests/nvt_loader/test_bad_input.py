"""Each thing that can be wrong with the data gets an error that names place, value and remedy."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.nvt_loader.parquet.dataset import read_dataset
from nvt_torchrec.nvt_loader.parquet.decoder import make_cpu_decoder
from nvt_torchrec.nvt_loader.parquet.row_chunks import RowGroupSlice
from tests.nvt_loader import fake_libcudf
from tests.nvt_loader.data import WRITER, write_split
from tests.nvt_loader.helper import assert_same


@pytest.fixture(params=["cpu", "libcudf"], autouse=True)
def decoder(request, monkeypatch):
    if request.param == "libcudf":
        fake_libcudf.install(monkeypatch)
    return request.param


@pytest.fixture
def train(tmp_path):
    write_split(tmp_path, {"train": [100, 100], "valid": [10]})
    return tmp_path / "train"


def test_ids_that_int32_cannot_hold(tmp_path):
    """They would be truncated: 2³³ + 5 to 5."""
    table = pa.table({"y": pa.array([1.0], pa.float32()), "c": pa.array([2**33 + 5])})
    pq.write_table(table, tmp_path / "part.parquet")
    schema = TableSchema("y", (), ("c",), (8,))
    with pytest.raises(SchemaError, match=r"column c: a table of 17179869184 rows; int32"):
        KJTLoader(tmp_path, 1, schema=schema, table_sizes=[2**34], device="cpu")


def read(path) -> None:
    for _ in KJTLoader(path, 8, device="cpu"):
        pass


def rewrite(path, change) -> None:
    """Write the file again with its table changed."""
    pq.write_table(change(pq.read_table(path)), path, row_group_size=64, **WRITER)


def put(column, row, value, kind=None):
    """A change of a table: a value, in a column of another type."""

    def change(table):
        at, kept = table.schema.get_field_index(column), table.schema.field(column).type
        values = table[column].to_pylist()
        values[row] = value
        return table.set_column(at, column, pa.array(values, kind or kept))

    return change


def cast(column, kind):
    """A change of a table: the type of a column; lists hold its numbers."""

    def change(table):
        values = table[column]
        if pa.types.is_list(kind):
            values = pa.array([[value] for value in values.to_pylist()])
        at = table.schema.get_field_index(column)
        return table.set_column(at, pa.field(column, kind), values.cast(kind, safe=False))

    return change


def test_a_table_whose_offsets_lie():
    """The process would end when they are used."""
    offsets = pa.py_buffer(np.array([0, 2**30, 5, 3], np.int32).tobytes())
    kind, values = pa.list_(pa.int32()), pa.array([1, 2, 3], pa.int32())
    lists = pa.Array.from_buffers(kind, 3, [None, offsets], children=[values])
    table = pa.table({"y": pa.array([1.0] * 3, pa.float32()), "c": lists})
    with pytest.raises(SchemaError, match="the table: not valid Arrow data"):
        KJTLoader(table, 2, schema=TableSchema("y", (), ("c",), (9,), multi_hot=("c",)))


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
        BadInputError, match=r"no parquet file in it[\s\S]*name one split, for example .*/train"
    ):
        read(train.parent)


def test_no_schema(train):
    shutil.rmtree(train / ".merlin")
    with pytest.raises(BadInputError, match=r"schema\.json: no such file[\s\S]*the ETL writes"):
        read(train)


INTEGERS = [getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)]


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        *(("cat_1", kind) for kind in INTEGERS),
        ("int_0", pa.float64()),
        *(("label", kind) for kind in (pa.float64(), pa.int8(), pa.uint32(), pa.bool_())),
    ],
    ids=str,
)
def test_a_column_of_another_numeric_type_is_converted(train, column, kind):
    """Whatever the types of the columns beside it, and in other files."""
    expected = list(KJTLoader(train, 8, device="cpu"))
    rewrite(train / "part.1.parquet", cast(column, kind))
    assert_same(list(KJTLoader(train, 8, device="cpu")), expected)


NAN, INFINITY = float("nan"), float("inf")
WRONG = [
    *((lambda t, c=c: t.drop_columns([c]), f"{c} is missing") for c in ("label", "int_1", "cat_2")),
    (lambda t: t.rename_columns({"cat_1": "cat1"}), r"cat_1 is missing \(there is cat1\)"),
    (cast("cat_1", pa.string()), "cat_1 is string, not integer ids"),
    (cast("cat_1", pa.float32()), "cat_1 is float, not integer ids"),
    (cast("int_0", pa.string()), "int_0 is string, not numbers"),
    (cast("cat_1", pa.list_(pa.int32())), "cat_1 is list<element: int32>, not integer ids"),
    *((put(column, 90, None), f"{column} holds 1 null") for column in ("label", "int_1", "cat_2")),
    *((put("int_2", 70, value), f"int_2 holds {value}") for value in (NAN, INFINITY)),
    *((put("label", 70, value), f"label holds {value}") for value in (NAN, INFINITY)),
    *(
        (
            put("label", 70, value, kind),
            rf"label holds {value}, and labels are from 0[\s\S]*threshold",
        )
        for value, kind in [(5, None), (-1, None), (1.5, None), (3, pa.int64())]
    ),
    *(
        (put("cat_1", 70, value, kind), f"cat_1 holds id {value}, .* table of 50 rows .* group 1")
        for value, kind in [(50, None), (2**31 - 1, None), (-1, None)]
        + [(value, pa.int64()) for value in (50, 2**40, -1)]
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_file_that_is_refused(train, change, message):
    rewrite(train / "part.1.parquet", change)
    with pytest.raises(SchemaError, match=rf"part\.1\.parquet: column {message}"):
        read(train)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.truncate(path, path.stat().st_size // 2),
        lambda path: path.unlink(),
        lambda path: rewrite(path, lambda table: table.slice(0, 50)),
    ],
    ids=["cut short", "removed", "rewritten"],
)
def test_a_file_that_changes_while_it_is_read(train, change):
    loader = KJTLoader(train, 8, virtual_shards=1, device="cpu")
    change(train / "part.1.parquet")
    with pytest.raises(BadInputError, match=r"part\.1\.parquet: rewritten, cut short or removed"):
        list(loader)


def test_a_file_cut_short_after_it_was_opened(tmp_path):
    write_split(tmp_path, {"train": [60000]}, row_group_rows=60000, table_sizes=(10**6,))
    path = tmp_path / "train" / "part.0.parquet"
    dataset = read_dataset(path.parent)
    expected = np.asarray(pq.read_table(path)["cat_0"])
    (rows,) = make_cpu_decoder(dataset)(RowGroupSlice(0, 0, 60000), 1000)
    os.truncate(path, 10000)
    # a mapped file would end the process here; what is read stays whole
    found = [rows.slice(begin, begin + 1000) for begin in range(0, 60000, 1000)]
    found = [chunk.view_column(4, np.int32).copy() for part in found for chunk in part.decode()]
    assert np.array_equal(np.concatenate(found), expected)


def test_row_groups_that_changed_behind_the_loader(train, monkeypatch):
    loader = KJTLoader(train, 8, device="cpu")
    path = train / "part.0.parquet"
    size = path.stat().st_size
    table = pq.read_table(path)
    pq.write_table(table, path, row_group_size=50, compression="none", use_dictionary=False)
    with open(path, "r+b") as file:  # the same size, by bytes between pages and footer
        content = file.read()
        footer = int.from_bytes(content[-8:-4], "little") + 8
        file.seek(0)
        file.write(content[:4] + bytes(size - footer - 4) + content[-footer:])
        file.truncate(size)
    with pytest.raises(BadInputError, match=r"row group 0 no longer has 64 rows"):
        list(loader)


def test_an_error_ends_the_epoch_and_stays(train):
    rewrite(train / "part.1.parquet", put("cat_1", 99, 50))
    loader = KJTLoader(train, 8, virtual_shards=1, device="cpu")
    iterator = iter(loader)
    with pytest.raises(SchemaError) as first:
        list(iterator)
    with pytest.raises(SchemaError) as second:
        next(iterator)
    assert second.value is first.value
