"""What happened before, beside a saved workflow: the events of each key, summed up, for aggregates.

Layout of ``WORKFLOW/events``; the arrays are mapped, not read, and ``metadata.json`` of the
workflow has the digest of ``state.json``::

    state.json      digest of the workflow, the time from which rows can be scored, the smoothing of
                    rates; size and SHA-256 of the other files. Written last
    rates.npy       float64 [1 + labels, hours + 1], the rates of all events: hours since 1970 in
                    which further events become known, and of each label the rate before each of
                    them; the last one is infinite
    N.keys.npy      int64 [keys]: of the group N of the spec, the hashes of its keys, rising
    N.offsets.npy   int64 [keys + 1]; so are N.known.npy, N.last.npy and N.sums.npy, and of groups
                    with last, min or max N.picks.npy, with distinct N.previous.npy, see
                    :class:`.event_sums.GroupEvents`. Only of groups with aggregates

and of each history its newest events, at most ``kept`` of a key::

    NAME.keys.npy     int64 [keys], rising
    NAME.offsets.npy  int64 [keys + 1], where the events of each key begin, the oldest first
    NAME.known.npy    int64 [events], from when each is known
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
    aggregate_values,
    cut_times,
    sums_of_groups,
)
from nvt_torchrec.workflows.event_kernels import find_newest
from nvt_torchrec.workflows.event_state_arrays import (
    DIRECTORY,
    RATES,
    STATE_FILE,
    array_kind,
    check_shapes,
    list_arrays,
    list_group_files,
    list_history_files,
)
from nvt_torchrec.workflows.event_sums import GroupEvents
from nvt_torchrec.workflows.history_tail import HistoryTail

FORMAT = Format("nvt-torchrec event state", 3, "what happened before, beside a workflow")
_COPY_AGAIN = "copy the whole workflow again, or run the ETL again"


@dataclasses.dataclass(frozen=True)
class _EventStateRecord:
    """What ``state.json`` holds."""

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
        rates: The rates of all events from that time on.
        tails: The newest events of each of its histories.
    """
    directory = workflow / DIRECTORY
    remove(directory / STATE_FILE)
    hours = np.append(rates.hours.astype(np.float64), np.inf)
    rates_of_labels = [rates.rates[label] for label in spec.labels]
    arrays: dict[str, np.ndarray] = {RATES: np.stack([hours, *rates_of_labels])}
    for number, (group, events) in enumerate(zip(sums_of_groups(spec), groups, strict=True)):
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
    """Looks up the aggregates of rows by their keys. Made by :meth:`load`; thread-safe.

    Attributes:
        as_of: The earliest time before which events count for a row, in microseconds since 1970:
            that of a row without a time, or with an earlier one.
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
        for number, group in enumerate(sums_of_groups(spec)):
            if not group.aggregates:
                continue
            # By name: a group may have ``previous`` without ``picks``.
            names = GroupEvents.array_names(group)
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
            description: Of the workflow; it has the digest of ``state.json``, which is compared.
            verify: Read all other files as well, and compare their digests.

        Raises:
            BadInputError: It is missing or damaged, or of another day than the workflow.
            SchemaError: It is another workflow's, or of another version.
        """
        if EVENT_STATE_FILE not in description.files:
            raise BadInputError(
                f"{description.path}: does not say what happened before: an earlier version wrote "
                "it, or it was not finished",
                "run the ETL again",
            )
        spec = description.spec
        file = description.check_file(EVENT_STATE_FILE)
        directory = file.parent
        record = FORMAT.read(_EventStateRecord, file, _COPY_AGAIN)
        if record.workflow_digest != description.digest:
            raise SchemaError(f"{file}: of another workflow than the one beside it", _COPY_AGAIN)
        names = list_arrays(spec)
        rates = {c.name for c in spec.aggregates if c.aggregate and c.aggregate.label}
        if set(record.files) != set(names) or set(record.smoothing) != rates:
            raise BadInputError(f"{file}: damaged: it is of another spec", _COPY_AGAIN)
        check_sizes(directory, record.files, _COPY_AGAIN)
        if verify:
            check_digests(directory, record.files, _COPY_AGAIN)
        try:
            arrays = {name: MappedArray(directory / name, *array_kind(name)) for name in names}
            check_shapes(spec, {name: array.values.shape for name, array in arrays.items()})
        except (OSError, ValueError) as error:
            raise BadInputError(f"{directory}: damaged: {error}", _COPY_AGAIN) from error
        return cls(spec, record, arrays)

    def cuts(self, rows: int, times: np.ndarray | None) -> np.ndarray:
        """Return the times before which events count for rows, int64 [n].

        Args:
            rows: How many rows there are.
            times: ``RawRows.times``: int64 [1 or 2, n], the first those of the rows; None without.
        """
        if times is None:
            return np.full(rows, self.as_of)
        return np.maximum(cut_times(self._spec, times[0]), self.as_of)

    def values(self, groups: np.ndarray, times: np.ndarray | None = None) -> np.ndarray:
        """Return the aggregates of rows in their units, float64 [aggregates, n]; NaN where missing.

        Args:
            groups: ``RawRows.groups``, int64 [groups, n].
            times: ``RawRows.times``; rows without a time are of :attr:`as_of`.

        Raises:
            BadInputError: The state is damaged, or a file was written to since it was opened.
        """
        for array in self._arrays:
            array.check()
        cuts = self.cuts(groups.shape[1], times)
        found: dict[str, np.ndarray] = {}
        for number, (group, events) in self._groups.items():
            sums = events.sums_before(group, self.as_of, groups[number], cuts)
            found |= aggregate_values(group, self._rates, sums, cuts)
        return np.array([found[column.name] for column in self._spec.aggregates])

    def newest(
        self, name: str, groups: np.ndarray, wanted: np.ndarray, maximum: int, cuts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the newest events of a history for each row, oldest first.

        Args:
            name: The name of the history.
            groups: ``RawRows.groups``, int64 [groups, n].
            wanted: bool [n]; other rows get none.
            maximum: The most events of a row.
            cuts: int64 [n], the time before which events count for each row.

        Returns:
            The ids of all rows, int32 [columns, events]; int64 [n], how many each row has.
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
                f"history {name}: damaged: its offsets are beyond its events", _COPY_AGAIN
            )
        # The indices of the events of each row, from ends - counts on, one row after the other.
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
        """Return the ids with the events of histories for rows without events of their own.

        Args:
            ids: The categorical columns and, unless the rows are those of a file, the histories.
            groups: ``RawRows.groups``, int64 [groups, n].
            histories: The histories.
            sizes: The rows of the table of each categorical column.
            maximum: The most events of a row.
            times: ``RawRows.times``; rows without a time are of :attr:`as_of`.

        Raises:
            BadInputError: The state is damaged.
        """
        first = len(sizes)
        if ids.count > first and _all_have_events(ids.get_lengths(first), histories):
            return ids  # nothing of the state is needed
        cuts = self.cuts(len(ids), times)
        columns = ids.columns[:first]
        lengths = list(ids.lengths[:first])
        rows_have_histories = ids.count > first  # unless they are those of a file
        end = first
        for history in histories:
            begin, end = end, end + len(history.columns)
            if rows_have_histories:
                own, own_counts = ids.columns[begin:end], ids.lengths[begin:end]
            else:
                own = [np.empty(0, np.int32)] * len(history.columns)
                own_counts = np.zeros((len(history.columns), len(ids)), np.int64)
            # A row with events in one of the columns has a history of its own.
            has_own = own_counts.max(axis=0) > 0
            if has_own.all():
                columns += own
                lengths += list(own_counts)  # of an array, += would add numbers
                continue
            newest, counts = self.newest(history.name, groups, ~has_own, maximum, cuts)
            for i, name in enumerate(history.columns):
                events = newest[i]
                if len(events) and not 0 <= events.min() <= events.max() < sizes[name]:
                    raise BadInputError(
                        f"history {history.name}: damaged: an id outside of the table of {name}",
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

    def add(self, rows: RawRows) -> RawRows:
        """Return rows with the aggregates of their keys."""
        assert rows.groups is not None
        return add_aggregates(rows, self._spec, self.values(rows.groups, rows.times))


def _all_have_events(lengths: np.ndarray, histories: Sequence[StoredHistory]) -> bool:
    """Return whether each row has events of its own of each history.

    Args:
        lengths: int64 [columns of histories, n], how many values each row has.
        histories: The histories, in the order of their columns.
    """
    begin = 0
    for history in histories:
        end = begin + len(history.columns)
        if not lengths[begin:end].max(axis=0).all():
            return False
        begin = end
    return True


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
