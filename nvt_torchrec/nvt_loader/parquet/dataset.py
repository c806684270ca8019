"""Describe the data of a loader: a source of rows, the columns that are read, and histories."""

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

#: The remedy for bad values of a table or source, which no ETL wrote.
_CORRECT_ROWS = "correct the rows, or the schema that schema= gives"
#: Rows whose lists are counted to estimate how long lists are on average.
_SAMPLED_ROWS = 16384


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Rows, and how the loader reads them.

    Attributes:
        source: Where the rows come from.
        stored: The columns of the source, and table sizes.
        schema: The columns that are read: of the labels only those that were asked for.
        several_labels: Whether batches hold labels [B, labels] instead of [B].
        undersampling: The share of the negative rows that is kept, and the seed; None keeps all.
        kept: The number of rows of each row group that undersampling keeps.
        stores: The events of each of the schema's histories.
        max_events: The largest number of events of a history that a row gets.
        vectors: The stores of the schema's vectors; None without any.
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
        """The number of rows that the loader delivers of each row group: int64 [row_groups]."""
        kept = self.source.row_counts if self.kept is None else self.kept
        return np.array(kept, dtype=np.int64)

    @property
    def jagged(self) -> bool:
        """Whether a row may have any number of ids in some column."""
        return bool(self.schema.multi_hot)

    @property
    def files(self) -> ParquetFiles | None:
        """The source, if it is parquet files, for which there are faster ways to read."""
        return self.source if isinstance(self.source, ParquetFiles) else None

    def locate(self, row_group: int) -> tuple[str, int]:
        """Return the name of a row group's file or source, and its number there, for errors."""
        if self.files is None:
            return self.source.name, row_group
        group = self.files.row_groups[row_group]
        return str(self.files.paths[group.file]), group.index

    @functools.cached_property
    def batch_row_bytes(self) -> float:
        """Bytes of a row in a batch; with lists, as many ids as the first rows have on average."""
        schema = self.schema
        if not self.jagged:
            return float(4 * len(schema.columns))
        # Besides its ids, a row has a length and an offset (int32) and a start (int64) per column.
        return 4 * (len(schema.floats) + _estimate_ids(self)) + 16 * len(schema.integers)

    def fingerprint(self) -> dict[str, Any]:
        """Return counts, and a digest of the source's fingerprint, row groups and columns."""
        counts: dict[str, Any] = {}
        content = [self.source.fingerprint, *map(int, self.source.row_counts)]
        if self.files is not None:
            counts = {"files": len(self.files.paths), "bytes": sum(self.files.sizes)}
            content = self.files.fingerprint  # holds the row groups
        # The digest is compared with those in loader states of earlier versions. Hence the order of
        # the columns, some of them only if there are any, and an empty list that once held more.
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


