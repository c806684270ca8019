"""The values of aggregates: of the rows of a block, and of each key after the last row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.etl.events.extract import KEY, ROW, ROW_SHIFT, TIME, EventFiles, block_name
from nvt_torchrec.etl.events.label_rates import LabelRates
from nvt_torchrec.etl.events.sums import GroupSums, cut_times, sums_of_groups
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.events import parse_duration
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.workflows.event_state import add_aggregates

#: Microseconds in a second.
_SECOND = 1e6


def aggregate_values(
    spec: FeatureSpec, group: GroupSums, rates: LabelRates, sums: np.ndarray, cuts: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the values of a group's aggregates, float64 [n] by column; NaN where missing.

    Args:
        spec: The columns.
        group: The group.
        rates: What rates are smoothed by.
        sums: int64 [sums, n], see :class:`etl.events.sums.GroupSums`.
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

    def read_values(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """Return the aggregates of a block's rows, and the pointers to their histories.

        Returns:
            float64 [aggregates, n], NaN where missing; int32 [2 histories, n], of each history the
            number of the key, -1 without a key, and that of the events before.
        """
        columns: dict[str, np.ndarray] = {}
        name = block_name(block)
        for number, group in enumerate(self._groups):
            events = np.load(self._files.events(name, number), mmap_mode="r")
            sums = np.load(self._files.sums(name, number), mmap_mode="r")
            cuts = cut_times(self._spec, events[TIME])
            found = aggregate_values(self._spec, group, self._rates, sums, cuts)
            key, there = events[KEY], events[KEY] != 0
            for place, history in enumerate(group.histories):
                rule = self._spec.histories[history]
                keys = np.load(self._files.row_keys(number), mmap_mode="r")
                first = self._first_keys[rule.name]
                found[f"{rule.name}.key"] = np.where(there, np.searchsorted(keys, key) + first, -1)
                found[f"{rule.name}.events"] = sums[group.last + 1 + place]
            row = events[ROW] >> ROW_SHIFT
            for column, values in found.items():
                columns[column] = np.empty_like(values)
                columns[column][row] = values
        rows = events.shape[1]
        pointers = [f"{rule.name}.{k}" for rule in self._spec.histories for k in ("key", "events")]
        return (
            np.array([columns[c.name] for c in self._spec.aggregates]).reshape(-1, rows),
            np.array([columns[name] for name in pointers], np.int32).reshape(-1, rows),
        )

    def add(self, pieces: Iterable[RawRows], block: Block) -> Iterator[RawRows]:
        """Yield rows of a block, which come in their order, with what happened before them."""
        values, pointers = self.read_values(block)
        begin = 0
        for rows in pieces:
            end = begin + len(rows)
            added = add_aggregates(rows, self._spec, values[:, begin:end])
            yield dataclasses.replace(added, groups=None, pointers=pointers[:, begin:end])
            begin = end
