"""Read the keys, times and labels of a log's rows, and sort those of each block by time."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import mask_to_arrow, to_arrow, to_numpy
from nvt_torchrec.base.files.atomic import atomic_path, together
from nvt_torchrec.base.files.mapping import map_array, write_array
from nvt_torchrec.clicklog.readers.log_format import Block, read_block_chunks
from nvt_torchrec.etl.events.label_rates import count_hours
from nvt_torchrec.etl.units.split_pass import CHUNK_BYTES
from nvt_torchrec.etl.units.unit_plan import DividedBlock
from nvt_torchrec.etl.units.writing import choose
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.file_formats import INPUT_FORMATS
from nvt_torchrec.formats.rows import RawRows, is_missing
from nvt_torchrec.formats.splits import SPLITS

#: The bits of an event's flags: whether it is a row for training, and whether it is a row at all,
#: not one of the events that a history keeps of earlier days; then a bit for each label, and one
#: for each history that has the event.
TRAIN, EVENT, FIRST_LABEL = 0, 1, 2


def history_bit(spec: FeatureSpec, number: int) -> int:
    """Return the bit of the events of a history."""
    return FIRST_LABEL + len(spec.labels) + number


def flag_type(spec: FeatureSpec) -> np.dtype:
    """Return the type of flags, which has room for all bits."""
    return np.min_scalar_type(2 ** history_bit(spec, len(spec.histories)) - 1)


@dataclasses.dataclass(frozen=True)
class EventFiles:
    """The files of a run's events below its state.

    The arrays of a block are in the order in which its events are known; ``order`` is there unless
    that is the order of the rows, and ``time_order`` unless it is that of their times.
    """

    directory: Path

    def times(self, name: str) -> Path:
        """Int64 [1 or 2, n], microseconds: when an event happened; from when it is known."""
        return self.directory / f"{name}.times.npy"

    def flags(self, name: str) -> Path:
        """Unsigned [n], see :data:`TRAIN`."""
        return self.directory / f"{name}.flags.npy"

    def order(self, name: str) -> Path:
        """Int64 [n], the number of the row of each event in the block."""
        return self.directory / f"{name}.order.npy"

    def time_order(self, name: str) -> Path:
        """Int64 [2, n], the times, rising, and the places of the events."""
        return self.directory / f"{name}.by_time.npy"

    def block_keys(self, name: str, group: int) -> Path:
        """Int64 [keys], the different keys of a block, 0 for none."""
        return self.directory / f"{name}.{group}.keys.npy"

    def codes(self, name: str, group: int) -> Path:
        """Int32 [n], the place of each event's key among those of the block."""
        return self.directory / f"{name}.{group}.codes.npy"

    def numbers(self, name: str, group: int) -> Path:
        """Int32 [n], the number of each event's key in the group; -1 without a key."""
        return self.directory / f"{name}.{group}.numbers.npy"

    def sums(self, name: str, group: int) -> Path:
        """Integers [sums, n], what the events before each event sum up to."""
        return self.directory / f"{name}.{group}.sums.npy"

    def last(self, name: str, group: int) -> Path:
        """Int64 [n], the time of the last event before; only where it is wanted."""
        return self.directory / f"{name}.{group}.last.npy"

    def values(self, name: str) -> Path:
        """The columns of the histories, as dictionaries of values, in the order of the rows."""
        return self.directory / f"{name}.arrow"

    def ids(self, name: str) -> Path:
        """Int32 [columns of histories, n], their ids."""
        return self.directory / f"{name}.ids.npy"

    def hours(self, name: str) -> Path:
        """What :func:`.label_rates.count_hours` returns of the events of a block."""
        return self.directory / f"{name}.hours.npy"

    def keys(self, group: int) -> Path:
        """Int64 [keys], the keys of a group by their numbers: rising."""
        return self.directory / f"{group}.keys.npy"

    def row_keys(self, group: int) -> Path:
        """Int64 [keys], the keys of a group's rows, rising."""
        return self.directory / f"{group}.row_keys.npy"

    def read_order(self, name: str) -> slice | np.ndarray:
        """Return the rows of a block's events; a slice of all if they are in the same order."""
        file = self.order(name)
        return map_array(file) if file.exists() else slice(None)


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
    if files.times(name).exists():  # by an earlier process
        return map_array(files.times(name)).shape[1]
    # where no row is left out, none is that has a wrong value in another column
    read = spec if reject else narrow(spec)
    lines = 0
    keys, times, flags = [], [], []
    columns = {name: read.categorical_names.index(name) for name in history_columns(spec)}
    values: dict[str, list[pa.Array]] = {name: [] for name in columns}
    for rows in read_block_chunks(block, read, reject=reject, chunk_bytes=CHUNK_BYTES):
        assert rows.groups is not None
        assert rows.times is not None
        keys.append(rows.groups)
        times.append(rows.times)
        flags.append(_make_flags(rows, block, split, spec, lines))
        for column, j in columns.items():
            values[column].append(_mark_nulls(rows, j))
        lines += rows.lines
    with together():
        if values:
            _write_values(files.values(name), values)
        return _write_events(name, spec, files, keys, times, flags)


