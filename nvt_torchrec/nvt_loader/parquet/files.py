"""Parquet files as a loader's source: which ones there are, and what their footers say."""

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
from nvt_torchrec.base.files.remote import RemoteFile, filesystem_of, open_file
from nvt_torchrec.base.files.validation import strict_json
from nvt_torchrec.base.parquet.footer import Footer, read_footer
from nvt_torchrec.formats.day_names import natural_order
from nvt_torchrec.formats.etl_output import find_part
from nvt_torchrec.formats.schema import SCHEMA_FILE, TableSchema
from nvt_torchrec.formats.splits import SPLITS

REWRITE = "restore the file, or run the ETL again"
#: Footers kept, so that a shuffled epoch does not parse one for each row group.
FOOTERS = 64

#: What names parquet files: a directory, a file, a glob, a URL, or several of them.
Paths: TypeAlias = "str | os.PathLike[str] | list[Any] | tuple[Any, ...]"


@dataclasses.dataclass(frozen=True)
class RowGroup:
    """A row group: the number of its file, its index there, its rows."""

    file: int
    index: int
    rows: int


@dataclasses.dataclass(frozen=True)
class ParquetFiles:
    """Parquet files, a :class:`nvt_loader.parquet.sources.Source`.

    Attributes:
        name: The directory, or what else was given.
        schema: The columns that are read.
        paths: The files, ``part.2`` before ``part.10``, or as they were listed.
        status: What the system said of each file.
        row_groups: All row groups in the order of the files.
    """

    name: str
    schema: TableSchema
    paths: tuple[Path | RemoteFile, ...] = ()
    status: tuple[Any, ...] = ()
    row_groups: tuple[RowGroup, ...] = ()

    @classmethod
    def open(cls, name: str, paths: list[Path | RemoteFile], schema: TableSchema) -> ParquetFiles:
        """Read the footers of some files.

        Raises:
            BadInputError: A file has no readable footer.
            SchemaError: As :func:`check_columns` raises it.
        """
        row_groups = [
            RowGroup(number, index, rows)
            for number, path in enumerate(paths)
            for index, rows in enumerate(_read_footer(path, schema).rows.tolist())
        ]
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
        """The files' sizes in bytes."""
        return [status.st_size for status in self.status]

    @property
    def is_local(self) -> bool:
        """Whether all files are on this machine."""
        return all(isinstance(path, Path) for path in self.paths)

    def path(self, file: int) -> Path | RemoteFile:
        """Return where a file can be opened: days that are added may give it other names.

        Raises:
            BadInputError: It was removed or rewritten.
        """
        path: Path | RemoteFile | None = self.paths[file]
        if isinstance(path, Path):
            path = find_part(path, self.status[file])
        elif path is not None and path.stat() != self.status[file]:
            path = None
        if path is None:
            raise BadInputError(
                f"{self.paths[file]}: rewritten, cut short or removed since the loader was made",
                "if days were added to this output meanwhile with --keep_days, begin the training "
                "again; else restore the file, or start again",
            )
        return path

    def check(self) -> None:
        """Raise :class:`BadInputError` if a file was removed or rewritten."""
        for file in range(len(self.paths)):
            self.path(file)

    @functools.cached_property
    def _footers(self) -> Callable[[int], Footer]:
        """Read a file's footer, or return it if it was read lately."""
        return functools.lru_cache(FOOTERS)(lambda file: _read_footer(self.path(file), self.schema))

    def footer(self, row_group: int) -> Footer:
        """Return the footer of a row group's file. Raises :class:`BadInputError` if it changed."""
        group = self.row_groups[row_group]
        footer = self._footers(group.file)
        if footer.rows[group.index : group.index + 1].tolist() != [group.rows]:
            raise BadInputError(
                f"{self.paths[group.file]}: row group {group.index} no longer has {group.rows} "
                "rows",
                "the file was rewritten while in use: start again",
            )
        return footer

    def read(self, row_group: int, columns: list[str], rows: int) -> Iterator[pa.RecordBatch]:
        """Read a row group by Arrow, which verifies the page checksums that there are.

        Raises:
            BadInputError: The file has changed.
            pa.ArrowException, OSError: It cannot be read.
        """
        group = self.row_groups[row_group]
        metadata, path = self.footer(row_group).metadata, self.path(group.file)
        # pyarrow takes a millisecond to open a path; a ParquetFile keeps the last call's settings
        source = pa.OSFile(str(path)) if isinstance(path, Path) else open_file(path)
        file = pq.ParquetFile(
            source, metadata=metadata, pre_buffer=False, page_checksum_verification=True
        )
        maximum = max(1, min(rows, group.rows))
        yield from file.iter_batches(
            maximum, row_groups=[group.index], columns=columns, use_threads=False
        )


