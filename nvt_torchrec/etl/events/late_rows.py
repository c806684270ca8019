"""Rows whose time is long after that of all others: one of them must not end every window.

What inference knows is as of the newest row, and days that are added must not be older. So a single
row of a wrong clock, a year ahead, would leave every window empty, and refuse every further day.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.atomic import read_json, write_json
from nvt_torchrec.base.files.validation import parse
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.clicklog.readers.log_format import Block, get_format, read_block_chunks
from nvt_torchrec.etl.events.event_files import EventFiles
from nvt_torchrec.etl.units.hours import add_hours, count_times, find_late
from nvt_torchrec.etl.units.split_pass import CHUNK_BYTES
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types.time import format_time
from nvt_torchrec.formats.feature_spec.spec_variants import drop_event_keys, keep_events_only
from nvt_torchrec.formats.rows import UNLIMITED
from nvt_torchrec.workflows.event_groups import BEFORE_ALL

log = logging.getLogger(__name__)


def read_end(
    blocks: Sequence[Block],
    spec: FeatureSpec,
    file: Path,
    threads: int,
    report: Callable[[float], object] = lambda rows: None,
) -> int | None:
    """Read the times of a log, and return that from which rows are late; None without such rows.

    Args:
        blocks: The log.
        spec: The columns.
        file: Keeps the answer for a process that resumes this one.
        threads: The number of blocks that are read at once.
        report: Called with the number of rows read since the last call.

    Raises:
        BadInputError: A block cannot be read.
        OutputError: ``file`` cannot be written.
    """
    if file.exists():
        try:
            return parse(list[int], read_json(file, "the time of late rows"), file)[0]
        except BadInputError:
            log.debug("%s: damaged; times are read again", file)
        except IndexError:
            return None
    times_alone = drop_event_keys(keep_events_only(spec))

    def count(block: Block) -> np.ndarray:
        counted = [np.zeros((2, 0), np.int64)]
        pieces = read_block_chunks(
            block, times_alone, max_bad_rows=UNLIMITED, chunk_bytes=CHUNK_BYTES
        )
        for rows in pieces:
            assert rows.times is not None
            counted.append(count_times(rows.times[0]))
            report(len(rows))
        return add_hours(counted)

    end = find_late(add_hours([*map_in_order(count, blocks, threads, "times")]))
    write_json(file, [] if end is None else [end])
    return end


@dataclasses.dataclass(frozen=True)
class LateRows:
    """The late rows of a block.

    Attributes:
        count: How many there are.
        row: The index of the first of them in the block; 0 without late rows.
        time: Its time; 0 without late rows.
        newest: The newest time of the other rows; the earliest there is without other rows.
    """

    count: int
    row: int
    time: int
    newest: int


def find_late_rows(name: str, files: EventFiles, end: int) -> LateRows:
    """Find the late rows of a block.

    Args:
        name: The name of the block.
        files: The events of its rows, of which none is malformed.
        end: The time from which rows are late.
    """
    times = files.read(name, files.times(name))[0]
    late = np.flatnonzero(times >= end)
    newest = int(times[times < end].max(initial=BEFORE_ALL))
    if not len(late):
        return LateRows(0, 0, 0, newest)
    return LateRows(len(late), int(late[0]), int(times[late[0]]), newest)


def warn_of_late_rows(
    blocks: Sequence[Block], spec: FeatureSpec, late_rows: Sequence[LateRows], newest: int
) -> None:
    """Say how many rows are late, and where the first of them is.

    Args:
        blocks: The log.
        spec: The columns.
        late_rows: Those of each block; there is at least one.
        newest: The newest time of the other rows.
    """
    found = [(block, late) for block, late in zip(blocks, late_rows, strict=True) if late.count]
    (block, first), reader = found[0], get_format(spec)
    num_rows = sum(late.count for _, late in found)
    more = f" (and {num_rows - 1} more)" if num_rows > 1 else ""
    log.warning(
        "warning: %s, %s %d: a row of %s%s is long after all others, the newest of which is of %s\n"
        "  -> correct its time, or leave such rows out with --on_bad_rows quarantine; until then, "
        "inference knows what happened until %s",
        block.source,
        reader.unit,
        reader.first_line(block) + first.row,
        format_time(first.time),
        more,
        format_time(newest),
        format_time(newest),
    )
