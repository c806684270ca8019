"""The events of all days so far, as they are kept for days that are added later.

Inference reads the event state of the workflow (:mod:`workflows.event_state`). Days that are added
read from ``OUT/extension``:

    events.json         newest time, smoothing; size and SHA-256 of the other files
    events.hours.npy    see :func:`etl.units.hours.count_hours`
    events.N.npy        int64 [rows, n], the events of group N, see
                        :class:`.earlier_events.EarlierEvents`
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.artifact import FileEntry, Format, check_digests, check_sizes
from nvt_torchrec.base.files.mapping import MappedArray, map_array
from nvt_torchrec.etl.events.earlier_events import EarlierEvents, EarlierFiles, kept_file_name
from nvt_torchrec.etl.events.event_files import EventFiles
from nvt_torchrec.etl.events.event_values import EventValues
from nvt_torchrec.etl.events.label_rates import LabelRates
from nvt_torchrec.etl.state.output import EVENTS
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.workflows.event_groups import plan_groups

FORMAT = Format("nvt-torchrec events", 3, "what is kept of the events of earlier days")
RECORD = "events.json"
HOURS = "events.hours.npy"
_RUN_AGAIN = "begin again with --restart"
_COPY_AGAIN = "copy extension and workflow again, both from the same output directory"


@dataclasses.dataclass(frozen=True)
class EventRecord:
    """The content of ``events.json``.

    Attributes:
        newest: The time of the newest row that is not late (:mod:`.late_rows`), in microseconds
            since 1970.
        smoothing: See :class:`.label_rates.LabelRates`.
        next_keys: The number of keys in the store of each history, by its name.
        files: Size and digest of the other files.
    """

    newest: int
    smoothing: dict[str, float]
    next_keys: dict[str, int]
    files: dict[str, FileEntry]


@dataclasses.dataclass(frozen=True)
class EarlierDays:
    """The events of all days before the days that are added.

    Attributes:
        record: The content of ``events.json``.
        hours: See :func:`etl.units.hours.count_hours`.
        files: Where the events of each group are; None for a run's own events, as long as it has no
            workflow.
    """

    record: EventRecord
    hours: np.ndarray
    files: EarlierFiles | None = None

    @classmethod
    def read(cls, directory: Path, spec: FeatureSpec, workflow: Path | None = None) -> EarlierDays:
        """Read the files from ``OUT/extension`` or from the state of a run, and check them.

        Args:
            directory: The directory of the files.
            spec: The columns.
            workflow: For an extension, ``OUT/workflow``, which must have been checked.

        Raises:
            BadInputError: A file is missing or damaged.
        """
        file = directory / RECORD
        record = FORMAT.read(EventRecord, file, _COPY_AGAIN)
        names = [kept_file_name(group) for group in range(len(spec.groups))]
        if sorted(record.files) != sorted([HOURS, *names]):
            raise BadInputError(f"{file}: damaged: it lists other files", _COPY_AGAIN)
        check_sizes(directory, record.files, _COPY_AGAIN)
        check_digests(directory, record.files, _COPY_AGAIN)
        num_rows = {HOURS: 2 + len(spec.labels)}
        for name, group in zip(names, plan_groups(spec), strict=True):
            num_rows[name] = EarlierEvents.count_rows(group)
        arrays = {}
        try:
            for name, expected in num_rows.items():
                arrays[name] = MappedArray(directory / name, np.int64, 2).values
                if len(arrays[name]) != expected:
                    raise ValueError(f"{name} has {len(arrays[name])} rows, not {expected}")
        except (OSError, ValueError) as error:
            raise BadInputError(f"{directory}: damaged: {error}", _COPY_AGAIN) from error
        files = EarlierFiles(directory, workflow) if workflow else None
        return cls(record, arrays[HOURS], files)


def read_record(directory: Path) -> EventRecord:
    """Read ``events.json`` of a run, which was just written."""
    return FORMAT.read(EventRecord, directory / RECORD, _RUN_AGAIN)


@functools.lru_cache(1)
def open_values(work: Path, spec: FeatureSpec) -> EventValues | None:
    """Open the aggregates of a run's rows; None for a spec without events."""
    if not spec.events:
        return None
    directory = work / EVENTS
    # The record suffices: EarlierDays.read would read the events of groups, which may be large.
    record = read_record(directory)
    rates = make_rates(record, map_array(directory / HOURS), spec)
    return EventValues(spec, directory, rates, count_first_keys(record, directory, spec))


def count_first_keys(record: EventRecord, directory: Path, spec: FeatureSpec) -> dict[str, int]:
    """Return, for each history, the number of the first key of this run or extension."""
    files = EventFiles(directory)
    first_keys = {}
    for rule in spec.histories:
        row_keys = map_array(files.row_keys(spec.groups.index(rule.group)))
        first_keys[rule.name] = record.next_keys[rule.name] - len(row_keys)
    return first_keys


def make_rates(record: EventRecord, hours: np.ndarray, spec: FeatureSpec) -> LabelRates:
    """Return the rates over all events, toward which rates of keys are smoothed.

    Args:
        record: The record of the events.
        hours: See :func:`etl.units.hours.count_hours`.
        spec: The columns.
    """
    return LabelRates(record.smoothing, hours, tuple(spec.labels))