def _read_footer(path: Path | RemoteFile, schema: TableSchema) -> Footer:
    """Read a file's footer and check its columns.

    Raises as :func:`check_columns`, and :class:`BadInputError` if the file has no footer.
    """
    footer = read_footer(path, REWRITE)
    check_columns(footer.schema, schema, str(path))
    return footer


def find_files(paths: Paths) -> list[Path | RemoteFile]:
    """Find the files that paths name; those of a directory or glob in numeric order.

    Raises:
        BadInputError: There are none.
    """
    if isinstance(paths, list | tuple):
        return [file for path in paths for file in find_files(path)]
    text = os.fspath(paths)
    found: list[Path] | list[RemoteFile]
    if "://" in text:
        filesystem, inner = filesystem_of(text)
        if filesystem.isfile(inner):
            return [RemoteFile(filesystem, inner)]
        pattern = inner if glob.has_magic(inner) else f"{inner.rstrip('/')}/*.parquet"
        found = [RemoteFile(filesystem, path) for path in filesystem.glob(pattern)]
    elif glob.has_magic(text) and not os.path.exists(text):
        found = list(map(Path, glob.glob(text)))
    else:
        path = Path(text)
        if path.is_file():
            return [path]
        if not path.is_dir():
            what = "file" if path.suffix == ".parquet" else "directory"
            raise BadInputError(f"{path}: no such {what}", _suggest(path))
        found = list(path.glob("*.parquet"))
    visible = (file for file in found if file.name[0] not in "._")
    files = sorted(visible, key=lambda file: natural_order(str(file)))
    if not files:
        raise BadInputError(f"{text}: no parquet file in it", _suggest(Path(text)))
    return files


def _suggest(directory: Path) -> str:
    splits = [name for name in SPLITS if (directory / name).is_dir()]
    if splits:
        return f"name one split, for example {directory / splits[0]}"
    siblings = [name for name in SPLITS if (directory.parent / name).is_dir()]
    if siblings:
        # "validation" and "val" are what the split is called elsewhere
        close = difflib.get_close_matches(directory.name, siblings, n=1, cutoff=0.4)
        return f"did you mean {directory.parent / (close or siblings)[0]}?"
    return "give the directory of a split that `python -m etl run` wrote, as …/split/train"


def schema_beside(file: Path | RemoteFile) -> TableSchema:
    """Read ``.merlin/schema.json`` in a file's directory.

    Raises:
        BadInputError, SchemaError: As :meth:`TableSchema.read`.
    """
    if isinstance(file, Path):
        return TableSchema.read(file.parent)
    path = RemoteFile(file.filesystem, f"{file.path.rpartition('/')[0]}/{SCHEMA_FILE}")
    try:
        with open_file(path) as opened:
            return TableSchema.from_dict(strict_json(opened.read()), str(path))
    except (OSError, AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        remedy = "copy the schema beside the files, or pass schema=TableSchema(…)"
        raise BadInputError(f"{path}: not a schema of Merlin: {error!r}", remedy) from error


def check_columns(
    columns: pa.Schema, schema: TableSchema, where: str, names: Iterable[str] | None = None
) -> None:
    """Refuse a file that lacks a column or holds it in a type that cannot be converted.

    Raises:
        SchemaError: The message names file and column.
    """
    wanted = dict.fromkeys(schema.floats, "numbers")
    wanted |= dict.fromkeys(schema.categorical, "integer ids")
    wanted |= dict.fromkeys(schema.multi_hot, "lists of integer ids")
    wanted |= {name: "int32" for history in schema.histories for name in history.pointers}
    for name in names or wanted:
        what = wanted[name]
        index = columns.get_field_index(name)
        if index < 0:
            close = difflib.get_close_matches(name, set(columns.names) - wanted.keys(), n=1)
            raise SchemaError(
                f"{where}: column {name} is missing" + (f" (there is {close[0]})" if close else ""),
                "all files of a split need the columns of its .merlin/schema.json, a table those "
                "of schema=",
            )
        kind = columns.field(index).type
        inner = kind.value_type if is_list(kind) else kind
        fits = pa.types.is_integer(inner)
        if what == "numbers":
            fits |= pa.types.is_floating(inner) or pa.types.is_boolean(inner)
        elif what == "int32":
            fits = inner == pa.int32()
        if is_list(kind) != what.startswith("lists") or not fits:
            raise SchemaError(
                f"{where}: column {name} is {kind}, not {what}",
                "write labels and dense features as float32, ids as int32, multi-hot ids as "
                "list<int32>, those of histories as int32, and say in the schema which are lists",
            )
