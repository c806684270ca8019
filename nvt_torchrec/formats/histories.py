"""Histories: the events of a row's key, such as its user, before the row; stored once.

The parquet has two int32 columns without nulls for each history, after the categorical columns:

- ``NAME.key``: the number of the row's key, from 0; -1 if the row has none;
- ``NAME.events``: the number of this key's events that precede the row; 0 without a key.

The events are in ``SPLITS/_histories/NAME/FIRST/``, where FIRST is the decimal number of the first
key in the directory. The first directory begins at 0, and each other one begins where the previous
one ends. Added days get new directories; old ones never change. A directory has

- ``offsets.npy``: int64 [keys + 1], the offset of each key's events and, last, the number of all
  events; from 0, never decreasing;
- ``COLUMN.npy`` for each column of the history: int32 [events], the ids of that categorical column,
  for each key the oldest first.

So the events of a row with key k are at the positions from ``offsets[k - FIRST]`` to
``offsets[k - FIRST] + events``, and a reader takes as many of the newest ones as it needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.base.files.atomic import new_directory
from nvt_torchrec.base.files.mapping import ArrayWriter, MappedArray
from nvt_torchrec.formats.parts import link_parts, open_parts

#: The directory of all histories, next to those of the splits.
HISTORIES = "_histories"
_OFFSETS = "offsets"
_REMEDY = "copy the histories again, or run the ETL again"


@dataclasses.dataclass(frozen=True)
class StoredHistory:
    """The name and columns of a history of the data.

    Attributes:
        name: The name, a plain file name.
        columns: The single-hot categorical columns whose ids its events have. They share the
            vocabularies and embedding tables of these columns.
    """

    name: str
    columns: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in (self.name, *self.columns):  # all become names of files
            if Path(name).name != name or "\0" in name or name in ("", "..", _OFFSETS):
                raise SchemaError(
                    f"history {self.name!r:.60}: {name!r:.60} cannot be the name of a file",
                    "name histories and their columns without slashes, and not 'offsets'",
                )
        if not self.columns or len(set(self.columns)) < len(self.columns):
            raise SchemaError(
                f"history {self.name}: no columns, or a column twice: {', '.join(self.columns)}"
            )

    @property
    def pointers(self) -> tuple[str, str]:
        """The parquet columns that point to the events of a row: its key, and their number."""
        return f"{self.name}.key", f"{self.name}.events"

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the model's features (lists of ids), one for each column."""
        return tuple(f"{self.name}.{column}" for column in self.columns)


def list_features(categorical: Sequence[str], histories: Sequence[StoredHistory]) -> dict[str, str]:
    """Return the model's features of ids, each with the categorical column whose table it uses.

    They are the categorical columns, then the columns of each history.
    """
    columns = {name: name for name in categorical}
    for history in histories:
        columns |= zip(history.features, history.columns, strict=True)
    return columns


@dataclasses.dataclass(frozen=True)
class HistoryPart:
    """The events of the keys of one directory, mapped from its files.

    Attributes:
        directory: The directory.
        first: The number of the first key.
        offsets: int64 [keys + 1], the offset of each key's events and, last, their number.
        ids: int32 [events] for each column of the history.
    """

    directory: Path
    first: int
    offsets: np.ndarray
    ids: tuple[np.ndarray, ...]


