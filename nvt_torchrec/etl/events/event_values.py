"""The values of aggregates: of the rows of a block, and of each key after the last row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from nvt_torchrec.base.files.mapping import map_array
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.etl.events.extract import (
    EVENT,
    FIRST_LABEL,
    EventFiles,
    block_name,
    history_bit,
)
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
    sums: np.ndarray,
    last: np.ndarray | None,
    cuts: np.ndarray,
) -> dict[str, np.ndarray]:
    """Return the values of a group's aggregates, float64 [n] by column; NaN where missing.

    Args:
        spec: The columns.
        group: The group.
        rates: What rates are smoothed by.
        sums: Each [n], see :class:`.sums.GroupSums`.
        last: int64 [n], the times of the last events; None where they are not wanted.
        cuts: int64 [n], the times before which events were summed up.
    """
    values = {}
    for column in spec.aggregates:
        aggregate = column.aggregate
        if aggregate is None or aggregate.key != group.key:
            continue
        window = parse_duration(aggregate.window)
        count = sums[group.place(EVENT, window)]
        if aggregate.value == "count":
            values[column.name] = count.astype(np.float64)
        elif aggregate.value == "since":
            assert last is not None
            since = np.log1p(np.maximum(cuts - np.where(count > 0, last, cuts), 0) / _SECOND)
            values[column.name] = np.where(count > 0, since, np.nan)
        else:
            label = FIRST_LABEL + spec.labels.index(aggregate.label)
            positives = sums[group.place(label, window)]
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
        self._groups = sums_of_groups(spec)
        # of each history, by the number of a key in its group, that in the store; -1 for none
        self._numbers = [
            self._number_stored(spec.groups.index(rule.key), first_keys[rule.name])
            for rule in spec.histories
        ]

    def _number_stored(self, group: int, first: int) -> np.ndarray:
        keys, row_keys = (
            map_array(self._files.keys(group)),
            map_array(self._files.row_keys(group)),
        )
        place = np.searchsorted(row_keys, keys)
        return np.append(place + first, -1).astype(np.int32)

    def _read_sums(self, block: Block) -> list[tuple[np.ndarray, np.ndarray | None, np.ndarray]]:
        """Return of each group what is known of a block's rows, in their order.

        They are the sums, [sums, n], the times of the last events, if they are wanted, and the
        numbers of their keys, int32 [n].
        """
        name, files, found = block_name(block), self._files, []
        order = files.read_order(name)

        def read(path: Path) -> np.ndarray:
            array = map_array(path)
            if isinstance(order, slice):
                return array
            ordered = np.empty_like(array)
            ordered[..., order] = array
            return ordered

        for number, group in enumerate(self._groups):
            last = read(files.last(name, number)) if group.has_last else None
            sums, numbers = files.sums(name, number), files.numbers(name, number)
            found.append((read(sums), last, read(numbers)))
        return found

    def add(self, pieces: Iterable[RawRows], block: Block) -> Iterator[RawRows]:
        """Yield rows of a block, which come in their order, with what happened before them."""
        found = self._read_sums(block)
        spec, begin = self._spec, 0
        for rows in pieces:
            assert rows.times is not None
            cuts, place = cut_times(spec, rows.times[0]), slice(begin, begin + len(rows))
            values: dict[str, np.ndarray] = {}
            pointers = np.empty((2 * len(spec.histories), len(rows)), np.int32)
            for group, (sums, last, numbers) in zip(self._groups, found, strict=True):
                of_rows = sums[:, place]
                last = None if last is None else last[place]
                values |= aggregate_values(spec, group, self._rates, of_rows, last, cuts)
                for history in group.histories:
                    keys = self._numbers[history]
                    pointers[2 * history] = keys[numbers[place]]
                    pointers[2 * history + 1] = of_rows[group.place(history_bit(spec, history))]
            ordered = [values[column.name] for column in spec.aggregates]
            added = add_aggregates(rows, spec, ordered)
            yield dataclasses.replace(added, times=None, groups=None, pointers=pointers)
            begin += len(rows)
