"""The event state beside a saved workflow: sums over the events of each key, and newest events.

Layout of ``WORKFLOW/events``; the arrays are mapped into memory, not read, and ``metadata.json`` of
the workflow has the digest of ``state.json``::

    state.json      digest of the workflow, the time from which rows can be scored, the smoothing of
                    rates; size and SHA-256 of the other files. Written last
    rates.npy       float64 [1 + labels, hours + 1], the rates over all events: row 0 has the hours
                    since 1970 in which more events become known, and infinity as the last one; the
                    other rows have the rate of each label before each of these hours

for group N of the spec, if it has aggregates, the arrays of :class:`.event_sums.GroupEvents`::

    N.keys.npy      int64 [keys], the hashes of its keys, ascending
    N.offsets.npy   int64 [keys + 1]
    N.known.npy     int64 [events]
    N.last.npy      int64 [events]
    N.sums.npy      int64 [sums, events]
    N.picks.npy     float64 [stored picks, events]; for groups with last, min or max
    N.previous.npy  int64 [distinct columns, events]; for groups with distinct

and for each history its newest events, at most ``kept`` for a key::

    NAME.keys.npy     int64 [keys], ascending
    NAME.offsets.npy  int64 [keys + 1], where the events of each key begin, oldest first
    NAME.known.npy    int64 [events], the time from which each is known
    NAME.ids.npy      int32 [columns, events]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.base.files.artifact import FileEntry, Format, check_digests, check_sizes
from nvt_torchrec.base.files.atomic import remove
from nvt_torchrec.base.files.mapping import MappedArray, write_array
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.histories import StoredHistory
from nvt_torchrec.formats.ids import Ids
from nvt_torchrec.formats.rows import RawRows, add_missing
from nvt_torchrec.formats.workflow_description import EVENT_STATE_FILE, WorkflowDescription
from nvt_torchrec.workflows.event_groups import (
    LaterRates,
    compute_aggregates,
    find_cuts,
    plan_groups,
)
from nvt_torchrec.workflows.event_kernels import find_newest
from nvt_torchrec.workflows.event_state_arrays import (
    DIRECTORY,
    RATES,
    STATE_FILE,
    check_shapes,
    get_array_type,
    list_arrays,
    list_group_files,
    list_history_files,
)
from nvt_torchrec.workflows.event_sums import GroupEvents
from nvt_torchrec.workflows.history_tail import HistoryTail

FORMAT = Format("nvt-torchrec event state", 3, "the event state of a workflow")
_COPY_AGAIN = "copy the whole workflow again, or run the ETL again"


@dataclasses.dataclass(frozen=True)
class _EventStateRecord:
    """The content of ``state.json``."""

    workflow_digest: str
    as_of: int
    smoothing: dict[str, float]
    files: dict[str, FileEntry]


def write_event_state(
    workflow: Path,
    spec: FeatureSpec,
    workflow_digest: str,
    as_of: int,
    groups: Sequence[GroupEvents],
    rates: LaterRates,
    tails: Sequence[HistoryTail],
) -> None:
    """Write the state beside a workflow. Raises :class:`OutputError`.

    Args:
        workflow: The directory of the workflow.
        spec: The columns.
        workflow_digest: The digest of the workflow.
        as_of: The earliest time before which events count for a row, in microseconds since 1970.
        groups: The events of each group of the spec.
        rates: The rates over all events from that time on.
        tails: The newest events of each history of the spec.
    """
    directory = workflow / DIRECTORY
    remove(directory / STATE_FILE)
    hours = np.append(rates.hours.astype(np.float64), np.inf)
    rates_of_labels = [rates.rates[label] for label in spec.labels]
    arrays: dict[str, np.ndarray] = {RATES: np.stack([hours, *rates_of_labels])}
    for number, (group, events) in enumerate(zip(plan_groups(spec), groups, strict=True)):
        for name in list_group_files(number, group):
            arrays[name] = getattr(events, name.split(".")[1])
    for rule, tail in zip(spec.histories, tails, strict=True):
        arrays |= zip(list_history_files(rule.name), vars(tail).values(), strict=True)
    entries = {}
    for name, array in arrays.items():
        write_array(directory / name, array)
        entries[name] = FileEntry.from_file(directory / name).to_dict()
    content = {
        "workflow_digest": workflow_digest,
        "as_of": as_of,
        "smoothing": dict(rates.smoothing),
        "files": entries,
    }
    FORMAT.write(directory / STATE_FILE, content)


class EventState:
    """Looks up aggregates and histories by the keys of rows. Opened by :meth:`load`; thread-safe.

    Attributes:
        as_of: The earliest time before which events count for a row, in microseconds since 1970. It
            also applies to rows with an earlier time or none.
        tails: The newest events of each history.
    """

    def __init__(
        self, spec: FeatureSpec, record: _EventStateRecord, arrays: dict[str, MappedArray]
    ) -> None:
        self.as_of = record.as_of
        self._spec = spec
        self._arrays = list(arrays.values())
        values = {name: array.values for name, array in arrays.items()}
        hours, *rates = values[RATES]
        rates_by_label = dict(zip(spec.labels, rates, strict=True))
        self._rates = LaterRates(record.smoothing, hours[:-1].astype(np.int64), rates_by_label)
        self._groups = {}
        for number, group in enumerate(plan_groups(spec)):
            if not group.aggregates:
                continue
            # By name: a group may have ``previous`` without ``picks``.
            names = GroupEvents.list_array_names(group)
            arrays_of_group = [values[file] for file in list_group_files(number, group)]
            events = GroupEvents(**dict(zip(names, arrays_of_group, strict=True)))
            self._groups[number] = group, events
        self.tails = []
        for rule in spec.histories:
            arrays_of_history = [values[name] for name in list_history_files(rule.name)]
            self.tails.append(HistoryTail(*arrays_of_history))

    @classmethod
    def load(cls, description: WorkflowDescription, *, verify: bool = False) -> EventState:
        """Open the state beside a workflow.

        Args:
            description: The workflow's description. The digest of ``state.json`` in it is compared.
            verify: Read all other files as well, and compare their digests.

        Raises:
            BadInputError: It is missing or damaged, or was written for another spec.
            SchemaError: It belongs to another workflow, or has another format version.
        """
        if EVENT_STATE_FILE not in description.files:
            raise BadInputError(
                f"{description.path}: it has no event state, because an earlier version wrote it "
                "or the ETL did not finish",
                "run the ETL again",
            )
        spec = description.spec
        file = description.check_file(EVENT_STATE_FILE)
        directory = file.parent
        record = FORMAT.read(_EventStateRecord, file, _COPY_AGAIN)
        if record.workflow_digest != description.digest:
            raise SchemaError(f"{file}: belongs to another workflow", _COPY_AGAIN)
        names = list_arrays(spec)
        rates = {c.name for c in spec.aggregates if c.aggregate and c.aggregate.label}
        if set(record.files) != set(names) or set(record.smoothing) != rates:
            raise BadInputError(f"{file}: damaged: it belongs to another spec", _COPY_AGAIN)
        check_sizes(directory, record.files, _COPY_AGAIN)
        if verify:
            check_digests(directory, record.files, _COPY_AGAIN)
        try:
            arrays = {name: MappedArray(directory / name, *get_array_type(name)) for name in names}
            check_shapes(spec, {name: array.values.shape for name, array in arrays.items()})
        except (OSError, ValueError) as error:
            raise BadInputError(f"{directory}: damaged: {error}", _COPY_AGAIN) from error
        return cls(spec, record, arrays)

    def find_cuts(self, rows: int, times: np.ndarray | None) -> np.ndarray:
        """Return the time before which events count for each row, int64 [n].

        Args:
            rows: Number of rows.
            times: ``RawRows.times``, int64 [1 or 2, n], whose first row is the time of each row;
                None if rows have no time.
        """
        if times is None:
            return np.full(rows, self.as_of)
        return np.maximum(find_cuts(self._spec, times[0]), self.as_of)

    def compute_aggregates(self, groups: np.ndarray, times: np.ndarray | None = None) -> np.ndarray:
        """Return the aggregates of rows in their units, float64 [aggregates, n]; NaN where missing.

        Args:
            groups: ``RawRows.groups``, int64 [groups, n].
            times: ``RawRows.times``; rows without a time are of :attr:`as_of`.

        Raises:
            BadInputError: The state is damaged, or a file was written to since it was opened.
        """
        for array in self._arrays:
            array.check()
        cuts = self.find_cuts(groups.shape[1], times)
        found: dict[str, np.ndarray] = {}
        for number, (group, events) in self._groups.items():
            sums = events.find_sums(group, self.as_of, groups[number], cuts)
            found |= compute_aggregates(group, self._rates, sums, cuts)
        return np.array([found[column.name] for column in self._spec.aggregates])

    def find_newest_events(
        self, name: str, groups: np.ndarray, wanted: np.ndarray, maximum: int, cuts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the newest events of a history for each row, oldest first.

        Args:
            name: The name of the history.
            groups: ``RawRows.groups``, int64 [groups, n].
            wanted: bool [n]; other rows get no events.
            maximum: The maximum number of events of a row.
            cuts: int64 [n], the time before which events count for each row.

        Returns:
            The ids of the events of all rows, int32 [columns, events]; the number of events of
            each row, int64 [n].
        """
        number = [rule.name for rule in self._spec.histories].index(name)
        tail = self.tails[number]
        rule = self._spec.histories[number]
        hashes = np.where(wanted, groups[self._spec.groups.index(rule.group)], 0)
        ends, counts = np.zeros((2, len(hashes)), np.int64)
        if not find_newest(
            tail.keys, tail.offsets, tail.known, hashes, cuts, maximum, ends, counts
        ):
            raise BadInputError(
                f"history {name}: damaged: an offset is beyond its last event", _COPY_AGAIN
            )
        # Concatenate the ranges [ends - counts, ends) of all rows without a loop over the rows.
        offsets = np.cumsum(counts) - counts
        events = np.repeat(ends - counts - offsets, counts) + np.arange(counts.sum())
        return tail.ids[:, events], counts

    def add_histories(
        self,
        ids: Ids,
        groups: np.ndarray,
        histories: Sequence[StoredHistory],
        sizes: Mapping[str, int],
        maximum: int,
        times: np.ndarray | None = None,
    ) -> Ids:
        """Return the ids, with the newest events of histories for rows that bring no events.

        Args:
            ids: The ids of the categorical columns and, unless the rows were read from a file, of
                the histories that rows bring.
            groups: ``RawRows.groups``, int64 [groups, n].
            histories: The histories.
            sizes: The number of rows of each categorical column's table.
            maximum: The maximum number of events of a row.
            times: ``RawRows.times``; rows without a time count as rows of :attr:`as_of`.

        Raises:
            BadInputError: The state is damaged.
        """
        first = len(sizes)
        if ids.count > first and _all_have_events(ids.get_lengths(first), histories):
            return ids
        cuts = self.find_cuts(len(ids), times)
        columns = ids.columns[:first]
        lengths = list(ids.lengths[:first])
        rows_have_histories = ids.count > first  # rows of a file have none
        end = first
        for history in histories:
            begin, end = end, end + len(history.columns)
            if rows_have_histories:
                own = ids.columns[begin:end]
                own_counts = ids.lengths[begin:end]
            else:
                own = [np.empty(0, np.int32)] * len(history.columns)
                own_counts = np.zeros((len(history.columns), len(ids)), np.int64)
            # A row with events in any of the columns brings its own history.
            has_own = own_counts.max(axis=0) > 0
            if has_own.all():
                columns += own
                lengths += list(own_counts)  # a list of arrays: += with the array would add numbers
                continue
            newest, counts = self.find_newest_events(history.name, groups, ~has_own, maximum, cuts)
            for i, name in enumerate(history.columns):
                events = newest[i]
                if len(events) and not 0 <= events.min() <= events.max() < sizes[name]:
                    raise BadInputError(
                        f"history {history.name}: damaged: an id is outside the table of {name}",
                        _COPY_AGAIN,
                    )
                total = own_counts[i] + counts
                is_own = np.repeat(has_own, total)
                column = np.empty(len(is_own), np.int32)
                column[is_own] = own[i]
                column[~is_own] = events
                columns.append(column)
                lengths.append(total)
        return Ids.from_lengths(columns, np.stack(lengths))

    def add_aggregates(self, rows: RawRows) -> RawRows:
        """Return rows with the aggregates of their keys."""
        assert rows.groups is not None
        values = self.compute_aggregates(rows.groups, rows.times)
        return set_aggregates(rows, self._spec, values)


