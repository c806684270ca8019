"""Parquet files as the source of a loader: find files, read footers, check columns."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import glob
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import is_list
from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.base.files.remote import RemoteFile, find_filesystem, open_file
from nvt_torchrec.base.files.validation import parse_strict_json
from nvt_torchrec.base.parquet.footer import Footer, read_footer
from nvt_torchrec.formats.day_names import make_natural_key
from nvt_torchrec.formats.etl_output import find_part
from nvt_torchrec.formats.schema import SCHEMA_FILE, TableSchema
from nvt_torchrec.formats.splits import SPLITS

#: The remedy for a file that cannot be read.
REWRITE = "restore the file, or run the ETL again"
#: The kinds of columns, as error messages name them.
_NUMBERS = "numbers"
_IDS = "integer ids"
_LISTS = "lists of integer ids"
_POINTERS = "int32"

#: The number of parsed footers to cache, so that a shuffled epoch does not parse one for each row
#: group.
MAX_FOOTERS = 64

#: A directory, a file, a glob or a URL, or a list of these.
Paths: TypeAlias = "str | os.PathLike[str] | list[Any] | tuple[Any, ...]"


@dataclasses.dataclass(frozen=True)
class RowGroup:
    """A row group.

    Attributes:
        file: The index of its file.
        index: The index of the row group in the file.
        rows: The number of rows.
    """

    file: int
    index: int
    rows: int


@dataclasses.dataclass(frozen=True)
class ParquetFiles:
    """Parquet files, a :class:`nvt_loader.parquet.sources.Source`.

    Attributes:
        name: The directory, file, glob or URL that the caller gave; for a list, the number of
            files.
        schema: The columns to read.
        paths: The files, in natural order (``part.2`` before ``part.10``) or in the given order.
        status: The ``stat`` of each file when its footer was read.
        row_groups: All row groups, in the order of the files.
    """

    name: str
    schema: TableSchema
    paths: tuple[Path | RemoteFile, ...] = ()
    status: tuple[Any, ...] = ()
    row_groups: tuple[RowGroup, ...] = ()

    @classmethod
    def open(cls, name: str, paths: list[Path | RemoteFile], schema: TableSchema) -> ParquetFiles:
        """Read the footers of parquet files.

        Raises:
            BadInputError: A file has no readable footer.
            SchemaError: A column is missing or has a type that cannot be converted.
        """
        row_groups = []
        for file, path in enumerate(paths):
            counts = _read_footer(path, schema).rows.tolist()
            row_groups += [RowGroup(file, index, rows) for index, rows in enumerate(counts)]
        status = tuple(path.stat() for path in paths)
        return cls(name, schema, tuple(paths), status, tuple(row_groups))

    @property
    def row_counts(self) -> list[int]:
        """The number of rows of each row group."""
        return [group.rows for group in self.row_groups]

    @property
    def fingerprint(self) -> list[Any]:
        """The names and sizes of the files, and the row groups."""
        groups = [dataclasses.astuple(group) for group in self.row_groups]
        return [[path.name for path in self.paths], self.sizes, groups]

    @property
    def sizes(self) -> list[int]:
        """The size of each file in bytes."""
        return [status.st_size for status in self.status]

    @property
    def is_local(self) -> bool:
        """Whether all files are on this machine."""
        return all(isinstance(path, Path) for path in self.paths)

    def find_path(self, file: int) -> Path | RemoteFile:
        """Return the current path of a file, which adding a day to the output may have renamed.

        Raises:
            BadInputError: The file was removed or rewritten.
        """
        opened = self.paths[file]
        path: Path | RemoteFile | None = opened
        if isinstance(opened, Path):
            path = find_part(opened, self.status[file])
        elif opened.stat() != self.status[file]:
            path = None
        if path is None:
            raise BadInputError(
                f"{self.paths[file]}: rewritten, cut short or removed since the loader was made",
                "if days were added to this output with --keep_days in the meantime, restart the "
                "training; otherwise restore the file, or start again",
            )
        return path

    def check_unchanged(self) -> None:
        """Raise :class:`BadInputError` if a file was removed or rewritten since it was opened."""
        for file in range(len(self.paths)):
            self.find_path(file)

    @functools.cached_property
    def _read_cached_footer(self) -> Callable[[int], Footer]:
        """A function that returns the footer of a file and caches the most recent ones."""

        def read(file: int) -> Footer:
            return _read_footer(self.find_path(file), self.schema)

        return functools.lru_cache(MAX_FOOTERS)(read)

    def read_footer(self, row_group: int) -> Footer:
        """Return the footer of a row group's file. Raises :class:`BadInputError` if it changed."""
        group = self.row_groups[row_group]
        footer = self._read_cached_footer(group.file)
        if group.index >= len(footer.rows) or footer.rows[group.index] != group.rows:
            raise BadInputError(
                f"{self.paths[group.file]}: row group {group.index} no longer has {group.rows} "
                "rows",
                "the file was rewritten while it was in use: start again",
            )
        return footer

    def read(self, row_group: int, columns: list[str], rows: int) -> Iterator[pa.RecordBatch]:
        """Read a row group by Arrow, which verifies page checksums if the pages have any.

        Raises:
            BadInputError: The file has changed.
            pa.ArrowException, OSError: The file cannot be read.
        """
        group = self.row_groups[row_group]
        metadata = self.read_footer(row_group).metadata
        path = self.find_path(group.file)
        # Pass an open file instead of a path, which pyarrow takes a millisecond to open. Make a new
        # ParquetFile for each call, because it keeps the columns and row groups of the last
        # iter_batches.
        source = pa.OSFile(str(path)) if isinstance(path, Path) else open_file(path)
        file = pq.ParquetFile(
            source, metadata=metadata, pre_buffer=False, page_checksum_verification=True
        )
        batch_rows = max(1, min(rows, group.rows))
        yield from file.iter_batches(
            batch_rows, row_groups=[group.index], columns=columns, use_threads=False
        )


