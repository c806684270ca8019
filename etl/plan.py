"""The plan of a run: which rows go to which part of which split."""

from __future__ import annotations

import dataclasses

from clicklog.errors import BadInputError
from clicklog.readers.lines import read_bytes
from clicklog.readers.raw import Block, DayFile, OpenDay, check_label, open_day
from clicklog.spec.feature_spec import FeatureSpec
from clicklog.splits import SPLITS, cut_last_day


@dataclasses.dataclass(frozen=True)
class Unit:
    """A unit of work: a block of rows, which becomes ``<split>/part.<part>.parquet``."""

    split: str
    part: int
    day: int
    block: Block

    @property
    def file(self) -> str:
        """The path of the part below the directory of the splits."""
        return f"{self.split}/part.{self.part}.parquet"


@dataclasses.dataclass(frozen=True)
class Plan:
    """All units of a run.

    Attributes:
        days: The input files, in the order of the days.
        units: The units of train by day, then those of valid and test; each split numbers its
            parts from 0.
        rows_per_step: Rows per step, estimated from the first rows. A step is what a block's begin
            and end count: a byte of text, or a row of parquet.
        bytes_per_step: Bytes of the files per step.
    """

    days: list[DayFile]
    units: list[Unit]
    rows_per_step: float
    bytes_per_step: float

    @property
    def train_blocks(self) -> list[Block]:
        """The blocks that the workflow is fitted on."""
        return [unit.block for unit in self.units if unit.split == "train"]

    @property
    def train_days(self) -> list[int]:
        """The days of these blocks, increasing."""
        return sorted({unit.day for unit in self.units if unit.split == "train"})

    def _steps(self, split: str | None) -> int:
        blocks = [unit.block for unit in self.units if split in (None, unit.split)]
        return sum(block.end - block.begin for block in blocks)

    def text_bytes(self, split: str | None = None) -> int:
        """Return the bytes of decompressed input in one split, or in all; estimated for parquet."""
        return round(self._steps(split) * self.bytes_per_step)

    def estimated_rows(self, split: str | None = None) -> int:
        """Estimate the rows in one split, or in all; exact for parquet."""
        return round(self._steps(split) * self.rows_per_step)


def make_plan(
    days: list[DayFile], spec: FeatureSpec, *, block_bytes: int, limit_rows: int | None = None
) -> Plan:
    """Cut the days into units; the last day becomes valid and test.

    The cuts depend only on the data and ``block_bytes``, not on the engine or its workers.

    Args:
        days: The uncompressed files; see :func:`etl.staging.staged`.
        spec: The columns, and the format of the files.
        block_bytes: The approximate size of a unit, as text or as decoded parquet.
        limit_rows: The number of rows of each day to use, from its begin; None for all.

    Raises:
        BadRowError: The rows have no label, or another number of fields than the spec.
        BadInputError: A file lacks a column, or a split would get no row.
    """
    units = _Units(dict.fromkeys(SPLITS, 0), block_bytes)
    for file in days:
        day, end = _opened(file, spec, limit_rows)
        if file is not days[-1]:
            units.add(day, "train", day.begin, end)
        else:
            rows = day.count_rows(end)
            units.add_rows(day, end, rows, cut_last_day(rows, only_day=len(days) == 1))
    empty = [split for split in SPLITS if not units.next_parts[split]]
    if empty:
        raise BadInputError(
            f"{days[-1].source}: too few rows: none left for {', '.join(empty)}",
            "the last day is halved into valid and test (a log of one day 80/10/10); "
            "use a longer file or a larger --limit_rows",
        )
    return _plan(days, units, day, spec)


def make_day_plan(
    file: DayFile,
    spec: FeatureSpec,
    splits: tuple[str, ...],
    next_parts: dict[str, int],
    *,
    block_bytes: int,
    limit_rows: int | None = None,
) -> Plan:
    """Cut a day that is added to an output into units.

    Args:
        file: The uncompressed file.
        spec: The columns, and the format of the file.
        splits: The splits of the day: valid, test, or both, which get half of the rows each.
        next_parts: The number of the first part in each split.
        block_bytes: As in :func:`make_plan`.
        limit_rows: The number of rows to use, from the begin; None for all.

    Raises:
        BadRowError: The rows have no label, or another number of fields than the spec.
        BadInputError: The file lacks a column, or a split would get no row.
    """
    units = _Units(dict(next_parts), block_bytes)
    day, end = _opened(file, spec, limit_rows)
    if len(splits) == 1:
        units.add(day, splits[0], day.begin, end)
    else:
        rows = day.count_rows(end)
        units.add_rows(day, end, rows, cut_last_day(rows))
    empty = [split for split in splits if units.next_parts[split] == next_parts[split]]
    if empty:
        raise BadInputError(
            f"{file.source}: too few rows: none left for {', '.join(empty)}",
            "use a longer file, or choose other days with --valid_days and --test_days",
        )
    return _plan([file], units, day, spec)


@dataclasses.dataclass
class _Units:
    """The units cut so far; ``next_parts`` is the number of the next part of each split."""

    next_parts: dict[str, int]
    block_bytes: int
    found: list[Unit] = dataclasses.field(default_factory=list)

    def add(self, day: OpenDay, split: str, begin: int, end: int) -> None:
        """Cut ``[begin, end)`` of a day into units of a split."""
        for block in day.cut(begin, end, self.block_bytes):
            self.found.append(Unit(split, self.next_parts[split], day.file.day, block))
            self.next_parts[split] += 1

    def add_rows(self, day: OpenDay, end: int, rows: int, cuts: dict[str, tuple[int, int]]) -> None:
        """Cut ranges of rows, by split, of the ``rows`` rows before ``end`` into units."""
        place = {0: day.begin, rows: end}  # by row number; finding others scans the text
        for split, cut in cuts.items():
            for row in cut:
                if row not in place:
                    place[row] = day.find_row(row, end)
            if cut[0] < cut[1]:
                self.add(day, split, place[cut[0]], place[cut[1]])


def _opened(file: DayFile, spec: FeatureSpec, limit_rows: int | None) -> tuple[OpenDay, int]:
    """Open a day whose rows have a label; where its last row that is used ends."""
    day = open_day(file, spec)
    check_label(day.label, file.source, spec)
    return day, day.find_row(limit_rows, day.end) if limit_rows else day.end


def _plan(days: list[DayFile], units: _Units, last: OpenDay, spec: FeatureSpec) -> Plan:
    if spec.input.format == "parquet":
        return Plan(days, units.found, 1.0, days[-1].size / max(1, last.end))
    return Plan(days, units.found, _rows_per_byte(units.found[0].block), 1.0)


def _rows_per_byte(block: Block) -> float:
    size = min(block.end - block.begin, 1 << 20)
    head = read_bytes(block.path, block.begin, block.begin + size)
    return max(1, head.count(b"\n")) / size
