"""The plan of a run, which assigns rows to the parts of the splits."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.readers.log_format import Block, OpenDay, get_format
from nvt_torchrec.etl.units.ready_rows import ReadyRows, locate_cuts
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types.time import parse_iso
from nvt_torchrec.formats.feature_spec.split import Split
from nvt_torchrec.formats.splits import SPLITS, RowRule, compute_hash_cuts, cut_last_day

#: Rough share of the rows in each split if it is unknown; used for progress bars only.
_USUAL_SHARES = {"train": 0.8, "valid": 0.1, "test": 0.1}


@dataclasses.dataclass(frozen=True)
class DividedBlock(Block):
    """A block whose rows go to several splits.

    Attributes:
        rule: Chooses the split of each row.
        file: The number of the file.
        first_row: The row number of the block's first row in its file, from 0; set only if the
            rule needs it.
    """

    rule: RowRule
    file: int
    first_row: int = 0


@dataclasses.dataclass(frozen=True)
class Unit:
    """A unit of work: rows of a block, which become ``<split>/part.<part>.parquet``.

    A unit has all rows of its block or, if that is a :class:`DividedBlock`, the rows of the split.
    """

    split: str
    part: int
    day: int
    block: Block

    @property
    def file(self) -> str:
        """The path of the part below the directory of the splits."""
        return f"{self.split}/part.{self.part}.parquet"


@dataclasses.dataclass(frozen=True)
class UnitPlan:
    """All units of a run.

    Attributes:
        days: The input files, in the order of the days.
        units: The units of train in the order of the days, then those of valid and test; each split
            numbers its parts from 0.
        rows_per_step: Rows per step, estimated from the first rows. A step is the unit of a block's
            begin and end: a byte of text, or a row of a parquet file.
        bytes_per_step: Bytes of the files per step.
        shares: The estimated share of a divided block's rows in each split.
    """

    days: list[DayFile]
    units: list[Unit]
    rows_per_step: float
    bytes_per_step: float
    shares: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def train_blocks(self) -> list[Block]:
        """The blocks that the workflow is fitted on."""
        return [unit.block for unit in self.units if unit.split == "train"]

    @property
    def train_days(self) -> list[int]:
        """The days of the train blocks, ascending."""
        return sorted({unit.day for unit in self.units if unit.split == "train"})

    @property
    def blocks(self) -> list[Block]:
        """All blocks, each once."""
        return list(dict.fromkeys(unit.block for unit in self.units))

    @property
    def divided_blocks(self) -> list[DividedBlock]:
        """The blocks whose rows go to several splits, each once."""
        return [block for block in self.blocks if isinstance(block, DividedBlock)]

    def bound_times(self, first: int, end: int, *, again: frozenset[str] = frozenset()) -> UnitPlan:
        """Return the plan with blocks in which rows outside ``[first, end)`` are malformed.

        Args:
            first: The earliest time that a row may have.
            end: The time before which a row must be.
            again: Sources that are read again by this extension; their rows may have any time.
        """
        bounded = {}
        for block in self.blocks:
            if block.source not in again:
                bounded[block] = dataclasses.replace(block, times=(first, end))
        return self.replace_blocks(bounded)

    def assign_day(self, day: int) -> UnitPlan:
        """Return the plan with all units on one day, the day that the extension adds."""
        units = [dataclasses.replace(unit, day=day) for unit in self.units]
        return dataclasses.replace(self, units=units)

    def replace_blocks(self, changed: Mapping[Block, Block]) -> UnitPlan:
        """Return the plan with other blocks for the same units."""
        units = []
        for unit in self.units:
            block = changed.get(unit.block, unit.block)
            units.append(dataclasses.replace(unit, block=block))
        return dataclasses.replace(self, units=units)

    def _steps(self, split: str | None) -> float:
        """Estimate the number of steps in one split; None for all splits."""
        total = 0.0
        for unit in self.units:
            if split in (None, unit.split):
                steps = unit.block.end - unit.block.begin
                if isinstance(unit.block, DividedBlock):
                    total += steps * self.shares[unit.split]
                else:
                    total += steps
        return total

    def text_bytes(self, split: str | None = None) -> int:
        """Return the bytes of decompressed input in one split, or in all.

        The number is estimated for parquet and divided blocks.
        """
        return round(self._steps(split) * self.bytes_per_step)

    def max_rows(self, spec: FeatureSpec) -> int:
        """Return an upper bound of the number of well-formed rows."""
        steps = sum(block.end - block.begin for block in self.blocks)
        return steps // get_format(spec).row_size

    def estimated_rows(self, split: str | None = None) -> int:
        """Estimate the number of rows in one split, or in all; exact for undivided parquet."""
        return round(self._steps(split) * self.rows_per_step)

    def estimate_file(self, source: str) -> int:
        """Estimate the number of rows of a file."""
        steps = sum(block.end - block.begin for block in self.blocks if block.source == source)
        return round(steps * self.rows_per_step)


def make_plan(
    files: list[DayFile],
    spec: FeatureSpec,
    *,
    block_bytes: int,
    limit_rows: int | None = None,
    halved: bool = False,
    ready: Mapping[str, ReadyRows] | None = None,
) -> UnitPlan:
    """Cut files into units of the splits, as the spec's split says.

    The cuts depend only on the data and ``block_bytes``, not on the engine or its workers. If rows
    are divided, :func:`etl.units.split_pass.prepare_division` completes the plan.

    Args:
        files: The uncompressed files; see :func:`etl.state.staging.decompress_days`.
        spec: The columns, and the format of the files.
        block_bytes: The approximate size of a unit, as text or as decoded parquet.
        limit_rows: The number of rows to use from the beginning of each day; None for all.
        halved: Whether the file is a new day of an output that is split by days: valid and test
            get half of the rows each.
        ready: By source, the rows of a file that are written; None if all rows are written.

    Raises:
        BadRowError: The rows have no label, or not as many fields as the spec.
        BadInputError: A file lacks a column, or a split would get no row.
    """
    units = _Units(block_bytes)
    if spec.split.by != "days":
        return _plan_divided_files(files, spec, units, limit_rows)
    if ready is not None:
        return _plan_ready_rows(files, spec, units, limit_rows, ready, halved=halved)
    for file in files:
        day, end = _open_day(file, spec, limit_rows)
        if file is not files[-1]:
            units.add(day, "train", day.begin, end)
        else:
            rows = day.count_rows(end)
            only_day = len(files) == 1 and not halved
            units.add_rows(day, end, rows, cut_last_day(rows, only_day=only_day))
    wanted = ("valid", "test") if halved else SPLITS
    empty = [split for split in wanted if not units.next_parts[split]]
    if empty:
        raise BadInputError(
            f"{files[-1].source}: too few rows: none left for {', '.join(empty)}",
            "the last day is halved into valid and test (a log of one day is split 80/10/10); use "
            "a longer file or a larger --limit_rows",
        )
    return _make_unit_plan(files, units, day)


def cut_files(
    files: list[DayFile], spec: FeatureSpec, *, block_bytes: int, limit_rows: int | None = None
) -> dict[str, list[Block]]:
    """Cut whole files into blocks, before any rows are assigned to splits.

    Args:
        files: See :func:`make_plan`.
        spec: See :func:`make_plan`.
        block_bytes: See :func:`make_plan`.
        limit_rows: See :func:`make_plan`.

    Returns:
        The blocks of each file, by its source.
    """
    blocks = {}
    for file in files:
        day, end = _open_day(file, spec, limit_rows)
        blocks[file.source] = day.cut(day.begin, end, block_bytes)
    return blocks


def _plan_ready_rows(
    files: list[DayFile],
    spec: FeatureSpec,
    units: _Units,
    limit_rows: int | None,
    ready: Mapping[str, ReadyRows],
    *,
    halved: bool,
) -> UnitPlan:
    """Cut days into units if some of their rows are not written yet.

    The newest day with at least half of its rows ready becomes valid and test, together with the
    ready rows of later days. When a day is added, all rows that are ready now become valid and
    test.
    """
    first = 0 if halved else _find_last_ready([ready[file.source] for file in files])
    total = sum(len(ready[file.source]) for file in files[first:])
    # By split, the range of ready rows, counted from the first ready row of the current file.
    cuts = cut_last_day(total, only_day=first == 0 and not halved)
    for i, file in enumerate(files):
        day, end = _open_day(file, spec, limit_rows)
        if i < first:
            units.add(day, "train", day.begin, end)
            continue
        rows = ready[file.source]
        units.add_rows(day, end, rows.lines, locate_cuts(rows, cuts))
        for split, (begin, stop) in cuts.items():
            cuts[split] = (begin - len(rows), stop - len(rows))
    halves = cut_last_day(total)
    is_empty = any(halves[split][0] == halves[split][1] for split in ("valid", "test"))
    if is_empty or not units.next_parts["valid"]:
        raise BadInputError(
            f"{files[-1].source}: too few rows have all their labels: {total}",
            "add days, or set a shorter `within` in the spec",
        )
    return _make_unit_plan(files, units, day)


def _find_last_ready(ready: Sequence[ReadyRows]) -> int:
    """Return the index of the newest day with at least half of its rows ready.

    If there is no such day, it is the newest day with any ready row.
    """
    last = 0
    for i, rows in enumerate(ready):
        if len(rows):
            last = i
    for i, rows in enumerate(ready):
        if 2 * len(rows) >= rows.lines:
            last = i
    return last


@dataclasses.dataclass
class _Units:
    """The units cut so far.

    Attributes:
        block_bytes: The approximate size of a unit.
        next_parts: The number of the next part of each split.
        cut: The units.
    """

    block_bytes: int
    next_parts: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    cut: list[Unit] = dataclasses.field(default_factory=list)

    def add_block(self, split: str, day: int, block: Block) -> None:
        """Make a block a unit of a split."""
        self.cut.append(Unit(split, self.next_parts[split], day, block))
        self.next_parts[split] += 1

    def add(self, day: OpenDay, split: str, begin: int, end: int) -> None:
        """Cut ``[begin, end)`` of a day into units of a split."""
        for block in day.cut(begin, end, self.block_bytes):
            self.add_block(split, day.file.day, block)

    def add_rows(self, day: OpenDay, end: int, rows: int, cuts: dict[str, tuple[int, int]]) -> None:
        """Cut the range of rows of each split into units.

        Args:
            day: The day.
            end: The end of the last row of the day that is used.
            rows: The number of rows before ``end``.
            cuts: The range of row numbers of each split.
        """
        # Row number → where the row begins. Finding a row scans the text, so each is found once.
        offsets = {0: day.begin, rows: end}
        for split, (first, last) in cuts.items():
            for row in (first, last):
                if row not in offsets:
                    offsets[row] = day.find_row(row, end)
            if first < last:
                self.add(day, split, offsets[first], offsets[last])


def _plan_divided_files(
    files: list[DayFile], spec: FeatureSpec, units: _Units, limit_rows: int | None
) -> UnitPlan:
    """Cut files into units whose rows are divided, unless the whole file is in one split."""
    for file in files:
        day, end = _open_day(file, spec, limit_rows)
        rule = _find_rule(file, spec.split)
        for block in day.cut(day.begin, end, units.block_bytes):
            if rule is None:
                units.add_block(file.split, file.day, block)
                continue
            first = block.begin if day.format.by_rows else 0
            divided = DividedBlock(
                **dataclasses.asdict(block), rule=rule, file=file.day, first_row=first
            )
            for split in rule.splits:
                units.add_block(split, file.day, divided)
    empty = [split for split in SPLITS if not units.next_parts[split]]
    if empty or not units.cut:
        source = "split by files" if spec.split.by == "files" else files[0].source
        raise BadInputError(
            f"{source}: no rows for {', '.join(empty or SPLITS)}", "use longer files"
        )
    units.cut.sort(key=lambda unit: SPLITS.index(unit.split))
    plan = _make_unit_plan(files, units, day)
    return dataclasses.replace(plan, shares=_estimate_shares(spec.split))


def _find_rule(file: DayFile, split: Split) -> RowRule | None:
    """Return the rule that divides the rows of a file; None if they are all in one split.

    Cuts by time that follow from shares are 0 here, because the times are not counted yet.
    """
    if split.by == "files":
        if file.split != "train" or not split.valid:
            return None
        return RowRule("share", compute_hash_cuts(split.valid, 0), split.seed)
    if split.by == "time":
        cuts = []
        for time in (split.valid_from, split.test_from):
            cuts.append(parse_iso(time, "split") if time else 0)
        return RowRule("time", tuple(cuts))
    if split.by == "values":
        valid_cut = compute_hash_cuts(split.valid, 0)[0] if split.valid else None
        return RowRule("values", (1, 2), split.seed, valid_cut)
    return RowRule(split.by, compute_hash_cuts(split.valid, split.test), split.seed)


def _estimate_shares(split: Split) -> dict[str, float]:
    """Estimate the share of the divided rows in each split."""
    if split.valid_from or split.by == "values":
        return _USUAL_SHARES
    return {"train": 1 - split.valid - split.test, "valid": split.valid, "test": split.test}


def group_by_block(units: Iterable[Unit]) -> list[tuple[Unit, ...]]:
    """Group units by block, in the order of each block's first unit."""
    blocks: dict[Block, list[Unit]] = {}
    for unit in units:
        blocks.setdefault(unit.block, []).append(unit)
    return [tuple(units_of_block) for units_of_block in blocks.values()]


def _open_day(file: DayFile, spec: FeatureSpec, limit_rows: int | None) -> tuple[OpenDay, int]:
    """Open a day whose rows have a label; return it, and the end of the last row that is used."""
    day = get_format(spec).open(file)
    day.format.check_label(day.label, file.source)
    end = day.find_row(limit_rows, day.end) if limit_rows else day.end
    return day, end


def _make_unit_plan(days: list[DayFile], units: _Units, last: OpenDay) -> UnitPlan:
    """Return the plan of the units; estimate rows and bytes per step from the last day."""
    rows_per_step, bytes_per_step = last.format.rates(last, units.cut[0].block)
    return UnitPlan(days, units.cut, rows_per_step, bytes_per_step)


def block_name(block: Block) -> str:
    """Return a name for a block that can be used in file names."""
    identity = f"{block.source}\n{block.begin}\n{block.end}"
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
