"""The interface of a source of rows, and its implementation for Arrow tables."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

#: The number of rows of a table's row groups. Row groups are views of the table, so small ones cost
#: little, and they shuffle well.
ROW_GROUP_ROWS = 16384


@runtime_checkable
class Source(Protocol):
    """Rows in row groups, for ``KJTLoader(source, batch_size, schema=TableSchema(…))``.

    Any object with these four members is a source. The row counts determine which rows form which
    batch, and are part of the loader's state. Values are converted and checked like those of files.
    Many row groups of some ten thousand rows shuffle well and decode fast.
    """

    @property
    def name(self) -> str:
        """The name of the data in error messages."""

    @property
    def row_counts(self) -> Sequence[int]:
        """The number of rows of each row group."""

    @property
    def fingerprint(self) -> Any:
        """Return a JSON value that changes with the rows.

        A loader state is only loaded if the fingerprint of the data is the same as when it was
        saved.
        """

    def read(self, row_group: int, columns: list[str], rows: int) -> Iterable[pa.RecordBatch]:
        """Return the rows of a row group, the same rows in the same order on every call.

        Several threads call it at the same time, in any order, and more than once for some row
        groups.

        Args:
            row_group: The index of the row group, from 0.
            columns: The needed columns; additional columns are ignored.
            rows: The maximum number of rows of a record batch. Larger batches take more memory than
                the loader plans for.
        """


class TableSource:
    """The rows of an Arrow table, for example from a frame, a Hugging Face dataset or Feather file.

    The table is in memory or mapped from a file. Nothing is copied.
    """

    def __init__(self, table: pa.Table) -> None:
        firsts = range(0, table.num_rows, ROW_GROUP_ROWS)
        self._parts = [table.slice(first, ROW_GROUP_ROWS) for first in firsts]
        self.name = f"a table of {table.num_rows} rows"
        self.row_counts = [part.num_rows for part in self._parts]

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of all values, which does not depend on how the table is chunked."""
        digest = hashlib.sha256()
        for part in self._parts:
            for batch in part.combine_chunks().to_batches():
                digest.update(batch.serialize())
        return digest.hexdigest()

    def read(self, row_group: int, _columns: list[str], rows: int) -> Iterable[pa.RecordBatch]:
        """Return the rows of a row group."""
        return self._parts[row_group].to_batches(max_chunksize=rows)
