"""Check rows and build blocks from them with torch's operators: on a GPU, or in tests on a CPU."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from nvt_torchrec.nvt_loader.cpu.blocks import (
    FlatBlock,
    JaggedBlock,
    ShardRows,
    count_float_columns,
    make_empty_block,
    split_floats,
)
from nvt_torchrec.nvt_loader.parquet.checks import Checker
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset

#: The offsets and the elements of a list column.
ListColumn = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class DeviceRows:
    """Consecutive rows on a device.

    Attributes:
        rows: The number of rows.
        floats: float32 [rows, columns]: labels, weight, log-Q correction, dense.
        ids: int32 or int64 [rows, categorical columns that are not multi-hot].
        lists: For each multi-hot column, its offsets, int32 [rows + 1], and its ids.
    """

    rows: int
    floats: torch.Tensor
    ids: torch.Tensor
    lists: tuple[ListColumn, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors on the device."""
        return [self.floats, self.ids, *itertools.chain.from_iterable(self.lists)]

    def slice(self, begin: int, end: int, elements: Sequence[tuple[int, int]]) -> DeviceRows:
        """Return rows [begin, end) as a view.

        Args:
            begin, end: The rows.
            elements: For each list column, the range of its elements that belong to these rows.
        """
        lists = []
        for (offsets, values), (first, last) in zip(self.lists, elements, strict=True):
            lists.append((offsets[begin : end + 1] - first, values[first:last]))
        return DeviceRows(end - begin, self.floats[begin:end], self.ids[begin:end], tuple(lists))

    def clone(self) -> DeviceRows:
        """Copy the rows, except for the offsets."""
        lists = tuple((offsets, values.clone()) for offsets, values in self.lists)
        return DeviceRows(self.rows, self.floats.clone(), self.ids.clone(), lists)

    def split(self, sizes: Sequence[int]) -> list[DeviceRows]:
        """Split the rows into consecutive parts of these sizes, each in separate memory."""
        bounds = itertools.accumulate(sizes, initial=0)
        parts = slice_rows([(self, begin, end) for begin, end in itertools.pairwise(bounds)])
        return [part.clone() for part in parts]


def slice_rows(wanted: Sequence[tuple[DeviceRows, int, int]]) -> list[DeviceRows]:
    """Return a view of rows [begin, end) of each item of ``wanted``.

    With lists this waits for the device, but only once for all items.
    """
    bounds = []
    for rows, begin, end in wanted:
        for offsets, _ in rows.lists:
            bounds += [offsets[begin], offsets[end]]
    elements: Iterator[tuple[int, int]] = iter(())
    if bounds:
        elements = iter(torch.stack(bounds).view(-1, 2).tolist())
    parts = []
    for rows, begin, end in wanted:
        own = list(itertools.islice(elements, len(rows.lists)))
        parts.append(rows.slice(begin, end, own))
    return parts


@dataclasses.dataclass(eq=False)
class DeviceRowGroup:
    """A row group that is decoded together with the other row groups of its block.

    Attributes:
        number: Its index in the order of the files.
        decoded: Its rows; None until they are decoded.
        reading: The task that decodes it; None until decoding begins.
    """

    number: int
    decoded: DeviceRows | None = None
    reading: concurrent.futures.Future | None = None

    def get_rows(self) -> DeviceRows:
        """Return the rows, which must have been decoded."""
        assert self.decoded is not None, f"row group {self.number} is not decoded"
        return self.decoded


@dataclasses.dataclass(frozen=True)
class DeviceRowGroupSlice:
    """Rows [begin, end) of a row group, which may not be decoded yet."""

    group: DeviceRowGroup
    begin: int
    end: int

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.end - self.begin

    def slice(self, begin: int, end: int) -> DeviceRowGroupSlice:
        """Return rows [begin, end) of the slice."""
        return DeviceRowGroupSlice(self.group, self.begin + begin, self.begin + end)


def take_decoded_rows(parts: Sequence[DeviceRowGroupSlice]) -> list[DeviceRows]:
    """Return the rows of slices, whose row groups must have been decoded."""
    return slice_rows([(part.group.get_rows(), part.begin, part.end) for part in parts])


def build_on_device(
    dataset: Dataset,
    chunks: list[DeviceRows],
    sources: list[ShardRows],
    steps: int,
    batch: int,
    device: torch.device,
) -> FlatBlock | JaggedBlock:
    """Build the block of ``steps`` batches from the rows of all sources, on ``device``.

    Concatenated, ``chunks`` are the rows of all sources in the order of ``sources``.
    """
    if not chunks:
        return make_empty_block(dataset, steps, device)
    # The index of each row of the block in the concatenated chunks.
    row_numbers = torch.empty((steps, batch), dtype=torch.int64, device=device)
    source_begin = 0
    for source in sources:
        rows = steps * source.width
        if source.order is None:
            order = torch.arange(source_begin, source_begin + rows, device=device)
        else:
            order = torch.from_numpy(source.order()).to(device) + source_begin
        own = order.view(steps, -1)[:, source.begin : source.end]
        row_numbers[:, source.first : source.first + own.shape[1]] = own
        source_begin += rows
    return arrange_rows(dataset, chunks, row_numbers)