class HistoryStore:
    """The events of all keys of a history, mapped from files.

    Opening the store checks types, lengths and the last offsets, but reads no events. Code that
    reads events must check them, as :meth:`read_newest` does.

    Args:
        directory: The directory of the splits.
        history: The history.
        sizes: The rows of the embedding table of each of its columns.

    Attributes:
        history: The history.
        sizes: The rows of the embedding table of each of its columns.
        parts: The parts, in the order of their first keys.

    Raises:
        BadInputError: There are no parts, or a file is missing or damaged.
    """

    def __init__(self, directory: Path, history: StoredHistory, sizes: Sequence[int]) -> None:
        self.history = history
        self.sizes = tuple(sizes)
        root = directory / HISTORIES / history.name
        self._mapped: list[MappedArray] = []
        what = f"the events of history {history.name}"
        self.parts: list[HistoryPart]
        self.parts, _ = open_parts(root, what, _REMEDY, self._open, "keys")

    def _open(self, directory: Path, first: int) -> tuple[HistoryPart, int]:
        """Map the files of a directory, and count its keys.

        Raises:
            BadInputError: A file is missing or damaged.
        """
        offsets = self._map(directory / f"{_OFFSETS}.npy", np.int64)
        ids = [self._map(directory / f"{name}.npy", np.int32) for name in self.history.columns]
        if not len(offsets):
            raise BadInputError(f"{directory}: no offsets in {_OFFSETS}.npy", _REMEDY)
        begin = int(offsets[0])
        end = int(offsets[-1])
        for name, column in zip(self.history.columns, ids, strict=True):
            if (begin, end) != (0, len(column)):
                raise BadInputError(
                    f"{directory}: {len(column)} events in {name}.npy, but the offsets go from "
                    f"{begin} to {end}",
                    _REMEDY,
                )
        return HistoryPart(directory, first, offsets, tuple(ids)), len(offsets) - 1

    def _map(self, path: Path, dtype: type) -> np.ndarray:
        """Map a file of one dimension. Raises BadInputError."""
        try:
            # Writable (in memory only), because Numba would compile its loops again for read-only
            # arrays.
            array = MappedArray(path, dtype, 1, writable=True)
        except (OSError, ValueError) as error:
            what = getattr(error, "strerror", None) or error
            raise BadInputError(f"{path}: {what}", _REMEDY) from error
        self._mapped.append(array)
        return array.values

    def check(self) -> None:
        """Raise :class:`BadInputError` if a file was written to since it was opened."""
        for array in self._mapped:
            array.check()

    def read_newest(self, key: int, events: int, maximum: int) -> list[np.ndarray]:
        """Return the newest events before a row, oldest first: int32 [n] for each column.

        Args:
            key: The row's key in the parquet.
            events: The row's number of events in the parquet.
            maximum: The largest number of events to return.

        Raises:
            SchemaError: The store does not have these events, or an id is outside its table.
        """
        if (key, events) == (-1, 0):
            return [np.empty(0, np.int32) for _ in self.history.columns]
        key_count = self.parts[-1].first + len(self.parts[-1].offsets) - 1
        if not 0 <= key < key_count:
            raise SchemaError(
                f"key {key} of history {self.history.name}, which has {key_count} keys"
            )
        part = next(part for part in reversed(self.parts) if part.first <= key)
        index = key - part.first
        begin, end = part.offsets[index : index + 2].tolist()
        if not (0 <= begin <= begin + events <= end <= part.offsets[-1] and events >= 0):
            raise SchemaError(
                f"{events} events of key {key} in history {self.history.name}, but "
                f"{part.directory} has {end - begin}"
            )
        end = begin + events
        begin += max(events - maximum, 0)
        found = [ids[begin:end] for ids in part.ids]
        for name, size, ids in zip(self.history.columns, self.sizes, found, strict=True):
            bad = np.flatnonzero((ids < 0) | (ids >= size))
            if bad.size:
                raise SchemaError(
                    f"{part.directory / name}.npy: id {ids[bad[0]]} at position {begin + bad[0]}, "
                    f"outside the table of {size} rows of column {name}",
                    _REMEDY,
                )
        return found


def link_histories(sources: Sequence[Path], target: Path) -> None:
    """Hard-link the histories of other splits, see :func:`.parts.link_parts`."""
    link_parts(sources, target, HISTORIES)


@contextlib.contextmanager
def write_history(directory: Path, history: StoredHistory, first: int) -> Iterator[HistoryWriter]:
    """Write the events of consecutive keys to ``directory/_histories/NAME/FIRST`` atomically.

    ::

        with write_history(splits, history, first=0) as writer:
            writer.add([2, 0, 1], {"item": [5, 3, 9]})  # keys 0, 1 and 2

    Raises:
        OutputError: The directory exists, or cannot be written.
    """
    with new_directory(directory / HISTORIES / history.name / str(first)) as temporary:
        names = (_OFFSETS, *history.columns)
        with contextlib.ExitStack() as stack:
            files = []
            for name in names:
                files.append(stack.enter_context(open(temporary / f"{name}.npy", "wb+")))
            writer = HistoryWriter(history, files)
            yield writer
            writer.finish()


class HistoryWriter:
    """Writes events key by key, without holding them in memory."""

    def __init__(self, history: StoredHistory, files: Sequence[IO[bytes]]) -> None:
        offsets, *ids = files
        self._offsets = ArrayWriter(offsets, np.int64)
        self._offsets.append([0])
        writers = (ArrayWriter(file, np.int32) for file in ids)
        self._ids = dict(zip(history.columns, writers, strict=True))
        self._events = 0

    def add(self, counts: np.ndarray | Sequence[int], ids: Mapping[str, np.ndarray]) -> None:
        """Add the next keys.

        Args:
            counts: The number of events of each key.
            ids: For each column, the ids of these events, the oldest of each key first.
        """
        ends = self._events + np.cumsum(np.asarray(counts, np.int64))
        self._offsets.append(ends)
        total = int(ends[-1]) - self._events if len(ends) else 0
        for name, writer in self._ids.items():
            if len(ids[name]) != total:
                raise ValueError(f"{len(ids[name])} ids of {name} for {total} events")
            writer.append(ids[name])
        self._events += total

    def finish(self) -> None:
        """Write the numbers of keys and events to the headers of the files."""
        for writer in (self._offsets, *self._ids.values()):
            writer.finish()
