"""The values of aggregates of the rows of a block."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        self._groups, self._first_keys = sums_of_groups(spec), first_keys

    def _read_rows(self, block: Block, read: Callable[[str, int], Path]) -> list[np.ndarray]:
        """Return of each group an array of a block's rows, in their order."""
        name, files = block_name(block), self._files
        return [files.read(name, read(name, number)) for number in range(len(self._groups))]

    def _read_sums(self, positions: Sequence[np.ndarray], rows: slice) -> list[FoundSums]:
        """Return of each group what the events before some rows of a block sum up to.

        Args:
            positions: Of each group, where the sums of the block's rows are, int64 [n].
            rows: The rows.
        """
        files, found = self._files, []
        for number, (group, of_group) in enumerate(zip(self._groups, positions, strict=True)):
            index = of_group[rows]
            sums = map_array(files.sums(number))[:, index]
            totals = np.empty((0, 2, len(index)))
            if group.totals:
                totals = map_array(files.totals(number))[..., index]
            picks = np.empty((0, len(index)))
            if group.picks:
                picks = map_array(files.picks(number))[:, index]
            distinct = sums[:0]
            if group.distinct:
                distinct = map_array(files.distinct(number))[:, index]
            last = map_array(files.last(number))[index] if group.has_last else None
            found.append(FoundSums(sums, totals, picks, distinct, last))
        return found

    def _aggregate(self, found: list[FoundSums], cuts: np.ndarray) -> list[np.ndarray]:
        """Return the values of each aggregate for some rows of a block, float64 [n] each."""
        values: dict[str, np.ndarray] = {}
        for group, sums in zip(self._groups, found, strict=True):
            values |= aggregate_values(group, self._rates, sums, cuts)
        return [values[column.name] for column in self._spec.aggregates]

    def _point(self, found: list[FoundSums], numbers: list[np.ndarray], rows: slice) -> np.ndarray:
        """Return ``RawRows.pointers`` of some rows of a block."""
        spec = self._spec
        pointers = np.empty((2 * len(spec.histories), rows.stop - rows.start), np.int32)
        for group, (sums, of_group) in enumerate(zip(found, numbers, strict=True)):
            for history in self._groups[group].histories:
                keys, first = of_group[rows], self._first_keys[spec.histories[history].name]
                has_key = keys >= 0
                stored = np.full(len(keys), -1, np.int32)
                stored[has_key] = first + map_array(self._files.row_indices(group))[keys[has_key]]
                count = self._groups[group].place(history_bit(spec, history))
                pointers[2 * history] = stored
                pointers[2 * history + 1] = sums.sums[count]
        return pointers

    def add(self, pieces: Iterable[RawRows], block: Block) -> Iterator[RawRows]:
        """Yield rows of a block, which come in their order, with what happened before them."""
        positions = self._read_rows(block, self._files.positions)
        numbers = self._read_rows(block, self._files.numbers)
        begin = 0
        for piece in pieces:
            assert piece.times is not None
            rows = slice(begin, begin + len(piece))
            found = self._read_sums(positions, rows)
            values = self._aggregate(found, cut_times(self._spec, piece.times[0]))
            pointers = self._point(found, numbers, rows)
            added = add_aggregates(piece, self._spec, values)
            yield dataclasses.replace(
                added, times=None, groups=None, amounts=None, pointers=pointers
            )
            begin = rows.stop

    def iterate_trained(self, block: Block) -> Iterator[RawRows]:
        """Yield the rows for training of a block, with their aggregates as the only columns."""
        files, name = self._files, block_name(block)
        positions = self._read_rows(block, files.positions)
        times = files.read(name, files.times(name))[0]
        train = files.read(name, files.flags(name)) >> TRAIN & 1 == 1
        aggregates = dataclasses.replace(self._spec, dense=tuple(self._spec.aggregates))
        for begin, end in itertools.pairwise(map_array(files.pieces(name)).tolist()):
            piece = slice(begin, end)
            found = self._read_sums(positions, piece)
            values = self._aggregate(found, cut_times(self._spec, times[piece]))
            every = np.array(values).reshape(len(values), end - begin)
            chosen = np.compress(train[piece], every, axis=1)
            nothing = np.zeros((len(chosen), chosen.shape[1]))
            none = empty_mask(len(chosen), chosen.shape[1])
            line = np.arange(chosen.shape[1])
            rows = RawRows(np.empty((0, len(line)), np.uint8), nothing, none, [], none, line)
            yield add_aggregates(rows, aggregates, chosen)
