"""What lies in a split's directory, from the parquet footers alone: files, row groups, columns."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clicklog.errors import BadInputError, SchemaError
from clicklog.schema import TableSchema
from clicklog.splits import SPLITS

REWRITE = "restore the file, or run the ETL again"


@dataclasses.dataclass(frozen=True)
class RowGroup:
    """A row group: its file (an index into :attr:`Layout.files`), its place there, its rows."""

    file: int
    index: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """A split on disk.

    Attributes:
        directory: of the split.
        schema: columns and table sizes, from ``.merlin/schema.json``.
        files: the parquet files, ``part.2`` before ``part.10``.
        sizes: their sizes in bytes.
        row_groups: all row groups in the order of the files.
    """

    directory: Path
    schema: TableSchema
    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    row_groups: tuple[RowGroup, ...]

    @property
    def rows(self) -> np.ndarray:
        """Rows of each row group: int64 [row_groups]."""
        return np.array([group.rows for group in self.row_groups], dtype=np.int64)

    def fingerprint(self) -> dict[str, int | str]:
        """Counts that say what the data is, and a digest of names, sizes, row groups, columns."""
        value = [
            [path.name for path in self.files],
            self.sizes,
            [dataclasses.astuple(group) for group in self.row_groups],
            dataclasses.astuple(self.schema),
        ]
        return {
            "files": len(self.files),
            "row_groups": len(self.row_groups),
            "rows": int(self.rows.sum()),
            "bytes": sum(self.sizes),
            "digest": hashlib.sha256(json.dumps(value).encode()).hexdigest(),
        }


def read_layout(directory: Path | str) -> Layout:
    """Read a split's schema and the footers of its files (from ``_metadata`` where it is fresh).

    Raises:
        BadInputError: there is no such directory, no parquet file or no schema in it, a file has
            no readable footer, or ``_metadata`` names a file that is gone.
        SchemaError: a column is missing from a file or has another type than the contract's.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise BadInputError(f"{directory}: no such directory", _suggest(directory))
    files = sorted(
        (path for path in directory.glob("*.parquet") if path.name[0] not in "._"),
        key=lambda path: [int(word) if word.isdigit() else word for word in _words(path.name)],
    )
    if not files:
        raise BadInputError(f"{directory}: no parquet file in it", _suggest(directory))
    schema = TableSchema.read(directory)
    collected = _read_collected(directory, schema, files)
    row_groups = []
    for number, path in enumerate(files):
        rows = collected.get(path.name)
        if rows is None:
            footer = read_footer(path, schema)
            rows = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
        row_groups += [RowGroup(number, index, count) for index, count in enumerate(rows)]
    sizes = tuple(path.stat().st_size for path in files)
    return Layout(directory, schema, tuple(files), sizes, tuple(row_groups))


def read_footer(path: Path, schema: TableSchema) -> pq.FileMetaData:
    """A file's footer, its columns checked by :func:`check_columns`. Raises as that, and
    :class:`BadInputError` when the file has none."""
    try:
        footer = pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise BadInputError(f"{path}: not a whole parquet file: {error}", REWRITE) from error
    check_columns(footer.schema.to_arrow_schema(), schema, path)
    return footer


def check_columns(found: pa.Schema, schema: TableSchema, path: Path) -> None:
    """Refuse a file that lacks a column or holds it in another type.

    Raises:
        SchemaError: naming file and column.
    """
    wanted = dict.fromkeys([schema.label, *schema.dense], pa.float32())
    wanted |= dict.fromkeys(schema.categorical, pa.int32())
    for name, kind in wanted.items():
        index = found.get_field_index(name)
        if index < 0:
            close = difflib.get_close_matches(name, set(found.names) - wanted.keys(), n=1)
            raise SchemaError(
                f"{path}: column {name} is missing" + (f" (there is {close[0]})" if close else ""),
                "all files of a split need the columns of its .merlin/schema.json",
            )
        if found.field(index).type != kind:
            raise SchemaError(
                f"{path}: column {name} is {found.field(index).type}, not {kind}",
                "write ids as int32, dense features and labels as float32",
            )


def _read_collected(
    directory: Path, schema: TableSchema, files: list[Path]
) -> dict[str, list[int]]:
    """From ``_metadata``: file name → rows of its row groups, for files not written after it."""
    path = directory / "_metadata"
    if not path.exists():
        return {}
    footer = read_footer(path, schema)
    rows: dict[str, list[int]] = {}
    for i in range(footer.num_row_groups):
        group = footer.row_group(i)
        rows.setdefault(group.column(0).file_path, []).append(group.num_rows)
    missing = sorted(rows.keys() - {file.name for file in files})
    if missing:
        raise BadInputError(
            f"{path} names {missing[0]}, which is not there",
            "restore the file; if its rows are meant to be gone, delete _metadata",
        )
    written = path.stat().st_mtime_ns
    fresh = {file.name for file in files if file.stat().st_mtime_ns <= written}
    return {name: counts for name, counts in rows.items() if name in fresh}


def _words(name: str) -> list[str]:
    return re.split(r"(\d+)", name)


def _suggest(directory: Path) -> str:
    splits = [name for name in SPLITS if (directory / name).is_dir()]
    if splits:
        return f"name one split, as {directory / splits[0]}"
    siblings = [name for name in SPLITS if (directory.parent / name).is_dir()]
    if siblings:
        # "validation" and "val" are what the split is called elsewhere
        close = difflib.get_close_matches(directory.name, siblings, n=1, cutoff=0.4)
        return f"did you mean {directory.parent / (close or siblings)[0]}?"
    return "give the directory of a split that `python -m etl run` wrote, as …/split/train"