def _read_footer(path: Path | RemoteFile, schema: TableSchema) -> Footer:
    """Read a file's footer and check its columns.

    Raises:
        BadInputError: The file has no readable footer.
        SchemaError: A column is missing or has a type that cannot be converted.
    """
    footer = read_footer(path, REWRITE)
    check_columns(footer.schema, schema, str(path))
    return footer


def find_files(paths: Paths) -> list[Path | RemoteFile]:
    """Find the files of a directory, glob or URL in natural order, or those of a list of these.

    Raises:
        BadInputError: A directory or file does not exist, or a directory or glob has no parquet
            file.
    """
    if isinstance(paths, list | tuple):
        listed: list[Path | RemoteFile] = []
        for path in paths:
            listed += find_files(path)
        return listed
    text = os.fspath(paths)
    found: list[Path] | list[RemoteFile]
    if "://" in text:
        filesystem, inner = find_filesystem(text)
        if filesystem.isfile(inner):
            return [RemoteFile(filesystem, inner)]
        pattern = inner if glob.has_magic(inner) else f"{inner.rstrip('/')}/*.parquet"
        found = [RemoteFile(filesystem, path) for path in filesystem.glob(pattern)]
    elif glob.has_magic(text) and not os.path.exists(text):
        found = list(map(Path, glob.glob(text)))
    else:
        directory = Path(text)
        if directory.is_file():
            return [directory]
        if not directory.is_dir():
            kind = "file" if directory.suffix == ".parquet" else "directory"
            raise BadInputError(f"{directory}: no such {kind}", _suggest_split(directory))
        found = list(directory.glob("*.parquet"))
    # By the convention of Hive and Spark, files with these prefixes are hidden: they are unfinished
    # or auxiliary.
    visible = [file for file in found if file.name[0] not in "._"]
    if not visible:
        raise BadInputError(f"{text}: no parquet file in it", _suggest_split(Path(text)))
    return sorted(visible, key=lambda file: make_natural_key(str(file)))


def _suggest_split(directory: Path) -> str:
    """Return a remedy that suggests a split of the ETL's output in or next to a directory."""
    splits = [name for name in SPLITS if (directory / name).is_dir()]
    if splits:
        return f"name one split, for example {directory / splits[0]}"
    siblings = [name for name in SPLITS if (directory.parent / name).is_dir()]
    if siblings:
        # The cutoff is low because other projects call the split "valid" "validation" or "val".
        close = difflib.get_close_matches(directory.name, siblings, n=1, cutoff=0.4)
        suggested = close[0] if close else siblings[0]
        return f"did you mean {directory.parent / suggested}?"
    return (
        "give the directory of a split that `python -m etl run` wrote, for example OUT/split/train"
    )


def read_directory_schema(file: Path | RemoteFile) -> TableSchema:
    """Read ``.merlin/schema.json`` in the directory of a file.

    Raises:
        BadInputError: The schema is missing or malformed.
        SchemaError: The schema lacks a label or a table size.
    """
    if isinstance(file, Path):
        return TableSchema.read(file.parent)
    directory = file.path.rpartition("/")[0]
    path = RemoteFile(file.filesystem, f"{directory}/{SCHEMA_FILE}")
    try:
        with open_file(path) as opened:
            return TableSchema.from_dict(parse_strict_json(opened.read()), str(path))
    except (OSError, AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise BadInputError(
            f"{path}: not a schema of Merlin: {error!r}",
            "copy the schema to the directory of the files, or pass schema=TableSchema(…)",
        ) from error


def check_columns(
    columns: pa.Schema, schema: TableSchema, where: str, names: Iterable[str] | None = None
) -> None:
    """Check that a file has the needed columns in types that can be converted.

    Args:
        columns: The columns of the file.
        schema: The needed columns.
        where: The file or source, for errors.
        names: The columns to check; by default all columns of the schema.

    Raises:
        SchemaError: A column is missing or has a type that cannot be converted. The message names
            the file and the column.
    """
    needed = dict.fromkeys(schema.floats, _NUMBERS)
    needed |= dict.fromkeys(schema.categorical, _IDS)
    needed |= dict.fromkeys(schema.multi_hot, _LISTS)
    for history in schema.histories:
        needed |= dict.fromkeys(history.pointers, _POINTERS)
    for vector in schema.vectors:
        needed[vector.pointer] = _POINTERS
    for name in names or needed:
        index = columns.get_field_index(name)
        if index < 0:
            similar = difflib.get_close_matches(name, set(columns.names) - needed.keys(), n=1)
            hint = f" (there is {similar[0]})" if similar else ""
            raise SchemaError(
                f"{where}: column {name} is missing{hint}",
                "all files of a split need the columns of its .merlin/schema.json; a table needs "
                "the columns of schema=",
            )
        kind = columns.field(index).type
        if not _can_convert(kind, needed[name]):
            raise SchemaError(
                f"{where}: column {name} is {kind}, not {needed[name]}",
                "write labels and dense features as float32, ids as int32, multi-hot ids as "
                "list<int32>, pointers of histories and vectors as int32, and mark the list "
                "columns in the schema",
            )


def _can_convert(kind: pa.DataType, needed: str) -> bool:
    """Return whether a column of type ``kind`` can be converted to the needed kind of column."""
    if needed == _LISTS:
        return is_list(kind) and pa.types.is_integer(kind.value_type)
    if needed == _POINTERS:
        return kind == pa.int32()
    if needed == _IDS:
        return pa.types.is_integer(kind)
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
