"""What happened before, beside a saved workflow: the aggregates of each key after the last row.

Layout of ``WORKFLOW/events``; the arrays are mapped, not read, and ``metadata.json`` of the
workflow has the digest of ``state.json``::

    state.json      digest of the workflow, the time that the values are of, the values of a key
                    without an event; size and SHA-256 of the other files. Written last
    N.keys.npy      int64 [keys]: of the group N of the spec, the hashes of its keys, rising
    N.values.npy    float64 [aggregates of the group, keys]; NaN where missing

and of each history its newest events, at most ``kept`` of a key::

    NAME.keys.npy     int64 [keys], rising
    NAME.offsets.npy  int64 [keys + 1], where the events of each key begin, the oldest first
    NAME.known.npy    int64 [events], from when each is known
    NAME.ids.npy      int32 [columns, events]
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.base.files.artifact import FileEntry, Format, check_digests, check_sizes
from nvt_torchrec.base.files.atomic import remove
from nvt_torchrec.base.files.mapping import MappedArray, write_array
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.histories import StoredHistory
from nvt_torchrec.formats.rows import Ids, RawRows, add_missing
from nvt_torchrec.formats.workflow_description import EVENT_STATE_FILE

FORMAT = Format("nvt-torchrec event state", 2, "what happened before, beside a workflow")
DIRECTORY, STATE_FILE = EVENT_STATE_FILE.split("/")
_COPY_AGAIN = "copy the whole workflow again, or run the ETL again"


@dataclasses.dataclass(frozen=True)
class KeyValues:
    """The aggregates of a group.

    Attributes:
        keys: int64 [keys], rising.
        values: By column float64 [keys + 1], the last one of a key without an event.
    """

    keys: np.ndarray
    values: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class HistoryTail:
    """The newest events of each key of a history.

    Attributes:
        keys: int64 [keys], rising.
        offsets: int64 [keys + 1], where the events of each key begin; the oldest comes first.
        known: int64 [events], from when each is known.
        ids: int32 [columns, events].
    """

    keys: np.ndarray
    offsets: np.ndarray
    known: np.ndarray
    ids: np.ndarray

    @classmethod
    def none(cls, columns: int) -> HistoryTail:
        """Return no events."""
        empty = np.empty(0, np.int64)
        return cls(empty, np.zeros(1, np.int64), empty, np.empty((columns, 0), np.int32))

    @classmethod
    def newest(
        cls, keys: np.ndarray, counts: np.ndarray, known: np.ndarray, ids: np.ndarray, most: int
    ) -> HistoryTail:
        """Return the newest events of each key that has any.

        Args:
            keys: int64 [keys], rising.
            counts: int64 [keys], how many events each has.
            known: int64 [events], by key, then time.
            ids: int32 [columns, events].
            most: How many events of a key there are at most.
        """
        ends = np.cumsum(counts)
        if (counts > most).any():
            there = np.repeat(ends, counts) - np.arange(len(known)) <= most
            known, ids = known[there], ids[:, there]
        kept = np.minimum(counts, most)[counts > 0]
        return cls(keys[counts > 0], np.concatenate([[0], np.cumsum(kept)]), known, ids)

    @classmethod
    def concatenate(cls, parts: Sequence[HistoryTail]) -> HistoryTail:
        """Return the events of several with rising keys."""
        counts = np.concatenate([np.diff(part.offsets) for part in parts])
        return cls(
            np.concatenate([part.keys for part in parts]),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            np.concatenate([part.known for part in parts]),
            np.concatenate([part.ids for part in parts], axis=1),
        )

    def take(self, keys: slice) -> HistoryTail:
        """Return the events of some keys that follow each other."""
        offsets = self.offsets[keys.start : keys.stop + 1]
        events = slice(int(offsets[0]), int(offsets[-1]))
        return HistoryTail(
            self.keys[keys], offsets - offsets[0], self.known[events], self.ids[:, events]
        )

    def expand(self) -> np.ndarray:
        """Return the key of each event, and from when it is known: int64 [2, events]."""
        return np.stack([np.repeat(self.keys, np.diff(self.offsets)), self.known])


@dataclasses.dataclass(frozen=True)
class _EventStateRecord:
    """What ``state.json`` holds."""

    workflow_digest: str
    as_of: int
    absent: dict[str, float | None]
    files: dict[str, FileEntry]


def event_files(spec: FeatureSpec) -> list[str]:
    """Return the files of the state beside a workflow, relative to it; none without events."""
    if not spec.events:
        return []
    return [f"{DIRECTORY}/{name}" for name in (*_array_names(spec), STATE_FILE)]


def _array_names(spec: FeatureSpec) -> list[str]:
    tails = itertools.chain(*(_tail_files(rule.name) for rule in spec.histories))
    return [*itertools.chain(*(_files(number) for number in range(len(spec.groups)))), *tails]


def _files(number: int) -> tuple[str, str]:
    return f"{number}.keys.npy", f"{number}.values.npy"


def _tail_files(name: str) -> list[str]:
    return [f"{name}.{field.name}.npy" for field in dataclasses.fields(HistoryTail)]


def _kind(name: str) -> tuple[type, int]:
    """Return the dtype and the number of dimensions of an array."""
    kind = name.split(".")[-2]
    return {"values": (np.float64, 2), "ids": (np.int32, 2)}.get(kind, (np.int64, 1))


def _columns_of(spec: FeatureSpec, key: tuple[str, ...]) -> list[str]:
    return [c.name for c in spec.aggregates if c.aggregate and c.aggregate.key == key]


def write_event_state(
    workflow: Path,
    spec: FeatureSpec,
    workflow_digest: str,
    as_of: int,
    groups: Sequence[KeyValues],
    tails: Sequence[HistoryTail],
) -> None:
    """Write the state beside a workflow. Raises :class:`OutputError`.

    Args:
        workflow: The directory of the workflow.
        spec: The columns.
        workflow_digest: The digest of the workflow.
        as_of: The time that the values are of, in microseconds since 1970.
        groups: The aggregates of each group of the spec.
        tails: The newest events of each of its histories.
    """
    directory = workflow / DIRECTORY
    remove(directory / STATE_FILE)
    entries, absent = {}, {}
    arrays: dict[str, np.ndarray] = {}
    for number, (key, group) in enumerate(zip(spec.groups, groups, strict=True)):
        columns = [group.values[name] for name in _columns_of(spec, key)]
        values = np.stack(columns) if columns else np.empty((0, len(group.keys) + 1))
        for name, value in zip(_columns_of(spec, key), values[:, -1].tolist(), strict=True):
            absent[name] = None if math.isnan(value) else value
        arrays |= zip(_files(number), (group.keys, values[:, :-1]), strict=True)
    for rule, tail in zip(spec.histories, tails, strict=True):
        arrays |= zip(_tail_files(rule.name), vars(tail).values(), strict=True)
    for name, array in arrays.items():
        write_array(directory / name, array)
        entries[name] = FileEntry.from_file(directory / name).to_dict()
    content = {"workflow_digest": workflow_digest, "as_of": as_of, "absent": absent}
    FORMAT.write(directory / STATE_FILE, {**content, "files": entries})


class EventState:
    """Looks up the aggregates of rows by their keys. Made by :meth:`load`; thread-safe.

    Attributes:
        as_of: The time that the values are of, in microseconds since 1970.
        tails: The newest events of each history.
    """

    def __init__(
        self, spec: FeatureSpec, record: _EventStateRecord, arrays: list[MappedArray]
    ) -> None:
        self.as_of = record.as_of
        self._spec, self._arrays = spec, arrays
        values = [array.values for array in arrays]
        groups = 2 * len(spec.groups)
        self._keys, self._values = values[:groups:2], values[1:groups:2]
        self.tails = [HistoryTail(*values[at : at + 4]) for at in range(groups, len(values), 4)]
        names = [_columns_of(spec, key) for key in spec.groups]
        self._absent = [
            np.array([math.nan if (v := record.absent[name]) is None else v for name in columns])
            for columns in names
        ]
        order = {name: i for i, name in enumerate(itertools.chain(*names))}
        self._order = np.array([order[column.name] for column in spec.aggregates], np.int64)

    @classmethod
    def load(
        cls,
        workflow: Path,
        spec: FeatureSpec,
        workflow_digest: str,
        entry: FileEntry | None,
        *,
        verify: bool = False,
    ) -> EventState:
        """Open the state beside a workflow.

        Args:
            workflow: The directory of the workflow.
            spec: The columns.
            workflow_digest: The digest of the workflow.
            entry: What the workflow says of the state's record; None if it says nothing.
            verify: Read all files, and compare their digests; otherwise only that of the record.

        Raises:
            BadInputError: It is missing or damaged.
            SchemaError: It is another workflow's, or of another version.
        """
        directory = workflow / DIRECTORY
        file = directory / STATE_FILE
        if entry is None:
            raise BadInputError(
                f"{workflow}: does not say what happened before: an earlier version wrote it, or "
                "it was not finished",
                "run the ETL again",
            )
        listed = {EVENT_STATE_FILE: entry}
        check_sizes(workflow, listed, _COPY_AGAIN)
        check_digests(workflow, listed, _COPY_AGAIN)
        record = FORMAT.read(_EventStateRecord, file, _COPY_AGAIN)
        if record.workflow_digest != workflow_digest:
            raise SchemaError(f"{file}: of another workflow than the one beside it", _COPY_AGAIN)
        names = _array_names(spec)
        columns = {column.name for column in spec.aggregates}
        if set(record.files) != set(names) or set(record.absent) != columns:
            raise BadInputError(f"{file}: damaged: it is of another spec", _COPY_AGAIN)
        check_sizes(directory, record.files, _COPY_AGAIN)
        if verify:
            check_digests(directory, record.files, _COPY_AGAIN)
        try:
            arrays = [MappedArray(directory / name, *_kind(name)) for name in names]
            shapes = {n: array.values.shape for n, array in zip(names, arrays, strict=True)}
            for number, key in enumerate(spec.groups):
                keys, values = _files(number)
                if shapes[values] != (len(_columns_of(spec, key)), *shapes[keys]):
                    raise ValueError(f"{values} holds {shapes[values]}, {keys} {shapes[keys]}")
            for rule in spec.histories:
                keys, offsets, known, ids = (shapes[name] for name in _tail_files(rule.name))
                if offsets[0] != keys[0] + 1 or ids != (len(rule.columns), *known):
                    raise ValueError(f"the files of {rule.name} are of other numbers of events")
        except (OSError, ValueError) as error:
            raise BadInputError(f"{directory}: damaged: {error}", _COPY_AGAIN) from error
        return cls(spec, record, arrays)

    def values(self, groups: np.ndarray) -> np.ndarray:
        """Return the aggregates of rows, float64 [aggregates, n]; NaN where missing.

        Args:
            groups: ``RawRows.groups``, int64 [groups, n].

        Raises:
            BadInputError: A file was written to since it was opened.
        """
        found = []
        for array in self._arrays:
            array.check()
        for hashes, keys, values, absent in zip(
            groups, self._keys, self._values, self._absent, strict=True
        ):
            columns = np.repeat(absent[:, None], len(hashes), axis=1)
            if len(keys):
                place = np.minimum(np.searchsorted(keys, hashes), len(keys) - 1)
                known = (keys[place] == hashes) & (hashes != 0)
                columns[:, known] = values[:, place[known]]
            found.append(columns)
        return np.concatenate(found)[self._order]

    def newest(
        self, name: str, groups: np.ndarray, wanted: np.ndarray, most: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the newest events of a history for each row, oldest first.

        Args:
            name: The name of the history.
            groups: ``RawRows.groups``, int64 [groups, n].
            wanted: bool [n]; other rows get none.
            most: The most events of a row.

        Returns:
            The ids of all rows, int32 [columns, events]; int64 [n], how many each row has.
        """
        number = [rule.name for rule in self._spec.histories].index(name)
        tail, rule = self.tails[number], self._spec.histories[number]
        hashes = groups[self._spec.groups.index(rule.key)]
        place = np.searchsorted(tail.keys, hashes)
        if not len(tail.known):
            return tail.ids, np.zeros(len(hashes), np.int64)
        there = wanted & (hashes != 0) & (place < len(tail.keys))
        there[there] = tail.keys[place[there]] == hashes[there]
        begin, end = (
            np.where(there, tail.offsets[np.where(there, place + at, 0)], 0) for at in (0, 1)
        )
        if ((begin < 0) | (begin > end) | (end > len(tail.known))).any():
            raise BadInputError(f"history {name}: damaged: events that are not there", _COPY_AGAIN)
        while (late := (end > begin) & (tail.known[end - 1] >= self.as_of)).any():
            end = end - late  # known after the last day
        counts = np.minimum(end - begin, most)
        offsets = np.cumsum(counts) - counts
        events = np.repeat(end - counts - offsets, counts) + np.arange(counts.sum())
        return tail.ids[:, events], counts

    def add_histories(
        self,
        ids: Ids,
        groups: np.ndarray,
        histories: Sequence[StoredHistory],
        sizes: Mapping[str, int],
        most: int,
    ) -> Ids:
        """Return the ids with the events of histories for rows without events of their own.

        Args:
            ids: The categorical columns and, unless the rows are those of a file, the histories.
            groups: ``RawRows.groups``, int64 [groups, n].
            histories: The histories.
            sizes: The rows of the table of each categorical column.
            most: The most events of a row.

        Raises:
            BadInputError: The state is damaged.
        """
        first = len(sizes)
        columns, lengths = ids.columns[:first], [*ids.lengths[:first]]
        given, given_lengths = ids.columns[first:], ids.lengths[first:]
        for history in histories:
            width = len(history.columns)
            own, given = given[:width], given[width:]
            counts_of_own = np.zeros((width, len(ids)), np.int64)
            if own:  # rows of a file have none
                counts_of_own, given_lengths = given_lengths[:width], given_lengths[width:]
            has_own = counts_of_own.max(axis=0) > 0  # in one of the columns
            newest, counts = self.newest(history.name, groups, ~has_own, most)
            for place, (name, events) in enumerate(zip(history.columns, newest, strict=True)):
                if len(events) and not 0 <= events.min() <= events.max() < sizes[name]:
                    what = f"history {history.name}: damaged: an id outside of the table of {name}"
                    raise BadInputError(what, _COPY_AGAIN)
                total = counts_of_own[place] + counts
                from_row = np.repeat(has_own, total)
                column = np.empty(len(from_row), np.int32)
                column[~from_row] = events
                if own:
                    column[from_row] = own[place]
                columns.append(column)
                lengths.append(total)
        return Ids.from_lengths(columns, np.stack(lengths))

    def add(self, rows: RawRows) -> RawRows:
        """Return rows with the aggregates of their keys."""
        assert rows.groups is not None
        return add_aggregates(rows, self._spec, self.values(rows.groups))


def add_aggregates(
    rows: RawRows, spec: FeatureSpec, values: np.ndarray | Sequence[np.ndarray]
) -> RawRows:
    """Return rows with their aggregates.

    Args:
        rows: The rows.
        spec: Their columns.
        values: float64 [aggregates, n]; NaN where missing.
    """
    dense, missing = rows.dense.copy(), rows.dense_missing.copy()
    places = [j for j, column in enumerate(spec.dense) if column.aggregate]
    for j, column in zip(places, values, strict=True):
        absent = np.isnan(column)
        dense[j] = np.where(absent, 0, column)
        add_missing(missing, j, absent)
    return dataclasses.replace(rows, dense=dense, dense_missing=missing, has_aggregates=True)
