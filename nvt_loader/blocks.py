"""Batch-major blocks: the columns of some steps, written once, so that a batch is three views."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from clicklog.schema import TableSchema
from nvt_loader.decode import Columns, Decoder, cpu_decoder
from nvt_loader.layout import Layout

#: Rows of which the dense columns are transposed at a time: what fits a core's cache.
TILE_ROWS = 1024


@dataclasses.dataclass(frozen=True)
class Block:
    """Some steps of one rank: batches of B rows.

    Attributes:
        labels: float32 [steps, B].
        dense: float32 [steps, B, dense columns].
        ids: int32 [steps, categorical columns, B].
    """

    labels: torch.Tensor
    dense: torch.Tensor
    ids: torch.Tensor

    @classmethod
    def empty(
        cls, steps: int, batch: int, schema: TableSchema, **options: torch.device | bool | None
    ) -> Block:
        """Uninitialised; ``options`` (device, pin_memory) go to :func:`torch.empty`."""
        dense, categorical = len(schema.dense), len(schema.categorical)
        return cls(
            torch.empty(steps, batch, **options),
            torch.empty(steps, batch, dense, **options),
            torch.empty(steps, categorical, batch, dtype=torch.int32, **options),
        )

    def to(self, device: torch.device) -> Block:
        """A copy on ``device``; from pinned memory it does not wait for the copy's end."""
        return Block(
            self.labels.to(device, non_blocking=True),
            self.dense.to(device, non_blocking=True),
            self.ids.to(device, non_blocking=True),
        )

    def skip(self, steps: int) -> Block:
        """Views of the block without its first ``steps`` steps (all of it if ``steps`` <= 0)."""
        steps = max(steps, 0)
        return Block(self.labels[steps:], self.dense[steps:], self.ids[steps:])


class CpuBlocks:
    """What turns a split's row groups into blocks: here by pyarrow, in CPU memory.

    The subclasses in :mod:`nvt_loader.gpu` make blocks on a GPU. ``decode``, ``empty``, ``fill``
    and ``produce`` run in the loader's thread, ``receive`` in the caller's.
    """

    def __init__(self, layout: Layout) -> None:
        self._schema = layout.schema
        self.decode: Decoder = cpu_decoder(layout)

    def empty(self, steps: int, batch: int) -> Block:
        """An uninitialised block."""
        return Block.empty(steps, batch, self._schema)

    @staticmethod
    def fill(
        block: Block, first: int, parts: list[Columns], share: slice, order: np.ndarray | None
    ) -> None:
        """Write a virtual shard's rows: :func:`fill_cpu`."""
        fill_cpu(block, first, parts, share, order)

    def produce(self, blocks: Iterator[Block]) -> tuple | None:
        """The next block and what :meth:`receive` needs besides, or None at the end."""
        block = next(blocks, None)
        return None if block is None else (block,)

    def receive(self, block: Block) -> Block:
        """Make the block usable by the caller."""
        return block


def fill_cpu(
    block: Block,
    first: int,
    parts: list[Columns],
    share: slice,
    order: np.ndarray | None,
) -> None:
    """Write a virtual shard's rows of a block's steps into the block (in CPU memory).

    Args:
        block: to write to.
        first: where in each batch the shard's rows begin.
        parts: column lists from :meth:`~nvt_loader.decode.RowReader.take`, together
            ``steps · g`` rows.
        share: which of the g rows of each step are this rank's.
        order: permutation of the ``steps · g`` rows, or None.
    """
    steps, width = block.labels.shape[0], share.stop - share.start
    rows = slice(first, first + width)
    dense = block.dense.numpy()[:, rows]
    staged = np.empty((dense.shape[2], steps, width), np.float32)
    targets = [
        block.labels.numpy()[:, rows],
        *staged,
        *np.moveaxis(block.ids.numpy()[:, :, rows], 1, 0),
    ]
    if order is None and sum(len(columns[0]) for columns in parts) == steps * width:
        _copy_all(targets, parts)
    else:
        for target, *columns in zip(targets, *parts, strict=True):
            column = columns[0] if len(columns) == 1 else np.concatenate(columns)
            if order is not None:
                column = column[order]
            target[:] = column.reshape(steps, -1)[:, share]
    tile = max(1, TILE_ROWS // width)
    for step in range(0, steps, tile):
        dense[step : step + tile] = np.moveaxis(staged[:, step : step + tile], 0, 2)


def _copy_all(targets: list[np.ndarray], parts: list[Columns]) -> None:
    """Write columns into targets [steps, width], row after row, without joining the parts."""
    done = 0
    for columns in parts:
        runs = list(_runs(done, len(columns[0]), targets[0].shape[1]))
        for target, column in zip(targets, columns, strict=True):
            for steps, rows, source in runs:
                view = target[steps, rows]
                view[:] = column[source].reshape(view.shape)
        done += len(columns[0])


def _runs(first: int, rows: int, width: int) -> Iterator[tuple[slice, slice, slice]]:
    """Rows [first, first + rows) of a row-major [steps, width] as at most three rectangles.

    Yields steps and rows of the rectangle, and where its rows are among the ``rows``.
    """
    step, offset = divmod(first, width)
    done = 0
    if offset:
        done = min(width - offset, rows)
        yield slice(step, step + 1), slice(offset, offset + done), slice(0, done)
        step += 1
    whole = (rows - done) // width
    if whole:
        yield slice(step, step + whole), slice(0, width), slice(done, done + whole * width)
        step, done = step + whole, done + whole * width
    if done < rows:
        yield slice(step, step + 1), slice(0, rows - done), slice(done, rows)


class BatchFactory:
    """Makes :class:`Batch` objects from views; what depends on B alone is made once per B.

    The constants are shared by all batches of B rows: nobody may write to them.
    """

    def __init__(self, keys: tuple[str, ...], device: torch.device) -> None:
        self._keys = list(keys)
        self._index_per_key = {key: i for i, key in enumerate(keys)}
        self._device = device
        self._constants: dict[int, dict] = {}

    def __call__(self, labels: torch.Tensor, dense: torch.Tensor, ids: torch.Tensor) -> Batch:
        """A batch of labels [B], dense [B, columns] and ids [columns, B]."""
        size = labels.shape[0]
        if size not in self._constants:
            self._constants[size] = self._make_constants(size)
        sparse = KeyedJaggedTensor(keys=self._keys, values=ids.reshape(-1), **self._constants[size])
        return Batch(dense_features=dense, sparse_features=sparse, labels=labels)

    def _make_constants(self, size: int) -> dict:
        keys = len(self._keys)

        def constant(tensor: torch.Tensor) -> torch.Tensor:
            # A blocking copy: it is there on return, whichever stream uses it first.
            return tensor.to(self._device, torch.int32)

        constants = {
            "lengths": constant(torch.ones(keys * size)),
            "offsets": constant(torch.arange(keys * size + 1)),
            "stride": size,
            "length_per_key": [size] * keys,
            "offset_per_key": [size * i for i in range(keys + 1)],
            "index_per_key": self._index_per_key,
        }
        if size == 0:  # KeyedJaggedTensor.to_dict, left to itself, fails without rows
            empty, zero = constant(torch.empty(0)), constant(torch.zeros(1))
            constants["jt_dict"] = {
                key: JaggedTensor(empty, lengths=empty, offsets=zero) for key in self._keys
            }
        return constants
