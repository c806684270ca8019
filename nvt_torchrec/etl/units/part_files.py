"""Write the parquet that the trainer reads, the same for all engines.

Row groups have 128 Ki rows. Columns with few values are dictionary encoded, others plain; nothing
is compressed. The files are larger than with Snappy and dictionaries everywhere, but they are
written and decoded faster: Snappy saves little on dictionary indices, which are bit-packed, and
makes plain pages slow to decode. Page checksums turn a flipped bit into an error instead of a wrong
id. :mod:`nvt_torchrec.base.parquet` writes the files in less CPU time than Arrow.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.files.atomic import atomic_path, together
from nvt_torchrec.base.parquet.file_writer import ParquetFileWriter
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.splits import SPLITS

#: Rows of a row group.
ROW_GROUP_ROWS = 128 << 10


class PartWriter:
    """A context manager that writes a part from tables of one schema and of any length.

    All row groups have ``row_group_rows`` rows, except for the last one, which may have fewer. Rows
    are buffered until they fill a row group. If no table is written, or the context ends with an
    error, there is no file.

    Args:
        path: The path of the part.
        row_group_rows: The rows of a row group; by default :data:`ROW_GROUP_ROWS`.

    Attributes:
        size: The bytes written, once the context has ended; 0 without a file.

    Raises:
        OutputError: The part cannot be written.
    """

    def __init__(self, path: Path, row_group_rows: int | None = None) -> None:
        self.size = 0
        self._path = path
        self._group_rows = row_group_rows or ROW_GROUP_ROWS
        self._stack = contextlib.ExitStack()
        self._writer: ParquetFileWriter | None = None  # opened by the first table
        self._waiting: list[pa.Table] = []

    def write(self, table: pa.Table) -> None:
        """Append the rows of a table, which may be empty."""
        if self._writer is None:
            self._writer = self._open(table.schema)
        self._waiting.append(table)
        while sum(map(len, self._waiting)) >= self._group_rows:
            joined = pa.concat_tables(self._waiting)
            self._waiting = [joined.slice(self._group_rows)]
            self._writer.write_row_group(joined.slice(0, self._group_rows))

    def _open(self, schema: pa.Schema) -> ParquetFileWriter:
        temporary = self._stack.enter_context(atomic_path(self._path))
        file = self._stack.enter_context(open(temporary, "wb"))  # noqa: SIM115
        writer = ParquetFileWriter(file.fileno(), schema)

        def finish(error: type[BaseException] | None, *_: object) -> None:
            if error is None:
                rest = pa.concat_tables(self._waiting)
                if len(rest):
                    writer.write_row_group(rest)
                writer.finish()
                self.size = writer.size

        self._stack.push(finish)
        return writer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def write_descriptions(split_root: Path, files: list[str], schema: TableSchema) -> None:
    """Write ``_metadata`` and the schemas, of all parts and of each split.

    Args:
        split_root: The directory of train, valid and test.
        files: The paths of all parts relative to ``split_root``, in order.
        schema: The columns and table sizes.
    """
    with together():
        _write_metadata(split_root, files, schema)
        schema.write(split_root)
        for split in SPLITS:
            names = [Path(file).name for file in files if file.startswith(f"{split}/")]
            directory = split_root / split
            _write_metadata(directory, names, schema)
            schema.write(directory)


def _write_metadata(directory: Path, files: list[str], schema: TableSchema) -> None:
    """Write ``_metadata`` from the footers of the parts, reading one footer at a time."""
    with atomic_path(directory / "_metadata") as temporary:
        pq.write_metadata(schema.arrow, temporary)
        metadata = pq.read_metadata(temporary)
        for file in files:
            footer = pq.read_metadata(directory / file)
            footer.set_file_path(file)
            metadata.append_row_groups(footer)
        metadata.write_metadata_file(temporary)
