"""Make the events of a run or an extension, and write what is kept of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.artifact import FileEntry
from nvt_torchrec.base.files.atomic import read_json, write_json
from nvt_torchrec.base.files.growing import GrowingArray
from nvt_torchrec.base.files.mapping import map_array, write_array
from nvt_torchrec.base.files.validation import parse
from nvt_torchrec.base.threads import MapTasks, run_each
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.etl.events.earlier_days import (
    FORMAT,
    HOURS,
    RECORD,
    EarlierDays,
    EventRecord,
    count_first_keys,
    make_rates,
    read_record,
)
from nvt_torchrec.etl.events.earlier_events import EarlierEvents, EarlierFiles, kept_file
from nvt_torchrec.etl.events.event_blocks import EventLog
from nvt_torchrec.etl.events.event_files import EventFiles
from nvt_torchrec.etl.events.extract import extract
from nvt_torchrec.etl.events.history_store import read_tail, write_histories
from nvt_torchrec.etl.events.key_numbers import number_keys
from nvt_torchrec.etl.events.label_rates import LabelRates, fit_smoothing
from nvt_torchrec.etl.events.late_rows import find_late_rows, warn_of_late_rows
from nvt_torchrec.etl.events.partitioned_sums import sum_group
from nvt_torchrec.etl.events.partitions import cut_by_key
from nvt_torchrec.etl.events.source_events import check_keys, list_blocks
from nvt_torchrec.etl.events.sums import find_end
from nvt_torchrec.etl.row_additions import RowAdditions
from nvt_torchrec.etl.state.output import EVENTS
from nvt_torchrec.etl.units.hours import add_hours, count_times, find_late
from nvt_torchrec.etl.units.unit_plan import UnitPlan, block_name
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.derivations import HOUR
from nvt_torchrec.formats.feature_spec.raw_types.time import format_time
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.event_groups import LaterRates, sums_of_groups
from nvt_torchrec.workflows.event_state import write_event_state
from nvt_torchrec.workflows.event_sums import GroupEvents

_BLOCKS = "blocks.json"


def prepare(
    plan: UnitPlan,
    spec: FeatureSpec,
    work: Path,
    *,
    earlier: EarlierDays | None,
    map_tasks: MapTasks,
    max_bad_rows: int,
    report: Callable[[float], object] = lambda rows: None,
) -> None:
    """Make the events of all blocks, and what they sum up to before each row.

    Blocks whose events are there, of an engine or an earlier process, are not read. Only counts
    come back from tasks, so the memory of the caller does not grow with the log.

    Args:
        plan: The blocks.
        spec: The columns.
        work: The directory of the run's state.
        earlier: The days before, of an extension.
        map_tasks: Runs tasks, see :meth:`.Engine.map_tasks`.
        max_bad_rows: How many malformed rows of a block may be left out; 0: one is an error.
        report: Called with the number of rows done since the last call: read, or summed up.

    Raises:
        BadRowError: A row is malformed.
        BadInputError: A block cannot be read, or there is no row.
        OutputError: ``work`` cannot be written.
    """
    directory = work / EVENTS
    if (directory / RECORD).exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    splits = {unit.block: unit.split for unit in plan.units}
    order = {day.source: number for number, day in enumerate(plan.days)}
    blocks = sorted(plan.blocks, key=lambda block: (order[block.source], block.begin))
    training = [(block, splits[block] == "train") for block in blocks]
    extract_block = functools.partial(
        _extract_block, spec=spec, work=work, max_bad_rows=max_bad_rows
    )
    times = []
    for rows_read, block_times in map_tasks(extract_block, training):
        report(rows_read)
        times.append(block_times)
    names = [block_name(block) for block in blocks]
    write_json(directory / _BLOCKS, names)
    log = EventLog(spec, EventFiles(directory), names, list_blocks(spec, work))
    if spec.split.by == "files":
        _check_files(blocks, times, splits)
    newest = _find_newest(log, blocks, times, map_tasks)
    if earlier:
        newest = max(newest, earlier.record.newest)
    record = _sum_groups(log, earlier, newest, map_tasks, report)
    FORMAT.write(directory / RECORD, dataclasses.asdict(record))


@dataclasses.dataclass(frozen=True)
class _BlockTimes:
    """The times of a block's rows.

    Attributes:
        rows: How many rows there are.
        first, last: The first and the last time; 0 without rows.
        hours: See :func:`etl.units.hours.count_times`.
    """

    rows: int
    first: int
    last: int
    hours: np.ndarray


def _extract_block(
    block_and_train: tuple[Block, bool], spec: FeatureSpec, work: Path, max_bad_rows: int
) -> tuple[int, _BlockTimes]:
    """Write the events of a block unless they are there; return how many are written, their times.

    Args:
        block_and_train: The block, and whether its rows are for training, unless they are divided.
        spec: The columns.
        work: The directory of the run's state.
        max_bad_rows: See :func:`prepare`.
    """
    block, train = block_and_train
    files, additions = EventFiles(work / EVENTS), RowAdditions.open(work, spec)
    rows_read = extract(
        block, spec, files, train=train, max_bad_rows=max_bad_rows, additions=additions
    )
    times = map_array(files.times(block_name(block)))[0]
    first, last = 0, 0
    if len(times):
        first, last = int(times.min()), int(times.max())
    return rows_read, _BlockTimes(len(times), first, last, count_times(times))


def _find_newest(
    log: EventLog, blocks: list[Block], times: list[_BlockTimes], map_tasks: MapTasks
) -> int:
    """Return the time of the newest row that is not late; warn of late ones.

    Raises:
        BadInputError: There is no well-formed row.
    """
    late_from = find_late(add_hours([block_times.hours for block_times in times]))
    if late_from is not None:
        find = functools.partial(find_late_rows, files=log.files, end=late_from)
        late_rows = list(map_tasks(find, log.names))
        newest = max(block_times.newest for block_times in late_rows)
        warn_of_late_rows(blocks, log.spec, late_rows, newest)
        return newest
    with_rows = [block_times.last for block_times in times if block_times.rows]
    if not with_rows:
        raise BadInputError("there is no well-formed row", "correct the input")
    return max(with_rows)


def _sum_groups(
    log: EventLog,
    earlier: EarlierDays | None,
    newest: int,
    map_tasks: MapTasks,
    report: Callable[[float], object],
) -> EventRecord:
    """Sum up the events of all groups; return what is known of them.

    Args:
        log: The events.
        earlier: The days before, of an extension.
        newest: The time of the newest row that is not late, also of earlier days.
        map_tasks: Runs tasks.
        report: Called with the number of rows done since the last call.
    """
    spec, files = log.spec, log.files
    kept = earlier.files if earlier else None
    number_keys(log, kept, map_tasks)
    if earlier is None:  # a day may have other users
        check_keys(log, map_tasks)
    moments: list[np.ndarray] = []
    next_keys: dict[str, int] = {}
    entries: dict[str, FileEntry] = {}
    for number, group in enumerate(sums_of_groups(spec)):
        summed = sum_group(log, number, kept, newest, map_tasks, report)
        moments.append(summed.moments)
        entries[kept_file(number)] = summed.kept
        for history in group.histories:
            name = spec.histories[history].name
            before = earlier.record.next_keys[name] if earlier else 0
            next_keys[name] = before + len(map_array(files.row_keys(number)))
    hours = [np.load(files.hours(name)) for name in log.names]
    if earlier:
        hours = [earlier.hours, *hours]
    file = files.directory / HOURS
    write_array(file, add_hours(hours))
    entries[HOURS] = FileEntry.from_file(file)
    smoothing = earlier.record.smoothing if earlier else _fit_smoothing(spec, moments)
    return EventRecord(newest, smoothing, next_keys, entries)


def _check_files(blocks: list[Block], times: list[_BlockTimes], splits: dict[Block, str]) -> None:
    """Check that no file for valid or test has a row that is older than one for training.

    Raises:
        BadInputError: One has, so training would count events of the rows that it is tested on.
    """
    newest, oldest = [], []
    for block, block_times in zip(blocks, times, strict=True):
        if block_times.rows and splits[block] == "train":
            newest.append((block_times.last, block.source))
        elif block_times.rows:
            oldest.append((block_times.first, block.source))
    if not newest or not oldest or min(oldest)[0] >= max(newest)[0]:
        return
    (last, trained), (first, tested) = max(newest), min(oldest)
    raise BadInputError(
        f"{tested}: it has rows from {format_time(first)} on, and {trained}, for training, until "
        f"{format_time(last)}: with [events], rows for training would count events of those for "
        "valid and test",
        'leave [events] out, or cut the rows of all files anew, by time: [split] by = "time"',
    )


def _fit_smoothing(spec: FeatureSpec, moments: list[np.ndarray]) -> dict[str, float]:
    """Return the smoothing of each rate."""
    smoothing = {}
    for column in spec.aggregates:
        aggregate = column.aggregate
        if aggregate and aggregate.label:
            group_moments = moments[spec.groups.index(aggregate.group)]
            fitted = fit_smoothing(group_moments[spec.labels.index(aggregate.label)])
            smoothing[column.name] = aggregate.smoothing or fitted
    return smoothing


def _select_later_rates(rates: LabelRates, end: int) -> LaterRates:
    """Return the rates of all events as of ``end`` and later times."""
    hours = rates.hours[0][rates.hours[0] >= end // HOUR]
    after_last = hours[-1] + 1 if len(hours) else end // HOUR
    times = np.append(hours, after_last) * HOUR
    by_label = {label: rates.before(label, times) for label in rates.labels}
    return LaterRates(rates.smoothing, hours, by_label)


def write_group_events(number: int, spec: FeatureSpec, directory: Path, end: int) -> None:
    """Write the events of a group for inference, a range of keys at a time.

    Args:
        number: The number of the group.
        spec: The columns.
        directory: That of the run's events, which has what is kept of all days.
        end: The time from which rows can be scored.

    Raises:
        OutputError: The directory cannot be written.
    """
    files, group = EventFiles(directory), sums_of_groups(spec)[number]
    kept = EarlierEvents.from_rows(map_array(directory / kept_file(number)), group)
    names = GroupEvents.array_names(group)
    kinds = {"sums": group.measures + len(group.compared), "picks": len(group.picked)}
    kinds["previous"] = len(group.compared)
    with contextlib.ExitStack() as stack:
        arrays = {}
        for name in names:
            kind = np.float64 if name == "picks" else np.int64
            array = GrowingArray(files.group_events(number, name), kind, kinds.get(name))
            arrays[name] = stack.enter_context(array)
        arrays["offsets"].append(np.zeros(1, np.int64))
        for events in cut_by_key(kept.key):
            part = GroupEvents.collect(spec, group, end, **vars(kept.take(events)))
            arrays["offsets"].append(arrays["known"].length + part.offsets[1:])
            for name in names:
                if name != "offsets":
                    arrays[name].append(getattr(part, name))


def write_kept(
    work: Path,
    description: WorkflowDescription,
    extension: Path,
    earlier: EarlierFiles | None,
    map_tasks: MapTasks,
) -> None:
    """Write what inference needs beside a workflow, and what further days need.

    Args:
        work: The directory of the run's state.
        description: Of the workflow, which is written already.
        extension: The directory of its state for extensions.
        earlier: What is kept of the days before; None of a run.
        map_tasks: Runs tasks, see :meth:`.Engine.map_tasks`.

    Raises:
        OutputError: A directory cannot be written.
    """
    directory, spec = work / EVENTS, description.spec
    record = read_record(directory)
    end = find_end(spec, record.newest)
    write_group = functools.partial(write_group_events, spec=spec, directory=directory, end=end)
    run_each(map_tasks, write_group, range(len(spec.groups)))
    if spec.histories:
        names = parse(list[str], read_json(directory / _BLOCKS, "the names of blocks"), directory)
        log = EventLog(spec, EventFiles(directory), names, {})  # sources have no histories
        first_keys = count_first_keys(record, directory, spec)
        write_histories(log, description, earlier, first_keys, map_tasks)
    write_state = functools.partial(
        _write_state, work=work, workflow=description.path, digest=description.digest, spec=spec
    )
    run_each(map_tasks, write_state, [extension])
    description.list_event_state()


def _write_state(
    extension: Path, work: Path, workflow: Path, digest: str, spec: FeatureSpec
) -> None:
    """Write the state of the events beside a workflow, and that for further days.

    Args:
        extension: The directory of the state for further days.
        work: The directory of the run's state.
        workflow: The directory of the workflow.
        digest: That of the workflow.
        spec: The columns.
    """
    directory = work / EVENTS
    files, days = EventFiles(directory), EarlierDays.read(directory, spec)
    end = find_end(spec, days.record.newest)
    groups = []
    for number, group in enumerate(sums_of_groups(spec)):
        names = GroupEvents.array_names(group)
        arrays = {name: map_array(files.group_events(number, name)) for name in names}
        groups.append(GroupEvents(**arrays))
    tails = [read_tail(files, rule) for rule in spec.histories]
    rates = _select_later_rates(make_rates(days.record, days.hours, spec), end)
    write_event_state(workflow, spec, digest, end, groups, rates, tails)
    for name in days.record.files:
        write_array(extension / name, map_array(directory / name))
    FORMAT.write(extension / RECORD, dataclasses.asdict(days.record))
