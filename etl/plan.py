"""What the ETL will do: which rows go to which part of which split. Needs no NVTabular."""

from __future__ import annotations

import dataclasses

from clicklog.errors import BadInputError
from clicklog.readers.lines import read_bytes
from clicklog.readers.raw import Block, DayFile, OpenDay, check_label, open_day
from clicklog.spec.feature_spec import FeatureSpec
from clicklog.splits import SPLITS, cut_last_day


@dataclasses.dataclass(frozen=True)
class Unit:
    """One block of rows, which becomes ``<split>/part.<part>.parquet``."""

    split: str
    part: int
    day: int
    block: Block

    @property
    def file(self) -> str:
        """Path below the directory of the splits."""
        return f"{self.split}/part.{self.part}.parquet"


@dataclasses.dataclass(frozen=True)
class Plan:
    """All units of a run.

    Attributes:
        days: the input files, by day.
        units: in order: train by day, valid, test. Parts are numbered in each split.
        rows_per_step: by the first rows; a block's begin and end are counted in steps: bytes of
            text, or rows of parquet.
        bytes_per_step: of the files.
    """

    days: list[DayFile]
    units: list[Unit]
    rows_per_step: float
    bytes_per_step: float

    @property
    def train_blocks(self) -> list[Block]:
        """The blocks a workflow is fitted on."""
        return [unit.block for unit in self.units if unit.split == "train"]

    def _steps(self, split: str | None) -> int:
        blocks = [unit.block for unit in self.units if split in (None, unit.split)]
        return sum(block.end - block.begin for block in blocks)

    def text_bytes(self, split: str | None = None) -> int:
        """Bytes of (decompressed) input in one split, or in all; of parquet about so many."""
        return round(self._steps(split) * self.bytes_per_step)

    def estimated_rows(self, split: str | None = None) -> int:
        """About how many rows are in one split, or in all; of parquet exactly."""
        return round(self._steps(split) * self.rows_per_step)


def make_plan(
    days: list[DayFile], spec: FeatureSpec, *, block_bytes: int, limit_rows: int | None = None
) -> Plan:
    """Cut the days into units; the last day there is becomes valid and test.

    The cuts depend on the data and ``block_bytes`` only, never on who will do the work.

    Args:
        days: uncompressed files; see :func:`etl.staging.staged`.
        spec: the columns, and the format of the files.
        block_bytes: about how much text, or how much of decoded parquet, a unit takes.
        limit_rows: use the first so many rows of each day only.

    Raises:
        BadRowError: the rows have no label, or not as many fields as the spec.
        BadInputError: a file lacks a column, or there are too few rows for every split to get one.
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
        place = {0: day.begin, rows: end}  # of a row; finding one takes a scan of the text
        for split, cut in cut_last_day(rows, only_day=len(days) == 1).items():
            for row in cut:
                if row not in place:
                    place[row] = day.find_row(row, end)
            if cut[0] < cut[1]:
                add(day, split, place[cut[0]], place[cut[1]])
    empty = [split for split in SPLITS if not parts[split]]
    if empty:
        raise BadInputError(
            f"{days[-1].source}: too few rows: nothing left for {', '.join(empty)}",
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
