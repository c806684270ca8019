"""Blocks on a GPU: decoded there by libcudf, or decoded on the CPU and copied asynchronously.

Everything a block needs happens on a stream of the loader's own, in the loader's thread. The
training thread never waits for the host: its stream waits for the event behind a block, once per
block. Blocks are torch's memory; what libcudf allocates is used on the loader's stream only, and
comes from torch's allocator too (:func:`share_allocator`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.utils.dlpack import from_dlpack

from clicklog.errors import BadInputError, SchemaError
from nvt_loader.blocks import Block, JaggedBlock, Source
from nvt_loader.checks import FILL_REMEDY, Checker, refuse_numbers
from nvt_loader.chunks import Decoder
from nvt_loader.cpu import CpuBlocks
from nvt_loader.device_rows import DeviceRows, build_on_device
from nvt_loader.layout import REWRITE, Layout, check_file, check_unchanged
from nvt_loader.memory import row_bytes
from nvt_loader.plan import Piece


def choose_blocks(layout: Layout, device: torch.device, threads: int = 1) -> CpuBlocks:
    """What makes blocks for ``device`` on this machine."""
    if device.type == "cpu":
        return CpuBlocks(layout, threads)
    # undersampling picks rows by their labels, which is done on the CPU
    if layout.undersampling is None and importlib.util.find_spec("pylibcudf") is not None:
        return CudfBlocks(layout, device)
    return PinnedBlocks(layout, device, threads)


class PinnedBlocks(CpuBlocks):
    """Blocks decoded on the CPU into pinned memory; asynchronous copies of each to the device."""

    def __init__(self, layout: Layout, device: torch.device, threads: int = 1) -> None:
        super().__init__(layout, threads)
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def memory(self, size: int) -> torch.Tensor:
        """Uninitialised pinned memory, which torch recycles: uint8 [size]."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def produce(
        self, produced: Iterator[tuple[slice, Block]]
    ) -> tuple[slice, Block | JaggedBlock, torch.cuda.Event] | None:
        """The next block, on its way to the device, and the event after it."""
        with torch.cuda.stream(self._stream):
            made = next(produced, None)
            if made is None:
                return None
            steps, block = made
            # torch keeps the pinned memory until the copies that read it are done
            return steps, block.to(self._device), self._stream.record_event()

    def receive(
        self, steps: slice, block: Block | JaggedBlock, ready: torch.cuda.Event
    ) -> tuple[slice, Block | JaggedBlock]:
        """Let the caller's stream wait for the block."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(ready)
        for tensor in block.tensors:
            tensor.record_stream(stream)
        return steps, block


class CudfBlocks(PinnedBlocks):
    """Blocks decoded by libcudf on the device; no column passes through the host."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        super().__init__(layout, device)
        share_allocator(device)
        self.decode = cudf_decoder(layout, self._stream)

    def build(self, steps: int, batch: int, sources: list[Source]) -> Block | JaggedBlock:
        """As :meth:`CpuBlocks.build`, on the device."""
        parts = [source.reader.take(steps * source.width) for source in sources]
        return build_on_device(self._layout, parts, sources, steps, batch, self._device)


_shared: dict[int, Any] = {}


def share_allocator(device: torch.device) -> None:
    """Let RMM take its memory on ``device`` from torch's caching allocator, once per process.

    So there is one pool, ``torch.cuda.memory_stats`` counts it all, and neither side hoards what
    the other needs. The other way round (RMM's allocator in torch) has to be chosen before
    torch's first allocation, and loses expandable segments.
    """
    if device.index in _shared:
        return
    import rmm

    def allocate(size: int, stream: Any) -> int:
        return torch.cuda.caching_allocator_alloc(size, device, stream.__cuda_stream__()[1])

    def deallocate(pointer: int, _size: int, _stream: Any) -> None:
        torch.cuda.caching_allocator_delete(pointer)

    resource = rmm.mr.CallbackMemoryResource(allocate, deallocate)
    rmm.mr.set_per_device_resource(device.index, resource)
    _shared[device.index] = resource  # RMM does not keep it


