"""Make the labels of a run or an extension that are from other files."""

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
from nvt_torchrec.etl.labels.label_values import RECORD_FILE, LabelCut, clicked_file
from nvt_torchrec.etl.labels.match_clicks import (
    Matches,
    join_newest,
    match_blocks,
)
from nvt_torchrec.etl.state.output import LABELS
from nvt_torchrec.etl.tables.keyed_rows import refuse_empty
from nvt_torchrec.etl.tables.prepare_tables import copy_rejected
from nvt_torchrec.etl.tables.table_sources import TableSources
from nvt_torchrec.etl.units.hours import find_late
from nvt_torchrec.etl.units.unit_plan import block_name
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.derivations import DAY, HOUR
from nvt_torchrec.formats.feature_spec.raw_types.time import format_time
from nvt_torchrec.formats.rows import NO_TIME

log = logging.getLogger(__name__)

#: The least share of clicks that have the key of a row, and of these that belong to a row.
_MIN_FOUND = 0.01
#: In the directory of the labels: the clicks that further days need, by the label's number; and
#: the times of the lines of each block.
_KEPT = "kept.{}.npy"
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
    """Find to which row each click belongs, and which rows are written now, unless it is known.

    Args:
        blocks: The log, in the order of its files.
        spec: The columns.
        sources: The files of each label.
        work: The directory of the run's state.
        earlier: Of an extension, what is kept of the clicks of earlier days.
        threads: How many blocks, or pieces of a file of clicks, are read at once.
        max_bad_rows: How many malformed rows of a block may be left out; 0: one is an error.
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
            raise refuse_empty(f"label {label.name}", paths, rejected)
        if rejected:
            (directory / f"rejected.{number}.tsv").write_bytes(b"".join(rejected))
        if earlier:
            clicks = _join_earlier(clicks, earlier.clicks[number], earlier.record.cut)
        matches.append(Matches(clicks, label.window))
    of_blocks = match_blocks(
        blocks,
        spec,
        matches,
        after=after,
        times_below=directory / _TIMES if spec.split.by == "days" else None,
        threads=threads,
        max_bad_rows=max_bad_rows,
        report=report,
    )
    counted = join_newest(of_blocks)
    if not counted.size:
        raise BadInputError("the log has no well-formed row", "look at its first line")
    _check_found(spec, matches, counted)
    of_log, newest = find_newest(spec, counted)
    if earlier:
        newest = max(newest, earlier.record.newest)
    # A click of the newest time itself may still come; so may rows, if the last day is not over.
    cut = min(newest - spec.label_window - 1, of_log)
    again = [*earlier.record.waiting] if earlier else []
    # Rows of a wrong clock, long after all others, would be waited for in vain.
    unfinished = []
    for block, (hours, _, newest_of_hours) in zip(blocks, of_blocks, strict=True):
        is_waiting = (newest_of_hours > cut) & (hours * HOUR <= newest)
        if is_waiting.any() and block.source not in unfinished:
            unfinished.append(block.source)
    record = LabelCut(after, cut, newest, again, unfinished)
    if counted[0, 0] * HOUR > cut or (after is not None and cut <= after):
        raise BadInputError(
            f"no row's window has ended: the log ends at {format_time(newest)}, and labels are "
            f"known {_longest(spec)} after a row",
            "add days; or write a shorter within in the spec",
        )
    log.info("rows until %s have all their labels; later ones wait", format_time(cut))
    for number, (label, of_label) in enumerate(zip(spec.label_files, matches, strict=True)):
        _write_label(directory, number, label.name, of_label, cut)
    write_json(directory / RECORD_FILE, dataclasses.asdict(record))


def _longest(spec: FeatureSpec) -> str:
    """Return the longest time within which a click of any label comes, as the spec has it."""
    return max(spec.label_files, key=lambda file: file.window).within


def _join_earlier(clicks: ClickLog, before: ClickLog, cut: int) -> ClickLog:
    """Return clicks that rows after the cut may have, with what is known of them."""
    clicks = clicks.take(clicks.times > cut)
    return ClickLog.join(
        np.concatenate([clicks.keys, before.keys]),
        np.concatenate([clicks.times, before.times]),
        np.concatenate([clicks.taken, before.taken]),
    )


def _write_label(directory: Path, number: int, name: str, matches: Matches, cut: int) -> None:
    """Write which rows are clicked, and the clicks that further days need."""
    clicks = matches.clicks
    is_new = matches.has_row & ~clicks.taken
    is_written = is_new & (matches.row_times <= cut)
    pairs = np.stack([clicks.keys[is_written], matches.row_times[is_written]])
    # the row times of a key's clicks rise as the clicks do, so equal pairs are neighbours
    is_first = np.ones(pairs.shape[1], np.bool_)
    is_first[1:] = (pairs[:, 1:] != pairs[:, :-1]).any(axis=0)
    write_array(directory / clicked_file(number), pairs[:, is_first])
    kept = ClickLog(clicks.keys, clicks.times, clicks.taken | is_written).take(clicks.times > cut)
    write_array(directory / _KEPT.format(number), kept.to_rows())
    log.info("label %s: %d clicks, %d belong to rows", name, len(clicks), int(is_new.sum()))
    newest = int(clicks.times.max(initial=NO_TIME))
    if newest < cut - HOUR:
        log.warning(
            "warning: label %s: its clicks end at %s, so that rows from then until %s are all 0\n"
            "  -> if files of clicks are missing, pass them with --label_path %s=PATH",
            name,
            format_time(newest) if len(clicks) else "no time",
            format_time(cut),
            name,
        )


def _check_found(spec: FeatureSpec, matches: Sequence[Matches], counted: np.ndarray) -> None:
    """Check that clicks have keys of rows, and come within their windows."""
    for label, of_label in zip(spec.label_files, matches, strict=True):
        count = len(of_label.clicks)
        if not count:
            continue
        known = of_label.count_known()
        if known < _MIN_FOUND * count:
            kinds = ", ".join(f"{name} as {spec.make_key_read(name).raw}" for name in label.key)
            raise SettingsError(
                f"label {label.name}: {known:,} of {count:,} clicks have the key of a row of the "
                "log",
                f"correct the key of the label in the spec; both sides are read alike: {kinds}",
            )
        found = int(np.count_nonzero(of_label.has_row))
        if found < _MIN_FOUND * known:
            times = of_label.clicks.times
            raise SettingsError(
                f"label {label.name}: {known:,} clicks have the key of a row, and {found:,} come "
                f"within {label.within} after it: rows are of "
                f"{_show_range(int(counted[0, 0]) * HOUR, int(counted[2, -1]))}, clicks of "
                f"{_show_range(int(times.min()), int(times.max()))}",
                "correct time, time_format, log_time or within of the label in the spec",
            )


def _show_range(first: int, last: int) -> str:
    return f"{format_time(first)} to {format_time(last)}"


def find_newest(spec: FeatureSpec, counted: np.ndarray) -> tuple[int, int]:
    """Return the newest time of rows, and until when the log is whole.

    A few rows that are long after all others do not count. With ``cut = "day"`` the last day of the
    log is whole, as it is for events. Clicks that are later than the log do not count, so that
    each click belongs to the newest row before it, whether files of clicks are ahead or not.

    Args:
        spec: The columns.
        counted: Of the rows, see :func:`.match_clicks.count_newest`; at least one.
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
    """Return the lines of a file's rows that are written now, int64 [n], from 0.

    Args:
        directory: Of the labels, in the state of a run.
        blocks: Those of the file, in their order, as they were read.
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
    """Return how many lines a file has; see :func:`list_ready`."""
    count = 0
    for block in blocks:
        count += len(map_array(directory / _TIMES / f"{block_name(block)}.npy"))
    return count


def keep_labels(work: Path, extension: Path, spec: FeatureSpec, waiting: Counter[str]) -> None:
    """Write to ``OUT/extension`` what further days need; see :mod:`.label_state`.

    Args:
        work: The directory of the run's state.
        extension: The directory of what further days need.
        spec: The columns.
        waiting: By file of the log, how many of its rows wait.
    """
    directory = work / LABELS
    record = LabelCut.read(directory)
    counts = {source: waiting[source] for source in record.unfinished}
    clicks = [
        ClickLog.from_rows(map_array(directory / _KEPT.format(number)))
        for number in range(len(spec.label_files))
    ]
    write_labels(extension, record.cut, record.newest, counts, clicks)


def keep_rejected_clicks(spec: FeatureSpec, work: Path, directory: Path) -> None:
    """Copy the rows of click files that were left out to the other rejected rows."""
    for number, label in enumerate(spec.label_files):
        file = work / LABELS / f"rejected.{number}.tsv"
        copy_rejected(file, directory / f"label.{label.name}.tsv")
