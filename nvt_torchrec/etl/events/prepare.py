"""Prepare the events of a run or an extension, and write the event state at its end."""

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
from nvt_torchrec.etl.events.earlier_events import EarlierEvents, EarlierFiles, kept_file_name
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
from nvt_torchrec.etl.events.sums import find_as_of
from nvt_torchrec.etl.row_additions import RowAdditions
from nvt_torchrec.etl.state.output import EVENTS
from nvt_torchrec.etl.units.hours import add_hours, count_times, find_late
from nvt_torchrec.etl.units.unit_plan import UnitPlan, block_name
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.derivations import HOUR
from nvt_torchrec.formats.feature_spec.raw_types.time import format_time
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.event_groups import LaterRates, plan_groups
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
    """Write the events of all blocks, and their sums before each row.

    Blocks whose events were written by the engine or by an earlier process are not read again.
    Tasks return only counts, so the memory of the caller does not grow with the log.

    Args:
        plan: The blocks.
        spec: The columns.
        work: The directory of the run's state.
        earlier: For an extension, the earlier days.
        map_tasks: Runs tasks, see :meth:`.Engine.map_tasks`.
        max_bad_rows: The maximum number of malformed rows of a block that are left out; 0: a
            malformed row is an error.
        report: Called with the number of rows read or summed since the last call.

    Raises:
        BadRowError: A row is malformed.
        BadInputError: A block cannot be read, or no row is well-formed.
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
        rows: Number of rows.
        first, last: The earliest and the latest time; 0 without rows.
        hours: See :func:`etl.units.hours.count_times`.
    """

    rows: int
    first: int
    last: int
    hours: np.ndarray


def _extract_block(
    block_and_train: tuple[Block, bool], spec: FeatureSpec, work: Path, max_bad_rows: int
) -> tuple[int, _BlockTimes]:
    """Write the events of a block unless they exist; return the number written, and their times.

    Args:
        block_and_train: The block, and ``train``, see :func:`.extract.extract`.
        spec: The columns.
        work: The directory of the run's state.
        max_bad_rows: See :func:`prepare`.
    """
    block, train = block_and_train
    files = EventFiles(work / EVENTS)
    additions = RowAdditions.open(work, spec)
    rows_read = extract(
        block, spec, files, train=train, max_bad_rows=max_bad_rows, additions=additions
    )
    times = map_array(files.times(block_name(block)))[0]
    first, last = 0, 0
    if len(times):
        first = int(times.min())
        last = int(times.max())
    return rows_read, _BlockTimes(len(times), first, last, count_times(times))


