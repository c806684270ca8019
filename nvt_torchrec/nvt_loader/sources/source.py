"""What a loader asks of the object that its rows come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa


@runtime_checkable
class Source(Protocol):
    """Rows in row groups: ``KJTLoader(source, batch_size, schema=TableSchema(…))``.

    Any object with these four members is a source. Which rows make which batch, the state and
    resuming follow from the row counts; values are converted and checked as those of files are.
    Some ten thousand rows in a row group, and many row groups, shuffle well and decode fast.
    """

    @property
    def name(self) -> str:
        """What errors call the data."""

    @property
    def row_counts(self) -> Sequence[int]:
        """The number of rows of each row group."""

    @property
    def fingerprint(self) -> Any:
        """A value for JSON that is another one when the rows are: states are loaded on the same."""

    def read(self, row_group: int, columns: list[str], rows: int) -> Iterable[pa.RecordBatch]:
        """Return the rows of a row group, each time the same in the same order.

        Several threads call it at once, in any order, for some row groups several times.

        Args:
            row_group: The number of the row group, from 0.
            columns: The columns that are needed; others are ignored.
            rows: The rows of a record batch, at most: more than that takes more memory.
        """
