"""Make the data of the benchmarks of loader and training, in the format of the ETL's output."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from nvt_torchrec.etl.units.part_files import PartWriter
from nvt_torchrec.formats.histories import StoredHistory, write_history
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.vectors import VECTORS, StoredVectors, write_vectors

log = logging.getLogger("benchmarks")

#: The rows of each of 26 embedding tables: the table sizes of a day of Criteo's log, capped.
TABLE_SIZES = (
    *(300000, 40000, 17000, 7000, 20000, 6, 7000, 1500, 66, 300000, 250000, 100000, 13),
    *(2200, 11000, 156, 7, 970, 18, 300000, 300000, 300000, 280000, 12000, 108, 39),
)
#: The number of dense columns.
DENSE = 13
FILE_ROWS = 1_000_000
#: Smaller row groups than the ETL writes: 44 in 4 M rows.
ROW_GROUP_ROWS = 91_000
#: The number of keys of a history.
KEYS = 100_000
#: The number of vectors in each store.
NUM_VECTORS = 100_000
#: The most events of a key; the average is half of it.
MAX_EVENTS = 200
#: TorchRec's binary layout has an array [rows, columns] for each kind of column.
NPY_KINDS = ("dense", "sparse", "labels")


def make_once(root: Path, contents: str, make: Callable[[], object]) -> None:
    """Empty a directory and call ``make`` to fill it, unless it already has the same contents.

    Args:
        root: The directory.
        contents: A description of the contents, which is recorded in the directory.
        make: Writes the contents.
    """
    done = root / "done"
    if done.is_file() and done.read_text() == contents:
        return
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    log.info("making %s in %s", contents, root)
    make()
    done.write_text(contents)


def make_criteo_schema(
    sizes: Sequence[int] = TABLE_SIZES,
    multi_hot: Sequence[str] = (),
    histories: Sequence[StoredHistory] = (),
    vectors: Sequence[StoredVectors] = (),
) -> TableSchema:
    """Make a schema of Criteo's columns with tables of the given sizes."""
    dense = tuple(f"int_{i}" for i in range(DENSE))
    categorical = tuple(f"cat_{i}" for i in range(len(sizes)))
    return TableSchema(
        labels=("label",),
        dense=dense,
        categorical=categorical,
        table_sizes=tuple(sizes),
        multi_hot=tuple(multi_hot),
        histories=tuple(histories),
        vectors=tuple(vectors),
    )


def write_rows(
    directory: Path,
    schema: TableSchema,
    rows: int,
    *,
    npy: Path | None = None,
    seed: int = 0,
    file_rows: int = FILE_ROWS,
) -> list[Path]:
    """Write random rows as one split of an ETL's output; return the files.

    Args:
        directory: The directory of the split.
        schema: The columns, histories and vectors.
        rows: The number of rows.
        npy: A directory for the same rows in the layout of TorchRec's scripts: ``N_dense.npy``,
            ``N_sparse.npy`` and ``N_labels.npy`` for file N.
        seed: The seed of the first file.
        file_rows: The most rows in a file.
    """
    directory.mkdir(parents=True)
    schema.write(directory)
    rng = np.random.default_rng(seed)
    for history in schema.histories:
        counts = rng.integers(MAX_EVENTS + 1, size=KEYS)
        ids = {}
        for name in history.columns:
            size = schema.table_sizes[schema.categorical.index(name)]
            ids[name] = _draw_ids(rng, int(counts.sum()), size)
        with write_history(directory.parent, history, 0) as writer:
            writer.add(counts, ids)
    for vector in schema.vectors:
        with write_vectors(directory.parent / VECTORS, vector, 0) as vectors:
            vectors.append(rng.standard_normal((NUM_VECTORS, vector.width), np.float32))
    files = []
    for number, first in enumerate(range(0, rows, file_rows)):
        table = _draw_rows(schema, min(file_rows, rows - first), seed + number)
        files.append(directory / f"part.{number}.parquet")
        with PartWriter(files[-1], ROW_GROUP_ROWS) as part:
            part.write(table)
        if npy:
            npy.mkdir(parents=True, exist_ok=True)
            names = (schema.dense, schema.categorical, (schema.label,))
            for kind, columns in zip(NPY_KINDS, names, strict=True):
                array = np.stack([np.asarray(table[name]) for name in columns], axis=1)
                array = array.astype(np.float32 if kind == "dense" else np.int32)
                np.save(npy / f"{number}_{kind}.npy", array)
    return files


def list_npy_files(directory: Path) -> list[list[str]]:
    """List the files of each kind of :data:`NPY_KINDS`, in the order of their rows."""
    count = len(list(directory.glob("*_dense.npy")))
    files = []
    for kind in NPY_KINDS:
        files.append([str(directory / f"{i}_{kind}.npy") for i in range(count)])
    return files


def _draw_rows(schema: TableSchema, rows: int, seed: int) -> pa.Table:
    """Draw labels, dense values and ids like those of a click log after the ETL."""
    rng = np.random.default_rng(seed)
    columns: dict[str, object] = {"label": (rng.random(rows) < 0.03).astype(np.float32)}
    for name in schema.dense:  # counts, as the ETL normalizes them
        columns[name] = ((np.log(rng.geometric(0.02, rows) + 3) - 3) / 1.3).astype(np.float32)
    for name, size in zip(schema.categorical, schema.table_sizes, strict=True):
        if name in schema.multi_hot:
            offsets = np.append(0, np.cumsum(rng.integers(0, 11, rows))).astype(np.int32)
            ids = pa.array(_draw_ids(rng, int(offsets[-1]), size))
            kind = pa.list_(pa.field("item", pa.int32(), nullable=False))
            columns[name] = pa.ListArray.from_arrays(offsets, ids, kind)
        else:
            columns[name] = _draw_ids(rng, rows, size)
    for history in schema.histories:
        # Draw the same counts as write_rows. Each row points to a prefix of its key's events.
        counts = np.random.default_rng(0).integers(MAX_EVENTS + 1, size=KEYS)
        keys = rng.integers(KEYS, size=rows)
        events = rng.integers(counts[keys] + 1)
        key_name, events_name = history.pointers
        columns[key_name] = keys.astype(np.int32)
        columns[events_name] = events.astype(np.int32)
    for vector in schema.vectors:
        columns[vector.pointer] = rng.integers(NUM_VECTORS, size=rows).astype(np.int32)
    table = pa.table(columns)
    fields = [pa.field(field.name, field.type, nullable=False) for field in table.schema]
    return table.cast(pa.schema(fields))


def _draw_ids(rng: np.random.Generator, rows: int, size: int) -> np.ndarray:
    """Draw int32 ids; small ids are frequent, as in a vocabulary sorted by falling frequency."""
    ids = np.minimum(3 + (rng.zipf(1.2, rows) - 1) % max(size - 3, 1), size - 1)
    return ids.astype(np.int32)
