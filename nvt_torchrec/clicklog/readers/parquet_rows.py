"""The parquet format."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import to_arrow
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.remote import open_input
from nvt_torchrec.base.parquet.footer import DECOMPRESSED, Footer, list_leaf_columns, parse_footer
from nvt_torchrec.clicklog.readers.lines import PARQUET_MAGIC
from nvt_torchrec.clicklog.readers.log_format import UnparsedRows
from nvt_torchrec.clicklog.readers.table_rows import (
    Rows,
    Table,
    TableFormat,
    check_columns,
    table_to_rows,
)
from nvt_torchrec.formats.rows import RawRows

#: The bytes of a column that are read at once if row groups are too large to hold in memory.
_PAGE_BYTES = 1 << 20
#: The size of a vector's number after parsing, in bytes.
_VALUE_BYTES = 8


class _ParquetTable(Table):
    """An open parquet file."""

    def __init__(self, file: pq.ParquetFile, footer: Footer) -> None:
        self._file = file
        self._footer = footer
        self.schema = file.schema_arrow
        self.rows = footer.rows.tolist()

    def sizes(self, names: Sequence[str]) -> list[int]:
        """See :meth:`Table.sizes`; encoded pages may be far smaller."""
        # the size of a struct's field s.c is that of the whole struct
        columns = {name if name in self.schema.names else name.split(".")[0] for name in names}
        leaves = [i for i, name in enumerate(list_leaf_columns(self.schema)) if name in columns]
        page_bytes = self._footer.chunks[:, leaves, DECOMPRESSED].sum(axis=1).tolist()
        decoded_bytes = super().sizes(list(columns))
        return [max(sizes) for sizes in zip(page_bytes, decoded_bytes, strict=True)]

    def decode(
        self, groups: list[int], names: Sequence[str] | None, chunk_rows: int | None
    ) -> Iterator[Rows]:
        """See :meth:`Table.decode`."""
        columns = None if names is None else list(names)
        if chunk_rows is None:
            yield self._file.read_row_groups(groups, columns=columns, use_threads=False)
            return
        yield from self._file.iter_batches(
            chunk_rows, row_groups=groups, columns=columns, use_threads=False
        )


@dataclasses.dataclass(frozen=True)
class DecodedRows(UnparsedRows):
    """Rows that have been decoded but not checked.

    Attributes:
        rows: The columns of the spec.
    """

    rows: pa.Table

    def parse_all(self, *, max_bad_rows: int) -> RawRows:
        """See :meth:`UnparsedRows.parse_all`."""
        return table_to_rows(
            self.rows, self.path, self.spec, label=self.label, max_bad_rows=max_bad_rows
        )

    def names(self) -> Sequence[str]:
        """See :meth:`UnparsedRows.names`."""
        return self.rows.schema.names

    def columns(self, names: Sequence[str], lines: np.ndarray) -> dict[str, pa.ChunkedArray]:
        """See :meth:`UnparsedRows.columns`."""
        return {name: self.rows.column(name).take(to_arrow(lines)) for name in names}


class Parquet(TableFormat):
    """Parquet files."""

    @classmethod
    def recognizes(cls, path: str, head: bytes) -> bool:
        """See :meth:`LogFormat.recognizes`."""
        return head.startswith(PARQUET_MAGIC)

    @classmethod
    @contextlib.contextmanager
    def open_table(cls, path: str, source: str, *, in_pages: bool = False) -> Iterator[Table]:
        """See :meth:`TableFormat.open_table`.

        Args:
            path: The path of the file.
            source: The name of the file in errors.
            in_pages: Whether to hold only the current pages of a row group in memory.
        """
        try:
            with open_input(path) as file:
                footer = parse_footer(file)
                with pq.ParquetFile(
                    file,
                    metadata=footer.metadata,
                    pre_buffer=not in_pages,
                    buffer_size=_PAGE_BYTES if in_pages else 0,
                    page_checksum_verification=True,
                ) as parquet:
                    yield _ParquetTable(parquet, footer)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
            raise BadInputError(
                f"{source}: cannot be read as parquet: {error}",
                "fetch it again, or set its format in the spec's [input]",
            ) from error

    def stream(self, path: str, block_bytes: int) -> Iterator[UnparsedRows]:
        """See :meth:`LogFormat.stream`.

        Row groups with vectors may have gigabytes, and one that is cut into blocks would be decoded
        as a whole for each block. So rows with vectors are decoded sequentially, in small chunks.
        """
        width = sum(read.width for read in self.spec.read_plan(label=False).reads)
        if not width:
            yield from super().stream(path, block_bytes)
            return
        chunk_rows = max(1, block_bytes // (width * _VALUE_BYTES))
        first = 0
        with self.open_table(path, path, in_pages=True) as table:
            names = check_columns(table.schema, path, self.spec, label=False)
            for rows in table.read(0, sum(table.rows), names, chunk_rows):
                yield DecodedRows(self, path, first, False, pa.table(rows))
                first += rows.num_rows
        if not first:
            raise BadInputError(f"{path}: no rows", "there is nothing to read")
