"""Histories: what the key of a row, such as its user, did before it; stored once beside the splits.

The parquet has two int32 columns for each history, without nulls, after the categorical columns:

- ``NAME.key``: the number of the row's key, from 0; -1: the row has none;
- ``NAME.events``: how many of this key's events precede the row; 0 where there is no key.

The events lie in ``SPLITS/_histories/NAME/FIRST/``, where FIRST is the number of the first key in
it, in decimal. The first directory begins at 0, each other one where the one before ends; days that
are added get new ones, and no old one ever changes. In it are

- ``offsets.npy``: int64 [keys + 1], where the events of each key begin, and where the last ones
  end; from 0, never falling;
- ``COLUMN.npy`` for each column of the history: int32 [events], the ids of that categorical column,
  of each key the oldest first.

So the events of a row with key k are those at positions from ``offsets[k - FIRST]`` to
``offsets[k - FIRST] + events``, and a reader takes as many of the newest ones as it likes.
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

#: The directory of all histories, beside those of the splits.
HISTORIES = "_histories"
_OFFSETS = "offsets"
_REMEDY = "copy the histories again, or run the ETL again"


@dataclasses.dataclass(frozen=True)
class StoredHistory:
    """A history of the data.

    Attributes:
        name: Its name, a plain file name.
        columns: The single-hot categorical columns whose ids its events have, with the vocabulary
            and the embedding table of the column.
    """

    name: str
    columns: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in (self.name, *self.columns):  # they become names of files
            if Path(name).name != name or "\0" in name or name in ("", "..", _OFFSETS):
                raise SchemaError(
                    f"history {self.name!r:.60}: {name!r:.60} cannot be the name of a file",
                    "name histories and their columns without slashes, and not 'offsets'",
                )
        if not self.columns or len(set(self.columns)) < len(self.columns):
            raise SchemaError(
                f"history {self.name}: no columns, or one twice: {', '.join(self.columns)}"
            )

    @property
    def pointers(self) -> tuple[str, str]:
        """The columns of the parquet that say which events precede a row: key and number."""
        return f"{self.name}.key", f"{self.name}.events"

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the lists of ids that a model gets, one for each column."""
        return tuple(f"{self.name}.{column}" for column in self.columns)


def list_features(categorical: Sequence[str], histories: Sequence[StoredHistory]) -> dict[str, str]:
    """Return the lists of ids that a model gets, each with the column whose table it has.

    They are the categorical columns, then each column of each history.
    """
    columns = {name: name for name in categorical}
    for history in histories:
        columns |= zip(history.features, history.columns, strict=True)
    return columns


@dataclasses.dataclass(frozen=True)
class HistoryPart:
    """The events of some keys, mapped from files.

    Attributes:
        directory: Where they are.
        first: The number of the first key.
        offsets: int64 [keys + 1], where the events of each key begin and the last ones end.
        ids: int32 [events] for each column of the history.
    """

    directory: Path
    first: int
    offsets: np.ndarray
    ids: tuple[np.ndarray, ...]


class HistoryStore:
    """The events of all keys of a history, mapped from files.

    Opening it reads no events: types, lengths and ends are checked, and whoever reads events checks
    what is read, as :meth:`read_newest` does.

    Args:
        directory: That of the splits.
        history: The history.
        sizes: Rows of the embedding table of each of its columns.

    Attributes:
        history, sizes: As given.
        parts: The directories, by their first keys.

    Raises:
        BadInputError: There is none, or a file is missing or damaged.
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
        """Map the files of a directory, whose first key has this number, and count its keys.

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
            # Writable, in memory alone, like arrays that are not mapped: for read-only ones, Numba
            # would compile loops again.
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
        """Return the newest of a row's events, oldest first: int32 [n] for each column.

        Args:
            key, events: What the parquet holds of the row.
            maximum: The most events to return.

        Raises:
            SchemaError: They lead outside the store, or an id is outside its table.
        """
        if (key, events) == (-1, 0):
            return [np.empty(0, np.int32) for _ in self.history.columns]
        key_count = self.parts[-1].first + len(self.parts[-1].offsets) - 1
        if not 0 <= key < key_count:
            raise SchemaError(f"key {key} of history {self.history.name}, which has {key_count}")
        part = next(part for part in reversed(self.parts) if part.first <= key)
        index = key - part.first
        begin, end = part.offsets[index : index + 2].tolist()
        if not (0 <= begin <= begin + events <= end <= part.offsets[-1] and events >= 0):
            raise SchemaError(
                f"{events} events of key {key} in history {self.history.name}, where "
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
    """Link the histories of some directories into another one, see :func:`.parts.link_parts`."""
    link_parts(sources, target, HISTORIES)


@contextlib.contextmanager
def write_history(directory: Path, history: StoredHistory, first: int) -> Iterator[HistoryWriter]:
    """Write the events of some keys to ``directory/_histories/NAME/FIRST``, whole or not at all.

    ::

        with write_history(splits, history, first=0) as writer:
            writer.add([2, 0, 1], {"item": [5, 3, 9]})  # of keys 0 … 2

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
    """Writes events key by key; holds none of them."""

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
            ids: For each column the ids of these events, of each key the oldest first.
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
        """Write how many keys and events there are."""
        for writer in (self._offsets, *self._ids.values()):
            writer.finish()
