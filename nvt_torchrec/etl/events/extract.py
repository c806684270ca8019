"""Read the keys, times and labels of a log's rows, and sort each block by key."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import mask_to_arrow, to_arrow
from nvt_torchrec.base.files.atomic import atomic_path
from nvt_torchrec.base.files.mapping import write_array
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.clicklog.readers.log_format import Block, read_block_chunks
from nvt_torchrec.etl.events.label_rates import count_hours
from nvt_torchrec.etl.units.split_pass import CHUNK_BYTES
from nvt_torchrec.etl.units.unit_plan import DividedBlock
from nvt_torchrec.etl.units.writing import choose
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.file_formats import INPUT_FORMATS
from nvt_torchrec.formats.rows import RawRows, is_missing
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

    def events(self, name: str, group: int) -> Path:
        """Int64 [4, n], the events of a block by rising key."""
        return self.directory / f"{name}.{group}.events.npy"

    def sums(self, name: str, group: int) -> Path:
        """Int64 [sums, n], what the events before them sum up to, in the same order."""
        return self.directory / f"{name}.{group}.sums.npy"

    def values(self, name: str) -> Path:
        """The columns of the histories, as dictionaries of values, in the order of the rows."""
        return self.directory / f"{name}.arrow"

    def ids(self, name: str) -> Path:
        """Int32 [columns of histories, n], their ids."""
        return self.directory / f"{name}.ids.npy"

    def hours(self, name: str) -> Path:
        """What :func:`.label_rates.count_hours` returns of the events of a block."""
        return self.directory / f"{name}.hours.npy"

    def row_keys(self, group: int) -> Path:
        """Int64 [keys], the keys of a group's rows, rising."""
        return self.directory / f"{group}.row_keys.npy"


def block_name(block: Block) -> str:
    """Return the name of a block in the names of files."""
    place = f"{block.source}\n{block.begin}\n{block.end}"
    return hashlib.blake2b(place.encode(), digest_size=16).hexdigest()


def narrow(spec: FeatureSpec) -> FeatureSpec:
    """Return the spec of what events are made of: keys, times, labels, columns of histories."""
    names = history_columns(spec)
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
    name = block_name(block)
    last = files.events(name, len(spec.groups) - 1)
    if last.exists():  # by an earlier process; written after those of the other groups
        return np.load(last, mmap_mode="r").shape[1]
    # where no row is left out, none is that has a wrong value in another column
    read = spec if reject else narrow(spec)
    lines, rows_before = 0, 0
    groups = [np.empty((len(spec.groups), 0), np.int64)]
    events = [np.empty((3, 0), np.int64)]  # but for their keys
    columns = {name: read.categorical_names.index(name) for name in history_columns(spec)}
    values: dict[str, list[pa.Array]] = {name: [] for name in columns}
    for rows in read_block_chunks(block, read, reject=reject, chunk_bytes=CHUNK_BYTES):
        assert rows.groups is not None
        assert rows.times is not None
        number = np.arange(rows_before, rows_before + len(rows), dtype=np.int64)
        packed = number << ROW_SHIFT | _flags(rows, block, split, lines)
        groups.append(rows.groups)
        events.append(np.stack([*rows.times, packed]))
        for column, j in columns.items():
            values[column].append(_mark_nulls(rows, j))
        lines += rows.lines
        rows_before += len(rows)
    if values:
        _write_values(files.values(name), values)
    of_rows = np.concatenate(events, axis=1)
    labels = [of_rows[2] >> (FIRST_LABEL + number) & 1 for number in range(len(spec.labels))]
    write_array(files.hours(name), count_hours(of_rows[1], np.stack(labels)))
    array = np.empty((4, rows_before), np.int64)
    for group, key in enumerate(np.concatenate(groups, axis=1)):
        order = order_by_key(key)
        for column, target in zip((key, *of_rows), array, strict=True):
            np.take(column, order, out=target, mode="clip")
        write_array(files.events(name, group), array)
    return rows_before


def order_by_key(key: np.ndarray) -> np.ndarray:
    """Return the stable order of hashes, int64 [n]; faster than a sort, as most occur often."""
    numbers, keys = np.empty(len(key), np.int32), np.empty(len(key), np.int64)
    keys = keys[
        : _number_keys(key, np.full(2 << len(key).bit_length(), -1, np.int32), keys, numbers)
    ]
    rising = np.argsort(keys)
    counts = np.bincount(numbers, minlength=len(keys))[rising]
    begins = np.empty(len(keys), np.int64)
    begins[rising] = np.cumsum(counts) - counts
    order = np.empty(len(key), np.int64)
    _place_rows(numbers, begins, order)
    return order


@compiled()
def _number_keys(key: np.ndarray, table: np.ndarray, keys: np.ndarray, numbers: np.ndarray) -> int:
    """Number hashes in the order in which they occur; return how many there are.

    Args:
        key: int64 [n], the hashes.
        table: int32, filled with -1, of a power of two that is larger than n.
        keys: int64 [n], filled with the distinct hashes.
        numbers: int32 [n], filled with the number of each hash.
    """
    used, mask = 0, np.uint64(len(table) - 1)
    for i in range(len(key)):
        at = np.uint64(key[i]) & mask
        while table[at] >= 0 and keys[table[at]] != key[i]:
            at = (at + np.uint64(1)) & mask
        if table[at] < 0:
            table[at], keys[used] = used, key[i]
            used += 1
        numbers[i] = table[at]
    return used


@compiled()
def _place_rows(numbers: np.ndarray, begins: np.ndarray, order: np.ndarray) -> None:
    for i in range(len(numbers)):
        order[begins[numbers[i]]] = i
        begins[numbers[i]] += 1


def history_columns(spec: FeatureSpec) -> list[str]:
    """Return the categorical columns of which there are histories."""
    return list(dict.fromkeys(name for rule in spec.histories for name in rule.columns))


def _mark_nulls(rows: RawRows, j: int) -> pa.Array:
    """Return the values of a categorical column, null where missing."""
    values, missing = rows.categorical[j], is_missing(rows.categorical_missing, j)
    array = values if isinstance(values, pa.Array) else to_arrow(np.asarray(values))
    return pc.if_else(mask_to_arrow(~missing), array, pa.scalar(None, array.type))


def _write_values(path: Path, values: dict[str, list[pa.Array]]) -> None:
    table = pa.table(
        {name: pa.chunked_array(pieces).dictionary_encode() for name, pieces in values.items()}
    )
    table = table.unify_dictionaries().combine_chunks()
    with atomic_path(path) as temporary, pa.ipc.new_file(temporary, table.schema) as file:
        file.write_table(table)


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
