"""Delta tables, by the package ``deltalake``, which is imported when one is read.

``TABLE`` is read as it is now, ``TABLE@v3`` at version 3. ``TABLE@v3/date=2024-10-30`` are its rows
with that value of a partition column: the days, where all values of the first one are numbers or
dates; otherwise the table is one day. Rows come in the order in which their files were added.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.base.files.remote import filesystem_of
from nvt_torchrec.base.versions import import_name
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.readers.parquet_rows import Parquet
from nvt_torchrec.clicklog.readers.table_rows import Rows, Table, TableFormat
from nvt_torchrec.formats.day_names import DayName, day_title, name_of, partition_name
from nvt_torchrec.formats.feature_spec.split import Split

_PATH = re.compile(r"(.+?)(?:@v(\d{1,18}))?((?:/[^/=]+=[^/]*)*)/*")
#: Of a path in the log that may lead elsewhere than below the table, or chains file systems.
_ELSEWHERE = re.compile(r"/|.*(://|::|\0)|(.*/)?\.\.(/|$)", re.DOTALL)
#: Reader features that leave the files as they were, or have a check of their own.
_FEATURES = {"columnMapping", "deletionVectors", "timestampNtz", "v2Checkpoint"}


class _Version(Table):
    """Files of a version of a table: what its log says of each, and its ``folder``.

    A folder is ``/date=2024-10-30`` or so, of the values of the partition columns.
    """

    def __init__(self, root: str, folder: str, schema: pa.Schema, files: list[dict]) -> None:
        self.root, self.folder, self.path, self.schema = root, folder, root + folder, schema
        self.files = [file for file in files if f"{file['folder']}/".startswith(f"{folder}/")]
        if not self.files:
            raise BadInputError(f"{self.path}: no rows", "there is nothing to read")

    def read(
        self, begin: int, end: int, names: Sequence[str] | None, chunk_rows: int | None
    ) -> Iterator[Rows]:
        """See :meth:`Table.read`; columns that a file lacks are those of partitions, or null."""
        every, at = self.schema.names, 0
        top = every if names is None else [n if n in every else n.split(".")[0] for n in names]
        for file, count in zip(self.files, self.rows, strict=True):
            first, last = max(begin - at, 0), min(end - at, count)
            at += count
            if first >= last:
                continue
            with Parquet.opened(file["path"], file["path"]) as table:
                there = [name for name in dict.fromkeys(top) if name in table.schema.names]
                for rows in table.read(first, last, there, chunk_rows):
                    yield pa.table({name: self._column(rows, name, file) for name in top})

    def _column(self, rows: Rows, name: str, file: dict) -> pa.Array | pa.ChunkedArray:
        held = self.schema.field(name).type
        if name in rows.schema.names:
            return rows.column(name).cast(held)
        return pa.repeat(pa.scalar(file.get(f"partition.{name}"), held), rows.num_rows)

    def day(self, folder: str, name: DayName) -> DayFile:
        """Return the files of a folder as a day."""
        of_day = _Version(self.root, self.folder + folder, self.schema, self.files)
        names = sorted(file["path"].rpartition("/")[2] for file in of_day.files)
        digest = hashlib.sha256(str(names).encode()).hexdigest()
        size = sum(file["size_bytes"] for file in of_day.files)
        added = max(file["modification_time"] for file in of_day.files) / 1000
        title, path = day_title(of_day.path), of_day.path
        return DayFile(name.number, path, size, path, added, title=title, digest=digest)


class Delta(TableFormat):
    """Delta tables."""

    @classmethod
    def recognizes(cls, path: str, head: bytes) -> bool:
        """See :meth:`LogFormat.recognizes`."""
        return not head and _place(path) is not None

    @classmethod
    def find_days(cls, path: str, split: Split) -> list[tuple[DayFile, DayName]] | None:
        """See :meth:`LogFormat.find_days`."""
        if _place(path) is None:
            return None
        if split.by == "files":
            raise SettingsError(f"{path}: a Delta table, split by files", "split it by other means")
        table = _version(path)
        folders = sorted({"/".join(file["folder"].split("/")[:2]) for file in table.files})
        days = {folder: partition_name(folder[1:]) for folder in folders}
        if split.by != "days" or table.folder or not all(days.values()):
            name = name_of(table.root.rpartition("@")[0] + table.folder)
            days = {"": name or DayName("day", "day_", 0)}
        return [(table.day(folder, day), day) for folder, day in days.items() if day]

    def pinned(self, path: str) -> str:
        """See :meth:`LogFormat.pinned`."""
        return _version(path).path

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: str, source: str) -> Iterator[Table]:
        """See :meth:`TableFormat.opened`."""
        table = _version(path)
        # of the footers, because the log may say anything
        table.rows = [_count_rows(file["path"]) for file in table.files]
        yield table


def _place(path: str) -> tuple[str, str | None, str] | None:
    """Return root, version and folder of a path; None if there is no Delta table."""
    match = _PATH.fullmatch(path)
    filesystem, name = filesystem_of(match[1] if match else path)
    if match is None or not filesystem.isdir(f"{name}/_delta_log"):
        return None
    return filesystem.unstrip_protocol(name).removeprefix("file://"), match[2], match[3]


def _version(path: str) -> _Version:
    """Read the log of a table. Raises :class:`BadInputError` for what cannot be read."""
    place = _place(path)
    if place is None:
        raise BadInputError(f"{path}: no Delta table", "set another format in the spec's [input]")
    root, number, folder = place
    try:
        version = int(number) if number else import_name("deltalake", "DeltaTable")(root).version()
        return _Version(f"{root}@v{version}", folder, *_contents(root, version))
    except import_name("deltalake.exceptions", "DeltaError") as error:
        raise BadInputError(
            f"{path}: cannot be read as a Delta table: {error}", "check the path and the version"
        ) from error


@functools.lru_cache(maxsize=8)
def _contents(root: str, version: int) -> tuple[pa.Schema, list[dict[str, Any]]]:
    """Return the columns and, in order, the files of a version, which never change."""
    table = import_name("deltalake", "DeltaTable")(root)
    if version > table.version():  # deltalake would look for each version between
        raise BadInputError(
            f"{root}@v{version}: cannot be read as a Delta table: the newest version is "
            f"{table.version()}",
            "check the path and the version",
        )
    table.load_as_version(version)
    meta, features = table.metadata(), set(table.protocol().reader_features or ())
    mapping = meta.configuration.get("delta.columnMapping.mode", "none")
    refused = features - _FEATURES | {f"columns mapped by {mapping}"} - {"columns mapped by none"}
    if "deletionVectors" in features and any(each.num_rows for each in table.deletion_vectors()):
        refused.add("deletion vectors")
    if refused:
        raise BadInputError(
            f"{root}@v{version}: a Delta table with {', '.join(sorted(refused))} is not read",
            "write a copy without; REORG TABLE … APPLY (PURGE) removes deletion vectors",
        )
    files = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    for file in files:
        path = urllib.parse.unquote(file["path"])
        if _ELSEWHERE.match(path):
            raise BadInputError(
                f"{root}@v{version}: its log names {path!r:.100}, which is not below the table",
                "only a table's own files are read: write a copy that has them",
            )
        file["path"] = f"{root}/{path}"
        values = ((name, file[f"partition.{name}"]) for name in meta.partition_columns)
        file["folder"] = "".join(f"/{name}={value}" for name, value in values)
    files.sort(key=lambda file: (file["modification_time"], file["path"]))
    return pa.schema(table.schema().to_arrow()), files


@functools.lru_cache(maxsize=1 << 16)
def _count_rows(path: str) -> int:
    """Return the rows of a file of a table, which never changes."""
    with Parquet.opened(path, path) as opened:
        return sum(opened.rows)
