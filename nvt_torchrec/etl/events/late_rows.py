"""Rows whose time is long after that of all others: one of them must not end every window.

What inference knows is as of the newest row, and days that are added must not be older. So a single
row of a wrong clock, a year ahead, would leave every window empty, and refuse every further day.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.atomic import read_json, write_json
from nvt_torchrec.base.files.validation import parse
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.clicklog.readers.log_format import Block, format_of, read_block_chunks
from nvt_torchrec.etl.events.extract import EventFiles, block_name, drop_keys, narrow
from nvt_torchrec.etl.events.label_rates import add_hours, count_hours
from nvt_torchrec.etl.units.split_pass import CHUNK_BYTES
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.derivations import HOUR
from nvt_torchrec.formats.feature_spec.raw_types.time import format_time
from nvt_torchrec.formats.rows import UNLIMITED

log = logging.getLogger(__name__)

#: Rows after a gap are late if they are at most one in so many, or a single one.
_SHARE = 10_000
#: Hours of a gap before late rows: nights and hours without service are shorter.
_GAP_HOURS = 24
#: How many times longer that gap is than any other.
_TIMES_LONGER = 2


def find_late(hours: np.ndarray) -> int | None:
    """Return the time from which rows are late, in microseconds; None if there are no such rows.

    They are a few rows after a gap that is longer than a day, and more than twice as long as any
    other gap, but for gaps after a few rows at the beginning.

    Args:
        hours: int64 [2, hours], the hours since 1970, rising, and how many rows have each.
    """
    hour, rows = hours
    before = np.cumsum(rows)[:-1]
    after = rows.sum() - before
    few = max(1, rows.sum() // _SHARE)
    gaps = np.diff(hour)
    longest = gaps[(before > few) & (after > few)].max(initial=1)
    late = (after <= few) & (before > few)
    late &= (gaps > _GAP_HOURS) & (gaps > _TIMES_LONGER * longest)
    places = np.flatnonzero(late)
    return int(hour[places[0] + 1]) * HOUR if len(places) else None


def count_times(times: np.ndarray) -> np.ndarray:
    """Count rows by the hour of their times, int64 [n]; return int64 [2, hours]."""
    return count_hours(times, np.empty((0, len(times)), np.int64))


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
    times_alone = drop_keys(narrow(spec))

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


def warn_of_late_rows(
    blocks: Sequence[Block], spec: FeatureSpec, files: EventFiles, end: int, newest: int
) -> None:
    """Say how many rows are late, and where the first of them is.

    Args:
        blocks: The log.
        spec: The columns.
        files: The events of its blocks, which have no malformed row.
        end: The time from which rows are late.
        newest: The newest time before it.
    """
    found = []
    for block in blocks:
        name = block_name(block)
        times = files.read(name, files.times(name))[0]
        found += [(block, int(row), int(times[row])) for row in np.flatnonzero(times >= end)]
    (block, row, time), reader = found[0], format_of(spec)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    log.warning(
        "warning: %s, %s %d: a row of %s%s is long after all others, the newest of which is of %s\n"
        "  -> correct its time, or leave such rows out with --on_bad_rows quarantine; until then, "
        "inference knows what happened until %s",
        block.source,
        reader.unit,
        reader.first_line(block) + row,
        format_time(time),
        more,
        format_time(newest),
        format_time(newest),
    )
