"""What extending a workflow needs to know and encoding rows does not: its state, on disk.

Layout of the directory, ``OUT/extension``, JSON and parquet only::

    state.json                    generation and digest of the workflow that the state belongs to,
                                  the last day counted, moments of the dense columns, numbers of
                                  values; size and SHA-256 of every other file. Written last
    pending.<vocabulary>.parquet  value int64 or string, count int64, last_day int32: values that
                                  were seen and have no id, in ascending order; for vocabularies
                                  with freq_threshold or max_table_size
    seen.<vocabulary>.parquet     last_day int32: row i is the day on which the value with the id
                                  reserved ids + i was last seen; for vocabularies with
                                  max_table_size, from generation 1 on

In generation 0, which counts many days at once, the day on which a value was last seen is not
known; the last of these days is taken instead. So a value is retired later than it might be, never
earlier. Of a vocabulary's pending values at most :data:`workflows.vocabulary.PENDING_LIMIT` are
kept: those with the lowest counts are forgotten first, then those not seen for longest, then the
largest values. Moments (:mod:`workflows.moments`) are of the rows of all days counted, null where
nothing is normalized. The same state gives the same bytes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import to_arrow, to_numpy
from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.base.files.artifact import FileEntry, Format, check_digests, check_sizes
from nvt_torchrec.base.files.atomic import atomic_path, deferred, publish, remove
from nvt_torchrec.formats.feature_spec import CategoricalColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.vocabularies import read_columns
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.moments import COUNT, normalized
from nvt_torchrec.workflows.vocabulary import (
    Values,
    arrow_values,
    concatenate,
    empty_values,
    has_pending,
    take,
)

FORMAT = Format("nvt-torchrec extension state", 1, "the state of a workflow that can be extended")
STATE_FILE = "state.json"
_COPY_AGAIN = (
    "copy workflow and extension again, both from the same output directory; or fit again with "
    "`python -m etl run`"
)


@dataclasses.dataclass(frozen=True)
class SeenValues:
    """Values of a vocabulary, by index.

    Attributes:
        values: Distinct values.
        counts: int64, how often each occurred.
        days: int32, the day on which each was last seen.
    """

    values: Values
    counts: np.ndarray
    days: np.ndarray

    def __len__(self) -> int:
        return len(self.counts)

    def take(self, indices: np.ndarray) -> SeenValues:
        """Return the values at indices."""
        return SeenValues(take(self.values, indices), self.counts[indices], self.days[indices])

    def and_also(self, other: SeenValues, column: str) -> SeenValues:
        """Return these values and others of a column behind them."""
        return SeenValues(
            concatenate([self.values, other.values], column),
            np.concatenate([self.counts, other.counts]),
            np.concatenate([self.days, other.days]),
        )


@dataclasses.dataclass(frozen=True)
class VocabularyState:
    """What is remembered of a vocabulary.

    Attributes:
        pending: Values without an id, in ascending order.
        last_days: int32, by place in the vocabulary, the day on which each value was last seen;
            None for a vocabulary without ``max_table_size``, which never retires values.
    """

    pending: SeenValues
    last_days: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class ExtensionState:
    """What is remembered beside a workflow.

    Attributes:
        digest: Of the workflow.
        generation: Of the workflow.
        day: The last day that was counted.
        vocabularies: By name; hashed columns are left out.
        moments: float64 [dense columns, 4] of all rows counted; None if nothing is normalized.
    """

    digest: str
    generation: int
    day: int
    vocabularies: dict[str, VocabularyState]
    moments: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class _StateRecord:
    """What ``state.json`` holds; ``pending`` is the number of values by vocabulary."""

    workflow_digest: str
    generation: int
    day: int
    pending: dict[str, int]
    moments: list[list[float]] | None
    files: dict[str, FileEntry]

    def __post_init__(self) -> None:
        for row in self.moments or ():
            if len(row) != 4 or row[COUNT] < 0:
                raise ValueError(f"moments has {row!r:.80}")


def remembered(spec: FeatureSpec) -> dict[str, CategoricalColumn]:
    """Return the first column of each vocabulary that is not hashed."""
    first = {name: columns[0] for name, columns in spec.vocabularies.items()}
    return {name: column for name, column in first.items() if not column.hash_buckets}


def _find_stored(spec: FeatureSpec, generation: int) -> tuple[list[str], list[str]]:
    """Return the vocabularies that have a file of pending values, and those with one of days."""
    columns = sorted(remembered(spec).items())
    pending = [name for name, column in columns if has_pending(column)]
    return pending, [name for name, c in columns if c.max_table_size and generation]


def write_state(directory: Path, spec: FeatureSpec, state: ExtensionState) -> None:
    """Write a state; ``state.json`` is removed first and written last.

    Raises:
        OutputError: The directory cannot be written.
    """
    remove(directory / STATE_FILE)
    with_pending, with_days = _find_stored(spec, state.generation)
    entries: dict[str, FileEntry] = {}
    with deferred() as written:
        for name in with_pending:
            values = state.vocabularies[name].pending
            table = {
                "value": arrow_values(values.values),
                "count": to_arrow(values.counts),
                "last_day": to_arrow(values.days),
            }
            entries |= _write(directory, f"pending.{name}.parquet", table)
        for name in with_days:
            days = state.vocabularies[name].last_days
            assert days is not None
            entries |= _write(directory, f"seen.{name}.parquet", {"last_day": to_arrow(days)})
    publish(written)
    record = {
        "workflow_digest": state.digest,
        "generation": state.generation,
        "day": state.day,
        "pending": {name: len(state.vocabularies[name].pending) for name in with_pending},
        "moments": None if state.moments is None else state.moments.tolist(),
        "files": {name: entry.to_dict() for name, entry in entries.items()},
    }
    FORMAT.write(directory / STATE_FILE, record)


def _write(directory: Path, name: str, columns: dict[str, pa.Array]) -> dict[str, FileEntry]:
    with atomic_path(directory / name) as temporary:
        pq.write_table(
            pa.table(columns),
            temporary,
            compression="none",
            use_dictionary=["last_day"],  # few days: a byte or less for each value
            write_page_checksum=True,
        )
        return {name: FileEntry.from_file(temporary)}


def read_state(directory: Path, description: WorkflowDescription) -> ExtensionState:
    """Read the state beside a workflow; every file is compared with its digest.

    Raises:
        BadInputError: A file is missing or damaged.
        SchemaError: The state belongs to another workflow, or has another version.
    """
    file = directory / STATE_FILE
    if not file.exists():
        raise BadInputError(
            f"{file}: no such file: extending needs what `python -m etl run` left there",
            _COPY_AGAIN,
        )
    record = FORMAT.read(_StateRecord, file, _COPY_AGAIN)
    identity = (description.digest, description.generation)
    if (record.workflow_digest, record.generation) != identity:
        raise SchemaError(
            f"{file}: the state of generation {record.generation} with digest "
            f"{record.workflow_digest[:12]}…, the workflow is generation {identity[1]} with digest "
            f"{description.digest[:12]}…",
            _COPY_AGAIN,
        )
    _check_record(file, record, description)
    with_pending, with_days = _find_stored(description.spec, record.generation)
    check_sizes(directory, record.files, _COPY_AGAIN)
    check_digests(directory, record.files, _COPY_AGAIN)
    vocabularies = {}
    for name, column in remembered(description.spec).items():
        kind = pa.string() if RAW_TYPES[column.raw].is_text else pa.int64()
        pending, seen = no_values(column), None
        if name in with_pending:
            kinds = {"value": kind, "count": pa.int64(), "last_day": pa.int32()}
            values, *numbers = read_columns(
                directory / f"pending.{name}.parquet", kinds, _COPY_AGAIN
            )
            values = values if pa.types.is_string(kind) else to_numpy(values)
            pending = SeenValues(values, *map(to_numpy, numbers))
        if name in with_days:
            kinds = {"last_day": pa.int32()}
            seen = to_numpy(*read_columns(directory / f"seen.{name}.parquet", kinds, _COPY_AGAIN))
        elif column.max_table_size:
            seen = np.full(description.vocabularies[column.name].values, record.day, np.int32)
        known = description.vocabularies[column.name].values
        if seen is not None and len(seen) != known:
            raise BadInputError(f"{file}: days of {len(seen)} values, not of {known}", _COPY_AGAIN)
        vocabularies[name] = VocabularyState(pending, seen)
    moments = None
    if record.moments is not None:  # four numbers a column, also of no columns
        moments = np.array(record.moments, np.float64).reshape(-1, 4)
    return ExtensionState(*identity, record.day, vocabularies, moments)


def no_values(column: CategoricalColumn) -> SeenValues:
    """Return no values of a column."""
    return SeenValues(empty_values(column.raw), np.empty(0, np.int64), np.empty(0, np.int32))


def _check_record(file: Path, record: _StateRecord, description: WorkflowDescription) -> None:
    """Check that a state holds what that of this workflow has to hold."""
    spec = description.spec
    with_pending, with_days = _find_stored(spec, record.generation)
    names = [f"pending.{name}.parquet" for name in with_pending]
    names += [f"seen.{name}.parquet" for name in with_days]
    moments = None if record.moments is None else len(record.moments)
    for what, held, needed in (
        ("files", sorted(record.files), sorted(names)),
        ("pending", sorted(record.pending), with_pending),
        ("day", record.day, description.lineage[-1].days[-1]),
        ("number of moments", moments, len(spec.dense) if normalized(spec) else None),
    ):
        if held != needed:
            raise BadInputError(
                f"{file}: damaged: {what} is {held!r:.80} instead of {needed!r:.80}", _COPY_AGAIN
            )
