"""What happened before, beside a saved workflow: the aggregates of each key after the last row.

Layout of ``WORKFLOW/events``; the arrays are mapped, not read::

    state.json      digest of the workflow, the time that the values are of, the values of a key
                    without an event; size and SHA-256 of the other files. Written last
    N.keys.npy      int64 [keys]: of the group N of the spec, the hashes of its keys, rising
    N.values.npy    float64 [aggregates of the group, keys]; NaN where missing
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
from nvt_torchrec.base.files.atomic import atomic_path, remove
from nvt_torchrec.base.files.mapping import MappedArray
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import RawRows, add_missing

FORMAT = Format("nvt-torchrec event state", 1, "what happened before, beside a workflow")
DIRECTORY, STATE_FILE = "events", "state.json"
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
    arrays = [_files(number) for number in range(len(spec.groups))]
    return [f"{DIRECTORY}/{name}" for name in (*itertools.chain(*arrays), STATE_FILE)]


def _files(number: int) -> tuple[str, str]:
    return f"{number}.keys.npy", f"{number}.values.npy"


def _columns_of(spec: FeatureSpec, of: tuple[str, ...]) -> list[str]:
    return [c.name for c in spec.aggregates if c.aggregate and c.aggregate.of == of]


def write_event_state(
    workflow: Path,
    spec: FeatureSpec,
    workflow_digest: str,
    as_of: int,
    groups: Sequence[KeyValues],
) -> None:
    """Write the state beside a workflow. Raises :class:`OutputError`.

    Args:
        workflow: The directory of the workflow.
        spec: The columns.
        workflow_digest: The digest of the workflow.
        as_of: The time that the values are of, in microseconds since 1970.
        groups: The aggregates of each group of the spec.
    """
    directory = workflow / DIRECTORY
    remove(directory / STATE_FILE)
    entries, absent = {}, {}
    for number, (of, group) in enumerate(zip(spec.groups, groups, strict=True)):
        columns = [group.values[name] for name in _columns_of(spec, of)]
        values = np.stack(columns) if columns else np.empty((0, len(group.keys) + 1))
        for name, value in zip(_columns_of(spec, of), values[:, -1].tolist(), strict=True):
            absent[name] = None if math.isnan(value) else value
        for name, array in zip(_files(number), (group.keys, values[:, :-1]), strict=True):
            with atomic_path(directory / name) as temporary, open(temporary, "wb") as file:
                np.save(file, np.ascontiguousarray(array), allow_pickle=False)
            entries[name] = FileEntry.from_file(directory / name).to_dict()
    content = {"workflow_digest": workflow_digest, "as_of": as_of, "absent": absent}
    FORMAT.write(directory / STATE_FILE, {**content, "files": entries})


class EventState:
    """Looks up the aggregates of rows by their keys. Made by :meth:`load`; thread-safe.

    Attributes:
        as_of: The time that the values are of, in microseconds since 1970.
    """

    def __init__(
        self, spec: FeatureSpec, record: _EventStateRecord, arrays: list[MappedArray]
    ) -> None:
        self.as_of = record.as_of
        self._spec, self._arrays = spec, arrays
        self._keys = [array.values for array in arrays[::2]]
        self._values = [array.values for array in arrays[1::2]]
        names = [_columns_of(spec, of) for of in spec.groups]
        self._absent = [
            np.array([math.nan if (v := record.absent[name]) is None else v for name in of])
            for of in names
        ]
        order = {name: i for i, name in enumerate(itertools.chain(*names))}
        self._order = np.array([order[column.name] for column in spec.aggregates], np.int64)

    @classmethod
    def load(
        cls, workflow: Path, spec: FeatureSpec, workflow_digest: str, *, verify: bool = False
    ) -> EventState:
        """Open the state beside a workflow.

        Args:
            workflow: The directory of the workflow.
            spec: The columns.
            workflow_digest: The digest of the workflow.
            verify: Read all files, and compare their digests.

        Raises:
            BadInputError: It is missing or damaged.
            SchemaError: It is another workflow's, or of another version.
        """
        directory = workflow / DIRECTORY
        file = directory / STATE_FILE
        record = FORMAT.read(_EventStateRecord, file, _COPY_AGAIN)
        if record.workflow_digest != workflow_digest:
            raise SchemaError(f"{file}: of another workflow than the one beside it", _COPY_AGAIN)
        names = itertools.chain(*(_files(number) for number in range(len(spec.groups))))
        columns = {column.name for column in spec.aggregates}
        if set(record.files) != set(names) or set(record.absent) != columns:
            raise BadInputError(f"{file}: damaged: it is of another spec", _COPY_AGAIN)
        check_sizes(directory, record.files, _COPY_AGAIN)
        if verify:
            check_digests(directory, record.files, _COPY_AGAIN)
        arrays = []
        for number, of in enumerate(spec.groups):
            try:
                keys, values = _files(number)
                arrays.append(MappedArray(directory / keys, np.int64, 1))
                arrays.append(MappedArray(directory / values, np.float64, 2))
                wanted = (len(_columns_of(spec, of)), len(arrays[-2].values))
                if arrays[-1].values.shape != wanted:
                    raise ValueError(f"holds {arrays[-1].values.shape} values, not {wanted}")
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

    def add(self, rows: RawRows) -> RawRows:
        """Return rows with the aggregates of their keys."""
        assert rows.groups is not None
        return add_aggregates(rows, self._spec, self.values(rows.groups))


def add_aggregates(rows: RawRows, spec: FeatureSpec, values: np.ndarray) -> RawRows:
    """Return rows with their aggregates, which need no keys any more.

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
    return dataclasses.replace(rows, dense=dense, dense_missing=missing, groups=None)
