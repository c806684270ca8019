"""The interface of a source of rows, and the source of an Arrow table's rows."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

#: Rows of a table's row groups. They are views of the table, so small ones cost little and shuffle
#: well.
ROW_GROUP_ROWS = 16384


@runtime_checkable
class Source(Protocol):
    """Rows in row groups: ``KJTLoader(source, batch_size, schema=TableSchema(…))``.

    Any object with these four members is a source. The row counts determine which rows make which
    batch, the state and resuming; values are converted and checked as those of files are. Many row
    groups of some ten thousand rows shuffle well and decode fast.
    """

    @property
    def name(self) -> str:
        """The name of the data in errors."""

    @property
    def row_counts(self) -> Sequence[int]:
        """The number of rows of each row group."""

    @property
    def fingerprint(self) -> Any:
        """Return a value for JSON that changes with the rows; states are loaded on the same."""

    def read(self, row_group: int, columns: list[str], rows: int) -> Iterable[pa.RecordBatch]:
        """Return the rows of a row group, each time the same in the same order.

        Several threads call it at once, in any order, for some row groups several times.

        Args:
            row_group: The number of the row group, from 0.
            columns: The columns that are needed; others are ignored.
            rows: The largest number of rows of a record batch. Larger batches take more memory than
                the loader plans for.
        """


class TableSource:
    """The rows of an Arrow table (of a frame, a Hugging Face dataset, a Feather file).

    It is in memory or mapped from a file; nothing is copied.
    """

    def __init__(self, table: pa.Table) -> None:
        firsts = range(0, table.num_rows, ROW_GROUP_ROWS)
        self._parts = [table.slice(first, ROW_GROUP_ROWS) for first in firsts]
        self.name = f"a table of {table.num_rows} rows"
        self.row_counts = [part.num_rows for part in self._parts]

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of all values, whatever the table's chunks."""
        digest = hashlib.sha256()
        for part in self._parts:
            for batch in part.combine_chunks().to_batches():
                digest.update(batch.serialize())
        return digest.hexdigest()

    def read(self, row_group: int, _columns: list[str], rows: int) -> Iterable[pa.RecordBatch]:
        """Return the rows of a row group."""
        return self._parts[row_group].to_batches(max_chunksize=rows)
