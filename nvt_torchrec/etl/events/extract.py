"""Read the keys, times and labels of a log's rows, and sort those of each block by time."""

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
from nvt_torchrec.workflows.event_groups import EVENT, FIRST_LABEL, TRAIN, history_bit

#: About how many rows are taken until memory is given back.
_RELEASED_ROWS = 1 << 19


def flag_type(spec: FeatureSpec) -> np.dtype:
    """Return the type of flags, which has room for all bits."""
    return np.min_scalar_type(2 ** history_bit(spec, len(spec.histories)) - 1)


def extract(
    block: Block,
    spec: FeatureSpec,
    files: EventFiles,
    *,
    train: bool,
    max_bad_rows: int,
    additions: RowAdditions = NO_ADDITIONS,
) -> int:
    """Write the events of a block, unless they are there; return how many are written.

    Args:
        block: The block.
        spec: The columns.
        files: Where they are written.
        train: Whether its rows are for training, unless they are divided.
        max_bad_rows: How many malformed rows may be left out, which are no events; 0: one is an
            error.
        additions: What is added to the rows.

    Raises:
        BadRowError: A row is malformed.
        BadInputError: The block cannot be read.
        OutputError: The directory cannot be written.
    """
    if files.times(block_name(block)).exists():  # by an engine that counts, or an earlier process
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
    """Takes the events of a block from its rows, and writes them.

    Args:
        block: The block.
        spec: The columns of the rows.
        files: Where the events are written.
        train: Whether the rows are for training, unless they are divided.
    """

    def __init__(self, block: Block, spec: FeatureSpec, files: EventFiles, *, train: bool) -> None:
        self._block, self._spec, self._files, self._train = block, spec, files, train
        self._name, self._lines, self._rows = block_name(block), 0, [0]
        names = spec.history_columns
        self._columns = {name: spec.categorical_names.index(name) for name in names}
        self._keys: list[list[pa.Array]] = [[] for _ in spec.row_keys]
        self._times = [np.empty((1 + has_delay(spec), 0), np.int64)]
        self._flags = [np.empty(0, flag_type(spec))]
        self._amounts = [np.empty((len(spec.amounts), 0))]
        self._values: dict[str, list[pa.Array]] = {name: [] for name in names}

    def take(self, pieces: Iterable[RawRows]) -> Iterator[RawRows]:
        """Take the events of rows, and yield the rows without keys and amounts."""
        for rows in pieces:
            self.add(rows)
            yield dataclasses.replace(rows, groups=None, amounts=None)

    def add(self, rows: RawRows) -> None:
        """Take the events of the next rows."""
        assert rows.groups is not None
        assert rows.times is not None
        # copies, as small as can be: what is kept of a piece keeps its memory from the next one
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
            # What stays of each piece is small, and lies between what is freed of it, which glibc
            # does not give back by itself: half a gigabyte in two blocks of narrow rows.
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
            flags |= np.asarray(chosen, flags.dtype) << history_bit(spec, number)
        if rows.drawn is not None:  # negatives did not happen
            flags[rows.drawn] &= 1 << TRAIN
        return flags

    def write(self) -> int:
        """Write the events; return how many there are. Raises :class:`OutputError`."""
        name, spec, files = self._name, self._spec, self._files
        times, flags = np.concatenate(self._times, axis=1), np.concatenate(self._flags)
        self._times.clear()
        self._flags.clear()
        release_memory()  # of the pieces, or that of a whole block would come on top
        with together():
            order: slice | np.ndarray = slice(None)
            if not is_rising(times[-1]):
                order = np.argsort(times[-1], kind="stable")
                write_array(files.order(name), order)
                times, flags = times[:, order], flags[order]
            if not is_rising(times[0]):
                write_array(files.time_order(name), np.argsort(times[0], kind="stable"))
            for group, keys in enumerate(self._keys):
                distinct, codes = code_keys(keys)
                write_array(files.block_keys(name, group), distinct)
                write_array(files.codes(name, group), codes[order])
                keys.clear()  # or the next group's would come on top
            if self._values:
                _write_values(files.values(name), self._values)
                self._values.clear()
            happened = flags >> EVENT != 0
            known, event_flags = times[-1, happened], flags[happened]
            labels = [
                event_flags >> (FIRST_LABEL + number) & 1 for number in range(len(spec.labels))
            ]
            write_array(files.hours(name), count_hours(known, np.stack(labels)))
            if spec.amounts:
                amounts = np.concatenate(self._amounts, axis=1)
                write_array(files.amounts(name), amounts[:, order])
            write_array(files.flags(name), flags)
            write_array(files.pieces(name), np.array(self._rows))
            write_array(files.times(name), times)  # the last one in place
        release_memory()
        return len(flags)


def code_keys(pieces: Sequence[pa.DictionaryArray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the different keys of some pieces, and of each value the index of its key.

    Returns:
        int64 [keys], rising; int32 [n].
    """
    dictionaries = [to_numpy(piece.dictionary) for piece in pieces]
    every = np.concatenate([np.empty(0, np.int64), *dictionaries])
    every.sort()  # np.unique would copy them, and these are most of a block's memory
    keys = every[mark_begins(every)]
    del every
    codes = np.empty(sum(map(len, pieces)), np.int32)
    begin = 0
    for piece, dictionary in zip(pieces, dictionaries, strict=True):
        # sorted ones are found much faster, as each is near the one before
        order = np.argsort(dictionary)
        code_of_index = np.empty(len(dictionary), np.int32)
        code_of_index[order] = np.searchsorted(keys, dictionary[order])
        codes[begin : begin + len(piece)] = code_of_index[to_numpy(piece.indices)]
        begin += len(piece)
    return keys, codes


def has_delay(spec: FeatureSpec) -> bool:
    """Return whether events are known later than they happen."""
    return bool(spec.events and (spec.events.delay or spec.events.source or spec.label_window))


def is_rising(values: np.ndarray) -> bool:
    """Return whether no value [n] is less than the one before."""
    return not (values[1:] < values[:-1]).any()


def _mark_nulls(rows: RawRows, j: int) -> pa.Array:
    """Return the values of a categorical column, null where missing."""
    values, missing = rows.categorical[j], is_missing(rows.categorical_missing, j)
    array = values if isinstance(values, pa.Array) else to_arrow(np.asarray(values))
    there = mask_to_arrow(np.append(np.zeros(array.offset, np.bool_), ~missing)).buffers()[1]
    buffers = [there, *array.buffers()[1:]]
    return pa.Array.from_buffers(array.type, len(array), buffers, offset=array.offset)


def _join(pieces: list[pa.DictionaryArray]) -> pa.DictionaryArray:
    joined = pa.chunked_array(pieces).unify_dictionaries().combine_chunks()
    return joined if isinstance(joined, pa.DictionaryArray) else joined.chunk(0)


def _write_values(path: Path, values: dict[str, list[pa.Array]]) -> None:
    table = pa.table({name: _join(pieces) for name, pieces in values.items()})
    with atomic_path(path) as temporary, pa.ipc.new_file(temporary, table.schema) as file:
        file.write_table(table)