def columns_to_read(schema: TableSchema, label: str | Sequence[str] | None = None) -> TableSchema:
    """Return the schema with one label or some only; by default with the main one.

    Raises:
        SettingsError: There is no such label, or one is named twice.
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
    """Read the schema of some data, and of parquet the footers.

    Args:
        data: The data of a :class:`nvt_loader.KJTLoader`.
        schema: The columns; by default those in ``.merlin/schema.json`` beside the files.
        label: The label to read, or several; None for the main one.
        table_sizes: The rows of each embedding table, instead of the schema's.
        max_events: The largest number of events of a history that a row gets; 0 leaves the schema's
            histories out.
        histories: The directory that ``_histories`` is in, by default the one above the files'.
        vectors: The directory that ``_vectors`` is in, likewise.
        read_vectors: Whether the schema's vectors are read; else they are left out.

    Raises:
        BadInputError: There is no such directory, no parquet file or no schema in it, or a file
            has no readable footer.
        SchemaError: A column is missing, its type cannot be converted, or there is another number
            of table sizes than of columns.
        SettingsError: There is no such label, the data are of a type that cannot be read, or their
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
            remedy = "give schema=TableSchema(labels, dense, categorical, table_sizes)"
            raise SettingsError(f"data of type {type(data).__name__} without a schema", remedy)
        schema = parquet_files.read_schema_beside(paths[0])
    if table_sizes is not None:
        schema = dataclasses.replace(schema, table_sizes=tuple(table_sizes))
    if not max_events:
        schema = dataclasses.replace(schema, histories=())
    if not read_vectors:
        schema = dataclasses.replace(schema, vectors=())
    read = columns_to_read(schema, label)
    source: Source
    if paths is not None:
        name = str(data) if isinstance(data, str | os.PathLike) else f"{len(paths)} files"
        source = ParquetFiles.open(name, paths, read)
    elif hasattr(data, "__arrow_c_stream__"):
        table = pa.table(data)
        parquet_files.check_columns(table.schema, read, "the table")
        table = table.select(read.columns)
        check_valid(table, "the table")
        source = TableSource(table)
    else:
        source = data
    several = label is not None and not isinstance(label, str)
    return Dataset(
        source,
        schema,
        read,
        several,
        stores=_open_stores(schema, paths, histories),
        max_events=max_events,
        vectors=_open_vectors(schema, paths, vectors),
    )


def _open_stores(
    schema: TableSchema,
    paths: list[Path | RemoteFile] | None,
    histories: str | os.PathLike[str] | None,
) -> tuple[HistoryStore, ...]:
    """Open the events of the histories."""
    if not schema.histories:
        return ()
    if histories is None:
        what = f"the events of history {schema.histories[0].name}"
        remedy = (
            f"give histories=, the directory on this machine that {HISTORIES} is in, or "
            "max_events=0 to leave the histories out"
        )
        histories = _find_splits(paths, what, remedy)
    sizes = dict(zip(schema.categorical, schema.table_sizes, strict=True))
    return tuple(
        HistoryStore(Path(histories), history, [sizes[name] for name in history.columns])
        for history in schema.histories
    )


def _open_vectors(
    schema: TableSchema,
    paths: list[Path | RemoteFile] | None,
    vectors: str | os.PathLike[str] | None,
) -> VectorStores | None:
    """Open the vectors of a schema; None if it has none. Raises SettingsError, BadInputError."""
    if not schema.vectors:
        return None
    if vectors is None:
        what = f"the values of vector {schema.vectors[0].name}"
        remedy = (
            f"give vectors=, the directory on this machine that {VECTORS} is in, or "
            "read_vectors=False to leave the vectors out"
        )
        vectors = _find_splits(paths, what, remedy)
    return VectorStores(Path(vectors) / VECTORS, schema.vectors)


def _find_splits(paths: list[Path | RemoteFile] | None, what: str, remedy: str) -> Path:
    """Return the directory of the splits, which is above that of the files.

    Raises:
        SettingsError: The data are not files of this machine; ``what`` is not beside them.
    """
    if paths is None or not isinstance(paths[0], Path):
        raise SettingsError(f"{what} are not beside the data", remedy)
    return paths[0].absolute().parent.parent


def _estimate_ids(dataset: Dataset) -> float:
    """Return how many ids a row has, where lists have as many as in the first rows on average."""
    lists = list(dataset.schema.multi_hot)
    single = len(dataset.schema.integers) - len(lists)
    filled = np.flatnonzero(dataset.source.row_counts)
    if not filled.size:
        return float(single)
    row_group = int(filled[0])
    with error_context(dataset, row_group):
        batch = next(iter(dataset.source.read(row_group, lists, _SAMPLED_ROWS)), None)
        # A source that yields fewer rows than it counts is refused where the rows are decoded.
        if batch is None or not batch.num_rows:
            return float(single)
        ids = sum(len(batch.column(name).flatten()) for name in lists)
    return single + ids / batch.num_rows


@contextlib.contextmanager
def error_context(dataset: Dataset, row_group: int) -> Iterator[None]:
    """Add the file and row group to errors."""
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