def arrange_rows(
    dataset: Dataset, chunks: list[DeviceRows], row_numbers: torch.Tensor
) -> FlatBlock | JaggedBlock:
    """Build a block from the rows of chunks.

    Args:
        dataset: The data.
        chunks: The chunks, at least one.
        row_numbers: int64 [steps, batch], the index of each row of the block in the concatenated
            chunks.
    """
    floats = torch.cat([chunk.floats for chunk in chunks])
    ids = torch.cat([chunk.ids for chunk in chunks])
    flat_numbers = row_numbers.view(-1)
    parts = [
        part[flat_numbers] for part in floats.split(count_float_columns(dataset.schema), dim=1)
    ]
    views = split_floats(dataset, len(row_numbers), parts)
    if not dataset.jagged:
        return FlatBlock(*views, ids[row_numbers].transpose(1, 2).contiguous())
    values, lengths, offsets, bounds = _arrange_lists(dataset, chunks, ids, row_numbers)
    return JaggedBlock(*views, values, lengths, offsets, bounds)


def _arrange_lists(
    dataset: Dataset, chunks: list[DeviceRows], ids: torch.Tensor, row_numbers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Put the ids of all columns into the order of a block.

    First concatenate them, column by column, to a pool, in which the ids of a row and column are a
    range. Then list the starts and lengths of these ranges in the order of the block, which give
    the index in the pool of each of the block's ids.

    Returns:
        The values, lengths, offsets and bounds of a :class:`JaggedBlock`.
    """
    steps, batch = row_numbers.shape
    schema = dataset.schema
    device = ids.device
    pool = []
    lengths_per_column = []
    starts_per_column = []
    pool_size = 0
    num_single = 0  # columns without lists so far
    for name in schema.categorical:
        if name in schema.multi_hot:
            list_index = schema.multi_hot.index(name)
            starts_per_chunk = []
            lengths_per_chunk = []
            for chunk in chunks:
                offsets, values = chunk.lists[list_index]
                starts_per_chunk.append(offsets[:-1].long() + pool_size)
                lengths_per_chunk.append(offsets.diff())
                pool.append(values)
                pool_size += len(values)
            starts_per_column.append(torch.cat(starts_per_chunk)[row_numbers])
            lengths_per_column.append(torch.cat(lengths_per_chunk)[row_numbers])
        else:
            values = ids[:, num_single]
            num_single += 1
            starts_per_column.append(row_numbers + pool_size)
            lengths_per_column.append(torch.ones_like(row_numbers, dtype=torch.int32))
            pool.append(values)
            pool_size += len(values)
    starts = torch.stack(starts_per_column, dim=1).view(-1)
    lengths = torch.stack(lengths_per_column, dim=1).view(-1)
    ends = lengths.cumsum(0)  # in the block's ids; int64
    num_ids = int(ends[-1])  # waits for the device, but only in the loader's thread
    # Id i of the block is at index i + (start of its range in the pool - its begin in the block).
    shifts = starts - (ends - lengths)
    index = torch.repeat_interleave(shifts, lengths, output_size=num_ids)
    index += torch.arange(num_ids, device=device)
    bounds = torch.cat([ends.new_zeros(1), ends])
    begins = bounds[:-1].view(steps, -1)
    step_ends = bounds[begins.shape[1] :: begins.shape[1]]
    offsets = torch.cat([begins, step_ends[:, None]], dim=1) - begins[:, :1]
    return (
        torch.cat(pool)[index],
        lengths.view(steps, -1).to(torch.int32),
        offsets.to(torch.int32),
        bounds[::batch].tolist(),
    )


class DeviceChecker:
    """Checks rows on their device by reductions, and reads back only a flag per column."""

    def __init__(self, dataset: Dataset, device: torch.device) -> None:
        self._dataset = dataset
        self._host = Checker(dataset)
        schema = dataset.schema
        # Indices among the categorical columns.
        self._lists = [schema.categorical.index(name) for name in schema.multi_hot]
        self._single = [i for i in range(len(schema.categorical)) if i not in self._lists]
        sizes = [schema.table_sizes[i] for i in self._single]
        self._sizes = torch.tensor(sizes, dtype=torch.int64, device=device)
        self._signed = torch.from_numpy(self._host.signed).to(device)

    def check(self, rows: DeviceRows, where: str) -> DeviceRows:
        """Check rows, and return them with their ids as int32.

        Args:
            rows: Rows with ids as int32 or int64.
            where: The name of the rows' file, for errors.

        Raises:
            SchemaError: A value is infinite or NaN, a label is outside [0, 1], a weight is
                negative, or an id is outside its table.
        """
        schema = self._dataset.schema
        num_floats = len(schema.floats)
        num_labels = len(schema.labels)
        bad_floats = ~rows.floats.isfinite().all(dim=0)
        bad_floats |= (rows.floats < 0).any(dim=0) & ~self._signed
        bad_floats[:num_labels] |= (rows.floats[:, :num_labels] > 1).any(dim=0)
        bad_ids = ((rows.ids < 0) | (rows.ids >= self._sizes)).any(dim=0)
        flags = [bad_floats, bad_ids]
        for i, (_, values) in zip(self._lists, rows.lists, strict=True):
            flags.append(((values < 0) | (values >= schema.table_sizes[i])).any().view(1))
        # The values of each column and its index in the schema, in the order of the flags.
        columns = [(rows.floats[:, i], i) for i in range(num_floats)]
        for values, i in zip(rows.ids.unbind(1), self._single, strict=True):
            columns.append((values, num_floats + i))
        for (_, values), i in zip(rows.lists, self._lists, strict=True):
            columns.append((values, num_floats + i))
        # One transfer for all flags. It waits for the device, but only in the loader's thread.
        # Flagged columns are copied to the host, whose check raises the error.
        bad = torch.cat(flags).cpu().numpy()
        for k in np.flatnonzero(bad).tolist():
            values, number = columns[k]
            self._host.check(values.contiguous().cpu().numpy(), number, where)
        narrow = tuple((offsets, values.to(torch.int32)) for offsets, values in rows.lists)
        return DeviceRows(rows.rows, rows.floats, rows.ids.to(torch.int32), narrow)
