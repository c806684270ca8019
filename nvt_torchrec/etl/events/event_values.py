"""The values of aggregates of the rows of a block."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from nvt_torchrec.base.files.mapping import map_array
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.etl.events.extract import EventFiles, block_name
from nvt_torchrec.etl.events.label_rates import LabelRates
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import RawRows, empty_mask
from nvt_torchrec.workflows.event_state import add_aggregates
from nvt_torchrec.workflows.event_sums import (
    TRAIN,
    aggregate_values,
    cut_times,
    history_bit,
    sums_of_groups,
)


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
        keys, row_keys = self._files.keys(group), self._files.row_keys(group)
        place = np.searchsorted(map_array(row_keys), map_array(keys))
        return np.append(place + first, -1).astype(np.int32)

    def _read_sums(self, block: Block) -> list[tuple[np.ndarray, np.ndarray | None, np.ndarray]]:
        """Return of each group what is known of a block's rows, in their order.

        They are the sums, [sums, n], the times of the last events, if they are wanted, and the
        numbers of their keys, int32 [n].
        """
        name, files, found = block_name(block), self._files, []
        for number, group in enumerate(self._groups):
            last = files.read(name, files.last(name, number)) if group.has_last else None
            sums, numbers = files.sums(name, number), files.numbers(name, number)
            found.append((files.read(name, sums), last, files.read(name, numbers)))
        return found

    def _aggregate(self, found: list, place: slice, cuts: np.ndarray) -> list[np.ndarray]:
        """Return the values of each aggregate for some rows of a block, float64 [n] each."""
        values: dict[str, np.ndarray] = {}
        for group, (sums, last, _) in zip(self._groups, found, strict=True):
            last = None if last is None else last[place]
            values |= aggregate_values(self._spec, group, self._rates, sums[:, place], last, cuts)
        return [values[column.name] for column in self._spec.aggregates]

    def add(self, pieces: Iterable[RawRows], block: Block) -> Iterator[RawRows]:
        """Yield rows of a block, which come in their order, with what happened before them."""
        found = self._read_sums(block)
        spec, begin = self._spec, 0
        for rows in pieces:
            assert rows.times is not None
            place = slice(begin, begin + len(rows))
            values = self._aggregate(found, place, cut_times(spec, rows.times[0]))
            pointers = np.empty((2 * len(spec.histories), len(rows)), np.int32)
            for group, (sums, _, numbers) in zip(self._groups, found, strict=True):
                for history in group.histories:
                    keys, count = self._numbers[history], group.place(history_bit(spec, history))
                    pointers[2 * history] = keys[numbers[place]]
                    pointers[2 * history + 1] = sums[count, place]
            added = add_aggregates(rows, spec, values)
            yield dataclasses.replace(added, times=None, groups=None, pointers=pointers)
            begin += len(rows)

    def iterate_trained(self, block: Block) -> Iterator[RawRows]:
        """Yield the rows for training of a block, with their aggregates as the only columns."""
        found, files, name = self._read_sums(block), self._files, block_name(block)
        times = files.read(name, files.times(name))[0]
        train = files.read(name, files.flags(name)) >> TRAIN & 1 == 1
        aggregates = dataclasses.replace(self._spec, dense=tuple(self._spec.aggregates))
        for begin, end in itertools.pairwise(map_array(files.pieces(name)).tolist()):
            place = slice(begin, end)
            values = self._aggregate(found, place, cut_times(self._spec, times[place]))
            chosen = np.compress(train[place], np.array(values).reshape(-1, end - begin), axis=1)
            nothing = np.zeros((len(chosen), chosen.shape[1]))
            none = empty_mask(len(chosen), chosen.shape[1])
            line = np.arange(chosen.shape[1])
            rows = RawRows(np.empty((0, len(line)), np.uint8), nothing, none, [], none, line)
            yield add_aggregates(rows, aggregates, chosen)
