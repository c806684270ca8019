"""A split's files, row groups and columns, read from the parquet footers alone."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.errors import BadInputError, SchemaError, SettingsError
from nvt_torchrec.formats.etl_output import existing_part
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.nvt_loader.parquet.row_chunks import Range, RowGroupSlice

INT32 = np.dtype(np.int32)

REWRITE = "restore the file, or run the ETL again"


@dataclasses.dataclass(frozen=True)
class RowGroup:
    """A row group: its file (an index into :attr:`Dataset.files`), its index there, its rows."""

    file: int
    index: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A split on disk, and how the loader reads it.

    Attributes:
        directory: The split's directory.
        schema: The columns that are read, and table sizes: one label, and the weight of the rows
            as the first dense column.
        files: The parquet files, ``part.2`` before ``part.10``.
        sizes: The files' sizes in bytes.
        row_groups: All row groups in the order of the files.
        id_dtype: The type of the ids that the loader hands out.
        hash_indices: Map ids outside their table into it.
        undersampling: Share of the negative rows that is kept, and the seed; None keeps all.
        kept: Rows of each row group that undersampling keeps.
        cuts: Row group → which of its rows (after undersampling) are read; of others all are.
        weighted: Whether the first dense column is the weight of the rows.
    """

    directory: Path
    schema: TableSchema
    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    row_groups: tuple[RowGroup, ...]
    id_dtype: np.dtype = INT32
    hash_indices: bool = False
    undersampling: tuple[float, int] | None = None
    kept: tuple[int, ...] | None = None
    cuts: dict[int, Range] = dataclasses.field(default_factory=dict)
    weighted: bool = False

    @property
    def rows(self) -> np.ndarray:
        """Rows that the loader delivers of each row group: int64 [row_groups]."""
        kept = [group.rows for group in self.row_groups] if self.kept is None else self.kept
        rows = np.array(kept, dtype=np.int64)
        for row_group, (begin, end) in self.cuts.items():
            rows[row_group] = end - begin
        return rows

    def locate(self, part: RowGroupSlice) -> RowGroupSlice:
        """Return where the rows of a slice of what is delivered lie in the row group."""
        begin, _ = self.cuts.get(part.row_group, (0, 0))
        return RowGroupSlice(part.row_group, begin + part.begin, begin + part.end)

    @property
    def jagged(self) -> bool:
        """Whether a row may have any number of ids in some column."""
        return bool(self.schema.multi_hot)

    def path(self, file: int) -> Path:
        """Return where a file can be opened: a day that is added may have given it another name."""
        return existing_part(self.files[file])

    @functools.cached_property
    def row_bytes(self) -> np.ndarray:
        """Bytes of a row in each of the schema's columns; for a list, of its offset: int64
        [columns]."""
        lists = set(self.schema.multi_hot)
        floats = [4] * (1 + len(self.schema.dense))
        ids = [4 if name in lists else self.id_dtype.itemsize for name in self.schema.categorical]
        return np.array(floats + ids, dtype=np.int64)

    @functools.cached_property
    def batch_row_bytes(self) -> float:
        """Bytes of a row in a batch; for lists the average by :attr:`list_elements`."""
        total = float(4 * (1 + len(self.schema.dense)))
        for name in self.schema.categorical:
            if name in self.schema.multi_hot:  # ids, and a length, an offset and a start
                total += self.list_elements[name] * self.id_dtype.itemsize + 16
            else:
                total += self.id_dtype.itemsize + (20 if self.jagged else 0)
        return total

    @functools.cached_property
    def list_elements(self) -> dict[str, float]:
        """Ids per row in each multi-hot column, on average, by the first file's footer."""
        if not self.files or not self.jagged:
            return {}
        footer = pq.read_metadata(self.files[0])
        groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
        rows = max(footer.num_rows, 1)
        return {
            name: sum(group.column(leaf).num_values for group in groups) / rows
            for name, leaf in find_leaves(footer, self.schema.multi_hot).items()
        }

    def read_footer(self, path: Path) -> pq.FileMetaData:
        """Read the footer of a file with these columns; see :func:`read_footer`."""
        return read_footer(path, self.schema)

    def fingerprint(self) -> dict[str, int | str]:
        """Return counts, and a digest of file names, sizes, row groups and columns."""
        schema = self.schema
        value = [
            [path.name for path in self.files],
            self.sizes,
            [dataclasses.astuple(group) for group in self.row_groups],
            # not all fields: states of before there were more must still be read
            [schema.label, schema.dense, schema.categorical, schema.table_sizes, schema.multi_hot],
            [],
        ]
        if self.cuts:
            value.append(sorted(self.cuts.items()))
        if self.weighted:
            value.append("weighted")
        return {
            "files": len(self.files),
            "row_groups": len(self.row_groups),
            "rows": int(self.rows.sum()),
            "bytes": sum(self.sizes),
            "digest": hashlib.sha256(json.dumps(value).encode()).hexdigest(),
        }


