"""Rows of an Arrow table: pandas and Polars frames, Hugging Face datasets and Feather files."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable

import pyarrow as pa

#: Rows of a row group. They are views of the table, so that small ones cost little.
ROW_GROUP_ROWS = 16384


class TableSource:
    """The rows of a table, which is in memory or mapped from a file; nothing is copied."""

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
