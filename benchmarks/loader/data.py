"""The data of the loader's benchmark: Criteo-shaped rows, made once, in each system's format."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.formats.schema import TableSchema

log = logging.getLogger("benchmarks")

#: Rows of each 26 embedding tables: a Criteo day's, capped.
TABLE_SIZES = (
    *(300000, 40000, 17000, 7000, 20000, 6, 7000, 1500, 66, 300000, 250000, 100000, 13),
    *(2200, 11000, 156, 7, 970, 18, 300000, 300000, 300000, 280000, 12000, 108, 39),
)
DENSE, FILE_ROWS, ROW_GROUP_ROWS = 13, 1_000_000, 91_000
MULTI_HOT = ("cat_0", "cat_4", "cat_9", "cat_19")
#: As the ETL writes (etl.parquet), but for smaller row groups: 44 of them in 4 M rows.
WRITER = {
    "compression": "none",
    "use_dictionary": True,
    "dictionary_pagesize_limit": 16 << 10,
    "write_page_checksum": True,
}
#: What the data are made of; another one makes them anew.
VERSION = 2


def ensure(root: Path, rows: int) -> None:
    """Make ``root/{int32,int64,lists}/train`` and ``root/npy``, unless they are there."""
    done = root / "done"
    if done.is_file() and done.read_text() == f"{rows} {VERSION}":
        return
    shutil.rmtree(root, ignore_errors=True)
    log.info("making %d rows in %s", rows, root)
    _make(root / "int32", rows, np.int32, ())
    _make(root / "int64", rows // 2, np.int64, ())
    _make(root / "lists", rows // 2, np.int32, MULTI_HOT)
    _to_npy(root / "int32" / "train", root / "npy")
    done.write_text(f"{rows} {VERSION}")


def bytes_per_row(root: Path) -> dict[str, float]:
    """Return the bytes on disk of a row, as parquet and as TorchRec's arrays."""
    rows = sum(pq.read_metadata(file).num_rows for file in (root / "int32").rglob("*.parquet"))
    files = {
        "parquet": (root / "int32").rglob("*.parquet"),
        "torchrec npy": (root / "npy").rglob("*.npy"),
    }
    return {name: sum(file.stat().st_size for file in own) / rows for name, own in files.items()}


def _make(root: Path, rows: int, dtype: type, multi_hot: tuple[str, ...]) -> None:
    categorical = tuple(f"cat_{i}" for i in range(len(TABLE_SIZES)))
    dense = tuple(f"int_{i}" for i in range(DENSE))
    schema = TableSchema("label", dense, categorical, TABLE_SIZES, multi_hot)
    directory = root / "train"
    directory.mkdir(parents=True)
    schema.write(directory)
    for number, first in enumerate(range(0, rows, FILE_ROWS)):
        table = make_rows(schema, min(FILE_ROWS, rows - first), number, dtype)
        path = directory / f"part.{number}.parquet"
        pq.write_table(table, path, row_group_size=ROW_GROUP_ROWS, **WRITER)


def make_rows(schema: TableSchema, rows: int, seed: int, dtype: type) -> pa.Table:
    """Random rows of a schema; labels, dense values and ids as in a click log after the ETL."""
    rng = np.random.default_rng(seed)
    columns: dict[str, object] = {"label": (rng.random(rows) < 0.03).astype(np.float32)}
    for name in schema.dense:  # counts, as the ETL normalizes them
        columns[name] = ((np.log(rng.geometric(0.02, rows) + 3) - 3) / 1.3).astype(np.float32)
    for name, size in zip(schema.categorical, schema.table_sizes, strict=True):
        if name in schema.multi_hot:
            offsets = np.append(0, np.cumsum(rng.integers(0, 11, rows))).astype(np.int32)
            columns[name] = pa.ListArray.from_arrays(
                offsets, pa.array(_ids(rng, int(offsets[-1]), size).astype(dtype))
            )
        else:
            columns[name] = _ids(rng, rows, size).astype(dtype)
    table = pa.table(columns)
    fields = [pa.field(field.name, field.type, nullable=False) for field in table.schema]
    return table.cast(pa.schema(fields))


def _ids(rng: np.random.Generator, rows: int, size: int) -> np.ndarray:
    """Frequent ids are small, as in a vocabulary by falling count."""
    return np.minimum(3 + (rng.zipf(1.2, rows) - 1) % max(size - 3, 1), size - 1)


def _to_npy(directory: Path, target: Path) -> None:
    """The same rows as TorchRec's scripts lay them out: three arrays by row, for each file."""
    target.mkdir(parents=True)
    schema = TableSchema.read(directory)
    for number, path in enumerate(sorted(directory.glob("*.parquet"))):
        table = pq.read_table(path)

        def stack(names: tuple[str, ...], table: pa.Table = table) -> np.ndarray:
            return np.stack([np.asarray(table[name]) for name in names], axis=1)

        np.save(target / f"{number}_dense.npy", stack(schema.dense))
        np.save(target / f"{number}_sparse.npy", stack(schema.categorical))
        np.save(target / f"{number}_labels.npy", stack((schema.label,)).astype(np.int32))
