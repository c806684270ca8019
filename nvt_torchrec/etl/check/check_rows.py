"""Checks that read all rows: page checksums, and pointers of histories."""

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

_BATCH_ROWS = 1 << 16


def read_parts(
    output: Output, *, workers: int, report: Callable[[int, int], object] | None = None
) -> None:
    """Read all parts that are there; see :func:`etl.commands.check.check` for the arguments."""
    total, events = sum(part.rows for part in output.parts), _count_events(output)
    with ThreadPoolExecutor(workers, "check") as pool:
        for rows in pool.map(lambda part: _read(output, part, events), output.parts):
            if report:
                report(rows, total)


def _count_events(output: Output) -> list[tuple[StoredHistory, np.ndarray]]:
    """Return how many events each key of each history has; check the ids of the events."""
    root, counts = output.paths.splits, []
    try:
        schema = TableSchema.read(root)
        for history in schema.histories:
            sizes = [schema.table_sizes[schema.categorical.index(name)] for name in history.columns]
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


def _read(output: Output, part: PartFile, events: list[tuple[StoredHistory, np.ndarray]]) -> int:
    """Read a part; return its rows."""
    path, row = output.paths.splits / part.file, 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as parquet:
            for batch in parquet.iter_batches(_BATCH_ROWS, use_threads=False):
                for history, counts in events:
                    _check_pointers(output, part.file, row, batch, history, counts)
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
    key, events = (to_numpy(batch.column(name)) for name in history.pointers)
    there = (key >= 0) & (key < len(counts))
    maximum = np.where(there, counts[np.where(there, key, 0)] if len(counts) else 0, 0)
    wrong = (events < 0) | (events > maximum) | (~there & (key != -1))
    if wrong.any():
        row = int(wrong.argmax())
        what = f"{events[row]} events of key {key[row]}, which has {maximum[row]}"
        output.add("histories", f"{file}: row {first + row}, {history.pointers[1]}", what, AGAIN)
