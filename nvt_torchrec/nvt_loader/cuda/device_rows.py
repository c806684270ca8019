"""Check rows and build blocks of them with torch's operators, on a GPU, and in tests on a CPU."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from nvt_torchrec.nvt_loader.cpu.blocks import (
    FlatBlock,
    JaggedBlock,
    ShardRows,
    empty_block,
    float_views,
    float_widths,
)
from nvt_torchrec.nvt_loader.parquet.checks import Checker
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset

#: Offsets and elements of a list column.
ListColumn = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class DeviceRows:
    """Consecutive rows on a device.

    Attributes:
        rows: The number of rows.
        floats: float32 [rows, columns]: labels, weight, dense.
        ids: int [rows, categorical columns that are not multi-hot].
        lists: Per multi-hot column offsets (int32 [rows + 1]) and ids.
    """

    rows: int
    floats: torch.Tensor
    ids: torch.Tensor
    lists: tuple[ListColumn, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors on the device."""
        of_lists = [tensor for parts in self.lists for tensor in parts]
        return [self.floats, self.ids, *of_lists]

    def slice(self, begin: int, end: int, ends: Sequence[tuple[int, int]]) -> DeviceRows:
        """Return rows [begin, end), on the same memory; ``ends`` say where their elements begin and
        end in each list column."""
        lists = tuple(
            (offsets[begin : end + 1] - first, values[first:last])
            for (offsets, values), (first, last) in zip(self.lists, ends, strict=True)
        )
        return DeviceRows(end - begin, self.floats[begin:end], self.ids[begin:end], lists)

    def clone(self) -> DeviceRows:
        """Copy the rows, except for the offsets."""
        lists = tuple((offsets, values.clone()) for offsets, values in self.lists)
        return DeviceRows(self.rows, self.floats.clone(), self.ids.clone(), lists)

    def split(self, sizes: Sequence[int]) -> list[DeviceRows]:
        """Split the rows into consecutive parts of these sizes, each on memory of its own."""
        bounds = list(itertools.accumulate(sizes, initial=0))
        parts = slices([(self, *ends) for ends in itertools.pairwise(bounds)])
        return [part.clone() for part in parts]


def slices(wanted: Sequence[tuple[DeviceRows, int, int]]) -> list[DeviceRows]:
    """Return rows [begin, end) of each; with lists this waits for the device, once."""
    if not wanted or not wanted[0][0].lists:
        return [rows.slice(begin, end, ()) for rows, begin, end in wanted]
    bounds = [
        offsets[at]
        for rows, begin, end in wanted
        for offsets, _ in rows.lists
        for at in (begin, end)
    ]
    ends: list[tuple[int, int]] = torch.stack(bounds).view(-1, 2).tolist()
    columns = len(wanted[0][0].lists)
    return [
        rows.slice(begin, end, ends[i * columns : (i + 1) * columns])
        for i, (rows, begin, end) in enumerate(wanted)
    ]


@dataclasses.dataclass(eq=False)
class DeviceRowGroup:
    """A row group that is decoded with the others that the same block needs.

    Attributes:
        number: Its number in file order.
        decoded: Its rows, once they are decoded.
        reading: The task that decodes it, once there is one.
    """

    number: int
    decoded: DeviceRows | None = None
    reading: concurrent.futures.Future | None = None

    def decoded_rows(self) -> DeviceRows:
        """Return its rows, which must have been decoded."""
        assert self.decoded is not None, f"row group {self.number} is not decoded"
        return self.decoded


@dataclasses.dataclass(frozen=True)
class DeviceRowGroupSlice:
    """Rows [begin, end) of a row group, decoded or not yet."""

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


def decoded_rows(parts: Sequence[DeviceRowGroupSlice]) -> list[DeviceRows]:
    """Return the rows of slices whose row groups have been decoded."""
    return slices([(part.group.decoded_rows(), part.begin, part.end) for part in parts])


def build_on_device(
    dataset: Dataset,
    chunks: list[DeviceRows],
    sources: list[ShardRows],
    steps: int,
    batch: int,
    device: torch.device,
) -> FlatBlock | JaggedBlock:
    """Build the block of ``steps`` batches from the rows of all sources, on ``device``.

    ``chunks`` hold the rows of the first source, then those of the next, and so on.
    """
    if not chunks:
        return empty_block(dataset, steps, device)
    # for each row of a batch its number among the rows of all chunks
    where = torch.empty((steps, batch), dtype=torch.int64, device=device)
    base = 0
    for source in sources:
        rows = steps * source.width
        if source.order is None:
            order = torch.arange(base, base + rows, device=device)
        else:
            order = torch.from_numpy(source.order()).to(device) + base
        own = order.view(steps, -1)[:, source.begin : source.end]
        where[:, source.first : source.first + own.shape[1]] = own
        base += rows
    return arrange_rows(dataset, chunks, where)


