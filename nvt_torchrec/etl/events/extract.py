"""Read the keys, times and labels of a log's rows, and sort each block by key."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np

from nvt_torchrec.base.files.atomic import atomic_path
from nvt_torchrec.clicklog.readers.log_format import Block, read_block_chunks
from nvt_torchrec.etl.units.unit_plan import DividedBlock
from nvt_torchrec.etl.units.writing import choose
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.file_formats import INPUT_FORMATS
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.formats.splits import SPLITS

#: The rows of an array of events: hash of the key, time, time from which it is known, both in
#: microseconds; and the row's number in the block, shifted by :data:`ROW_SHIFT`, with its flags.
KEY, TIME, KNOWN, ROW = range(4)
ROW_SHIFT = 32
#: The bits of the flags: whether it is a row for training; then a bit for each label.
TRAIN, FIRST_LABEL = 0, 1


@dataclasses.dataclass(frozen=True)
class EventFiles:
    """The files of a run's events below its state."""

    directory: Path

    def events(self, block: Block, group: int) -> Path:
        """Int64 [4, n], the events of a block by rising key."""
        return self._name_file(block, f"{group}.events")

    def sums(self, block: Block, group: int) -> Path:
        """Int64 [sums, n], what the events before them sum up to, in the same order."""
        return self._name_file(block, f"{group}.sums")

    def _name_file(self, block: Block, kind: str) -> Path:
        place = f"{block.source}\n{block.begin}\n{block.end}"
        name = hashlib.blake2b(place.encode(), digest_size=16).hexdigest()
        return self.directory / f"{name}.{kind}.npy"


def narrow(spec: FeatureSpec) -> FeatureSpec:
    """Return the spec of what events are made of: keys, times, labels, columns of histories."""
    names = {name for rule in spec.histories for name in rule.columns}
    columns = [column for column in spec.categorical if column.name in names]
    format = spec.input
    if INPUT_FORMATS[format.format].delimiter and not format.header:
        format = dataclasses.replace(format, columns=tuple(spec.file_columns(label=True)))
    return dataclasses.replace(
        spec,
        dense=tuple(spec.aggregates),
        categorical=tuple(columns or spec.categorical[:1]),
        input=format,
    )


def extract(
    block: Block, split: str, spec: FeatureSpec, files: EventFiles, *, reject: bool | int
) -> int:
    """Write the events of a block, unless they are there; return how many there are.

    Args:
        block: The block.
        split: The split of its rows, unless they are divided.
        spec: The columns.
        files: Where they are written.
        reject: Whether malformed rows are left out; they are no events.

    Raises:
        BadRowError: A row is malformed.
        BadInputError: The block cannot be read.
        OutputError: The directory cannot be written.
    """
    last = files.events(block, len(spec.groups) - 1)
    if last.exists():  # by an earlier process; written after those of the other groups
        return np.load(last, mmap_mode="r").shape[1]
    # where no row is left out, none is that has a wrong value in another column
    read = spec if reject else narrow(spec)
    lines, rows_before = 0, 0
    events: list[list[np.ndarray]] = [[] for _ in spec.groups]
    for rows in read_block_chunks(block, read, reject=reject):
        assert rows.groups is not None
        assert rows.times is not None
        number = np.arange(rows_before, rows_before + len(rows), dtype=np.int64)
        packed = number << ROW_SHIFT | _flags(rows, block, split, lines)
        for pieces, key in zip(events, rows.groups, strict=True):
            pieces.append(np.stack([key, *rows.times, packed]))
        lines += rows.lines
        rows_before += len(rows)
    for group, pieces in enumerate(events):
        array = np.concatenate(pieces, axis=1) if pieces else np.empty((4, 0), np.int64)
        array = array[:, np.argsort(array[KEY], kind="stable")]
        write_array(files.events(block, group), array)
    return rows_before


def write_array(path: Path, array: np.ndarray) -> None:
    """Write an array durably. Raises :class:`OutputError`."""
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        np.save(file, array, allow_pickle=False)


def _flags(rows: RawRows, block: Block, split: str, lines: int) -> np.ndarray:
    """Return the flags of rows, int64 [n]."""
    if isinstance(block, DividedBlock):
        train = choose(rows, block, lines) == SPLITS.index("train")
    else:
        train = np.full(len(rows), split == "train")
    flags = train.astype(np.int64) << TRAIN
    for number, label in enumerate(rows.labels):
        flags |= label.astype(np.int64) << (FIRST_LABEL + number)
    return flags