class _Stream:
    """A torch stream as libcudf takes it (torch's own has ``__cuda_stream__`` only of late)."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream.cuda_stream


def cudf_decoder(layout: Layout, stream: torch.cuda.Stream) -> Decoder:
    """A decoder on the GPU, chunk by chunk of a row group: :class:`DeviceRows`.

    Columns come as DLPack tensors of libcudf's, all columns of a dtype in one: one copy on the
    device per dtype, none on the host. libcudf does not verify page checksums.
    """
    import pylibcudf as plc

    names = layout.read_columns
    lists = {*layout.schema.multi_hot, *layout.weights.values()}
    device_stream = _Stream(stream)
    checker = DeviceChecker(layout, stream.device)
    footers: dict[int, pq.FileMetaData] = {}

    def tensor(*columns: Any) -> torch.Tensor:
        """Columns of one type as a tensor: [rows, columns]."""
        table = plc.Table(list(columns))
        # libcudf makes a tensor of one column one-dimensional
        return from_dlpack(plc.interop.to_dlpack(table, device_stream)).view(-1, len(columns))

    def stacked(columns: list[Any]) -> torch.Tensor:
        if len({column.type().id() for column in columns}) == 1:
            return tensor(*columns)
        return torch.cat([tensor(column).to(torch.int64) for column in columns], dim=1)

    def decode(piece: Piece, rows: int) -> Iterator[DeviceRows]:
        group = layout.row_groups[piece.row_group]
        path = layout.files[group.file]
        if group.file not in footers:
            footers[group.file] = check_file(layout, group.file)
        check_unchanged(layout, piece.row_group, footers[group.file])
        source = plc.io.SourceInfo([str(path)])
        options = plc.io.parquet.ParquetReaderOptions.builder(source).build()
        options.set_column_names(names)
        options.set_row_groups([[group.index]])
        first = 0
        try:
            reader = plc.io.parquet.ChunkedParquetReader(
                options, device_stream, chunk_read_limit=int(rows * row_bytes(layout))
            )
            while first < piece.end and reader.has_next():
                read = reader.read_chunk()
                columns = dict(zip(read.column_names(), read.columns, strict=True))
                chunk = _device_rows(columns, layout, stacked, tensor, lists, path)
                begin, end = max(piece.begin - first, 0), min(piece.end - first, chunk.rows)
                first += chunk.rows
                if begin < end:
                    yield checker.checked(chunk.slice(begin, end), group.file)
        except (RuntimeError, ValueError, IndexError, OSError) as error:  # libcudf's mapping
            raise BadInputError(
                f"{path}: row group {group.index} cannot be decoded: {error}", REWRITE
            ) from error

    return decode


def _device_rows(
    columns: dict[str, Any], layout: Layout, stacked: Any, tensor: Any, lists: set[str], path: Any
) -> DeviceRows:
    schema = layout.schema

    def parts(column: Any) -> tuple[torch.Tensor, Any]:
        view = column.list_view()
        return tensor(view.offsets()).view(-1), view.child()

    for name, column in columns.items():
        inner = parts(column)[1].null_count() if name in lists else 0
        if column.null_count() or inner:
            raise SchemaError(
                f"{path}: column {name} holds {column.null_count() or inner} null values",
                FILL_REMEDY,
            )
    floats = stacked([columns[name] for name in [schema.label, *schema.dense]])
    single = [columns[name] for name in schema.categorical if name not in lists]
    rows = len(floats)
    ids = stacked(single) if single else torch.empty(rows, 0, dtype=torch.int32)
    found = []
    for name in schema.multi_hot:
        offsets, child = parts(columns[name])
        weights = None
        if name in layout.weights:
            own, weight_child = parts(columns[layout.weights[name]])
            if not torch.equal(own.diff(), offsets.diff()):  # waits: in our own thread
                raise SchemaError(
                    f"{path}: column {layout.weights[name]} has not as many weights as {name} ids",
                    "each id needs a weight",
                )
            weights = tensor(weight_child).view(-1).to(torch.float32)
        found.append((offsets, tensor(child).view(-1), weights))
    return DeviceRows(rows, floats.to(torch.float32), ids, tuple(found))


class DeviceChecker:
    """Checks chunks on their device: one reduction each, read back in the loader's thread."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._host = Checker(layout)
        schema = layout.schema
        self._single = [i for i, n in enumerate(schema.categorical) if n not in schema.multi_hot]
        self._lists = [schema.categorical.index(name) for name in schema.multi_hot]
        sizes = [schema.table_sizes[i] for i in self._single]
        self._sizes = torch.tensor(sizes, dtype=torch.int64, device=device)

    def checked(self, chunk: DeviceRows, file: int) -> DeviceRows:
        """The chunk with its ids in the loader's dtype. Raises :class:`SchemaError`."""
        broken = ~chunk.floats.isfinite().all(dim=0)
        outside = ((chunk.ids < 0) | (chunk.ids >= self._sizes)).any(dim=0)
        in_lists = [
            ((values < 0) | (values >= self._layout.schema.table_sizes[i])).any().view(1)
            for i, (_, values, _) in zip(self._lists, chunk.lists, strict=True)
        ]
        flags = torch.cat([broken, outside, *in_lists]).cpu().numpy()  # waits: in our own thread
        floats = chunk.floats.shape[1]
        for i in np.flatnonzero(flags[:floats]):
            name = self._layout.schema.columns[i]
            refuse_numbers(chunk.floats[:, i].cpu().numpy(), name, self._layout.files[file])
        dtype = torch.int64 if self._layout.id_dtype.itemsize == 8 else torch.int32
        ids, lists = chunk.ids, list(chunk.lists)
        for i in np.flatnonzero(flags[floats : floats + len(self._single)]):
            ids = ids.clone()
            ids[:, i] = self._inside(ids[:, i], self._single[i], file)
        for k in np.flatnonzero(flags[floats + len(self._single) :]):
            offsets, values, weights = lists[k]
            lists[k] = offsets, self._inside(values, self._lists[k], file), weights
        return DeviceRows(
            chunk.rows,
            chunk.floats,
            ids.to(dtype),
            tuple((offsets, values.to(dtype), weights) for offsets, values, weights in lists),
        )

    def _inside(self, ids: torch.Tensor, column: int, file: int) -> torch.Tensor:
        found = self._host.inside(ids.cpu().numpy(), column, file)
        return torch.from_numpy(found).to(ids.device)
