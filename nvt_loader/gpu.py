"""Blocks on a GPU: decoded there by cuDF, or decoded on the CPU and copied asynchronously.

Everything a block needs happens on a stream of the loader's own, in the loader's thread. The
training thread never waits for the host: its stream waits for the event behind a block, once per
block. Blocks are torch's memory; what libcudf allocates is used on the loader's stream only.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.utils.dlpack import from_dlpack

from clicklog.errors import BadInputError, SchemaError
from nvt_loader.blocks import Block, CpuBlocks
from nvt_loader.decode import Columns, Decoder, check_finite, check_unchanged, raise_outside
from nvt_loader.layout import REWRITE, Layout, check_columns
from nvt_loader.plan import Piece


def choose_blocks(layout: Layout, device: torch.device) -> CpuBlocks:
    """What makes blocks for ``device`` on this machine."""
    if device.type == "cpu":
        return CpuBlocks(layout)
    if importlib.util.find_spec("pylibcudf") is not None:
        return CudfBlocks(layout, device)
    return PinnedBlocks(layout, device)


class PinnedBlocks(CpuBlocks):
    """Blocks decoded on the CPU into pinned memory; one asynchronous copy of each to the device."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        super().__init__(layout)
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def empty(self, steps: int, batch: int) -> Block:
        """An uninitialised block in pinned memory."""
        return Block.empty(steps, batch, self._schema, pin_memory=True)

    def produce(self, blocks: Iterator[Block]) -> tuple[Block, torch.cuda.Event] | None:
        """The next block, on its way to the device, and the event after it."""
        with torch.cuda.stream(self._stream):
            block = next(blocks, None)
            if block is None:
                return None
            # torch keeps the pinned memory until the copies that read it are done
            return block.to(self._device), self._stream.record_event()

    def receive(self, block: Block, ready: torch.cuda.Event) -> Block:
        """Let the caller's stream wait for the block."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(ready)
        for tensor in (block.labels, block.dense, block.ids):
            tensor.record_stream(stream)
        return block


class CudfBlocks(PinnedBlocks):
    """Blocks decoded by libcudf on the device; no column passes through the host."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        super().__init__(layout, device)
        self.decode = cudf_decoder(layout, self._stream)

    def empty(self, steps: int, batch: int) -> Block:
        """An uninitialised block on the device."""
        return Block.empty(steps, batch, self._schema, device=self._device)

    @staticmethod
    def fill(
        block: Block, first: int, parts: list[Columns], share: slice, order: np.ndarray | None
    ) -> None:
        """As :func:`nvt_loader.blocks.fill_cpu`, for columns in two tensors: floats and ids."""
        steps = block.labels.shape[0]
        rows = slice(first, first + share.stop - share.start)
        floats, ids = (torch.cat(arrays) for arrays in zip(*parts, strict=True))
        if order is not None:
            index = torch.from_numpy(order).to(floats.device)
            floats, ids = floats[index], ids[index]
        floats = floats.reshape(steps, -1, floats.shape[1])[:, share]
        ids = ids.reshape(steps, -1, ids.shape[1])[:, share]
        block.labels[:, rows] = floats[:, :, 0]
        block.dense[:, rows] = floats[:, :, 1:]
        block.ids[:, :, rows] = ids.transpose(1, 2)


class _Stream:
    """A torch stream as libcudf takes it (torch's own has ``__cuda_stream__`` only of late)."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream.cuda_stream


def cudf_decoder(layout: Layout, stream: torch.cuda.Stream) -> Decoder:
    """A decoder on the GPU: per row group, one float32 and one int32 tensor [rows, columns].

    Each is a DLPack of libcudf's, which holds the columns one after another: one copy on the
    device per dtype, none on the host. libcudf does not verify page checksums.
    """
    import pylibcudf as plc

    schema = layout.schema
    floats = 1 + len(schema.dense)
    sizes = torch.tensor(schema.table_sizes, device=stream.device)
    checked: set[int] = set()

    def check_file(group_number: int) -> None:
        number = layout.row_groups[group_number].file
        footer = pq.read_metadata(layout.files[number])
        check_columns(footer.schema.to_arrow_schema(), schema, layout.files[number])
        check_unchanged(layout, group_number, footer)
        checked.add(number)

    def check(tensors: list[torch.Tensor], file: int) -> None:
        broken = ~tensors[0].isfinite().all(dim=0)
        outside = ((tensors[1] < 0) | (tensors[1] >= sizes)).any(dim=0)
        bad = torch.cat([broken, outside]).cpu().nonzero().flatten()  # waits: in our own thread
        for i in bad.tolist():
            if i < floats:
                column = tensors[0][:, i].cpu().numpy()
                check_finite(column, schema.columns[i], layout.files[file])
            else:
                raise_outside(tensors[1][:, i - floats].cpu().numpy(), i - floats, layout, file)

    def decode(piece: Piece, _rows: int) -> Iterator[Columns]:
        group = layout.row_groups[piece.row_group]
        path = layout.files[group.file]
        if group.file not in checked:
            check_file(piece.row_group)
        source = plc.io.SourceInfo([str(path)])
        options = plc.io.parquet.ParquetReaderOptions.builder(source).build()
        options.set_column_names(schema.columns)
        options.set_row_groups([[group.index]])
        try:
            read = plc.io.parquet.read_parquet(options, _Stream(stream))
        except (RuntimeError, ValueError, IndexError, OSError) as error:  # libcudf's mapping
            raise BadInputError(
                f"{path}: row group {group.index} cannot be decoded: {error}", REWRITE
            ) from error
        by_name = dict(zip(read.column_names(), read.columns, strict=True))
        columns = [by_name[name] for name in schema.columns]
        for name, column in zip(schema.columns, columns, strict=True):
            if column.null_count():
                raise SchemaError(
                    f"{path}: column {name} holds {column.null_count()} null values",
                    "the ETL fills missing values; run it again",
                )
        tensors = [
            # libcudf makes a tensor of one column one-dimensional
            from_dlpack(plc.interop.to_dlpack(plc.Table(some), _Stream(stream))).view(-1, len(some))
            for some in (columns[:floats], columns[floats:])
        ]
        check(tensors, group.file)
        yield [tensor[piece.begin : piece.end] for tensor in tensors]

    return decode
