"""Checks that read all rows: page checksums, pointers of histories, and vectors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import to_numpy
from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.etl.check.check_files import AGAIN, Output
from nvt_torchrec.formats.histories import HistoryStore, StoredHistory
from nvt_torchrec.formats.manifest import PartFile
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.vectors import NO_VECTOR, VECTORS, VectorStore

_BATCH_ROWS = 1 << 16
#: Values of vectors that are read at once.
_BATCH_VALUES = 1 << 20


def read_parts(
    output: Output, *, workers: int, report: Callable[[int, int], object] | None = None
) -> None:
    """Read all parts that are there; see :func:`etl.commands.check.check` for the arguments."""
    total = sum(part.rows for part in output.parts)
    events = _count_events(output)
    vectors = _count_vectors(output)
    with ThreadPoolExecutor(workers, "check") as pool:
        for rows in pool.map(lambda part: _read(output, part, events, vectors), output.parts):
            if report:
                report(rows, total)


def _count_events(output: Output) -> list[tuple[StoredHistory, np.ndarray]]:
    """Return how many events each key of each history has; check the ids of the events."""
    root = output.paths.splits
    counts = []
    try:
        schema = TableSchema.read(root)
        size_by_column = dict(zip(schema.categorical, schema.table_sizes, strict=True))
        for history in schema.histories:
            sizes = [size_by_column[name] for name in history.columns]
            store = HistoryStore(root, history, sizes)
            for part in store.parts:
                for name, size, ids in zip(history.columns, sizes, part.ids, strict=True):
                    if len(ids) and not 0 <= ids.min() <= ids.max() < size:
                        what = f"an id outside of the table of {size} rows"
                        output.add("histories", part.directory / f"{name}.npy", what, AGAIN)
            events = [np.diff(part.offsets) for part in store.parts]
            counts.append((history, np.concatenate(events)))
    except ClickLogError as error:
        output.add("schema", root, error.what, error.remedy)
    return counts


def _count_vectors(output: Output) -> dict[str, int]:
    """Return how many vectors each column of their numbers may lead to; check their values."""
    counts: dict[str, int] = {}
    root = output.paths.splits / VECTORS
    try:
        vectors = TableSchema.read(output.paths.splits).vectors
    except ClickLogError:  # which was found before
        return counts
    try:
        for vector in vectors:
            store = VectorStore(root, vector)
            counts[vector.pointer] = store.count
            block = max(1, _BATCH_VALUES // vector.width)
            for first in range(0, store.count, block):
                numbers = np.arange(first, min(first + block, store.count), dtype=np.int32)
                if not np.isfinite(store.take_values(numbers)).all():
                    output.add("vectors", store.root, "a value that is not finite", AGAIN)
                    break
    except ClickLogError as error:
        output.add("vectors", root, error.what, error.remedy)
    return counts


def _read(
    output: Output,
    part: PartFile,
    events: list[tuple[StoredHistory, np.ndarray]],
    vectors: dict[str, int],
) -> int:
    """Read a part; return its rows."""
    path, row = output.paths.splits / part.file, 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as parquet:
            for batch in parquet.iter_batches(_BATCH_ROWS, use_threads=False):
                for history, counts in events:
                    _check_pointers(output, part.file, row, batch, history, counts)
                for name, count in vectors.items():
                    _check_numbers(output, part.file, row, batch, name, count)
                row += len(batch)
    except (OSError, pa.ArrowException) as error:
        output.add("data", part.file, f"cannot be read: {error}", AGAIN)
    return part.rows


def _check_pointers(
    output: Output,
    file: str,
    first: int,
    batch: pa.RecordBatch,
    history: StoredHistory,
    counts: np.ndarray,
) -> None:
    """Check that the pointers of rows lead to events that there are."""
    keys, num_events = (to_numpy(batch.column(name)) for name in history.pointers)
    is_known = (keys >= 0) & (keys < len(counts))
    max_events = np.zeros(len(keys), np.int64)
    max_events[is_known] = counts[keys[is_known]]
    wrong = (num_events < 0) | (num_events > max_events) | (~is_known & (keys != -1))
    if wrong.any():
        row = int(wrong.argmax())
        what = f"{num_events[row]} events of key {keys[row]}, which has {max_events[row]}"
        output.add("histories", f"{file}: row {first + row}, {history.pointers[1]}", what, AGAIN)


def _check_numbers(
    output: Output, file: str, first: int, batch: pa.RecordBatch, name: str, count: int
) -> None:
    """Check that a column has numbers of vectors that there are, or -1."""
    numbers = to_numpy(batch.column(name))
    wrong = (numbers < NO_VECTOR) | (numbers >= count)
    if wrong.any():
        row = int(wrong.argmax())
        what = f"vector {numbers[row]}, of which there are {count}"
        output.add("vectors", f"{file}: row {first + row}, {name}", what, AGAIN)
