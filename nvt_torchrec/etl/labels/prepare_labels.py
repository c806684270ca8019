"""Prepare the labels from other files for a run or an extension."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.base.files.atomic import write_json
from nvt_torchrec.base.files.mapping import map_array, write_array
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.etl.labels.click_files import ClickLog, read_clicks
from nvt_torchrec.etl.labels.label_state import EarlierLabels, write_labels
from nvt_torchrec.etl.labels.label_values import RECORD_FILE, LabelCut, clicked_file_name
from nvt_torchrec.etl.labels.match_clicks import (
    Matches,
    join_newest,
    match_blocks,
)
from nvt_torchrec.etl.state.output import LABELS
from nvt_torchrec.etl.tables.keyed_rows import make_no_rows_error
from nvt_torchrec.etl.tables.prepare_tables import copy_rejected
from nvt_torchrec.etl.tables.table_sources import TableSources
from nvt_torchrec.etl.units.hours import find_late
from nvt_torchrec.etl.units.unit_plan import block_name
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.derivations import DAY, HOUR
from nvt_torchrec.formats.feature_spec.raw_types.time import format_time
from nvt_torchrec.formats.rows import NO_TIME

log = logging.getLogger(__name__)

#: The minimum share of clicks that must have the key of a row, and the minimum share of these that
#: must belong to a row.
_MIN_FOUND = 0.01
#: In the directory of the labels, the file of a label's clicks that later days need.
_KEPT = "kept.{}.npy"
#: In the directory of the labels, the directory with the times of each block's lines.
_TIMES = "times"


def prepare_labels(
    blocks: Sequence[Block],
    spec: FeatureSpec,
    sources: TableSources,
    work: Path,
    *,
    earlier: EarlierLabels | None,
    threads: int,
    max_bad_rows: int,
    report: Callable[[float], object] = lambda rows: None,
) -> None:
    """Find the row of each click, and the range of rows that are written now.

    Nothing is done if the state of the run has the result already.

    Args:
        blocks: The blocks of the log, in the order of its files.
        spec: The columns.
        sources: The files of each label.
        work: The directory of the run's state.
        earlier: For an extension, the labels of earlier days.
        threads: Number of blocks, or pieces of a label's file, that are read at once.
        max_bad_rows: The maximum number of malformed rows of a block that are left out; 0: a
            malformed row is an error.
        report: Called with the number of rows read since the last call.

    Raises:
        BadRowError: A row is malformed.
        BadInputError: A file cannot be read, has no clicks, or no row's window has ended.
        SettingsError: Hardly any click belongs to a row.
        OutputError: ``work`` cannot be written.
    """
    directory = work / LABELS
    if (directory / RECORD_FILE).exists():
        return
    shutil.rmtree(directory, ignore_errors=True)
    (directory / _TIMES).mkdir(parents=True)
    after = earlier.record.cut if earlier else None
    matches = []
    for number, label in enumerate(spec.label_files):
        clicks, rejected = read_clicks(
            label,
            spec,
            sources[label.name],
            threads=threads,
            reject=max_bad_rows > 0,
            report=report,
        )
        if not len(clicks):
            paths = [file.source for file in sources[label.name]]
            raise make_no_rows_error(f"label {label.name}", paths, rejected)
        if rejected:
            (directory / f"rejected.{number}.tsv").write_bytes(b"".join(rejected))
        if earlier:
            clicks = _join_earlier(clicks, earlier.clicks[number], earlier.record.cut)
        matches.append(Matches(clicks, label.window))
    hours_by_block = match_blocks(
        blocks,
        spec,
        matches,
        after=after,
        times_below=directory / _TIMES if spec.split.by == "days" else None,
        threads=threads,
        max_bad_rows=max_bad_rows,
        report=report,
    )
    counted = join_newest(hours_by_block)
    if not counted.size:
        raise BadInputError("the log has no well-formed row", "look at its first line")
    _check_found(spec, matches, counted)
    newest_row, newest = find_newest(spec, counted)
    if earlier:
        newest = max(newest, earlier.record.newest)
    # More clicks with the newest time may still come, and more rows if the last day is not over.
    cut = min(newest - spec.label_window - 1, newest_row)
    again = [*earlier.record.waiting] if earlier else []
    # A file that only has rows from a wrong clock, long after all others, does not wait: these
    # would wait forever.
    unfinished = []
    for block, (hours, _, newest_in_hour) in zip(blocks, hours_by_block, strict=True):
        is_waiting = (newest_in_hour > cut) & (hours * HOUR <= newest)
        if is_waiting.any() and block.source not in unfinished:
            unfinished.append(block.source)
    record = LabelCut(after, cut, newest, again, unfinished)
    if counted[0, 0] * HOUR > cut or (after is not None and cut <= after):
        raise BadInputError(
            f"no row's window has ended: the log ends at {format_time(newest)}, and labels are "
            f"known {_find_longest_window(spec)} after a row",
            "add days, or set a shorter within in the spec",
        )
    log.info("rows until %s have all their labels; later ones wait", format_time(cut))
    for number, (label, label_matches) in enumerate(zip(spec.label_files, matches, strict=True)):
        _write_label(directory, number, label.name, label_matches, cut)
    write_json(directory / RECORD_FILE, dataclasses.asdict(record))


def _find_longest_window(spec: FeatureSpec) -> str:
    """Return the longest window of a label, as written in the spec."""
    return max(spec.label_files, key=lambda file: file.window).within


def _join_earlier(clicks: ClickLog, before: ClickLog, cut: int) -> ClickLog:
    """Return the clicks after the cut, joined with those that earlier days kept."""
    clicks = clicks.take(clicks.times > cut)
    return ClickLog.join(
        np.concatenate([clicks.keys, before.keys]),
        np.concatenate([clicks.times, before.times]),
        np.concatenate([clicks.taken, before.taken]),
    )


def _write_label(directory: Path, number: int, name: str, matches: Matches, cut: int) -> None:
    """Write the clicked rows of a label, and its clicks that later days need."""
    clicks = matches.clicks
    is_new = matches.has_row & ~clicks.taken
    is_written = is_new & (matches.row_times <= cut)
    pairs = np.stack([clicks.keys[is_written], matches.row_times[is_written]])
    # Within a key, row times ascend like the times of clicks, so duplicates are adjacent.
    is_first = np.ones(pairs.shape[1], np.bool_)
    is_first[1:] = (pairs[:, 1:] != pairs[:, :-1]).any(axis=0)
    write_array(directory / clicked_file_name(number), pairs[:, is_first])
    kept = ClickLog(clicks.keys, clicks.times, clicks.taken | is_written).take(clicks.times > cut)
    write_array(directory / _KEPT.format(number), kept.to_rows())
    log.info("label %s: %d clicks, %d belong to rows", name, len(clicks), int(is_new.sum()))
    newest = int(clicks.times.max(initial=NO_TIME))
    if newest < cut - HOUR:
        log.warning(
            "warning: label %s: its clicks end at %s, so it is 0 for all rows from then until %s\n"
            "  -> if files of clicks are missing, pass them with --label_path %s=PATH",
            name,
            format_time(newest) if len(clicks) else "no time",
            format_time(cut),
            name,
        )


def _check_found(spec: FeatureSpec, matches: Sequence[Matches], counted: np.ndarray) -> None:
    """Check that clicks have the keys of rows, and come within their windows.

    Raises:
        SettingsError: Hardly any click does.
    """
    for label, label_matches in zip(spec.label_files, matches, strict=True):
        count = len(label_matches.clicks)
        if not count:
            continue
        known = label_matches.count_known()
        if known < _MIN_FOUND * count:
            kinds = ", ".join(f"{name} as {spec.make_key_read(name).raw}" for name in label.key)
            raise SettingsError(
                f"label {label.name}: {known:,} of {count:,} clicks have the key of a row of the "
                "log",
                f"correct the key of the label in the spec; log and clicks are read alike: {kinds}",
            )
        found = int(np.count_nonzero(label_matches.has_row))
        if found < _MIN_FOUND * known:
            times = label_matches.clicks.times
            raise SettingsError(
                f"label {label.name}: {known:,} clicks have the key of a row, and {found:,} come "
                f"within {label.within} after it: rows range from "
                f"{_show_range(int(counted[0, 0]) * HOUR, int(counted[2, -1]))}, clicks from "
                f"{_show_range(int(times.min()), int(times.max()))}",
                "correct time, time_format, log_time or within of the label in the spec",
            )


def _show_range(first: int, last: int) -> str:
    return f"{format_time(first)} to {format_time(last)}"


def find_newest(spec: FeatureSpec, counted: np.ndarray) -> tuple[int, int]:
    """Return the newest time of a row, and the time until which the log is complete.

    Late rows (:mod:`etl.events.late_rows`) do not count. With ``cut = "day"`` the last day of the
    log is complete, as it is for events. Clicks later than the log do not count, so that each click
    belongs to the newest row before it, even if the files of clicks are ahead of the log.

    Args:
        spec: The columns.
        counted: The result of :func:`.match_clicks.count_newest`, for at least one row.
    """
    late_from = find_late(counted[:2])
    times = counted[2]
    if late_from is not None:
        times = times[times < late_from]
    newest = int(times.max())
    if spec.events is not None and spec.events.cut == "day":
        return newest, (newest // DAY + 1) * DAY
    return newest, newest


def list_ready(directory: Path, blocks: Sequence[Block]) -> np.ndarray:
    """Return the line numbers of a file's rows that are written now, int64 [n], from 0.

    Args:
        directory: The directory of the labels in the state of a run.
        blocks: The blocks of the file, in order, as they were read.
    """
    record = LabelCut.read(directory)
    found = [np.empty(0, np.int64)]
    first = 0
    for block in blocks:
        times = map_array(directory / _TIMES / f"{block_name(block)}.npy")
        found.append(first + np.flatnonzero(record.mark_ready(times)))
        first += len(times)
    return np.concatenate(found)


def count_lines(directory: Path, blocks: Sequence[Block]) -> int:
    """Return the number of lines of a file; see :func:`list_ready`."""
    count = 0
    for block in blocks:
        count += len(map_array(directory / _TIMES / f"{block_name(block)}.npy"))
    return count


def keep_labels(work: Path, extension: Path, spec: FeatureSpec, waiting: Counter[str]) -> None:
    """Write the state of labels for later days; see :mod:`.label_state`.

    Args:
        work: The directory of the run's state.
        extension: ``OUT/extension``.
        spec: The columns.
        waiting: By file of the log, the number of waiting rows.
    """
    directory = work / LABELS
    record = LabelCut.read(directory)
    counts = {source: waiting[source] for source in record.unfinished}
    clicks = []
    for number in range(len(spec.label_files)):
        clicks.append(ClickLog.from_rows(map_array(directory / _KEPT.format(number))))
    write_labels(extension, record.cut, record.newest, counts, clicks)


def keep_rejected_clicks(spec: FeatureSpec, work: Path, directory: Path) -> None:
    """Copy the rejected rows of labels to the directory of all rejected rows."""
    for number, label in enumerate(spec.label_files):
        file = work / LABELS / f"rejected.{number}.tsv"
        copy_rejected(file, directory / f"label.{label.name}.tsv")