def arrange_rows(
    dataset: Dataset, chunks: list[DeviceRows], where: torch.Tensor
) -> FlatBlock | JaggedBlock:
    """Build a block of the rows of some chunks.

    Args:
        dataset: The data.
        chunks: At least one.
        where: For each row of a batch its number among the rows of all chunks:
            int64 [steps, batch].
    """
    floats = torch.cat([chunk.floats for chunk in chunks])
    ids = torch.cat([chunk.ids for chunk in chunks])
    parts = [part[where.view(-1)] for part in floats.split(float_widths(dataset.schema), dim=1)]
    views = float_views(dataset, len(where), parts)
    if not dataset.jagged:
        return FlatBlock(*views, ids[where].transpose(1, 2).contiguous())
    values, lengths, offsets, bounds = _jagged(dataset, chunks, ids, where)
    return JaggedBlock(*views, values, lengths, offsets, bounds)


def _jagged(
    dataset: Dataset, chunks: list[DeviceRows], ids: torch.Tensor, where: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Concatenate the ids of all columns; each row of each column is a range of these.

    Returns:
        The values, lengths, offsets and bounds of a :class:`JaggedBlock`.
    """
    steps, batch = where.shape
    schema, device = dataset.schema, ids.device
    pool, lengths, starts = [], [], []
    size = single = 0
    for name in schema.categorical:
        if name in schema.multi_hot:
            k = schema.multi_hot.index(name)
            first = []
            for chunk in chunks:
                offsets, values = chunk.lists[k]
                first.append((offsets[:-1].long() + size, offsets.diff()))
                pool.append(values)
                size += len(values)
            starts.append(torch.cat([start for start, _ in first])[where])
            lengths.append(torch.cat([length for _, length in first])[where])
        else:
            values = ids[:, single]
            single += 1
            pool.append(values)
            starts.append(where + size)
            lengths.append(torch.ones_like(where, dtype=torch.int32))
            size += len(values)
    length = torch.stack(lengths, dim=1).view(-1)
    start = torch.stack(starts, dim=1).view(-1)
    ends = length.cumsum(0)  # int64
    total = int(ends[-1])  # waits: in the loader's own thread
    index = torch.repeat_interleave(start - ends + length, length, output_size=total)
    index += torch.arange(total, device=device)
    begins = torch.cat([ends.new_zeros(1), ends])
    by_step = begins[:-1].view(steps, -1)
    last = begins[by_step.shape[1] :: by_step.shape[1]]
    offsets = torch.cat([by_step, last[:, None]], dim=1) - by_step[:, :1]
    return (
        torch.cat(pool)[index],
        length.view(steps, -1).to(torch.int32),
        offsets.to(torch.int32),
        begins[::batch].tolist(),
    )


class DeviceChecker:
    """Checks rows on their device by reductions that the loader's thread reads back."""

    def __init__(self, dataset: Dataset, device: torch.device) -> None:
        self._dataset = dataset
        self._host = Checker(dataset)
        schema = dataset.schema
        self._single = [i for i, n in enumerate(schema.categorical) if n not in schema.multi_hot]
        self._lists = [schema.categorical.index(name) for name in schema.multi_hot]
        sizes = [schema.table_sizes[i] for i in self._single]
        self._sizes = torch.tensor(sizes, dtype=torch.int64, device=device)
        self._signed = torch.from_numpy(self._host.signed).to(device)

    def checked(self, rows: DeviceRows, where: str) -> DeviceRows:
        """Return the rows with their ids as int32. Raises :class:`SchemaError`.

        Args:
            rows: Rows with ids as int32 or int64.
            where: The name of the file that the rows are from.
        """
        schema = self._dataset.schema
        broken = ~rows.floats.isfinite().all(dim=0)
        broken |= (rows.floats < 0).any(dim=0) & ~self._signed
        labels = len(schema.labels)
        broken[:labels] |= (rows.floats[:, :labels] > 1).any(dim=0)
        outside = ((rows.ids < 0) | (rows.ids >= self._sizes)).any(dim=0)
        in_lists = [
            ((values < 0) | (values >= schema.table_sizes[i])).any().view(1)
            for i, (_, values) in zip(self._lists, rows.lists, strict=True)
        ]
        parts = [broken, outside, *in_lists]
        found = torch.cat(parts).cpu().numpy()  # waits, in the loader's thread
        ends = np.cumsum([len(broken), len(outside)])
        bad_floats, bad_ids, bad_lists = np.split(found, ends)
        for i in np.flatnonzero(bad_floats):
            self._host.check(rows.floats[:, i].contiguous().cpu().numpy(), int(i), where)
        first = len(schema.floats)
        wrong = [(rows.ids[:, i], self._single[i]) for i in np.flatnonzero(bad_ids)]
        wrong += [(rows.lists[k][1], self._lists[k]) for k in np.flatnonzero(bad_lists)]
        for values, column in wrong:
            self._host.check(values.cpu().numpy(), first + column, where)
        narrow = tuple((offsets, values.to(torch.int32)) for offsets, values in rows.lists)
        return DeviceRows(rows.rows, rows.floats, rows.ids.to(torch.int32), narrow)
