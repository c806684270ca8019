"""Describe a loader's data: the source of its rows, the columns to read, histories and vectors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import check_valid
from nvt_torchrec.base.errors import BadInputError, SchemaError, SettingsError
from nvt_torchrec.base.files.remote import RemoteFile
from nvt_torchrec.formats.feature_spec.field_checks import did_you_mean
from nvt_torchrec.formats.histories import HISTORIES, HistoryStore
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.vectors import VECTORS, VectorStores
from nvt_torchrec.nvt_loader.parquet import files as parquet_files
from nvt_torchrec.nvt_loader.parquet.files import REWRITE, ParquetFiles
from nvt_torchrec.nvt_loader.parquet.sources import Source, TableSource

#: The remedy for bad values in a table or a custom source, which the ETL did not write.
_CORRECT_ROWS = "correct the rows, or the schema that schema= gives"
#: The number of rows sampled to estimate the average length of lists.
_SAMPLED_ROWS = 16384


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The rows of a loader, and how it reads them.

    Attributes:
        source: The source of the rows.
        stored: All columns of the source, with the sizes of the embedding tables.
        schema: The columns to read: those of ``stored``, but only the requested labels.
        several_labels: Whether batches hold labels [B, labels] instead of [B].
        undersampling: The share of negative rows to keep, and the seed; None to keep all rows.
        kept: The number of rows that undersampling keeps in each row group; None without
            undersampling.
        stores: The events of each history of the schema.
        max_events: The maximum number of events per history and row.
        vectors: The stores of the schema's vectors; None if the schema has no vectors.
    """

    source: Source
    stored: TableSchema
    schema: TableSchema
    several_labels: bool = False
    undersampling: tuple[float, int] | None = None
    kept: tuple[int, ...] | None = None
    stores: tuple[HistoryStore, ...] = ()
    max_events: int = 0
    vectors: VectorStores | None = None

    @property
    def rows(self) -> np.ndarray:
        """The number of rows that the loader delivers from each row group: int64 [row_groups]."""
        kept = self.source.row_counts if self.kept is None else self.kept
        return np.array(kept, dtype=np.int64)

    @property
    def jagged(self) -> bool:
        """Whether a column may have any number of ids per row."""
        return bool(self.schema.multi_hot)

    @property
    def files(self) -> ParquetFiles | None:
        """The source if it consists of parquet files, which have faster readers; else None."""
        return self.source if isinstance(self.source, ParquetFiles) else None

    def locate(self, row_group: int) -> tuple[str, int]:
        """Return the file (or source) of a row group and its index in it, for error messages."""
        if self.files is None:
            return self.source.name, row_group
        group = self.files.row_groups[row_group]
        return str(self.files.paths[group.file]), group.index

    @functools.cached_property
    def batch_row_bytes(self) -> float:
        """The bytes of a row in a batch, with the average list length of the first rows."""
        schema = self.schema
        if not self.jagged:
            return float(4 * len(schema.columns))
        # In addition to its ids, each column has a length and an offset (int32) and a start (int64)
        # per row.
        return 4 * (len(schema.floats) + _estimate_ids(self)) + 16 * len(schema.integers)

    def compute_fingerprint(self) -> dict[str, Any]:
        """Return the size of the data and a digest of the source, its row groups and columns.

        Loader states store it, to refuse to resume on other data.
        """
        counts: dict[str, Any] = {}
        content = [self.source.fingerprint, *map(int, self.source.row_counts)]
        if self.files is not None:
            counts = {"files": len(self.files.paths), "bytes": sum(self.files.sizes)}
            content = self.files.fingerprint  # holds the row groups
        # Loader states of earlier versions hold the same digest, so its input must not change:
        # neither the order of the values, nor the empty list (of a removed feature). Newer features
        # are added only where the schema uses them.
        schema = self.schema
        main, *labels = schema.labels
        columns: list[Any] = [main, schema.dense, schema.categorical, schema.table_sizes]
        histories = [dataclasses.astuple(history) for history in schema.histories]
        columns += [schema.multi_hot, schema.weight, labels, histories]
        if schema.vocabularies:
            columns.append(schema.vocabularies)
        if schema.vectors:
            vectors = [dataclasses.astuple(vector) for vector in schema.vectors]
            columns.append({"vectors": vectors})
        if schema.log_q_correction:
            columns.append({"log_q_correction": schema.log_q_correction})
        value = [*content, columns, [], bool(histories)]
        return counts | {
            "row_groups": len(self.source.row_counts),
            "rows": int(self.rows.sum()),
            "digest": hashlib.sha256(json.dumps(value).encode()).hexdigest(),
        }


