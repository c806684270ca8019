"""Detect late rows, whose time is long after the time of all other rows.

The event state for inference is as of the newest row, and later days must not be older than it. So
a single row from a wrong clock, a year ahead, would leave every window empty, and every day that is
added would be refused. Late rows therefore do not count as the newest.
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


def find_late_start(
    blocks: Sequence[Block],
    spec: FeatureSpec,
    file: Path,
    threads: int,
    report: Callable[[float], object] = lambda rows: None,
) -> int | None:
    """Read the times of a log, and return the time from which rows are late; None if none is late.

    Args:
        blocks: The blocks of the log.
        spec: The columns.
        file: The file that keeps the answer for a process that resumes this one.
        threads: Number of blocks that are read at once.
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
        count: Number of late rows.
        row: The index of the first one in the block; 0 without late rows.
        time: Its time; 0 without late rows.
        newest: The newest time of the other rows; :data:`.BEFORE_ALL` without other rows.
    """

    count: int
    row: int
    time: int
    newest: int


def find_late_rows(name: str, files: EventFiles, end: int) -> LateRows:
    """Find the late rows of a block.

    Args:
        name: The name of the block.
        files: The events of its rows.
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
    """Log the number of late rows, and the position of the first.

    Args:
        blocks: The blocks of the log.
        spec: The columns.
        late_rows: The late rows of each block; at least one block has some.
        newest: The newest time of the other rows.
    """
    found = [(block, late) for block, late in zip(blocks, late_rows, strict=True) if late.count]
    block, first = found[0]
    reader = get_format(spec)
    num_rows = sum(late.count for _, late in found)
    more = f" (and {num_rows - 1} more)" if num_rows > 1 else ""
    log.warning(
        "warning: %s, %s %d: the time %s%s is long after the other rows, which end at %s\n"
        "  -> correct it, or leave such rows out with --on_bad_rows quarantine; until then, "
        "inference counts events until %s",
        block.source,
        reader.unit,
        reader.first_line(block) + first.row,
        format_time(first.time),
        more,
        format_time(newest),
        format_time(newest),
    )