def _all_have_events(lengths: np.ndarray, histories: Sequence[StoredHistory]) -> bool:
    """Return whether each row brings events of each history.

    Args:
        lengths: int64 [columns of histories, n], the number of values of each row.
        histories: The histories, in the order of their columns.
    """
    begin = 0
    for history in histories:
        end = begin + len(history.columns)
        if not lengths[begin:end].max(axis=0).all():
            return False
        begin = end
    return True


def set_aggregates(
    rows: RawRows, spec: FeatureSpec, values: np.ndarray | Sequence[np.ndarray]
) -> RawRows:
    """Return rows with the given values in their aggregate columns.

    Args:
        rows: The rows.
        spec: Their columns.
        values: float64 [aggregates, n]; NaN where missing.
    """
    dense = rows.dense.copy()
    missing = rows.dense_missing.copy()
    indices = [j for j, column in enumerate(spec.dense) if column.aggregate]
    if indices:
        numbers = np.asarray(values)
        absent = np.isnan(numbers)
        dense[indices] = numbers
        if absent.any():
            dense[indices] = np.where(absent, 0, numbers)
            for j, column_absent in zip(indices, absent, strict=True):
                add_missing(missing, j, column_absent)
    return dataclasses.replace(rows, dense=dense, dense_missing=missing, has_aggregates=True)