def select_labels(schema: TableSchema, label: str | Sequence[str] | None = None) -> TableSchema:
    """Return the schema with the given labels only; by default with the main label.

    Raises:
        SettingsError: A label does not exist or is listed twice.
    """
    if isinstance(label, str):
        labels: tuple[str, ...] = (label,)
    else:
        labels = tuple(label or [schema.label])
    for name in labels:
        if name not in schema.labels:
            raise SettingsError(
                f"label {name!r}: the data have no such label",
                did_you_mean(str(name), schema.labels),
            )
    if len(set(labels)) < len(labels):
        raise SettingsError(f"labels {', '.join(labels)}: one is named twice", "name each once")
    return dataclasses.replace(schema, labels=labels)


def read_dataset(
    data: Any,
    schema: TableSchema | None = None,
    label: str | Sequence[str] | None = None,
    table_sizes: Iterable[int] | None = None,
    max_events: int = 0,
    histories: str | os.PathLike[str] | None = None,
    vectors: str | os.PathLike[str] | None = None,
    *,
    read_vectors: bool = True,
) -> Dataset:
    """Read the schema of the data and, for parquet files, their footers.

    Args:
        data: The data, as :class:`nvt_loader.KJTLoader` takes them.
        schema: The columns; by default those in ``.merlin/schema.json`` next to the files.
        label: The label to read, or several; None for the main label.
        table_sizes: The number of rows of each embedding table, which replaces the schema's.
        max_events: The maximum number of events per history and row; 0 leaves the histories out.
        histories: The directory that contains ``_histories``; by default the parent of the files'
            directory.
        vectors: The directory that contains ``_vectors``; by default the parent of the files'
            directory.
        read_vectors: Whether to read the schema's vectors.

    Raises:
        BadInputError: The directory does not exist or has no parquet file or schema, or a file has
            no readable footer.
        SchemaError: A column is missing or has a type that cannot be converted, or the number of
            table sizes differs from the number of categorical columns.
        SettingsError: The label does not exist, the data have an unsupported type, or their
            histories or vectors are not on this machine.
    """
    parts = data if isinstance(data, list | tuple) else [data]
    paths = None
    if parts and all(isinstance(part, str | os.PathLike) for part in parts):
        paths = parquet_files.find_files(data)
    elif not hasattr(data, "__arrow_c_stream__") and not isinstance(data, Source):
        raise SettingsError(
            f"data of type {type(data).__name__}: {data!r:.60}",
            "give a path, a list of paths, an Arrow table or a frame, or an object with the "
            "members of nvt_torchrec.nvt_loader.parquet.sources.Source",
        )
    if schema is None:
        if paths is None:
            raise SettingsError(
                f"data of type {type(data).__name__} without a schema",
                "give schema=TableSchema(labels, dense, categorical, table_sizes)",
            )
        schema = parquet_files.read_directory_schema(paths[0])
    if table_sizes is not None:
        schema = dataclasses.replace(schema, table_sizes=tuple(table_sizes))
    if not max_events:
        schema = dataclasses.replace(schema, histories=())
    if not read_vectors:
        schema = dataclasses.replace(schema, vectors=())
    selected = select_labels(schema, label)
    source: Source
    if paths is not None:
        name = str(data) if isinstance(data, str | os.PathLike) else f"{len(paths)} files"
        source = ParquetFiles.open(name, paths, selected)
    elif hasattr(data, "__arrow_c_stream__"):
        table = pa.table(data)
        parquet_files.check_columns(table.schema, selected, "the table")
        table = table.select(selected.columns)
        check_valid(table, "the table")
        source = TableSource(table)
    else:
        source = data
    return Dataset(
        source,
        schema,
        selected,
        several_labels=label is not None and not isinstance(label, str),
        stores=_open_histories(schema, paths, histories),
        max_events=max_events,
        vectors=_open_vectors(schema, paths, vectors),
    )


