"""What is known of the events of a run, and kept of them for further days.

The workflow gets what inference needs (:mod:`workflows.event_state`). ``OUT/extension`` gets what
further days need:

    events.json         newest time, smoothing; size and SHA-256 of the others
    events.hours.npy    see :func:`etl.units.hours.count_hours`
    events.N.npy        int64 [rows, n]: of group N the key, from when it is known, the time, the
                        number of events, of those with each label, and what is kept of numbers, see
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
from nvt_torchrec.etl.events.earlier_events import EarlierEvents, EarlierFiles, kept_file
from nvt_torchrec.etl.events.event_files import EventFiles
from nvt_torchrec.etl.events.event_values import EventValues
from nvt_torchrec.etl.events.label_rates import LabelRates
from nvt_torchrec.etl.state.output import EVENTS
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.workflows.event_groups import sums_of_groups

FORMAT = Format("nvt-torchrec events", 3, "what is kept of the events of earlier days")
RECORD, HOURS = "events.json", "events.hours.npy"
_RUN_AGAIN = "begin again with --restart"
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
        files: Where the events of each group are; None of a run's own, before it has a workflow.
    """

    record: EventRecord
    hours: np.ndarray
    files: EarlierFiles | None = None

    @classmethod
    def read(cls, directory: Path, spec: FeatureSpec, workflow: Path | None = None) -> EarlierDays:
        """Read ``OUT/extension``, or the same of a run, and check what is kept of groups.

        Args:
            directory: The directory.
            spec: The columns.
            workflow: ``OUT/workflow``, which was checked; for an extension.

        Raises:
            BadInputError: It is missing or damaged.
        """
        file = directory / RECORD
        record = FORMAT.read(EventRecord, file, _COPY_AGAIN)
        names = [kept_file(group) for group in range(len(spec.groups))]
        if sorted(record.files) != sorted([HOURS, *names]):
            raise BadInputError(f"{file}: damaged: it lists other files", _COPY_AGAIN)
        check_sizes(directory, record.files, _COPY_AGAIN)
        check_digests(directory, record.files, _COPY_AGAIN)
        try:
            hours, *kept = (
                MappedArray(directory / name, np.int64, 2).values for name in (HOURS, *names)
            )
            wanted = sums_of_groups(spec)
            rows = [2 + len(spec.labels), *map(EarlierEvents.count_rows, wanted)]
            for name, array, count in zip((HOURS, *names), (hours, *kept), rows, strict=True):
                if len(array) != count:
                    raise ValueError(f"{name} is of other labels: {list(array.shape)}")
        except (OSError, ValueError) as error:
            raise BadInputError(f"{directory}: damaged: {error}", _COPY_AGAIN) from error
        return cls(record, hours, EarlierFiles(directory, workflow) if workflow else None)


def read_record(directory: Path) -> EventRecord:
    """Read what is known of the events of a run, whose files were just written."""
    return FORMAT.read(EventRecord, directory / RECORD, _RUN_AGAIN)


@functools.lru_cache(1)
def open_values(work: Path, spec: FeatureSpec) -> EventValues | None:
    """Open the aggregates of a run's rows; None for a spec without."""
    if not spec.events:
        return None
    directory = work / EVENTS
    # What is kept of groups, which may be large, is not needed here.
    record = read_record(directory)
    rates = make_rates(record, map_array(directory / HOURS), spec)
    return EventValues(spec, directory, rates, count_first_keys(record, directory, spec))


def count_first_keys(record: EventRecord, directory: Path, spec: FeatureSpec) -> dict[str, int]:
    """Return, of each history, the number of the first key of a run or an extension."""
    files = EventFiles(directory)
    keys = {
        rule.name: len(map_array(files.row_keys(spec.groups.index(rule.group))))
        for rule in spec.histories
    }
    return {name: count - keys[name] for name, count in record.next_keys.items()}


def make_rates(record: EventRecord, hours: np.ndarray, spec: FeatureSpec) -> LabelRates:
    """Return what rates are smoothed by.

    Args:
        record: What is known of the events.
        hours: See :func:`etl.units.hours.count_hours`.
        spec: The columns.
    """
    return LabelRates(record.smoothing, hours, tuple(spec.labels))
