"""What a division of rows needs to know before the first row is divided.

The hash of a row's place needs row numbers: the lines of text files are counted, which only looks
for line ends. Cuts by time that follow from shares need all times: the log is read once more, and
each block's distinct times with their counts become a file. The cuts are found by bisection over
these files, which are mapped and not loaded. So memory is bounded and the cuts are exact.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.atomic import read_json, write_json
from nvt_torchrec.base.files.mapping import MappedArray, write_array
from nvt_torchrec.base.files.validation import parse
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.clicklog.readers.log_format import Block, format_of, read_block_chunks
from nvt_torchrec.etl.state.output import TIMES
from nvt_torchrec.etl.units.unit_plan import UnitPlan
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types.time import format_time

log = logging.getLogger(__name__)

#: In the directory of the counted times: the cuts that were found.
_CUTS_FILE = "cuts.json"
#: Text that is parsed at once.
CHUNK_BYTES = 2 << 20


def prepared(
    plan: UnitPlan,
    spec: FeatureSpec,
    work: Path,
    *,
    threads: int,
    reject: bool | int,
    report: Callable[[int], object] = lambda rows: None,
) -> UnitPlan:
    """Return the plan with the row numbers, or the cuts by time, that its division of rows needs.

    After an interruption, blocks whose times were counted are not read again.

    Args:
        plan: See :func:`etl.units.unit_plan.make_plan`.
        spec: The columns and the split.
        work: The directory of the run's state.
        threads: The number of blocks that are read at once.
        reject: Whether to leave malformed rows out instead of raising.
        report: Called with the number of rows read since the last call.

    Raises:
        BadRowError: A row is malformed.
        BadInputError: A file cannot be read, or a split would have no rows.
        OutputError: ``work`` cannot be written.
    """
    split = spec.split
    if split.by == "time" and not split.valid_from:
        cuts = _time_cuts(plan, spec, work / TIMES, threads, reject, report)
        changed = {
            block: dataclasses.replace(block, rule=dataclasses.replace(block.rule, cuts=cuts))
            for block in plan.divided_blocks
        }
        return plan.replace_blocks(changed)
    if split.by in ("share", "files") and not format_of(spec).by_rows:
        return _number_rows(plan, spec, threads)
    return plan


def _number_rows(plan: UnitPlan, spec: FeatureSpec, threads: int) -> UnitPlan:
    """Count the rows of each divided block; note how many are before it in its file."""
    blocks, count_rows = plan.divided_blocks, format_of(spec).count_rows
    counts = map_in_order(
        lambda block: count_rows(block.path, block.begin, block.end), blocks, threads, "rows"
    )
    rows: Counter[str] = Counter()  # so far, by file
    changed = {}
    for block, count in zip(blocks, counts, strict=True):
        changed[block] = dataclasses.replace(block, first_row=rows[block.source])
        rows[block.source] += count
    return plan.replace_blocks(changed)


def _time_cuts(
    plan: UnitPlan,
    spec: FeatureSpec,
    directory: Path,
    threads: int,
    reject: bool | int,
    report: Callable[[int], object],
) -> tuple[int, int]:
    """Count all times, or take the cuts that an earlier process found."""
    file = directory / _CUTS_FILE
    with contextlib.suppress(BadInputError, ValueError):  # not there, or damaged: counted again
        begin, end = parse(list[int], read_json(file, "the cuts by time"), file)
        return begin, end

    def count(item: tuple[int, Block]) -> int:
        return _count_times(*item, spec, directory, reject)

    missing = []
    for item in enumerate(plan.blocks):
        try:
            report(_rows(_counted(directory, item[0])))
        except (OSError, ValueError):  # not there, or damaged
            missing.append(item)
    for rows in map_in_order(count, missing, threads, "times"):
        report(rows)
    # not in the threads: NumPy's parser of headers can fail in several, see etl.engines.runs
    counted = [_counted(directory, i) for i in range(len(plan.blocks))]
    cuts = find_cuts(counted, spec.split.valid, spec.split.test)
    write_json(file, list(cuts))
    for i in range(len(plan.blocks)):
        _file(directory, i).unlink()
    return cuts


def _file(directory: Path, block: int) -> Path:
    return directory / f"{block}.npy"


def _counted(directory: Path, block: int) -> np.ndarray:
    """Map what was counted in a block; raises OSError, and ValueError if it is something else."""
    counted = MappedArray(_file(directory, block), np.int64, 2).values
    if len(counted) != 2:
        raise ValueError(f"{len(counted)} rows instead of times and counts")
    return counted


def _count_times(
    index: int, block: Block, spec: FeatureSpec, directory: Path, reject: bool | int
) -> int:
    """Write the distinct times of a block, and how many rows are not later; return its rows."""
    log.debug("begin times %s:%d", block.source, block.begin)
    pieces = read_block_chunks(block, spec, reject=reject, chunk_bytes=CHUNK_BYTES)
    keys = np.concatenate([rows.key for rows in pieces])
    times, counts = np.unique(keys, return_counts=True)
    counted = np.stack([times, np.cumsum(counts)])
    write_array(_file(directory, index), counted)
    return _rows(counted)


def _rows(counted: np.ndarray) -> int:
    return int(counted[1, -1]) if counted.shape[1] else 0


def find_cuts(counted: list[np.ndarray], valid: float, test: float) -> tuple[int, int]:
    """Return the times at which validation and test begin, so that they have these shares.

    A cut is the time of a row. Rows of the same time are on the same side, so a share may be
    larger than asked for. There is at least one time in each split.

    Args:
        counted: Of each block, int64 [2, distinct times]: the times in ascending order, and the
            number of the block's rows that are not later.
        valid: The share of the rows for validation.
        test: The share of the rows for test.

    Raises:
        BadInputError: A split would have no rows.
    """
    counted = [block for block in counted if block.shape[1]]
    rows = sum(map(_rows, counted))
    test_rows, valid_rows = (max(1, round(rows * share)) for share in (test, valid))
    if rows < test_rows + valid_rows + 1:
        raise BadInputError(f"split by time: {rows} rows are too few for three splits", "use more")
    test_from = _time_of(counted, rows - test_rows)
    until = sum(_rows_until(block, test_from - 1) for block in counted)  # rows before test
    # the rows of one time may be more than the shares of valid and test together
    valid_from = _time_of(counted, min(rows - test_rows - valid_rows, until - 1)) if until else 0
    first = min(int(block[0, 0]) for block in counted)
    if not until or valid_from == first:
        raise BadInputError(
            f"split by time: rows of one time stay together, so {'valid' if until else 'test'} "
            f"would begin at {format_time(first)}, the first time, and no row is left for training",
            "give the times at which valid and test begin as valid_from and test_from, or use a "
            "column of finer times",
        )
    return valid_from, test_from


def _time_of(counted: list[np.ndarray], row: int) -> int:
    """Return the time of a row, numbered from 0 in the order of time, by bisection."""
    low = min(int(block[0, 0]) for block in counted)
    high = max(int(block[0, -1]) for block in counted)
    while low < high:
        middle = (low + high) // 2
        if sum(_rows_until(block, middle) for block in counted) > row:
            high = middle
        else:
            low = middle + 1
    return low


def _rows_until(block: np.ndarray, time: int) -> int:
    """Return how many rows of a block are not later than a time."""
    at = int(np.searchsorted(block[0], time, side="right"))
    return int(block[1, at - 1]) if at else 0


def describe(plan: UnitPlan, spec: FeatureSpec) -> dict[str, object]:
    """Return the rule of the split for the manifest: its settings, and the cuts by time."""
    rule: dict[str, object] = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in dataclasses.asdict(spec.split).items()
        if value not in ("", 0, ())
    }
    if spec.split.by == "time":
        cuts = plan.divided_blocks[0].rule.cuts
        rule["valid_from"], rule["test_from"] = map(format_time, cuts)
    return rule