def _find_newest(
    log: EventLog, blocks: list[Block], times: list[_BlockTimes], map_tasks: MapTasks
) -> int:
    """Return the time of the newest row that is not late, and warn of late rows.

    Raises:
        BadInputError: No row is well-formed.
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
        raise BadInputError("the input has no well-formed row", "correct the input")
    return max(with_rows)


def _sum_groups(
    log: EventLog,
    earlier: EarlierDays | None,
    newest: int,
    map_tasks: MapTasks,
    report: Callable[[float], object],
) -> EventRecord:
    """Sum the events of all groups, and return the record for later days.

    Args:
        log: The events.
        earlier: For an extension, the earlier days.
        newest: The time of the newest row that is not late, including earlier days.
        map_tasks: Runs tasks.
        report: Called with the number of rows done since the last call.
    """
    spec = log.spec
    files = log.files
    kept = earlier.files if earlier else None
    number_keys(log, kept, map_tasks)
    if earlier is None:  # a single later day may have none of the keys
        check_keys(log, map_tasks)
    moments: list[np.ndarray] = []
    next_keys: dict[str, int] = {}
    entries: dict[str, FileEntry] = {}
    for number, group in enumerate(plan_groups(spec)):
        summed = sum_group(log, number, kept, newest, map_tasks, report)
        moments.append(summed.moments)
        entries[kept_file_name(number)] = summed.kept
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
    """Check that no file for valid or test has a row older than a training row.

    Otherwise training rows would count events of the rows that the model is tested on.

    Raises:
        BadInputError: A file for valid or test has an older row.
    """
    newest = []
    oldest = []
    for block, block_times in zip(blocks, times, strict=True):
        if block_times.rows and splits[block] == "train":
            newest.append((block_times.last, block.source))
        elif block_times.rows:
            oldest.append((block_times.first, block.source))
    if not newest or not oldest or min(oldest)[0] >= max(newest)[0]:
        return
    last, trained = max(newest)
    first, tested = min(oldest)
    raise BadInputError(
        f"{tested}: its rows begin at {format_time(first)}, but those of {trained}, for training, "
        f"end at {format_time(last)}: with [events], training rows would count events of rows for "
        "valid and test",
        'leave [events] out, or split the rows of all files by time: [split] by = "time"',
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
    """Return the rates over all events for the time ``end`` and later times."""
    hours = rates.hours[0][rates.hours[0] >= end // HOUR]
    after_last = hours[-1] + 1 if len(hours) else end // HOUR
    times = np.append(hours, after_last) * HOUR
    by_label = {label: rates.find_prior(label, times) for label in rates.labels}
    return LaterRates(rates.smoothing, hours, by_label)


def write_group_events(number: int, spec: FeatureSpec, directory: Path, end: int) -> None:
    """Write the events of a group for inference, a range of keys at a time.

    Args:
        number: The number of the group.
        spec: The columns.
        directory: The directory of the run's events, with the kept events of all days.
        end: The time from which rows can be scored.

    Raises:
        OutputError: The directory cannot be written.
    """
    files = EventFiles(directory)
    group = plan_groups(spec)[number]
    kept = EarlierEvents.from_rows(map_array(directory / kept_file_name(number)), group)
    names = GroupEvents.list_array_names(group)
    # The numbers of rows of arrays with two dimensions.
    num_rows = {
        "sums": group.num_measures + len(group.distinct_columns),
        "picks": len(group.stored_picks),
        "previous": len(group.distinct_columns),
    }
    with contextlib.ExitStack() as stack:
        arrays = {}
        for name in names:
            dtype = np.float64 if name == "picks" else np.int64
            array = GrowingArray(files.group_events(number, name), dtype, num_rows.get(name))
            arrays[name] = stack.enter_context(array)
        arrays["offsets"].append(np.zeros(1, np.int64))
        for events in cut_by_key(kept.key):
            part = GroupEvents.collect(spec, group, end, **vars(kept.take(events)))
            arrays["offsets"].append(arrays["known"].length + part.offsets[1:])
            for name in names:
                if name != "offsets":
                    arrays[name].append(getattr(part, name))


def write_event_output(
    work: Path,
    description: WorkflowDescription,
    extension: Path,
    earlier: EarlierFiles | None,
    map_tasks: MapTasks,
) -> None:
    """Write the event state beside the workflow, and the events that later days need.

    Args:
        work: The directory of the run's state.
        description: The description of the workflow, which must have been written.
        extension: The directory of its state for extensions.
        earlier: The files of earlier days; None for a run.
        map_tasks: Runs tasks, see :meth:`.Engine.map_tasks`.

    Raises:
        OutputError: A directory cannot be written.
    """
    directory = work / EVENTS
    spec = description.spec
    record = read_record(directory)
    end = find_as_of(spec, record.newest)
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
    """Write the event state beside a workflow, and the state for later days.

    Args:
        extension: The directory of the state for later days.
        work: The directory of the run's state.
        workflow: The directory of the workflow.
        digest: The digest of the workflow.
        spec: The columns.
    """
    directory = work / EVENTS
    files = EventFiles(directory)
    days = EarlierDays.read(directory, spec)
    end = find_as_of(spec, days.record.newest)
    groups = []
    for number, group in enumerate(plan_groups(spec)):
        names = GroupEvents.list_array_names(group)
        arrays = {name: map_array(files.group_events(number, name)) for name in names}
        groups.append(GroupEvents(**arrays))
    tails = [read_tail(files, rule) for rule in spec.histories]
    rates = _select_later_rates(make_rates(days.record, days.hours, spec), end)
    write_event_state(workflow, spec, digest, end, groups, rates, tails)
    for name in days.record.files:
        write_array(extension / name, map_array(directory / name))
    FORMAT.write(extension / RECORD, dataclasses.asdict(days.record))
