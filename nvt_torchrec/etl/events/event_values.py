"""The values of aggregates of the rows of a block."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from nvt_torchrec.base.files.mapping import map_array
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.etl.events.extract import EventFiles
from nvt_torchrec.etl.events.label_rates import LabelRates
from nvt_torchrec.etl.units.unit_plan import block_name
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import RawRows, empty_mask
from nvt_torchrec.workflows.event_groups import (
    TRAIN,
    FoundSums,
    aggregate_values,
    cut_times,
    history_bit,
    sums_of_groups,
)
from nvt_torchrec.workflows.event_state import add_aggregates


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
            self._number_stored(spec.groups.index(rule.group), first_keys[rule.name])
            for rule in spec.histories
        ]

    def _number_stored(self, group: int, first: int) -> np.ndarray:
        keys, row_keys = self._files.keys(group), self._files.row_keys(group)
        index = np.searchsorted(map_array(row_keys), map_array(keys))
        return np.append(index + first, -1).astype(np.int32)

    def _read_sums(self, block: Block) -> list[FoundSums]:
        """Return of each group what the events before a block's rows sum up to, in their order."""
        name, files, found = block_name(block), self._files, []
        for number, group in enumerate(self._groups):
            sums = files.read(name, files.sums(name, number))
            totals = np.empty((0, 2, sums.shape[1]))
            if group.totals:
                totals = files.read(name, files.totals(name, number))
            picks = np.empty((0, sums.shape[1]))
            if group.picks:
                picks = files.read(name, files.picks(name, number))
            distinct = sums[:0]
            if group.distinct:
                distinct = files.read(name, files.distinct(name, number))
            last = files.read(name, files.last(name, number)) if group.has_last else None
            found.append(FoundSums(sums, totals, picks, distinct, last))
        return found

    def _read_numbers(self, block: Block) -> list[np.ndarray]:
        """Return of each group the numbers of the keys of a block's rows, int32 [n]."""
        name, files = block_name(block), self._files
        return [files.read(name, files.numbers(name, i)) for i in range(len(self._groups))]

    def _aggregate(self, found: list[FoundSums], rows: slice, cuts: np.ndarray) -> list[np.ndarray]:
        """Return the values of each aggregate for some rows of a block, float64 [n] each."""
        values: dict[str, np.ndarray] = {}
        for group, sums in zip(self._groups, found, strict=True):
            values |= aggregate_values(group, self._rates, sums.take(rows), cuts)
        return [values[column.name] for column in self._spec.aggregates]

    def _point(self, found: list[FoundSums], numbers: list[np.ndarray], rows: slice) -> np.ndarray:
        """Return ``RawRows.pointers`` of some rows of a block."""
        spec = self._spec
        pointers = np.empty((2 * len(spec.histories), rows.stop - rows.start), np.int32)
        for group, sums, of_group in zip(self._groups, found, numbers, strict=True):
            for history in group.histories:
                count = group.place(history_bit(spec, history))
                pointers[2 * history] = self._numbers[history][of_group[rows]]
                pointers[2 * history + 1] = sums.sums[count, rows]
        return pointers

    def add(self, pieces: Iterable[RawRows], block: Block) -> Iterator[RawRows]:
        """Yield rows of a block, which come in their order, with what happened before them."""
        found, numbers = self._read_sums(block), self._read_numbers(block)
        begin = 0
        for piece in pieces:
            assert piece.times is not None
            rows = slice(begin, begin + len(piece))
            values = self._aggregate(found, rows, cut_times(self._spec, piece.times[0]))
            pointers = self._point(found, numbers, rows)
            added = add_aggregates(piece, self._spec, values)
            yield dataclasses.replace(
                added, times=None, groups=None, amounts=None, pointers=pointers
            )
            begin = rows.stop

    def iterate_trained(self, block: Block) -> Iterator[RawRows]:
        """Yield the rows for training of a block, with their aggregates as the only columns."""
        found, files, name = self._read_sums(block), self._files, block_name(block)
        times = files.read(name, files.times(name))[0]
        train = files.read(name, files.flags(name)) >> TRAIN & 1 == 1
        aggregates = dataclasses.replace(self._spec, dense=tuple(self._spec.aggregates))
        for begin, end in itertools.pairwise(map_array(files.pieces(name)).tolist()):
            piece = slice(begin, end)
            values = self._aggregate(found, piece, cut_times(self._spec, times[piece]))
            every = np.array(values).reshape(len(values), end - begin)
            chosen = np.compress(train[piece], every, axis=1)
            nothing = np.zeros((len(chosen), chosen.shape[1]))
            none = empty_mask(len(chosen), chosen.shape[1])
            line = np.arange(chosen.shape[1])
            rows = RawRows(np.empty((0, len(line)), np.uint8), nothing, none, [], none, line)
            yield add_aggregates(rows, aggregates, chosen)
