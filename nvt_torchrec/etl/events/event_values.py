"""Add aggregates and history pointers to the rows of blocks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from nvt_torchrec.base.files.mapping import map_array
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.etl.events.event_files import EventFiles
from nvt_torchrec.etl.events.label_rates import LabelRates
from nvt_torchrec.etl.units.unit_plan import block_name
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import RawRows, make_empty_mask
from nvt_torchrec.workflows.event_groups import (
    TRAIN,
    FoundSums,
    compute_aggregates,
    find_cuts,
    get_history_bit,
    plan_groups,
)
from nvt_torchrec.workflows.event_state import set_aggregates


class EventValues:
    """Adds aggregates and pointers to histories to the rows of blocks.

    Args:
        spec: The columns.
        directory: The directory of the run's event files.
        rates: The rates over all events, for smoothing.
        first_keys: For each history, the number of the first key of this run or extension.
    """

    def __init__(
        self, spec: FeatureSpec, directory: Path, rates: LabelRates, first_keys: Mapping[str, int]
    ) -> None:
        self._spec = spec
        self._files = EventFiles(directory)
        self._rates = rates
        self._groups = plan_groups(spec)
        self._first_keys = first_keys

    def _map_sums(self, block: Block) -> list[np.ndarray]:
        """Map, for each group, the sums before the rows of a block, records [n]."""
        name = block_name(block)
        return [map_array(self._files.sums(name, number)) for number in range(len(self._groups))]

    def _read_sums(self, sums_of_block: Sequence[np.ndarray], rows: slice) -> list[FoundSums]:
        """Return, for each group, the sums before the given rows of a block.

        Args:
            sums_of_block: See :meth:`_map_sums`.
            rows: The rows.
        """
        found = []
        for group, sums_of_group in zip(self._groups, sums_of_block, strict=True):
            records = sums_of_group[rows]
            sums = np.ascontiguousarray(records["sums"].T)
            totals = np.empty((0, 2, len(records)))
            if group.totals:
                totals = np.ascontiguousarray(np.moveaxis(records["totals"], 0, -1))
            picks = np.empty((0, len(records)))
            if group.picks:
                picks = np.ascontiguousarray(records["picks"].T)
            distinct = sums[:0]
            if group.distinct:
                distinct = np.ascontiguousarray(records["distinct"].T)
            last = np.ascontiguousarray(records["last"]) if group.has_last else None
            found.append(FoundSums(sums, totals, picks, distinct, last))
        return found

    def _read_numbers(self, block: Block) -> dict[int, np.ndarray]:
        """Return the key numbers of a block's rows, int32 [n], by group; groups with histories."""
        name = block_name(block)
        files = self._files
        numbers = {}
        for number, group in enumerate(self._groups):
            if group.histories:
                numbers[number] = files.read(name, files.numbers(name, number))
        return numbers

    def _aggregate(self, found: list[FoundSums], cuts: np.ndarray) -> list[np.ndarray]:
        """Return the values of each aggregate, float64 [n] each, in the order of the spec."""
        values: dict[str, np.ndarray] = {}
        for group, sums in zip(self._groups, found, strict=True):
            values |= compute_aggregates(group, self._rates, sums, cuts)
        return [values[column.name] for column in self._spec.aggregates]

    def _make_pointers(
        self, found: list[FoundSums], numbers: Mapping[int, np.ndarray], rows: slice
    ) -> np.ndarray:
        """Return ``RawRows.pointers`` for the given rows of a block.

        Args:
            found: For each group, the sums before these rows.
            numbers: See :meth:`_read_numbers`.
            rows: The rows.
        """
        spec = self._spec
        pointers = np.empty((2 * len(spec.histories), rows.stop - rows.start), np.int32)
        for number, numbers_of_block in numbers.items():
            group = self._groups[number]
            keys = numbers_of_block[rows]
            row_indices = map_array(self._files.row_indices(number))
            has_key = keys >= 0
            for history in group.histories:
                first = self._first_keys[spec.histories[history].name]
                stored = np.full(len(keys), -1, np.int32)
                stored[has_key] = first + row_indices[keys[has_key]]
                pointers[2 * history] = stored
                pointers[2 * history + 1] = found[number].sums[
                    group.find_sum(get_history_bit(spec, history))
                ]
        return pointers

    def add(self, pieces: Iterable[RawRows], block: Block) -> Iterator[RawRows]:
        """Yield the rows of a block, in order, with their aggregates and pointers."""
        sums_of_block = self._map_sums(block)
        numbers = self._read_numbers(block)
        begin = 0
        for piece in pieces:
            assert piece.times is not None
            rows = slice(begin, begin + len(piece))
            found = self._read_sums(sums_of_block, rows)
            values = self._aggregate(found, find_cuts(self._spec, piece.times[0]))
            pointers = self._make_pointers(found, numbers, rows)
            added = set_aggregates(piece, self._spec, values)
            yield dataclasses.replace(
                added, times=None, groups=None, amounts=None, pointers=pointers
            )
            begin = rows.stop

    def iterate_trained(self, block: Block) -> Iterator[RawRows]:
        """Yield the training rows of a block, with their aggregates as the only columns."""
        files = self._files
        name = block_name(block)
        sums_of_block = self._map_sums(block)
        times = files.read(name, files.times(name))[0]
        train = files.read(name, files.flags(name)) >> TRAIN & 1 == 1
        aggregates = dataclasses.replace(self._spec, dense=tuple(self._spec.aggregates))
        for begin, end in itertools.pairwise(map_array(files.pieces(name)).tolist()):
            piece = slice(begin, end)
            found = self._read_sums(sums_of_block, piece)
            values = self._aggregate(found, find_cuts(self._spec, times[piece]))
            every = np.array(values).reshape(len(values), end - begin)
            chosen = np.compress(train[piece], every, axis=1)
            num_rows = chosen.shape[1]
            rows = RawRows(
                labels=np.empty((0, num_rows), np.uint8),
                dense=np.zeros(chosen.shape),
                dense_missing=make_empty_mask(*chosen.shape),
                categorical=[],
                categorical_missing=make_empty_mask(*chosen.shape),
                line=np.arange(num_rows),
            )
            yield set_aggregates(rows, aggregates, chosen)
