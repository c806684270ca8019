"""Make the events of a run or an extension, and what is kept of them.

The workflow gets what inference needs (:mod:`workflows.event_state`). ``OUT/extension`` gets what
further days need::

    events.json         newest time, smoothing; size and SHA-256 of the others
    events.hours.npy    see :func:`etl.units.hours.count_hours`
    events.N.npy        int64 [rows, n]: of group N the key, from when it is known, the time, the
                        number of events, of those with each label, and what is kept of numbers, see
                        :class:`.earlier_events.EarlierEvents`
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.artifact import FileEntry, Format, check_digests, check_sizes
from nvt_torchrec.base.files.atomic import read_json, write_json
from nvt_torchrec.base.files.growing import GrowingArray
from nvt_torchrec.base.files.mapping import MappedArray, map_array, write_array
from nvt_torchrec.base.files.validation import parse
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.etl.events.earlier_events import EarlierEvents
from nvt_torchrec.etl.events.event_values import EventValues
from nvt_torchrec.etl.events.extract import EventFiles, extract
from nvt_torchrec.etl.events.history_store import write_histories
from nvt_torchrec.etl.events.key_numbers import number_keys
from nvt_torchrec.etl.events.label_rates import KeyMoments, LabelRates, fit_smoothing
from nvt_torchrec.etl.events.late_rows import warn_of_late_rows
from nvt_torchrec.etl.events.partitioned_sums import sum_up
from nvt_torchrec.etl.events.partitions import cut_by_key
from nvt_torchrec.etl.events.source_events import check_keys, list_blocks
from nvt_torchrec.etl.events.sums import end_of
from nvt_torchrec.etl.events.timeline import EventLog
from nvt_torchrec.etl.row_additions import RowAdditions
from nvt_torchrec.etl.state.output import EVENTS
from nvt_torchrec.etl.units.hours import add_hours, count_times, find_late
from nvt_torchrec.etl.units.unit_plan import UnitPlan, block_name
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.derivations import HOUR
from nvt_torchrec.formats.feature_spec.raw_types.time import format_time
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.event_groups import GroupSums, LaterRates, sums_of_groups
from nvt_torchrec.workflows.event_state import write_event_state
from nvt_torchrec.workflows.event_sums import GroupEvents
from nvt_torchrec.workflows.history_tail import HistoryTail

FORMAT = Format("nvt-torchrec events", 3, "what is kept of the events of earlier days")
_RECORD, _BLOCKS, _HOURS = "events.json", "blocks.json", "events.hours.npy"
_COPY_AGAIN = "copy extension and workflow again, both from the same output directory"


@dataclasses.dataclass(frozen=True)
class EventRecord:
    """What is known of the events of all days so far.

    Attributes:
        newest: The time of the newest row that is not late (:mod:`.late_rows`), in microseconds
            since 1970.
        smoothing: See :class:`.label_rates.LabelRates`.
        next_keys: By history, how many keys its store has.
        files: The other files.
    """

    newest: int
    smoothing: dict[str, float]
    next_keys: dict[str, int]
    files: dict[str, FileEntry]


@dataclasses.dataclass(frozen=True)
class EarlierDays:
    """The events of the days before those that are added.

    Attributes:
        record: What is known of them.
        hours: See :func:`etl.units.hours.count_hours`.
        groups: Of each group, its events.
    """

    record: EventRecord
    hours: np.ndarray
    groups: list[EarlierEvents]

    @classmethod
    def read(cls, directory: Path, spec: FeatureSpec) -> EarlierDays:
        """Read ``OUT/extension``, or the same of a run. Raises :class:`BadInputError`."""
        file = directory / _RECORD
        record = FORMAT.read(EventRecord, file, _COPY_AGAIN)
        names = [_kept_file(group) for group in range(len(spec.groups))]
        if sorted(record.files) != sorted([_HOURS, *names]):
            raise BadInputError(f"{file}: damaged: it lists other files", _COPY_AGAIN)
        check_sizes(directory, record.files, _COPY_AGAIN)
        check_digests(directory, record.files, _COPY_AGAIN)
        try:
            hours, *kept = (
                MappedArray(directory / name, np.int64, 2).values for name in (_HOURS, *names)
            )
            wanted = sums_of_groups(spec)
            rows = [2 + len(spec.labels), *map(EarlierEvents.count_rows, wanted)]
            for name, array, count in zip((_HOURS, *names), (hours, *kept), rows, strict=True):
                if len(array) != count:
                    raise ValueError(f"{name} is of other labels: {list(array.shape)}")
        except (OSError, ValueError) as error:
            raise BadInputError(f"{directory}: damaged: {error}", _COPY_AGAIN) from error
        groups = [
            EarlierEvents.from_rows(rows, group) for rows, group in zip(kept, wanted, strict=True)
        ]
        return cls(record, hours, groups)


def _kept_file(group: int) -> str:
    return f"events.{group}.npy"


def prepare(
    plan: UnitPlan,
    spec: FeatureSpec,
    work: Path,
    *,
    earlier: EarlierDays | None,
    tails: list[HistoryTail] | None,
    threads: int,
    max_bad_rows: int,
    report: Callable[[float], object] = lambda rows: None,
) -> None:
    """Make the events of all blocks, and what they sum up to before each row.

    Blocks whose events are there, of an engine or an earlier process, are not read.

    Args:
        plan: The blocks.
        spec: The columns.
        work: The directory of the run's state.
        earlier: The days before, of an extension.
        tails: Of each history, the newest events of the days before.
        threads: How many blocks, or partitions of a group, are in work at once.
        max_bad_rows: How many malformed rows of a block may be left out; 0: one is an error.
        report: Called with the number of rows done since the last call: read, or summed up.

    Raises:
        BadRowError: A row is malformed.
        BadInputError: A block cannot be read, or there is no row.
        OutputError: ``work`` cannot be written.
    """
    directory = work / EVENTS
    if (directory / _RECORD).exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    files = EventFiles(directory)
    splits = {unit.block: unit.split for unit in plan.units}
    order = {day.source: number for number, day in enumerate(plan.days)}
    blocks = sorted(plan.blocks, key=lambda block: (order[block.source], block.begin))
    additions = RowAdditions.open(work, spec)

    def read(block: Block) -> int:
        train = splits[block] == "train"
        return extract(
            block, spec, files, train=train, max_bad_rows=max_bad_rows, additions=additions
        )

    for rows in map_in_order(read, blocks, threads, "events"):
        report(rows)
    names = [block_name(block) for block in blocks]
    write_json(directory / _BLOCKS, names)
    groups = sums_of_groups(spec)
    kept = earlier.groups if earlier else [*map(EarlierEvents.none, groups)]
    sources = list_blocks(spec, work)
    log = EventLog(spec, files, names, sources)
    if spec.split.by == "files":
        _check_files(log, blocks, splits)
    times = [files.times(name) for name in names]
    late_from = find_late(add_hours([count_times(log.map(file)[0]) for file in times]))
    newest = log.find_newest(late_from)
    if late_from is not None:
        warn_of_late_rows(blocks, spec, files, late_from, newest)
    newest = max(newest, earlier.record.newest if earlier else newest)
    entries: dict[str, FileEntry] = {}
    number_keys(log, kept, threads)
    if earlier is None:  # a day may have other users
        check_keys(spec, files, sources)
    moments, next_keys = [], {}
    partitions = sum_up(log, kept, tails or [], newest, threads, report)
    for group, summed in itertools.groupby(partitions, key=lambda result: result.group):
        for number in groups[group].histories:
            name = spec.histories[number].name
            before = earlier.record.next_keys[name] if earlier else 0
            next_keys[name] = before + len(map_array(files.row_keys(group)))
        file = directory / _kept_file(group)
        of_keys = KeyMoments(files.scratch(group, "moments"), groups[group].labels)
        with GrowingArray(file, np.int64, EarlierEvents.count_rows(groups[group])) as written:
            for result in summed:
                written.append(result.kept.to_rows())
                of_keys.add(result.trained)
        entries[file.name] = FileEntry.from_file(file)
        moments.append(of_keys.sum())
    hours = [np.load(files.hours(name)) for name in names]
    write_array(directory / _HOURS, add_hours([earlier.hours, *hours] if earlier else hours))
    entries[_HOURS] = FileEntry.from_file(directory / _HOURS)
    smoothing = earlier.record.smoothing if earlier else _fit_smoothing(spec, moments)
    record = EventRecord(newest, smoothing, next_keys, entries)
    FORMAT.write(directory / _RECORD, dataclasses.asdict(record))


def _check_files(log: EventLog, blocks: list[Block], splits: dict[Block, str]) -> None:
    """Check that no file for valid or test has a row that is older than one for training.

    Raises:
        BadInputError: One has, so training would count events of the rows that it is tested on.
    """
    newest, oldest = [], []
    for block, name in zip(blocks, log.names, strict=True):
        rows, first, last = log.bounds_of(name)
        if rows and splits[block] == "train":
            newest.append((last, block.source))
        elif rows:
            oldest.append((first, block.source))
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
            of_group = moments[spec.groups.index(aggregate.group)]
            fitted = fit_smoothing(of_group[spec.labels.index(aggregate.label)])
            smoothing[column.name] = aggregate.smoothing or fitted
    return smoothing


@functools.lru_cache(1)
def open_values(work: Path, spec: FeatureSpec) -> EventValues | None:
    """Open the aggregates of a run's rows; None for a spec without."""
    if not spec.events:
        return None
    directory = work / EVENTS
    days = EarlierDays.read(directory, spec)
    return EventValues(spec, directory, _rates(days, spec), first_keys(days, directory, spec))


