"""Read the keys and times of a log's rows, and find the row that each click belongs to."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from nvt_torchrec.base.files.mapping import write_array
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.clicklog.readers.log_format import Block, read_block_chunks
from nvt_torchrec.etl.labels.click_files import ClickLog
from nvt_torchrec.etl.labels.click_kernels import choose_shift, index_keys, match_rows
from nvt_torchrec.etl.units.hours import add_hours
from nvt_torchrec.etl.units.split_pass import CHUNK_BYTES
from nvt_torchrec.etl.units.unit_plan import block_name
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.derivations import HOUR
from nvt_torchrec.formats.feature_spec.spec_variants import keep_label_keys_only
from nvt_torchrec.formats.rows import NO_TIME, RawRows


@dataclasses.dataclass
class Matches:
    """Finds the rows that the clicks of a label belong to.

    Attributes:
        clicks: The clicks.
        window: The longest time from a row to its click, in microseconds.
    """

    clicks: ClickLog
    window: int

    def __post_init__(self) -> None:
        keys = self.clicks.keys
        self._begins = index_keys(keys)
        #: int64 [clicks], the time of each click's row; NO_TIME without a row.
        self.row_times = np.full(len(keys), NO_TIME)
        #: bool [clicks], True at the first click of each key that a row has.
        self._seen = np.zeros(len(keys), np.bool_)
        self._lock = threading.Lock()

    def add(self, keys: np.ndarray, times: np.ndarray) -> None:
        """Add rows: their keys and times, int64 [n] each. Thread-safe."""
        with self._lock:
            match_rows(
                self.clicks.keys,
                self.clicks.times,
                self._begins,
                choose_shift(self._begins),
                self.row_times,
                self._seen,
                np.ascontiguousarray(keys),
                times,
                self.window,
            )

    def count_known(self) -> int:
        """Return the number of clicks that have the key of any row, regardless of its time."""
        keys = self.clicks.keys
        if not len(keys):
            return 0
        is_first = np.ones(len(keys), np.bool_)
        is_first[1:] = keys[1:] != keys[:-1]
        return int(np.count_nonzero(self._seen[is_first][np.cumsum(is_first) - 1]))

    @property
    def has_row(self) -> np.ndarray:
        """The mask of clicks that belong to a row, bool [clicks]."""
        return self.row_times != NO_TIME


def count_newest(times: np.ndarray) -> np.ndarray:
    """Count times, int64 [n], by hour.

    Returns:
        int64 [3, hours]: the hours since 1970 that have times, ascending, the number of times, and
        the newest time in each.
    """
    if not len(times):
        return np.zeros((3, 0), np.int64)
    ordered = np.sort(times)
    hours = ordered // HOUR
    is_last = np.append(hours[1:] != hours[:-1], True)
    last = np.flatnonzero(is_last)
    counts = np.diff(last, prepend=-1)
    return np.stack([hours[last], counts, ordered[last]])


def join_newest(counted: Sequence[np.ndarray]) -> np.ndarray:
    """Return what :func:`count_newest` returns of all times together."""
    every = np.concatenate([np.zeros((3, 0), np.int64), *counted], axis=1)
    hours, index = np.unique(every[0], return_inverse=True)
    newest = np.full(len(hours), NO_TIME)
    np.maximum.at(newest, index, every[2])
    return np.stack([*add_hours([every[:2]]), newest])


def match_blocks(
    blocks: Sequence[Block],
    spec: FeatureSpec,
    matches: Sequence[Matches],
    *,
    after: int | None,
    times_below: Path | None,
    threads: int,
    max_bad_rows: int,
    report: Callable[[float], object] = lambda rows: None,
) -> list[np.ndarray]:
    """Read the log, and find the rows that clicks belong to.

    Args:
        blocks: The blocks of the log.
        spec: The columns.
        matches: For each label from other files, its clicks, to which rows are added.
        after: Rows until this time were written before and are ignored; None for a run.
        times_below: The directory to which the times of each block's lines are written; None if
            they are not needed.
        threads: Number of blocks that are read at once.
        max_bad_rows: The maximum number of malformed rows of a block that are left out; 0: a
            malformed row is an error.
        report: Called with the number of rows read since the last call.

    Returns:
        For each block, the result of :func:`count_newest` for its rows.

    Raises:
        BadRowError: A row is malformed.
        BadInputError: A block cannot be read.
        OutputError: A file cannot be written.
    """
    # Without quarantine a malformed row ends the run, so the columns of labels suffice; with it,
    # all columns decide which rows count.
    read = spec if max_bad_rows else keep_label_keys_only(spec)

    def match(block: Block) -> np.ndarray:
        counted = []
        times_by_line = [np.empty(0, np.int64)]
        pieces = read_block_chunks(block, read, max_bad_rows=max_bad_rows, chunk_bytes=CHUNK_BYTES)
        for rows in pieces:
            assert rows.label_keys is not None
            assert rows.label_times is not None
            counted.append(count_newest(rows.label_times))
            if times_below is not None:
                times_by_line.append(_order_by_line(rows))
            keys = rows.label_keys
            times = rows.label_times
            if after is not None:
                is_later = times > after
                keys = keys[:, is_later]
                times = times[is_later]
            for label_matches, row_keys in zip(matches, keys, strict=True):
                label_matches.add(row_keys, times)
            report(rows.lines)
        if times_below is not None:
            write_array(times_below / f"{block_name(block)}.npy", np.concatenate(times_by_line))
        return join_newest(counted)

    return [*map_in_order(match, blocks, threads, "labels")]


def _order_by_line(rows: RawRows) -> np.ndarray:
    """Return the time of each line, int64 [lines]; NO_TIME for malformed lines."""
    assert rows.label_times is not None
    times = np.full(rows.lines, NO_TIME)
    times[rows.line] = rows.label_times
    return times
