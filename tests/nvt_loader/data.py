"""Small parquet splits as DESIGN.md's contract on disk has them, for tests of every room."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.formats.histories import StoredHistory, write_history
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.formats.vectors import VECTORS, StoredVectors, write_vectors

#: Step of the row numbers in dense column 0: small, so that models train on it undisturbed, and a
#: power of two, so that float32 holds row numbers below 2**24 exactly.
ROW_STEP = 2.0**-20

#: As the ETL writes.
WRITER = {"compression": "none", "use_dictionary": True, "write_page_checksum": True}


def without_nulls(columns: dict | pa.Table) -> pa.Table:
    """A table whose schema says, as that of the ETL's, that no value is missing."""
    table = pa.table(columns)
    return table.cast(pa.schema([field.with_nullable(False) for field in table.schema]))


def row_numbers(dense) -> np.ndarray:
    """The row numbers (int64) of rows with these dense features (array or tensor [rows, dense])."""
    return np.rint(np.asarray(dense)[:, 0].astype(np.float64) / ROW_STEP).astype(np.int64)


def make_columns(
    first_row: int, rows: int, *, table_sizes: tuple[int, ...], dense: int, seed: int
) -> dict[str, np.ndarray]:
    """Rows ``first_row …`` as columns. A click depends on the dense features and on the ids."""
    effects = [
        np.random.default_rng([seed, 1, i]).normal(size=n) for i, n in enumerate(table_sizes)
    ]
    rng = np.random.default_rng([seed, 0, first_row])
    ids = [rng.integers(min(1, n - 1), n, rows, dtype=np.int32) for n in table_sizes]
    counts = rng.normal(size=(dense, rows)).astype(np.float32)
    score = counts[1:].sum(axis=0) * 0.5 - 1.0
    for effect, column in zip(effects, ids, strict=True):
        score = score + effect[column]
    counts[:1] = np.arange(first_row, first_row + rows) * ROW_STEP
    label = (rng.random(rows) < 1 / (1 + np.exp(-score))).astype(np.float32)
    columns = {"label": label}
    columns |= {f"int_{i}": column for i, column in enumerate(counts)}
    columns |= {f"cat_{i}": column for i, column in enumerate(ids)}
    return columns


def make_lists(
    columns: dict[str, np.ndarray], names: tuple[str, ...], *, seed: int
) -> dict[str, pa.Array]:
    """Columns as lists of 0 to 4 ids, their rows' ids among them."""
    lists = {}
    for i, name in enumerate(names):
        rng = np.random.default_rng([seed, i])
        offsets = np.append(0, np.cumsum(rng.integers(0, 5, len(columns[name])))).astype(np.int32)
        ids = rng.choice(columns[name], offsets[-1]) if len(columns[name]) else columns[name]
        lists[name] = pa.ListArray.from_arrays(offsets, pa.array(ids, pa.int32()))
    return lists


def write_metadata(root: Path) -> None:
    """Write ``_metadata`` of each split in ``root`` and one over all of them."""
    splits = {split: _parts(root / split) for split in SPLITS if _parts(root / split)}
    for split, paths in splits.items():
        _write_collected(root / split, paths)
    _write_collected(root, [path for paths in splits.values() for path in paths])


def _parts(directory: Path) -> list[Path]:
    return sorted(directory.glob("part.*.parquet"), key=lambda path: int(path.name.split(".")[1]))


def _write_collected(directory: Path, paths: list[Path]) -> None:
    footers = [pq.read_metadata(path) for path in paths]
    for footer, path in zip(footers, paths, strict=True):
        footer.set_file_path(str(path.relative_to(directory)))
    pq.write_metadata(pq.read_schema(paths[0]), directory / "_metadata", footers)


def write_split(
    root: Path,
    files: dict[str, list[int]],
    *,
    table_sizes: tuple[int, ...] = (10, 50, 200),
    dense: int = 3,
    row_group_rows: int = 64,
    seed: int = 0,
    multi_hot: tuple[str, ...] = (),
    vocabularies: tuple[str, ...] = (),
) -> TableSchema:
    """Write ``root/{split}/part.N.parquet``, ``_metadata`` and ``.merlin/schema.json``.

    Args:
        root: as ``OUT/criteo_binary/split``.
        files: per split (train, valid, test) the rows of each of its files; 0 is an empty file.
        table_sizes: of the categorical columns; ids 1 … size-1 occur.
        dense: number of dense columns; the first one is the row number (see :func:`row_numbers`),
            counted through the splits in the order train, valid, test.
        row_group_rows: rows of a row group, at most.
        seed: of the features and labels.
        multi_hot: categorical columns that become lists of 0 to 4 ids.
        vocabularies: as in the schema.
    """
    schema = TableSchema(
        labels="label",
        dense=tuple(f"int_{i}" for i in range(dense)),
        categorical=tuple(f"cat_{i}" for i in range(len(table_sizes))),
        table_sizes=tuple(table_sizes),
        multi_hot=multi_hot,
        vocabularies=vocabularies,
    )
    first_row = 0
    for split in SPLITS:
        if split not in files:
            continue
        (root / split).mkdir(parents=True, exist_ok=True)
        for number, rows in enumerate(files[split]):
            columns = make_columns(
                first_row, rows, table_sizes=schema.table_sizes, dense=dense, seed=seed
            )
            columns |= make_lists(columns, multi_hot, seed=seed + first_row)
            first_row += rows
            path = root / split / f"part.{number}.parquet"
            table = without_nulls(columns)
            pq.write_table(table, path, row_group_size=row_group_rows, **WRITER)
        schema.write(root / split)
    schema.write(root)
    write_metadata(root)
    return schema


