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
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import to_arrow, to_numpy
from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.base.files.artifact import FileEntry, Format, check_digests, check_sizes
from nvt_torchrec.base.files.atomic import atomic_path, deferred, publish, remove
from nvt_torchrec.formats.spec.feature_spec import CategoricalColumn, FeatureSpec
from nvt_torchrec.formats.spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.moments import COUNT, normalized
from nvt_torchrec.workflows.vocabulary import (
    PendingValues,
    differ_from_next,
    empty_values,
    has_pending,
    is_text,
    order_by_value,
)

FORMAT = Format("nvt-torchrec extension state", 1, "the state of a workflow that can be extended")
STATE_FILE = "state.json"
_COPY_AGAIN = (
    "copy workflow and extension again, both from the same output directory; or fit again with "
    "`python -m etl run`"
)


@dataclasses.dataclass(frozen=True)
class VocabularyState:
    """What is remembered of a vocabulary.

    Attributes:
        pending: Values without an id.
        pending_days: int32, the day on which each was last seen.
        last_days: int32, by place in the vocabulary, the day on which each value was last seen;
            None for a vocabulary without ``max_table_size``, which never retires values.
    """

    pending: PendingValues
    pending_days: np.ndarray
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
        if self.generation < 0 or not 0 <= self.day < 2**31:
            raise ValueError(f"generation {self.generation}, day {self.day}")
        for row in self.moments or ():
            if len(row) != 4 or row[COUNT] < 0:
                raise ValueError(f"moments has {row!r:.80}")


def remembered(spec: FeatureSpec) -> dict[str, CategoricalColumn]:
    """Return the first column of each vocabulary that is not hashed."""
    first = {name: columns[0] for name, columns in spec.vocabularies.items()}
    return {name: column for name, column in first.items() if not column.hash_buckets}


def _files(spec: FeatureSpec, generation: int) -> dict[str, set[str]]:
    """Return the vocabularies that have a file of pending values, and one of days."""
    columns = remembered(spec)
    return {
        "pending": {name for name, column in columns.items() if has_pending(column)},
        "seen": {name for name, c in columns.items() if c.max_table_size and generation},
    }


def write_state(directory: Path, spec: FeatureSpec, state: ExtensionState) -> None:
    """Write a state; ``state.json`` is removed first and written last.

    Raises:
        OutputError: The directory cannot be written.
    """
    remove(directory / STATE_FILE)
    files = _files(spec, state.generation)
    entries: dict[str, FileEntry] = {}
    with deferred() as written:
        for name in sorted(files["pending"]):
            vocabulary = state.vocabularies[name]
            values = vocabulary.pending.values
            table = {
                "value": values if is_text(values) else to_arrow(values),
                "count": to_arrow(vocabulary.pending.counts),
                "last_day": to_arrow(vocabulary.pending_days),
            }
            entries |= _write(directory, f"pending.{name}.parquet", table)
        for name in sorted(files["seen"]):
            days = state.vocabularies[name].last_days
            assert days is not None
            entries |= _write(directory, f"seen.{name}.parquet", {"last_day": to_arrow(days)})
    publish(written)
    record = _StateRecord(
        workflow_digest=state.digest,
        generation=state.generation,
        day=state.day,
        pending={name: len(state.vocabularies[name].pending) for name in sorted(files["pending"])},
        moments=None if state.moments is None else state.moments.tolist(),
        files={},
    )
    content = {**dataclasses.asdict(record), "files": {k: e.to_dict() for k, e in entries.items()}}
    FORMAT.write(directory / STATE_FILE, content)


def _write(directory: Path, name: str, columns: dict[str, pa.Array]) -> dict[str, FileEntry]:
    with atomic_path(directory / name) as temporary:
        pq.write_table(
            pa.table(columns),
            temporary,
            compression="none",
            use_dictionary=["last_day"],  # few days: a byte or less for each value
            write_page_checksum=True,
        )
        return {name: FileEntry.of(temporary)}


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
    spec = description.spec
    _check_record(file, record, description)
    check_sizes(directory, record.files, _COPY_AGAIN)
    check_digests(directory, record.files, _COPY_AGAIN)
    files = _files(spec, record.generation)
    vocabularies = {}
    for name, column in remembered(spec).items():
        pending, days = _no_pending(column)
        if name in files["pending"]:
            pending, days = _read_pending(directory, name, column, record)
        seen = None
        if column.max_table_size:
            values = description.vocabularies[column.name].values
            seen = np.full(values, record.day, np.int32)
            if name in files["seen"]:
                seen = _read_days(directory, name, values, record.day)
        vocabularies[name] = VocabularyState(pending, days, seen)
    moments = None if record.moments is None else np.array(record.moments, np.float64)
    if moments is not None:
        moments = moments.reshape(-1, 4)  # without dense columns too
    return ExtensionState(
        record.workflow_digest, record.generation, record.day, vocabularies, moments
    )


