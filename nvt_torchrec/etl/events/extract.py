"""Read the keys, times, labels and amounts of a log's rows, and write them by block and time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import mark_begins, mask_to_arrow, to_arrow, to_numpy
from nvt_torchrec.base.files.atomic import atomic_path, together
from nvt_torchrec.base.files.mapping import write_array
from nvt_torchrec.base.freed_memory import release_memory
from nvt_torchrec.clicklog.readers.log_format import Block, read_block_chunks
from nvt_torchrec.etl.events.event_files import EventFiles
from nvt_torchrec.etl.row_additions import NO_ADDITIONS, RowAdditions
from nvt_torchrec.etl.units.hours import count_hours
from nvt_torchrec.etl.units.split_pass import CHUNK_BYTES
from nvt_torchrec.etl.units.unit_plan import DividedBlock, block_name
from nvt_torchrec.etl.units.writing import choose_splits
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.spec_variants import keep_events_only
from nvt_torchrec.formats.rows import RawRows, is_missing
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.workflows.event_groups import EVENT, FIRST_LABEL, TRAIN, get_history_bit

#: About how many rows are read until freed memory is returned to the operating system.
_RELEASED_ROWS = 1 << 19


def flag_type(spec: FeatureSpec) -> np.dtype:
    """Return the smallest unsigned type that has room for all flag bits."""
    return np.min_scalar_type(2 ** get_history_bit(spec, len(spec.histories)) - 1)


def extract(
    block: Block,
    spec: FeatureSpec,
    files: EventFiles,
    *,
    train: bool,
    max_bad_rows: int,
    additions: RowAdditions = NO_ADDITIONS,
) -> int:
    """Write the events of a block, unless they exist; return the number of events written.

    Args:
        block: The block.
        spec: The columns.
        files: The files that are written.
        train: Whether its rows are for training; ignored for a :class:`DividedBlock`, which has
            rows of several splits.
        max_bad_rows: The maximum number of malformed rows that are left out and are no events; 0:
            a malformed row is an error.
        additions: The labels, negatives and tables that are added to the rows.

    Raises:
        BadRowError: A row is malformed.
        BadInputError: The block cannot be read.
        OutputError: The directory cannot be written.
    """
    # The engine may have written them while counting, or an earlier process.
    if files.times(block_name(block)).exists():
        return 0
    # Without quarantine a malformed row ends the run, so the columns of the events suffice; with
    # it, all columns decide which rows count.
    read = spec if max_bad_rows else keep_events_only(spec)
    extractor = BlockExtractor(block, read, files, train=train)
    pieces = read_block_chunks(block, read, max_bad_rows=max_bad_rows, chunk_bytes=CHUNK_BYTES)
    tables = additions.tables
    for rows in additions.add_rows(pieces, block, read):
        extractor.add(tables.join(rows, read) if tables else rows)
    return extractor.write()


class BlockExtractor:
    """Collects the events of a block's rows, and writes them.

    Args:
        block: The block.
        spec: The columns of the rows.
        files: The files that are written.
        train: See :func:`extract`.
    """

    def __init__(self, block: Block, spec: FeatureSpec, files: EventFiles, *, train: bool) -> None:
        self._block = block
        self._spec = spec
        self._files = files
        self._train = train
        self._name = block_name(block)
        self._lines = 0
        self._rows = [0]
        names = spec.history_columns
        self._columns = {name: spec.categorical_names.index(name) for name in names}
        self._keys: list[list[pa.Array]] = [[] for _ in spec.row_keys]
        self._times = [np.empty((1 + has_delay(spec), 0), np.int64)]
        self._flags = [np.empty(0, flag_type(spec))]
        self._amounts = [np.empty((len(spec.amounts), 0))]
        self._values: dict[str, list[pa.Array]] = {name: [] for name in names}

    def take(self, pieces: Iterable[RawRows]) -> Iterator[RawRows]:
        """Add the events of rows, and yield the rows without keys and amounts."""
        for rows in pieces:
            self.add(rows)
            yield dataclasses.replace(rows, groups=None, amounts=None)

    def add(self, rows: RawRows) -> None:
        """Add the events of the next rows."""
        assert rows.groups is not None
        assert rows.times is not None
        # Copies that are as small as possible: a view would keep the memory of the whole piece.
        for keys, row_keys in zip(self._keys, rows.groups, strict=True):
            keys.append(to_arrow(row_keys).dictionary_encode())
        self._times.append(rows.times[: len(self._times[0])].copy())
        if rows.amounts is not None and len(rows.amounts):
            self._amounts.append(rows.amounts.copy())
        self._flags.append(self._make_flags(rows))
        for name, j in self._columns.items():
            self._values[name].append(_mark_nulls(rows, j).dictionary_encode())
        self._lines += rows.lines
        self._rows.append(self._rows[-1] + len(rows))
        if self._rows[-1] // _RELEASED_ROWS > self._rows[-2] // _RELEASED_ROWS:
            # The small copies lie between freed pieces, which glibc therefore does not return by
            # itself. With two blocks of narrow rows, that was half a gigabyte.
            release_memory()

    def _make_flags(self, rows: RawRows) -> np.ndarray:
        """Return the flags of rows, unsigned [n]."""
        spec = self._spec
        flags = np.full(len(rows), 1 << EVENT, flag_type(spec))
        if isinstance(self._block, DividedBlock):
            flags |= choose_splits(rows, self._block, self._lines) == SPLITS.index("train")
        else:
            flags |= self._train
        for number, label in enumerate(rows.labels):
            flags |= label.astype(flags.dtype) << (FIRST_LABEL + number)
        for number, rule in enumerate(spec.histories):
            chosen = rows.labels[spec.labels.index(rule.where)] if rule.where else np.uint8(1)
            flags |= np.asarray(chosen, flags.dtype) << get_history_bit(spec, number)
        if rows.drawn is not None:  # negatives are rows, but no events
            flags[rows.drawn] &= 1 << TRAIN
        return flags

    def write(self) -> int:
        """Write the events; return their number. Raises :class:`OutputError`."""
        name = self._name
        spec = self._spec
        files = self._files
        times = np.concatenate(self._times, axis=1)
        flags = np.concatenate(self._flags)
        # Return the memory of the pieces, or they would be in memory twice.
        self._times.clear()
        self._flags.clear()
        release_memory()
        with together():
            order: slice | np.ndarray = slice(None)
            if not is_sorted(times[-1]):
                order = np.argsort(times[-1], kind="stable")
                write_array(files.order(name), order)
                times = times[:, order]
                flags = flags[order]
            if not is_sorted(times[0]):
                write_array(files.time_order(name), np.argsort(times[0], kind="stable"))
            for group, keys in enumerate(self._keys):
                distinct, codes = code_keys(keys)
                write_array(files.block_keys(name, group), distinct)
                write_array(files.codes(name, group), codes[order])
                keys.clear()  # before the memory for the next group is needed
            if self._values:
                _write_values(files.values(name), self._values)
                self._values.clear()
            happened = flags >> EVENT != 0
            event_flags = flags[happened]
            bits = range(FIRST_LABEL, FIRST_LABEL + len(spec.labels))
            labels = np.stack([event_flags >> bit & 1 for bit in bits])
            write_array(files.hours(name), count_hours(times[-1, happened], labels))
            if spec.amounts:
                amounts = np.concatenate(self._amounts, axis=1)
                write_array(files.amounts(name), amounts[:, order])
            write_array(files.flags(name), flags)
            write_array(files.pieces(name), np.array(self._rows))
            # The last file: it marks the events of the block as complete, see extract.
            write_array(files.times(name), times)
        release_memory()
        return len(flags)


def code_keys(pieces: Sequence[pa.DictionaryArray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct keys of pieces, and the index of each value's key.

    Returns:
        The keys, int64 [keys], ascending; the indices, int32 [n].
    """
    dictionaries = [to_numpy(piece.dictionary) for piece in pieces]
    every = np.concatenate([np.empty(0, np.int64), *dictionaries])
    every.sort()  # in place: np.unique would copy the keys, which take most of a block's memory
    keys = every[mark_begins(every)]
    del every
    codes = np.empty(sum(map(len, pieces)), np.int32)
    begin = 0
    for piece, dictionary in zip(pieces, dictionaries, strict=True):
        # Sorted keys are found much faster, because each is near the previous one.
        order = np.argsort(dictionary)
        code_of_index = np.empty(len(dictionary), np.int32)
        code_of_index[order] = np.searchsorted(keys, dictionary[order])
        codes[begin : begin + len(piece)] = code_of_index[to_numpy(piece.indices)]
        begin += len(piece)
    return keys, codes