def add_history(
    root: Path,
    schema: TableSchema,
    history: StoredHistory,
    *,
    keys: int,
    click: Callable[[list[tuple[int, ...]]], float] | None = None,
) -> TableSchema:
    """Give the rows of :func:`write_split` a history, of which each row is an event afterwards.

    The key of a row is random, and none in a tenth of them; the last third of the keys lies in a
    directory of its own, as after a day was added. ``click`` gives the probability of a click after
    the events of the history, by which rows get a label anew.
    """
    rng, past = np.random.default_rng(7), [[] for _ in range(keys)]
    for path in [path for split in SPLITS for path in _parts(root / split)]:
        table = pq.read_table(path)
        chosen = rng.integers(0, keys, table.num_rows)
        chosen[rng.random(table.num_rows) < 0.1] = -1
        events = np.zeros(table.num_rows, np.int32)
        labels = np.array(table["label"]).copy()
        for row, ids in enumerate(
            zip(*(table[c].to_pylist() for c in history.columns), strict=True)
        ):
            own = past[chosen[row]] if chosen[row] >= 0 else []
            if click:
                labels[row] = rng.random() < click(own)
            if chosen[row] >= 0:
                events[row] = len(own)
                own.append(ids)
        table = table.set_column(0, "label", pa.array(labels))
        for name, values in zip(history.pointers, (chosen.astype(np.int32), events), strict=True):
            table = table.append_column(name, pa.array(values))
        pq.write_table(without_nulls(table), path, row_group_size=64, **WRITER)
    for first, end in ((0, keys * 2 // 3), (keys * 2 // 3, keys)):
        with write_history(root, history, first) as writer:
            for of_key in past[first:end]:
                ids = np.array(of_key, np.int32).reshape(-1, len(history.columns)).T
                writer.add([len(of_key)], dict(zip(history.columns, ids, strict=True)))
    schema = dataclasses.replace(schema, histories=(*schema.histories, history))
    for directory in (root, *(root / split for split in SPLITS if (root / split).is_dir())):
        schema.write(directory)
    write_metadata(root)
    return schema


def add_vector(
    root: Path,
    schema: TableSchema,
    vectors: StoredVectors,
    *,
    keys: int,
    seed: int = 0,
    offset: float = 0.0,
    scale: float = 1.0,
    click: Callable[[np.ndarray], np.ndarray] | None = None,
) -> TableSchema:
    """Give the rows of :func:`write_split` a vector, of which there are ``keys``.

    The number of a row is random, and none in a tenth of them; the last third of the vectors lies
    in a directory of its own, as after a day was added. Values are ``offset + scale`` times those
    of a normal distribution. ``click`` gives the probabilities of a click after these, [rows,
    width] (zeros for none), by which rows get labels anew.
    """
    rng = np.random.default_rng([seed, 11])
    drawn = rng.normal(size=(keys, vectors.width))
    for path in [path for split in SPLITS for path in _parts(root / split)]:
        table = pq.read_table(path)
        numbers = rng.integers(0, keys, table.num_rows).astype(np.int32)
        numbers[rng.random(table.num_rows) < 0.1] = -1
        if click:
            seen = np.where(numbers[:, None] < 0, 0, drawn[numbers])
            labels = (rng.random(table.num_rows) < click(seen)).astype(np.float32)
            table = table.set_column(0, "label", pa.array(labels))
        table = table.append_column(vectors.pointer, pa.array(numbers))
        pq.write_table(without_nulls(table), path, row_group_size=64, **WRITER)
    for first, end in ((0, keys * 2 // 3), (keys * 2 // 3, keys)):
        with write_vectors(root / VECTORS, vectors, first) as writer:
            writer.append(offset + scale * drawn[first:end])
    schema = dataclasses.replace(schema, vectors=(*schema.vectors, vectors))
    for directory in (root, *(root / split for split in SPLITS if (root / split).is_dir())):
        schema.write(directory)
    write_metadata(root)
    return schema
