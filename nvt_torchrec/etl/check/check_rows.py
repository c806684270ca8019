"""Checks that read all rows: page checksums, history pointers, and vectors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import to_numpy
from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.etl.check.check_files import RESTORE, Output
from nvt_torchrec.formats.histories import HistoryStore, StoredHistory
from nvt_torchrec.formats.manifest import PartFile
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.vectors import NO_VECTOR, VECTORS, VectorStore

_BATCH_ROWS = 1 << 16
#: Values of vectors to read at once.
_BATCH_VALUES = 1 << 20


def read_parts(
    output: Output, *, workers: int, report: Callable[[int, int], object] | None = None
) -> None:
    """Read all parts of an output, and add what is wrong to its findings.

    Args:
        output: The output, whose files were checked.
        workers: Number of reading threads.
        report: Called with the rows read since the last call, and the rows of all parts.
    """
    total = sum(part.rows for part in output.parts)
    events = _count_events(output)
    vectors = _count_vectors(output)

    def read(part: PartFile) -> int:
        return _read_part(output, part, events, vectors)

    with ThreadPoolExecutor(workers, "check") as pool:
        for rows in pool.map(read, output.parts):
            if report:
                report(rows, total)


def _count_events(output: Output) -> list[tuple[StoredHistory, np.ndarray]]:
    """Check the ids of history events; return, for each history, the number of events by key."""
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
                        output.add("histories", part.directory / f"{name}.npy", what, RESTORE)
            events = [np.diff(part.offsets) for part in store.parts]
            counts.append((history, np.concatenate(events)))
    except ClickLogError as error:
        output.add("schema", root, error.what, error.remedy)
    return counts


def _count_vectors(output: Output) -> dict[str, int]:
    """Check the values of vectors; return the number of vectors by the name of their pointers."""
    counts: dict[str, int] = {}
    root = output.paths.splits / VECTORS
    try:
        vectors = TableSchema.read(output.paths.splits).vectors
    except ClickLogError:  # reported by _count_events
        return counts
    try:
        for vector in vectors:
            store = VectorStore(root, vector)
            counts[vector.pointer] = store.count
            block = max(1, _BATCH_VALUES // vector.width)
            for first in range(0, store.count, block):
                numbers = np.arange(first, min(first + block, store.count), dtype=np.int32)
                if not np.isfinite(store.take_values(numbers)).all():
                    output.add("vectors", store.root, "a value that is not finite", RESTORE)
                    break
    except ClickLogError as error:
        output.add("vectors", root, error.what, error.remedy)
    return counts


def _read_part(
    output: Output,
    part: PartFile,
    events: list[tuple[StoredHistory, np.ndarray]],
    vectors: dict[str, int],
) -> int:
    """Read a part and check its pointers; return the number of its rows."""
    path = output.paths.splits / part.file
    row = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as parquet:
            for batch in parquet.iter_batches(_BATCH_ROWS, use_threads=False):
                for history, counts in events:
                    _check_history_pointers(output, part.file, row, batch, history, counts)
                for name, count in vectors.items():
                    _check_vector_pointers(output, part.file, row, batch, name, count)
                row += len(batch)
    except (OSError, pa.ArrowException) as error:
        output.add("data", part.file, f"cannot be read: {error}", RESTORE)
    return part.rows


def _check_history_pointers(
    output: Output,
    file: str,
    first: int,
    batch: pa.RecordBatch,
    history: StoredHistory,
    counts: np.ndarray,
) -> None:
    """Check that the pointers of rows lead to existing events.

    Args:
        output: The output.
        file: The name of the part.
        first: The row number of the batch's first row.
        batch: Rows of the part.
        history: The history.
        counts: int64 [keys], the number of stored events of each key.
    """
    key_name, count_name = history.pointers
    keys = to_numpy(batch.column(key_name))
    num_events = to_numpy(batch.column(count_name))
    is_known = (keys >= 0) & (keys < len(counts))
    max_events = np.zeros(len(keys), np.int64)
    max_events[is_known] = counts[keys[is_known]]
    wrong = (num_events < 0) | (num_events > max_events) | (~is_known & (keys != -1))
    if wrong.any():
        row = int(wrong.argmax())
        what = f"{num_events[row]} events of key {keys[row]}, which has only {max_events[row]}"
        output.add("histories", f"{file}: row {first + row}, {history.pointers[1]}", what, RESTORE)


def _check_vector_pointers(
    output: Output, file: str, first: int, batch: pa.RecordBatch, name: str, count: int
) -> None:
    """Check that the pointers of a column lead to one of ``count`` vectors, or are -1."""
    pointers = to_numpy(batch.column(name))
    wrong = (pointers < NO_VECTOR) | (pointers >= count)
    if wrong.any():
        row = int(wrong.argmax())
        what = f"vector {pointers[row]}, but only {count} vectors exist"
        output.add("vectors", f"{file}: row {first + row}, {name}", what, RESTORE)
