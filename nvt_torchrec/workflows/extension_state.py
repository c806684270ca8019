"""The state on disk that is needed to extend a workflow, but not to encode rows.

Layout of the directory, ``OUT/extension``, JSON and parquet only::

    state.json                    generation and digest of the workflow that the state belongs to,
                                  the last day counted, numbers of values; size and SHA-256 of
                                  every other file. Written last
    pending.<vocabulary>.parquet  value int64 or string, count int64: values that were seen and have
                                  no id, in ascending order; for vocabularies with freq_threshold
                                  or max_table_size

At most :data:`workflows.vocabulary.PENDING_LIMIT` pending values are kept for each vocabulary:
values with the lowest counts are dropped first, and among equal counts the largest values. The same
state gives the same bytes. Earlier versions also wrote moments of the dense columns and the day on
which each value was last seen; neither is read.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

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
from nvt_torchrec.workflows.vocabulary import (
    PendingValues,
    has_pending,
    make_empty_values,
    to_arrow_array,
)

FORMAT = Format("nvt-torchrec extension state", 1, "the state of a workflow that can be extended")
STATE_FILE = "state.json"
_COPY_AGAIN = (
    "copy workflow and extension again, both from the same output directory; or fit again with "
    "`python -m etl run`"
)


@dataclasses.dataclass(frozen=True)
class ExtensionState:
    """The state that belongs to a workflow.

    Attributes:
        digest: The digest of the workflow.
        generation: The generation of the workflow.
        day: The last day that was counted.
        pending: By vocabulary, the values without an id; hashed columns are left out.
    """

    digest: str
    generation: int
    day: int
    pending: dict[str, PendingValues]


@dataclasses.dataclass(frozen=True)
class _StateRecord:
    """The content of ``state.json``; ``pending`` has the number of values of each vocabulary."""

    workflow_digest: str
    generation: int
    day: int
    pending: dict[str, int]
    files: dict[str, FileEntry]
    moments: Any = None  # written by earlier versions


def find_growing(spec: FeatureSpec) -> dict[str, CategoricalColumn]:
    """Return the first column of each vocabulary that new days add values to: all but hashed."""
    growing = {}
    for name, (first, *_) in spec.vocabularies.items():
        if not first.hash_buckets:
            growing[name] = first
    return growing


def _list_pending(spec: FeatureSpec) -> list[str]:
    """Return the vocabularies that have a file of pending values."""
    return [name for name, column in sorted(find_growing(spec).items()) if has_pending(column)]


def write_state(directory: Path, spec: FeatureSpec, state: ExtensionState) -> None:
    """Write a state; ``state.json`` is removed first and written last.

    Raises:
        OutputError: The directory cannot be written.
    """
    remove(directory / STATE_FILE)
    names = _list_pending(spec)
    entries: dict[str, FileEntry] = {}
    with deferred() as written:
        for name in names:
            file = f"pending.{name}.parquet"
            pending = state.pending[name]
            table = {"value": to_arrow_array(pending.values), "count": to_arrow(pending.counts)}
            with atomic_path(directory / file) as temporary:
                pq.write_table(
                    pa.table(table),
                    temporary,
                    compression="none",
                    use_dictionary=False,
                    write_page_checksum=True,
                )
                entries[file] = FileEntry.from_file(temporary)
    publish(written)
    record = {
        "workflow_digest": state.digest,
        "generation": state.generation,
        "day": state.day,
        "pending": {name: len(state.pending[name]) for name in names},
        "files": {name: entry.to_dict() for name, entry in entries.items()},
    }
    FORMAT.write(directory / STATE_FILE, record)


def read_state(directory: Path, description: WorkflowDescription) -> ExtensionState:
    """Read the state of a workflow; every file is compared with its digest.

    Raises:
        BadInputError: A file is missing or damaged.
        SchemaError: The state belongs to another workflow, or has another version.
    """
    file = directory / STATE_FILE
    if not file.exists():
        raise BadInputError(
            f"{file}: no such file: extending needs the state that `python -m etl run` wrote "
            "beside the workflow",
            _COPY_AGAIN,
        )
    record = FORMAT.read(_StateRecord, file, _COPY_AGAIN)
    identity = (description.digest, description.generation)
    if (record.workflow_digest, record.generation) != identity:
        raise SchemaError(
            f"{file}: it belongs to generation {record.generation} with digest "
            f"{record.workflow_digest[:12]}…, but the workflow is generation "
            f"{description.generation} with digest {description.digest[:12]}…",
            _COPY_AGAIN,
        )
    files = {name: entry for name, entry in record.files.items() if not name.startswith("seen.")}
    check_sizes(directory, files, _COPY_AGAIN)
    check_digests(directory, files, _COPY_AGAIN)
    pending = {}
    for name, column in find_growing(description.spec).items():
        if not has_pending(column):
            pending[name] = make_empty_pending(column)
            continue
        is_text = RAW_TYPES[column.raw].is_text
        types = {"value": pa.string() if is_text else pa.int64(), "count": pa.int64()}
        values, counts = read_columns(directory / f"pending.{name}.parquet", types, _COPY_AGAIN)
        pending[name] = PendingValues(values if is_text else to_numpy(values), to_numpy(counts))
    return ExtensionState(*identity, record.day, pending)


def make_empty_pending(column: CategoricalColumn) -> PendingValues:
    """Return an empty set of pending values for a column."""
    return PendingValues(make_empty_values(column.raw), np.empty(0, np.int64))
