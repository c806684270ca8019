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
    units: list[Unit] = []
    parts = dict.fromkeys(SPLITS, 0)

    def add(day: OpenDay, split: str, begin: int, end: int) -> None:
        for block in day.cut(begin, end, block_bytes):
            units.append(Unit(split, parts[split], day.file.day, block))
            parts[split] += 1

    for file in days:
        day = open_day(file, spec)
        check_label(day.label, file.source, spec)
        end = day.find_row(limit_rows, day.end) if limit_rows else day.end
        if file is not days[-1]:
            add(day, "train", day.begin, end)
            continue
        rows = day.count_rows(end)
        place = {0: day.begin, rows: end}  # by row number; finding others scans the text
        for split, cut in cut_last_day(rows, only_day=len(days) == 1).items():
            for row in cut:
                if row not in place:
                    place[row] = day.find_row(row, end)
            if cut[0] < cut[1]:
                add(day, split, place[cut[0]], place[cut[1]])
    empty = [split for split in SPLITS if not parts[split]]
    if empty:
        raise BadInputError(
            f"{days[-1].source}: too few rows: none left for {', '.join(empty)}",
            "the last day is halved into valid and test (a log of one day 80/10/10); "
            "use a longer file or a larger --limit_rows",
        )
    if spec.input.format == "parquet":
        return Plan(days, units, 1.0, days[-1].size / max(1, day.end))
    return Plan(days, units, _rows_per_byte(units[0].block), 1.0)


def _rows_per_byte(block: Block) -> float:
    size = min(block.end - block.begin, 1 << 20)
    head = read_bytes(block.path, block.begin, block.begin + size)
    return max(1, head.count(b"\n")) / size