def _write_events(
    name: str,
    spec: FeatureSpec,
    files: EventFiles,
    keys: Sequence[np.ndarray],
    times: Sequence[np.ndarray],
    flags: Sequence[np.ndarray],
) -> int:
    happened, known = np.concatenate([np.empty((2, 0), np.int64), *times], axis=1)
    flag = np.concatenate([np.empty(0, flag_type(spec)), *flags])
    order: slice | np.ndarray = slice(None)
    if not is_rising(known):
        order = np.argsort(known, kind="stable")
        write_array(files.order(name), order)
        happened, known, flag = happened[order], known[order], flag[order]
    if not is_rising(happened):
        by_time = np.argsort(happened, kind="stable")
        write_array(files.time_order(name), np.stack([happened[by_time], by_time]))
    for group in range(len(spec.groups)):
        pieces = [to_arrow(piece[group]) for piece in keys]
        coded = pa.chunked_array(pieces, pa.int64()).combine_chunks().dictionary_encode()
        write_array(files.block_keys(name, group), to_numpy(coded.dictionary))
        write_array(files.codes(name, group), to_numpy(coded.indices)[order])
    labels = [flag >> (FIRST_LABEL + number) & 1 for number in range(len(spec.labels))]
    write_array(files.hours(name), count_hours(known, np.stack(labels)))
    write_array(files.flags(name), flag)
    # the last one in place
    write_array(files.times(name), np.stack([happened, known] if has_delay(spec) else [happened]))
    return len(known)


def has_delay(spec: FeatureSpec) -> bool:
    """Return whether events are known later than they happen."""
    return bool(spec.events and (spec.events.delay or spec.events.source))


def is_rising(values: np.ndarray) -> bool:
    """Return whether no value [n] is less than the one before."""
    return not (values[1:] < values[:-1]).any()


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


def _make_flags(
    rows: RawRows, block: Block, split: str, spec: FeatureSpec, lines: int
) -> np.ndarray:
    """Return the flags of rows, unsigned [n]."""
    flags = np.full(len(rows), 1 << EVENT, flag_type(spec))
    if isinstance(block, DividedBlock):
        flags |= choose(rows, block, lines) == SPLITS.index("train")
    else:
        flags |= split == "train"
    for number, label in enumerate(rows.labels):
        flags |= label.astype(flags.dtype) << (FIRST_LABEL + number)
    for number, rule in enumerate(spec.histories):
        chosen = rows.labels[spec.labels.index(rule.where)] if rule.where else np.uint8(1)
        flags |= np.asarray(chosen, flags.dtype) << history_bit(spec, number)
    return flags
