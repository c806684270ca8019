"""A split's files, row groups and columns, read from the parquet footers alone."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from nvt_torchrec.base import parquet_footer
from nvt_torchrec.base.errors import BadInputError, SchemaError, SettingsError
from nvt_torchrec.base.parquet_footer import VALUES, Footer
from nvt_torchrec.formats.etl_output import find_part
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.nvt_loader.parquet.row_chunks import Range, RowGroupSlice

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
        stored: The columns of the files, and table sizes.
        schema: Those that are read: not all labels.
        several_labels: Whether batches hold labels [B, labels] instead of [B].
        files: The parquet files, ``part.2`` before ``part.10``.
        status: What the system said of each file.
        row_groups: All row groups in the order of the files.
        hash_indices: Map ids outside their table into it.
        undersampling: Share of the negative rows that is kept, and the seed; None keeps all.
        kept: Rows of each row group that undersampling keeps.
        cuts: Row group → which of its rows (after undersampling) are read; of others all are.
    """

    directory: Path
    stored: TableSchema
    schema: TableSchema
    files: tuple[Path, ...]
    status: tuple[os.stat_result, ...]
    row_groups: tuple[RowGroup, ...]
    several_labels: bool = False
    hash_indices: bool = False
    undersampling: tuple[float, int] | None = None
    kept: tuple[int, ...] | None = None
    cuts: dict[int, Range] = dataclasses.field(default_factory=dict)

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

    @property
    def sizes(self) -> tuple[int, ...]:
        """The files' sizes in bytes."""
        return tuple(status.st_size for status in self.status)

    def path(self, file: int) -> Path:
        """Return where a file can be opened: days that are added may give it other names.

        Raises:
            BadInputError: It was removed or rewritten.
        """
        path = find_part(self.files[file], self.status[file])
        if path is None:
            raise BadInputError(
                f"{self.files[file]}: rewritten, cut short or removed since the loader was made",
                "if days were added to this output meanwhile with --keep_days, or one was taken "
                "back, begin the training again; else restore the file, or start again",
            )
        return path

    @functools.cached_property
    def batch_row_bytes(self) -> float:
        """Bytes of a row in a batch; with lists, as many ids as the first file has on average."""
        schema = self.schema
        if not self.jagged:
            return float(4 * len(schema.columns))
        ids = float(len(schema.categorical))
        if self.files:
            footer = read_footer(self.files[0], schema)
            rows = max(int(footer.rows.sum()), 1)
            for leaf in find_leaves(footer.schema, schema.multi_hot).values():
                ids += float(footer.chunks[:, leaf, VALUES].sum()) / rows - 1
        # besides the ids, a length, an offset and a start in each categorical column
        return 4 * (len(schema.floats) + ids) + 16 * len(schema.categorical)

    def fingerprint(self) -> dict[str, int | str]:
        """Return counts, and a digest of file names, sizes, row groups and columns."""
        value = [
            [path.name for path in self.files],
            self.sizes,
            [dataclasses.astuple(group) for group in self.row_groups],
            dataclasses.astuple(self.schema),
            sorted(self.cuts.items()),
            bool(self.schema.weight),
        ]
        return {
            "files": len(self.files),
            "row_groups": len(self.row_groups),
            "rows": int(self.rows.sum()),
            "bytes": sum(self.sizes),
            "digest": hashlib.sha256(json.dumps(value).encode()).hexdigest(),
        }


