"""Columns of the input that are copied to the output, to identify rows."""

from __future__ import annotations

import dataclasses
import difflib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import to_arrow
from nvt_torchrec.base.errors import BadRowError, SchemaError, SettingsError
from nvt_torchrec.clicklog.readers.lines import filesystem_of
from nvt_torchrec.clicklog.readers.stream import UnparsedRows
from nvt_torchrec.clicklog.readers.text_rows import header_lines
from nvt_torchrec.clicklog.text.convert import convert
from nvt_torchrec.clicklog.text.delimited import split_rows
from nvt_torchrec.clicklog.text.tokenizer import as_utf8
from nvt_torchrec.formats.feature_spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types.base import MESSAGES, NOT_UTF8
from nvt_torchrec.formats.feature_spec.reading import Read


@dataclasses.dataclass(frozen=True)
class IdColumns:
    """Reads columns of a file by name: strings from text, the columns' own types from parquet.

    Attributes:
        names: Names of the columns.
        available: Names of all columns of the file, in order.
    """

    names: tuple[str, ...]
    available: tuple[str, ...]

    def read(self, piece: UnparsedRows, lines: np.ndarray) -> dict[str, pa.Array | pa.ChunkedArray]:
        """Return the values of the rows ``lines`` (from 0) of a piece, by column name."""
        if not self.names:
            return {}
        if piece.block is not None:
            return self._read_parquet(piece, lines)
        places = sorted(map(self.available.index, self.names))
        text = as_utf8(piece.text, piece.spec.input.encoding)
        split = split_rows(text, piece.spec.input, len(self.available), places)
        rows = to_arrow(np.searchsorted(split.line, lines))
        columns = {}
        for name in self.names:
            fields = split.columns[places.index(self.available.index(name))].take(rows)
            column = convert(fields, Read(name, "string"))
            if column.code.any():
                row = int(column.code.argmax())
                line = piece.first + int(lines[row]) + 1 + header_lines(piece.spec, piece.path)
                raise BadRowError(
                    f"{piece.path}, line {line}: column {name}: {column.show(row)}: "
                    f"{MESSAGES[NOT_UTF8]}",
                    "correct the file, or leave that column out of --id_columns",
                )
            columns[name] = column.values
        return columns

    def _read_parquet(self, piece: UnparsedRows, lines: np.ndarray) -> dict[str, pa.ChunkedArray]:
        begin, end = piece.block.begin, piece.block.end
        filesystem, path = filesystem_of(piece.path)
        with filesystem.open(path, "rb") as file, pq.ParquetFile(file) as parquet:
            groups, first, at = [], begin, 0
            for index in range(parquet.metadata.num_row_groups):
                rows = parquet.metadata.row_group(index).num_rows
                if at < end and begin < at + rows:
                    first = min(first, at)
                    groups.append(index)
                at += rows
            table = parquet.read_row_groups(groups, columns=list(self.names), use_threads=False)
        table = table.slice(begin - first, end - begin)
        if len(lines) < len(table):
            table = table.take(to_arrow(lines))
        return {name: table.column(name) for name in self.names}


def find_id_columns(
    names: tuple[str, ...], path: str, spec: FeatureSpec, first: UnparsedRows
) -> IdColumns:
    """Check the names of columns to copy. ``first`` is the first piece of the file.

    Raises:
        SchemaError: The file has no such column.
        SettingsError: A name occurs twice, or is in the output anyway.
    """
    taken = ("row", "probability", "label", *(["weight"] if spec.weight else []))
    for name in names:
        if name in taken or names.count(name) > 1:
            raise SettingsError(
                f"--id_columns {','.join(names)}: {name!r} is in the output already",
                "leave it out",
            )
    available = names_of_file(path, spec, first) if names else ()
    for name in names:
        if available.count(name) != 1:
            close = difflib.get_close_matches(name, available, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise SchemaError(
                f"{path}: column {name} of --id_columns is "
                f"{'ambiguous' if name in available else 'missing'}",
                f"{hint}it has {', '.join(available[:50])}",
            )
    return IdColumns(names, available)


def names_of_file(path: str, spec: FeatureSpec, first: UnparsedRows) -> tuple[str, ...]:
    """Return the names of all columns of a file, "" for fields without a name."""
    if spec.input.format == "parquet":
        filesystem, name = filesystem_of(path)
        with filesystem.open(name, "rb") as file, pq.ParquetFile(file) as parquet:
            return tuple(parquet.schema_arrow.names)
    if spec.input.format == "json":
        raise SettingsError(
            f"{path}: --id_columns of JSON lines", "leave it out, or write the rows as parquet"
        )
    return first.layout.fields
