"""Tables of many rows and columns: what they take in memory, and their order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.clicklog.readers.days import find_days
from nvt_torchrec.etl.tables.table_writer import store_table, to_arrays
from nvt_torchrec.formats.feature_spec import CategoricalColumn
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.workflows.stored_table import StoredTable
from tests.shell import python

_SPEC = """
[input]
format = "csv"
[label]
name = "y"
[[table]]
name = "items"
path = "items.parquet"
key = "item"
[[dense]]
names = [{names}]
raw = "float"
table = "items"
[[categorical]]
names = "item"
raw = "int"
"""
_STORE = """
import resource, sys
from pathlib import Path
from tests.etl.test_large_tables import store
store(Path(sys.argv[1]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


def write_table(directory: Path, rows: int, columns: int) -> np.ndarray:
    """Write a spec and its table, with keys in random order; return the keys."""
    directory.mkdir()
    names = [f"d{j}" for j in range(columns)]
    listed = ", ".join(f'"{name}"' for name in names)
    (directory / "spec.toml").write_text(_SPEC.format(names=listed))
    keys = np.random.default_rng(0).permutation(rows)
    values = {"item": keys}
    for j, name in enumerate(names):
        values[name] = (keys + j).astype(np.float64)
    pq.write_table(pa.table(values), directory / "items.parquet", row_group_size=10_000)
    return keys


def store(directory: Path) -> StoredTable:
    spec = load_spec(directory / "spec.toml")
    files = find_days(str(directory / "items.parquet"))
    store_table(spec.tables[0], spec, files, directory / "stored")
    return StoredTable(directory / "stored", spec, "items")


def test_memory_does_not_grow_with_the_columns(tmp_path: Path) -> None:
    """28 more columns of 1,000,000 rows are 224 MB, and copies of them would be twice that."""
    peaks = {}
    for columns in (2, 30):
        directory = tmp_path / str(columns)
        write_table(directory, 1_000_000, columns)
        done = python("-c", _STORE, directory)
        assert done.returncode == 0, done.stderr
        peaks[columns] = int(done.stdout)
    assert peaks[30] < peaks[2] + 224, peaks


#: Prints the peak in KiB; that of getrusage would be one of this process, too.
_STORE_VECTORS = """
import re, sys
from pathlib import Path
from tests.etl.test_large_tables import store
store(Path(sys.argv[1]))
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""
_VECTORS = """
input = {{format = "csv"}}
label = {{name = "y"}}
table = [{{name = "items", path = "items.parquet", key = "item"}}]
vector = [{{name = "text", table = "items", width = {width}}}]
[[categorical]]
names = "item"
raw = "int"
"""


def test_memory_does_not_grow_with_the_width_of_vectors(tmp_path: Path) -> None:
    """250,000 vectors of 256 numbers, in one group of rows, are 256 MB."""
    peaks = {}
    for width in (2, 256):
        directory = tmp_path / str(width)
        directory.mkdir()
        (directory / "spec.toml").write_text(_VECTORS.format(width=width))
        values = np.random.default_rng(0).random(250_000 * width, np.float32)
        lists = pa.FixedSizeListArray.from_arrays(pa.array(values), width)
        table = pa.table({"item": np.arange(250_000), "text": lists})
        pq.write_table(table, directory / "items.parquet")
        done = python("-c", _STORE_VECTORS, directory)
        assert done.returncode == 0, done.stderr
        peaks[width] = int(done.stdout) >> 10
        stored = np.load(directory / "stored/vectors/text/0/values.npy", mmap_mode="r")
        np.testing.assert_array_equal(stored, values.reshape(-1, width))
    assert peaks[256] < peaks[2] + 128, peaks


def test_many_keys_are_found_as_few_are(tmp_path: Path) -> None:
    """Many are looked for in small buckets of the table."""
    keys = write_table(tmp_path / "table", 20_000, 1)
    table = store(tmp_path / "table")
    asked = np.concatenate([table.keys, table.keys + 1, [0]])
    found = table.find(asked)
    few = [table.find(part) for part in np.array_split(asked, 100)]
    np.testing.assert_array_equal(found, np.concatenate(few))
    np.testing.assert_array_equal(found[: len(keys)], np.arange(len(keys)))
    values, missing = table.take("d0", found[: len(keys)])
    assert not missing.any()
    np.testing.assert_array_equal(np.sort(np.asarray(values)), np.arange(len(keys)))


@pytest.mark.parametrize("raw", ["hex32", "int", "bool"])
@pytest.mark.parametrize("rows", [0, 1, 500])
def test_numbers_have_codes_of_their_sorted_values(raw: str, rows: int) -> None:
    dtype = RAW_TYPES[raw].dtype
    values = np.random.default_rng(rows).integers(0, 90, rows).astype(dtype)
    missing = np.zeros(rows, np.bool_)
    arrays = to_arrays(CategoricalColumn("c", raw=raw), values, missing)
    distinct, codes = np.unique(values, return_inverse=True)
    np.testing.assert_array_equal(arrays["values"], distinct)
    np.testing.assert_array_equal(arrays["codes"], codes)
    assert arrays["values"].dtype == values.dtype
    assert arrays["codes"].dtype == np.int32