def _open_histories(
    schema: TableSchema,
    paths: list[Path | RemoteFile] | None,
    histories: str | os.PathLike[str] | None,
) -> tuple[HistoryStore, ...]:
    """Open the events of each history of a schema. Raises SettingsError, BadInputError."""
    if not schema.histories:
        return ()
    if histories is None:
        content = f"the events of history {schema.histories[0].name}"
        remedy = (
            f"give histories=, the directory on this machine that contains {HISTORIES}, or "
            "max_events=0 to leave the histories out"
        )
        histories = _find_splits(paths, content, remedy)
    sizes = dict(zip(schema.categorical, schema.table_sizes, strict=True))
    stores = []
    for history in schema.histories:
        column_sizes = [sizes[name] for name in history.columns]
        stores.append(HistoryStore(Path(histories), history, column_sizes))
    return tuple(stores)


def _open_vectors(
    schema: TableSchema,
    paths: list[Path | RemoteFile] | None,
    vectors: str | os.PathLike[str] | None,
) -> VectorStores | None:
    """Open the vectors of a schema; None if it has none. Raises SettingsError, BadInputError."""
    if not schema.vectors:
        return None
    if vectors is None:
        content = f"the values of vector {schema.vectors[0].name}"
        remedy = (
            f"give vectors=, the directory on this machine that contains {VECTORS}, or "
            "read_vectors=False to leave the vectors out"
        )
        vectors = _find_splits(paths, content, remedy)
    return VectorStores(Path(vectors) / VECTORS, schema.vectors)


def _find_splits(paths: list[Path | RemoteFile] | None, content: str, remedy: str) -> Path:
    """Return the directory of the splits, which is the parent of the files' directory.

    Args:
        paths: The parquet files; None if the data are not files.
        content: What is looked for in the directory of the splits, for the error message.
        remedy: The remedy of the error.

    Raises:
        SettingsError: The data are not files on this machine.
    """
    if paths is None or not isinstance(paths[0], Path):
        raise SettingsError(f"{content} are not stored next to the data", remedy)
    return paths[0].absolute().parent.parent


def _estimate_ids(dataset: Dataset) -> float:
    """Return the number of ids per row, with the average list length of the first rows."""
    lists = list(dataset.schema.multi_hot)
    num_single = len(dataset.schema.integers) - len(lists)
    nonempty = np.flatnonzero(dataset.source.row_counts)
    if not nonempty.size:
        return float(num_single)
    row_group = int(nonempty[0])
    with error_context(dataset, row_group):
        batch = next(iter(dataset.source.read(row_group, lists, _SAMPLED_ROWS)), None)
        # A source that yields fewer rows than it reports fails later, when its rows are decoded.
        if batch is None or not batch.num_rows:
            return float(num_single)
        num_list_ids = sum(len(batch.column(name).flatten()) for name in lists)
    return num_single + num_list_ids / batch.num_rows


@contextlib.contextmanager
def error_context(dataset: Dataset, row_group: int) -> Iterator[None]:
    """Add the file and the row group to errors of reading and checking."""
    try:
        yield
    except SchemaError as error:
        what = f"{error.what}, in row group {dataset.locate(row_group)[1]}"
        remedy = error.remedy if dataset.files is not None else _CORRECT_ROWS
        raise SchemaError(what, remedy) from error
    except (pa.ArrowException, OSError) as error:
        name, index = dataset.locate(row_group)
        what = f"{name}: row group {index} cannot be decoded: {error}"
        raise BadInputError(what, REWRITE) from error
