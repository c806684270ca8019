"""What the ETL will do: which rows go to which part of which split. Needs no NVTabular."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

from clicklog.errors import BadInputError, BadRowError
from clicklog.files import atomic_path
from clicklog.lines import read_bytes, read_stream
from clicklog.raw import Block, DayFile, OpenDay, open_day
from clicklog.spec import FeatureSpec
from clicklog.splits import SPLITS, cut_last_day

log = logging.getLogger(__name__)


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
        days: uncompressed files; see :func:`stage`.
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
        if not day.label:
            raise BadRowError(f"{file.source}: {_no_label(spec)}", "training data needs the label")
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


def _no_label(spec: FeatureSpec) -> str:
    if spec.input.format == "parquet" or spec.input.header:
        return f"no column {spec.label}, so there is no label"
    return f"rows of {len(spec.columns) - 1} fields, so there is no label"


def _rows_per_byte(block: Block) -> float:
    size = min(block.end - block.begin, 1 << 20)
    head = read_bytes(block.path, block.begin, block.begin + size)
    return max(1, head.count(b"\n")) / size


def stage(
    days: list[DayFile], directory: Path, report: Callable[[int], object] = lambda n: None
) -> list[DayFile]:
    """Decompress the compressed days into ``directory``: blocks need random access.

    Args:
        days: as found; gzip, bzip2, xz and zstd by the endings of their names.
        directory: for the decompressed files; they keep their names. Those that are there
            already, from an earlier call, are whole.
        report: called with the bytes written since the last call.

    Raises:
        BadInputError: a file is truncated or not in the format its name says.
        OutputError: the directory cannot be written.
    """
    staged = []
    for day in days:
        if not day.compressed:
            staged.append(day)
            continue
        target = directory / Path(day.path).name.rsplit(".", 1)[0]
        if not target.exists():
            log.debug("begin decompress %s", day.path)
            with atomic_path(target) as temporary, open(temporary, "wb") as out:
                for chunk in read_stream(day.path, 8 << 20):
                    out.write(chunk)
                    report(len(chunk))
        if not target.stat().st_size:
            raise BadInputError(f"{day.source}: empty file", f"fetch day {day.day} again")
        staged.append(dataclasses.replace(day, path=str(target), size=target.stat().st_size))
    return staged