def first_keys(days: EarlierDays, directory: Path, spec: FeatureSpec) -> dict[str, int]:
    """Return, of each history, the number of the first key of a run or an extension."""
    files = EventFiles(directory)
    keys = {
        rule.name: len(map_array(files.row_keys(spec.groups.index(rule.group))))
        for rule in spec.histories
    }
    return {name: count - keys[name] for name, count in days.record.next_keys.items()}


def _rates(days: EarlierDays, spec: FeatureSpec) -> LabelRates:
    return LabelRates(days.record.smoothing, days.hours, tuple(spec.labels))


def _later_rates(rates: LabelRates, end: int) -> LaterRates:
    """Return the rates of all events as of ``end`` and later times."""
    hours = rates.hours[0][rates.hours[0] >= end // HOUR]
    after_last = hours[-1] + 1 if len(hours) else end // HOUR
    times = np.append(hours, after_last) * HOUR
    by_label = {label: rates.before(label, times) for label in rates.labels}
    return LaterRates(rates.smoothing, hours, by_label)


def _collect_events(
    spec: FeatureSpec,
    group: GroupSums,
    end: int,
    kept: EarlierEvents,
    path_of: Callable[[str], Path],
) -> GroupEvents:
    """Collect the events of a group for inference, a range of keys at a time, in mapped files.

    Args:
        spec: The columns.
        group: What is summed up.
        end: The time from which rows can be scored.
        kept: What is kept of the events of all days.
        path_of: Returns the path of an array by its name.
    """
    names = GroupEvents.array_names(group)
    kinds = {"sums": group.measures + len(group.compared), "picks": len(group.picked)}
    kinds["previous"] = len(group.compared)
    with contextlib.ExitStack() as stack:
        arrays = {}
        for name in names:
            kind = np.float64 if name == "picks" else np.int64
            arrays[name] = stack.enter_context(GrowingArray(path_of(name), kind, kinds.get(name)))
        arrays["offsets"].append(np.zeros(1, np.int64))
        for events in cut_by_key(kept.key):
            part = GroupEvents.collect(spec, group, end, **vars(kept.take(events)))
            arrays["offsets"].append(arrays["known"].length + part.offsets[1:])
            for name in names:
                if name != "offsets":
                    arrays[name].append(getattr(part, name))
    return GroupEvents(**{name: map_array(path_of(name)) for name in names})


def write_kept(
    work: Path,
    description: WorkflowDescription,
    extension: Path,
    tails: list[HistoryTail] | None,
) -> None:
    """Write what inference needs beside a workflow, and what further days need.

    Args:
        work: The directory of the run's state.
        description: Of the workflow, which is written already.
        extension: The directory of its state for extensions.
        tails: Of each history, the newest events of the days before; None without such days.

    Raises:
        OutputError: A directory cannot be written.
    """
    directory, spec, workflow = work / EVENTS, description.spec, description.path
    days = EarlierDays.read(directory, spec)
    files, end = EventFiles(directory), end_of(spec, days.record.newest)
    groups = []
    for number, (group, kept) in enumerate(zip(sums_of_groups(spec), days.groups, strict=True)):
        groups.append(
            _collect_events(spec, group, end, kept, functools.partial(files.summed, number))
        )
    newest: list[HistoryTail] = []
    if spec.histories:
        names = parse(list[str], read_json(directory / _BLOCKS, "the names of blocks"), directory)
        log = EventLog(spec, files, names, {})  # sources have no histories
        encoder = compiled.load(workflow, events=False)
        newest = write_histories(log, encoder, tails, first_keys(days, directory, spec))
    rates = _later_rates(_rates(days, spec), end)
    write_event_state(workflow, spec, description.digest, end, groups, rates, newest)
    description.list_event_state()
    for name in days.record.files:
        write_array(extension / name, map_array(directory / name))
    FORMAT.write(extension / _RECORD, dataclasses.asdict(days.record))
