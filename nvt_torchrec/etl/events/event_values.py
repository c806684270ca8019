"""The values of aggregates: of the rows of a block, and of each key after the last row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from nvt_torchrec.base.arrays import mark_begins
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.etl.events.extract import KEY, ROW, ROW_SHIFT, EventFiles, block_name
from nvt_torchrec.etl.events.label_rates import LabelRates
from nvt_torchrec.etl.events.sums import GroupSums, cut_times, sums_of_groups
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.events import parse_duration
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.workflows.event_state import add_aggregates

#: Microseconds in a second.
_SECOND = 1e6


def aggregate_values(
    spec: FeatureSpec,
    group: GroupSums,
    rates: LabelRates,
    sums: np.ndarray | Sequence[np.ndarray],
    cuts: np.ndarray,
) -> dict[str, np.ndarray]:
    """Return the values of a group's aggregates, float64 [n] by column; NaN where missing.

    Args:
        spec: The columns.
        group: The group.
        rates: What rates are smoothed by.
        sums: Each int64 [n], see :class:`etl.events.sums.GroupSums`.
        cuts: int64 [n], the times before which events were summed up.
    """
    values = {}
    for column in spec.aggregates:
        aggregate = column.aggregate
        if aggregate is None or aggregate.key != group.key:
            continue
        window = parse_duration(aggregate.window)
        count = sums[group.sums.index((window, -1))]
        if aggregate.value == "count":
            values[column.name] = count.astype(np.float64)
        elif aggregate.value == "since":
            since = np.log1p(
                np.maximum(cuts - np.where(count > 0, sums[group.last], cuts), 0) / _SECOND
            )
            values[column.name] = np.where(count > 0, since, np.nan)
        else:
            positives = sums[group.sums.index((window, spec.labels.index(aggregate.label)))]
            weight = rates.smoothing[column.name]
            prior = rates.before(aggregate.label, cuts)
            values[column.name] = (positives + weight * prior) / (count + weight)
    return values


class EventValues:
    """Adds the aggregates to the rows of blocks, and the pointers to histories.

    Args:
        spec: The columns.
        directory: Of the files of the run's events.
        rates: What rates are smoothed by.
        first_keys: Of each history, the number of the first key of this run or extension.
    """

    def __init__(
        self, spec: FeatureSpec, directory: Path, rates: LabelRates, first_keys: Mapping[str, int]
    ) -> None:
        self._spec, self._files, self._rates = spec, EventFiles(directory), rates
        self._groups, self._first_keys = sums_of_groups(spec), first_keys

    def _read_sums(self, block: Block) -> tuple[list[list[np.ndarray]], np.ndarray]:
        """Return what is known of a block's rows, in their order.

        Returns:
            Of each group its sums, int64 [n] each; int32 [2 histories, n], of each history the
            number of the key, -1 without a key, and that of the events before.
        """
        sums, name, histories = [], block_name(block), self._spec.histories
        pointers: list[np.ndarray] = [np.empty(0)] * (2 * len(histories))
        for number, group in enumerate(self._groups):
            events = np.load(self._files.events(name, number), mmap_mode="r")
            counts = np.load(self._files.sums(name, number), mmap_mode="r")
            row = events[ROW] >> ROW_SHIFT
            sums.append(_put_rows(counts[: group.last + 1], row))
            if group.histories:
                keys = np.load(self._files.row_keys(number), mmap_mode="r")
                first = np.flatnonzero(mark_begins(events[KEY]))
                each = events[KEY, first]
                place = np.where(each != 0, np.searchsorted(keys, each), -1).astype(np.int32)
                place = np.repeat(place, np.diff(first, append=len(row)))
            for history, count in zip(group.histories, counts[group.last + 1 :], strict=True):
                first_key = np.int32(self._first_keys[histories[history].name])
                of_history = np.where(place < 0, place, place + first_key), count.astype(np.int32)
                pointers[2 * history : 2 * history + 2] = _put_rows(of_history, row)
        return sums, np.array(pointers, np.int32).reshape(-1, len(row))

    def add(self, pieces: Iterable[RawRows], block: Block) -> Iterator[RawRows]:
        """Yield rows of a block, which come in their order, with what happened before them."""
        sums, pointers = self._read_sums(block)
        spec, begin = self._spec, 0
        for rows in pieces:
            assert rows.times is not None
            cuts, place = cut_times(spec, rows.times[0]), slice(begin, begin + len(rows))
            values: dict[str, np.ndarray] = {}
            for group, of_group in zip(self._groups, sums, strict=True):
                of_rows = [column[place] for column in of_group]
                values |= aggregate_values(spec, group, self._rates, of_rows, cuts)
            ordered = [values[column.name] for column in spec.aggregates]
            added = add_aggregates(rows, spec, ordered)
            yield dataclasses.replace(added, times=None, groups=None, pointers=pointers[:, place])
            begin += len(rows)


def _put_rows(columns: Iterable[np.ndarray], row: np.ndarray) -> list[np.ndarray]:
    """Return columns [n] in the order of the rows, whose numbers are int64 [n]."""
    ordered = []
    for column in columns:
        ordered.append(np.empty_like(column, subok=False))
        ordered[-1][row] = column
    return ordered