def columns_to_read(schema: TableSchema, label: str | Sequence[str] | None = None) -> TableSchema:
    """Return the schema with these labels only; by default with the main one.

    Raises:
        SettingsError: There is no such label, or one is named twice.
    """
    labels = (label,) if isinstance(label, str) else tuple(label or (schema.label,))
    for name in labels:
        if name not in schema.labels:
            close = difflib.get_close_matches(str(name), schema.labels, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise SettingsError(
                f"label {name!r}: the data have no such label",
                f"{hint}their labels are {', '.join(schema.labels)}",
            )
    if len(set(labels)) < len(labels):
        raise SettingsError(f"labels {', '.join(labels)}: one is named twice", "name each once")
    return dataclasses.replace(schema, label=labels[0], more_labels=labels[1:])


def read_dataset(
    path: Path | str,
    schema: TableSchema | None = None,
    label: str | Sequence[str] | None = None,
    table_sizes: Iterable[int] | None = None,
) -> Dataset:
    """Read a split's schema and the footers of its files.

    Args:
        path: A directory of parquet files, or one file.
        schema: The columns; by default what ``.merlin/schema.json`` beside the files says.
        label: The label to read, or several; None for the main one.
        table_sizes: Rows of the embedding tables, instead of the schema's.

    Raises:
        BadInputError: There is no such directory, no parquet file or no schema in it, or a file
            has no readable footer.
        SchemaError: A column is missing from a file, its type cannot be converted, or there is
            another number of table sizes than of columns.
        SettingsError: There is no such label.
    """
    path = Path(path)
    directory = path.parent if path.is_file() else path
    files = _files(path)
    stored = schema or TableSchema.read(directory)
    if table_sizes is not None:
        stored = dataclasses.replace(stored, table_sizes=tuple(table_sizes))
    several = label is not None and not isinstance(label, str)
    schema = columns_to_read(stored, label)
    row_groups = [
        RowGroup(number, index, rows)
        for number, file in enumerate(files)
        for index, rows in enumerate(read_footer(file, schema).rows.tolist())
    ]
    status = tuple(file.stat() for file in files)
    return Dataset(directory, stored, schema, tuple(files), status, tuple(row_groups), several)


def _files(directory: Path) -> list[Path]:
    if directory.is_file():
        return [directory]
    if not directory.is_dir():
        raise BadInputError(f"{directory}: no such directory", _suggest(directory))
    files = sorted(
        (path for path in directory.glob("*.parquet") if path.name[0] not in "._"),
        key=lambda path: [
            int(word) if word.isdigit() else word for word in re.split(r"(\d+)", path.name)
        ],
    )
    if not files:
        raise BadInputError(f"{directory}: no parquet file in it", _suggest(directory))
    return files


def read_footer(path: Path, schema: TableSchema) -> Footer:
    """Read a file's footer and check its columns.

    Raises as :func:`nvt_loader.parquet.dataset.check_columns`, and :class:`BadInputError` if the
    file has no footer.
    """
    footer = parquet_footer.read_footer(path, REWRITE)
    check_columns(footer.schema, schema, path)
    return footer


def check_file(dataset: Dataset, number: int) -> Footer:
    """Return a file's footer. Raises :class:`BadInputError` if the file has changed."""
    return read_footer(dataset.path(number), dataset.schema)


def check_unchanged(dataset: Dataset, row_group: int, footer: Footer) -> None:
    """Refuse a file whose row groups have changed. Raises :class:`BadInputError`."""
    group = dataset.row_groups[row_group]
    if footer.rows[group.index : group.index + 1].tolist() != [group.rows]:
        raise BadInputError(
            f"{dataset.files[group.file]}: row group {group.index} no longer has {group.rows} rows",
            "the file was rewritten while in use: start again",
        )


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


def check_columns(columns: pa.Schema, schema: TableSchema, path: Path) -> None:
    """Refuse a file that lacks a column or holds it in a type that cannot be converted.

    Raises:
        SchemaError: The message names file and column.
    """
    wanted = dict.fromkeys(schema.floats, "numbers")
    wanted |= dict.fromkeys(schema.categorical, "integer ids")
    wanted |= dict.fromkeys(schema.multi_hot, "lists of integer ids")
    for name, what in wanted.items():
        index = columns.get_field_index(name)
        if index < 0:
            close = difflib.get_close_matches(name, set(columns.names) - wanted.keys(), n=1)
            raise SchemaError(
                f"{path}: column {name} is missing" + (f" (there is {close[0]})" if close else ""),
                "all files of a split need the columns of its .merlin/schema.json",
            )
        kind = columns.field(index).type
        is_list = isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType)
        inner = kind.value_type if is_list else kind
        fits = pa.types.is_integer(inner)
        if what == "numbers":
            fits |= pa.types.is_floating(inner) or pa.types.is_boolean(inner)
        if is_list != what.startswith("lists") or not fits:
            raise SchemaError(
                f"{path}: column {name} is {kind}, not {what}",
                "write labels and dense features as float32, ids as int32, multi-hot ids as "
                "list<int32>, and say in the schema which columns are lists",
            )


def find_leaves(columns: pa.Schema, names: Iterable[str]) -> dict[str, int]:
    """Return the number of the leaf that holds the values of each column, flat or a list."""
    leaves = parquet_footer.columns_of_leaves(columns)
    return {name: leaves.index(name) for name in names}