def has_delay(spec: FeatureSpec) -> bool:
    """Return whether events are known later than they happen."""
    return bool(spec.events and (spec.events.delay or spec.events.source or spec.label_window))


def is_sorted(values: np.ndarray) -> bool:
    """Return whether values [n] are in ascending order."""
    return not (values[1:] < values[:-1]).any()


def _mark_nulls(rows: RawRows, j: int) -> pa.Array:
    """Return the values of a categorical column, null where missing."""
    values = rows.categorical[j]
    missing = is_missing(rows.categorical_missing, j)
    array = values if isinstance(values, pa.Array) else to_arrow(np.asarray(values))
    # An array may begin at an offset in its buffers, and so must the bits that say which are valid.
    is_valid = np.append(np.zeros(array.offset, np.bool_), ~missing)
    validity = mask_to_arrow(is_valid).buffers()[1]
    buffers = [validity, *array.buffers()[1:]]
    return pa.Array.from_buffers(array.type, len(array), buffers, offset=array.offset)


def _join(pieces: list[pa.DictionaryArray]) -> pa.DictionaryArray:
    joined = pa.chunked_array(pieces).unify_dictionaries().combine_chunks()
    return joined if isinstance(joined, pa.DictionaryArray) else joined.chunk(0)


def _write_values(path: Path, values: dict[str, list[pa.Array]]) -> None:
    table = pa.table({name: _join(pieces) for name, pieces in values.items()})
    with atomic_path(path) as temporary, pa.ipc.new_file(temporary, table.schema) as file:
        file.write_table(table)
