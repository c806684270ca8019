"""The pass over a log that some divisions of rows need before the first row is divided.

A division by the hash of a row's position needs row numbers, so the lines of text files are
counted, which only looks for line ends. Cuts by time that follow from shares need all times, so the
log is read once more, and the distinct times are counted in memory, 16 bytes each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.atomic import read_json, write_json
from nvt_torchrec.base.files.validation import parse
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.clicklog.readers.log_format import Block, get_format, read_block_chunks
from nvt_torchrec.etl.state.output import CUTS_FILE
from nvt_torchrec.etl.units.counting import Counts, count, merge
from nvt_torchrec.etl.units.unit_plan import UnitPlan
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types.time import format_time
from nvt_torchrec.formats.rows import RawRows

log = logging.getLogger(__name__)

#: Yields the pieces of a block without the rows that are not written.
LeaveOut: TypeAlias = Callable[[Iterable[RawRows], Block], Iterator[RawRows]]
#: Bytes of text to parse at once.
CHUNK_BYTES = 2 << 20


def prepare_division(
    plan: UnitPlan,
    spec: FeatureSpec,
    work: Path,
    *,
    threads: int,
    max_bad_rows: int,
    report: Callable[[int], object] = lambda rows: None,
    leave_out: LeaveOut | None = None,
) -> UnitPlan:
    """Return the plan with the row numbers, or the cuts by time, that its division of rows needs.

    Args:
        plan: See :func:`etl.units.unit_plan.make_plan`.
        spec: The columns and the split.
        work: The directory of the run's state.
        threads: The number of blocks to read at once.
        max_bad_rows: How many malformed rows of a block may be left out; 0: one is an error.
        report: Called with the number of rows read since the last call.
        leave_out: Yields the rows of a block that are written; None if all are written.

    Raises:
        BadRowError: A row is malformed.
        BadInputError: A file cannot be read, or a split would have no rows.
        OutputError: ``work`` cannot be written.
    """
    split = spec.split
    if split.by == "time" and not split.valid_from:
        cuts = _read_or_find_cuts(
            plan, spec, work / CUTS_FILE, threads, max_bad_rows, report, leave_out
        )
        changed: dict[Block, Block] = {}
        for block in plan.divided_blocks:
            rule = dataclasses.replace(block.rule, cuts=cuts)
            changed[block] = dataclasses.replace(block, rule=rule)
        return plan.replace_blocks(changed)
    is_drawn = split.by == "share" or (split.by in ("files", "values") and split.valid)
    if is_drawn and not get_format(spec).by_rows:
        return _number_rows(plan, spec, threads)
    return plan


def _number_rows(plan: UnitPlan, spec: FeatureSpec, threads: int) -> UnitPlan:
    """Set the ``first_row`` of each divided block, by counting the rows of all blocks."""
    log_format = get_format(spec)

    def count_rows(block: Block) -> int:
        return log_format.count_rows(block.path, block.begin, block.end)

    blocks = plan.divided_blocks
    counts = map_in_order(count_rows, blocks, threads, "rows")
    rows_so_far: Counter[str] = Counter()  # by source
    changed: dict[Block, Block] = {}
    for block, num_rows in zip(blocks, counts, strict=True):
        changed[block] = dataclasses.replace(block, first_row=rows_so_far[block.source])
        rows_so_far[block.source] += num_rows
    return plan.replace_blocks(changed)


def _read_or_find_cuts(
    plan: UnitPlan,
    spec: FeatureSpec,
    file: Path,
    threads: int,
    max_bad_rows: int,
    report: Callable[[int], object],
    leave_out: LeaveOut | None,
) -> tuple[int, int]:
    """Return the cuts that an earlier process wrote to ``file``, or count all times."""
    with contextlib.suppress(BadInputError, ValueError):  # if missing or damaged, count again
        begin, end = parse(list[int], read_json(file, "the cuts by time"), file)
        return begin, end

    def count_times(block: Block) -> Counts:
        pieces = read_block_chunks(block, spec, max_bad_rows=max_bad_rows, chunk_bytes=CHUNK_BYTES)
        if leave_out:
            pieces = leave_out(pieces, block)
        return count([rows.key for rows in pieces if rows.key is not None])

    def count_all() -> Iterator[Counts]:
        for counted in map_in_order(count_times, plan.blocks, threads, "times"):
            report(int(counted.counts.sum()))
            yield counted

    cuts = find_cuts(merge(count_all()), spec.split.valid, spec.split.test)
    write_json(file, list(cuts))
    return cuts


def find_cuts(counted: Counts, valid: float, test: float) -> tuple[int, int]:
    """Return the times at which validation and test begin, for the given shares of rows.

    A cut is the time of a row. Rows with equal times are on the same side of it, so a split may be
    larger than its share. Each split has at least one time.

    Args:
        counted: The distinct times in ascending order, int64, and the number of rows of each.
        valid: The share of the rows for validation.
        test: The share of the rows for test.

    Raises:
        BadInputError: A split would have no rows.
    """
    times = np.asarray(counted.values)
    ends = np.cumsum(counted.counts)  # the number of rows up to and including each time
    rows = int(counted.counts.sum())
    test_rows = max(1, round(rows * test))
    valid_rows = max(1, round(rows * valid))
    if rows < test_rows + valid_rows + 1:
        raise BadInputError(
            f"split by time: {rows} rows are too few for three splits", "use a longer log"
        )
    test_index = int(np.searchsorted(ends, rows - test_rows, side="right"))
    rows_before_test = int(ends[test_index - 1]) if test_index else 0
    # One time may have more rows than the shares of valid and test together. Then valid gets the
    # last time before test.
    first_valid_row = min(rows - test_rows - valid_rows, rows_before_test - 1)
    valid_from = int(times[np.searchsorted(ends, first_valid_row, side="right")])
    first_time = int(times[0])
    if test_index == 0 or valid_from == first_time:
        split = "test" if test_index == 0 else "valid"
        raise BadInputError(
            f"split by time: rows of one time stay together, so {split} would begin at "
            f"{format_time(first_time)}, the first time, and no row is left for training",
            "set valid_from and test_from to the times at which valid and test begin, or use a "
            "column with finer times",
        )
    return valid_from, int(times[test_index])


def describe(plan: UnitPlan, spec: FeatureSpec) -> dict[str, object]:
    """Return the rule of the split for the manifest: its settings, and the cuts by time."""
    rule: dict[str, object] = {}
    for key, value in dataclasses.asdict(spec.split).items():
        if value not in ("", 0, ()):  # skip unset values
            rule[key] = list(value) if isinstance(value, tuple) else value
    if spec.split.by == "time":
        cuts = plan.divided_blocks[0].rule.cuts
        rule["valid_from"], rule["test_from"] = map(format_time, cuts)
    return rule