def columns_to_read(schema: TableSchema, label: str = "") -> TableSchema:
    """Return the schema of what is read: one label, and the weight as the first dense column.

    Args:
        schema: The schema of the files.
        label: The label; "" for the main one.

    Raises:
        SettingsError: There is no such label.
    """
    if label and label not in schema.labels:
        close = difflib.get_close_matches(label, schema.labels, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise SettingsError(
            f"label {label!r}: the data have no such label",
            f"{hint}their labels are {', '.join(schema.labels)}",
        )
    return dataclasses.replace(
        schema,
        label=label or schema.label,
        more_labels=(),
        weight="",
        dense=(*([schema.weight] if schema.weight else []), *schema.dense),
    )


def read_dataset(
    path: Path | str,
    schema: TableSchema | None = None,
    label: str = "",
) -> Dataset:
    """Read a split's schema and the footers of its files (from ``_metadata`` where it is fresh).

    Args:
        path: A directory of parquet files, or one file.
        schema: The columns; by default what ``.merlin/schema.json`` beside the files says.
        label: The label to read; "" for the main one.

    Raises:
        BadInputError: There is no such directory, no parquet file or no schema in it, a file has
            no readable footer, or ``_metadata`` names a missing file.
        SchemaError: A column is missing from a file, or its type cannot be converted.
        SettingsError: There is no such label.
    """
    path = Path(path)
    single = path.is_file()
    directory = path.parent if single else path
    files = [path] if single else _files(directory)
    given = schema or TableSchema.read(directory)
    schema = columns_to_read(given, label)
    collected = {} if single else _read_collected(directory, schema, files)
    row_groups = []
    for number, file in enumerate(files):
        rows = collected.get(file.name)
        if rows is None:
            footer = read_footer(file, schema)
            rows = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
        row_groups += [RowGroup(number, index, count) for index, count in enumerate(rows)]
    sizes = tuple(file.stat().st_size for file in files)
    weighted = bool(given.weight)
    return Dataset(directory, schema, tuple(files), sizes, tuple(row_groups), weighted=weighted)


def _files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise BadInputError(f"{directory}: no such directory", _suggest(directory))
    files = sorted(
        (path for path in directory.glob("*.parquet") if path.name[0] not in "._"),
        key=lambda path: [int(word) if word.isdigit() else word for word in _words(path.name)],
    )
    if not files:
        raise BadInputError(f"{directory}: no parquet file in it", _suggest(directory))
    return files


def read_footer(path: Path, schema: TableSchema) -> pq.FileMetaData:
    """Read a file's footer and check its columns.

    Raises as :func:`nvt_loader.parquet.dataset.check_columns`, and :class:`BadInputError` if the
    file has no footer.
    """
    try:
        footer = pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise BadInputError(f"{path}: not a whole parquet file: {error}", REWRITE) from error
    check_columns(footer.schema.to_arrow_schema(), schema, path)
    return footer


def check_file(dataset: Dataset, number: int) -> pq.FileMetaData:
    """Return a file's footer. Raises :class:`BadInputError` if the file's size has changed."""
    path, size = dataset.path(number), dataset.sizes[number]
    try:
        found = path.stat().st_size
    except OSError as error:
        raise BadInputError(
            f"{path}: cannot be read since the loader was made: {error.strerror}",
            "if days were added to this output meanwhile, or one was taken back, begin the "
            f"training again, or resume it; else {REWRITE}",
        ) from error
    if found != size:
        raise BadInputError(
            f"{path} has {found} bytes; it had {size} when the loader was made",
            "the file was rewritten or cut short while in use: restore it, or start again",
        )
    return dataset.read_footer(path)


def check_unchanged(dataset: Dataset, row_group: int, footer: pq.FileMetaData) -> None:
    """Refuse a file whose row groups have changed. Raises :class:`BadInputError`."""
    group = dataset.row_groups[row_group]
    if group.index >= footer.num_row_groups or footer.row_group(group.index).num_rows != group.rows:
        raise BadInputError(
            f"{dataset.files[group.file]}: row group {group.index} no longer has {group.rows} rows",
            "the file was rewritten while in use, or _metadata is out of date: delete _metadata",
        )


def _read_collected(
    directory: Path, schema: TableSchema, files: list[Path]
) -> dict[str, list[int]]:
    """Read ``_metadata``: file name → rows of its row groups, for files not written after it."""
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
            f"{path} names {missing[0]}, which does not exist",
            "restore the file; if it was removed on purpose, delete _metadata",
        )
    written = path.stat().st_mtime_ns
    fresh = {file.name for file in files if file.stat().st_mtime_ns <= written}
    return {name: counts for name, counts in rows.items() if name in fresh}