def _no_pending(column: CategoricalColumn) -> tuple[PendingValues, np.ndarray]:
    nothing = PendingValues(empty_values(column.raw), np.empty(0, np.int64))
    return nothing, np.empty(0, np.int32)


def _check_record(file: Path, record: _StateRecord, description: WorkflowDescription) -> None:
    """Check that a state holds what that of this workflow has to hold."""
    spec, files = description.spec, _files(description.spec, record.generation)
    wanted = {f"{kind}.{name}.parquet" for kind, names in files.items() for name in names}
    what = ""
    if wrong := sorted(wanted ^ record.files.keys()):
        what = f"{wrong[0]!r:.80} is {'missing' if wrong[0] in wanted else 'unknown'}"
    elif record.pending.keys() != files["pending"]:
        what = "pending has other vocabularies than the spec"
    elif record.day != description.lineage[-1].days[-1]:
        what = f"its last day is {record.day}, that of the workflow {description.lineage[-1].days}"
    elif (record.moments is None) == normalized(spec):
        what = "its moments are not those of the spec"
    elif record.moments is not None and len(record.moments) != len(spec.dense):
        what = f"moments of {len(record.moments)} dense columns, the spec has {len(spec.dense)}"
    if what:
        raise BadInputError(f"{file}: damaged: {what}", _COPY_AGAIN)


def _read_pending(
    directory: Path, name: str, column: CategoricalColumn, record: _StateRecord
) -> tuple[PendingValues, np.ndarray]:
    text = RAW_TYPES[column.raw].is_text
    kinds = {
        "value": pa.string() if text else pa.int64(),
        "count": pa.int64(),
        "last_day": pa.int32(),
    }

    def check(
        values: pa.Array, counts: pa.Array, days: pa.Array
    ) -> tuple[PendingValues, np.ndarray]:
        numbers = values if text else to_numpy(values)
        pending, last_days = PendingValues(numbers, to_numpy(counts)), to_numpy(days)
        if len(pending) != record.pending[name]:
            raise ValueError(f"{len(pending)} values instead of {record.pending[name]}")
        in_order = np.array_equal(order_by_value(numbers), np.arange(len(pending)))
        if not (in_order and differ_from_next(numbers).all()):
            raise ValueError("its values are not in ascending order")
        if len(pending) and not (
            pending.counts.min() >= 1 and 0 <= last_days.min() <= last_days.max() <= record.day
        ):
            raise ValueError("a count is below 1, or a day is not one that was counted")
        return pending, last_days

    return _read(directory / f"pending.{name}.parquet", kinds, check)


def _read_days(directory: Path, name: str, values: int, last: int) -> np.ndarray:
    def check(days: pa.Array) -> np.ndarray:
        numbers = to_numpy(days)
        if len(numbers) != values:
            raise ValueError(f"{len(numbers)} days for {values} values")
        if values and not 0 <= numbers.min() <= numbers.max() <= last:
            raise ValueError("a day is not one that was counted")
        return numbers

    return _read(directory / f"seen.{name}.parquet", {"last_day": pa.int32()}, check)


def _read(file: Path, kinds: dict[str, pa.DataType], check: Callable):
    """Read a file with these columns and no nulls; return what ``check`` makes of the columns."""
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as opened:
            table = opened.read()
        if dict(zip(table.column_names, table.schema.types, strict=True)) != kinds:
            raise ValueError(f"its columns are {table.schema.names}")
        columns = [column.combine_chunks() for column in table.columns]
        if any(column.null_count for column in columns):
            raise ValueError("it has nulls")
        return check(*columns)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise BadInputError(f"{file}: damaged: {error}", _COPY_AGAIN) from error