def _words(name: str) -> list[str]:
    return re.split(r"(\d+)", name)


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


def is_list(kind: pa.DataType) -> bool:
    """Whether a column type holds a list in each row."""
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def is_number(kind: pa.DataType) -> bool:
    """Whether a column type can be read as float32."""
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def check_columns(found: pa.Schema, schema: TableSchema, path: Path) -> None:
    """Refuse a file that lacks a column or holds it in a type that cannot be converted.

    Raises:
        SchemaError: The message names file and column.
    """
    wanted = dict.fromkeys([schema.label, *schema.dense], "numbers")
    wanted |= dict.fromkeys(schema.categorical, "integer ids")
    wanted |= dict.fromkeys(schema.multi_hot, "lists of integer ids")
    for name, what in wanted.items():
        index = found.get_field_index(name)
        if index < 0:
            close = difflib.get_close_matches(name, set(found.names) - wanted.keys(), n=1)
            raise SchemaError(
                f"{path}: column {name} is missing" + (f" (there is {close[0]})" if close else ""),
                "all files of a split need the columns of its .merlin/schema.json",
            )
        kind = found.field(index).type
        lists = is_list(kind)
        inner = kind.value_type if lists else kind
        fits = pa.types.is_integer(inner) if "ids" in what else is_number(inner)
        if lists != what.startswith("lists") or not fits:
            raise SchemaError(
                f"{path}: column {name} is {kind}, not {what}",
                "write labels and dense features as float32, ids as int32, multi-hot ids as "
                "list<int32>, and say in the schema which columns are lists",
            )


def find_leaves(footer: pq.FileMetaData, columns: Iterable[str]) -> dict[str, int]:
    """Return the number of the leaf that holds the values of each column, flat or a list."""
    fields = footer.schema.to_arrow_schema()
    first = itertools.accumulate((_count_leaves(field.type) for field in fields), initial=0)
    leaves = dict(zip(fields.names, first, strict=False))  # leaves' paths are ambiguous
    return {name: leaves[name] for name in columns}


def _count_leaves(kind: pa.DataType) -> int:
    return sum(_count_leaves(kind.field(i).type) for i in range(kind.num_fields)) or 1
