"""Batch-major blocks: the columns of some steps, written once, so that a batch is views of them.

The ids of a block lie in the order in which a KeyedJaggedTensor wants each batch's: step, column,
row. With one id per row and column, all else about a batch is constants, made once per B. With
multi-hot columns, lengths and offsets are views too; lengths per key are made for each step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from nvt_loader.parquet.decode import RowReader
from nvt_loader.parquet.footers import Layout


@dataclasses.dataclass(frozen=True)
class Block:
    """Some steps of one rank: batches of B rows with one id per row and column.

    Attributes:
        labels: float32 [steps, B].
        dense: float32 [steps, B, dense columns].
        ids: int32 or int64 [steps, categorical columns, B].
    """

    labels: torch.Tensor
    dense: torch.Tensor
    ids: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that is on the device."""
        return self.labels, self.dense, self.ids

    def to(self, device: torch.device) -> Block:
        """A copy on ``device``; from pinned memory it does not wait for the copy's end."""
        return Block(*(tensor.to(device, non_blocking=True) for tensor in self.tensors))

    def batches(self, steps: slice, make_batch: BatchFactory) -> Iterator[Batch]:
        """The batches of some of the block's steps."""
        ids = self.ids.view(self.ids.shape[0], self.ids.shape[1] * self.ids.shape[2])
        return map(make_batch, self.labels[steps], self.dense[steps], ids[steps])


@dataclasses.dataclass(frozen=True)
class JaggedBlock:
    """Some steps of one rank.

    Attributes:
        labels: float32 [steps, B].
        dense: float32 [steps, B, dense columns].
        values: int32 or int64 [ids of all steps].
        weights: float32 [ids of all steps], or None.
        lengths: int32 [steps, categorical columns · B].
        offsets: int32 [steps, categorical columns · B + 1], in each step from 0.
        bounds: per step and column, where its ids begin in ``values``; then where the last
            step's end: steps · columns + 1 integers.
    """

    labels: torch.Tensor
    dense: torch.Tensor
    values: torch.Tensor
    weights: torch.Tensor | None
    lengths: torch.Tensor
    offsets: torch.Tensor
    bounds: Sequence[int]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that is on the device."""
        found = (self.labels, self.dense, self.values, self.weights, self.lengths, self.offsets)
        return tuple(tensor for tensor in found if tensor is not None)

    def to(self, device: torch.device) -> JaggedBlock:
        """A copy on ``device``; from pinned memory it does not wait for the copy's end."""
        changes = {
            field.name: getattr(self, field.name).to(device, non_blocking=True)
            for field in dataclasses.fields(self)
            if isinstance(getattr(self, field.name), torch.Tensor)
        }
        return dataclasses.replace(self, **changes)

    def batches(self, steps: slice, make_batch: BatchFactory) -> Iterator[Batch]:
        """The batches of some of the block's steps."""
        size = self.labels.shape[1]
        columns = self.lengths.shape[1] // size if size else 0
        for step in range(self.labels.shape[0])[steps]:
            bounds = self.bounds[step * columns : (step + 1) * columns + 1]
            begin, end = bounds[0], bounds[-1]
            if size == 0:
                yield make_batch(self.labels[step], self.dense[step], self.values)
                continue
            yield make_batch.jagged(
                self.labels[step],
                self.dense[step],
                self.values[begin:end],
                weights=None if self.weights is None else self.weights[begin:end],
                lengths=self.lengths[step],
                offsets=self.offsets[step],
                offset_per_key=[bound - begin for bound in bounds],
                length_per_key=[b - a for a, b in itertools.pairwise(bounds)],
            )


@dataclasses.dataclass(frozen=True)
class Source:
    """What a virtual shard gives to a block: ``steps · width`` rows of which some are this rank's.

    Attributes:
        reader: of the shard's rows.
        width: g, rows of each step.
        begin, end: which of those are this rank's.
        first: where in each batch they go.
        order: a function that gives the rows' order (int64 [steps · width], which row comes to
            each place), or None.
    """

    reader: RowReader
    width: int
    begin: int
    end: int
    first: int
    order: Callable[[], np.ndarray] | None = None

    @property
    def drawn(self) -> Source:
        """The source once its rows are in their order: of these it then has this rank's alone."""
        if self.order is None:
            return self
        rows = self.end - self.begin
        return dataclasses.replace(self, width=rows, begin=0, end=rows)


def empty_block(layout: Layout, steps: int, device: torch.device) -> Block | JaggedBlock:
    """Steps without rows."""
    schema = layout.schema
    dtype = torch.int64 if layout.id_dtype.itemsize == 8 else torch.int32
    labels = torch.empty(steps, 0, device=device)
    dense = torch.empty(steps, 0, len(schema.dense), device=device)
    columns = len(schema.categorical)
    if not schema.multi_hot:
        return Block(labels, dense, torch.empty(steps, columns, 0, dtype=dtype, device=device))
    return JaggedBlock(
        labels,
        dense,
        torch.empty(0, dtype=dtype, device=device),
        torch.empty(0, device=device) if layout.weights else None,
        torch.empty(steps, 0, dtype=torch.int32, device=device),
        torch.zeros(steps, 1, dtype=torch.int32, device=device),
        [0] * (steps * columns + 1),
    )


class BatchFactory:
    """Makes :class:`Batch` objects from views; what depends on B alone is made once per B.

    The constants are shared by all batches of B rows: nobody may write to them.
    """

    def __init__(self, keys: tuple[str, ...], device: torch.device) -> None:
        self._keys = list(keys)
        self._index_per_key = {key: i for i, key in enumerate(keys)}
        self._device = device
        self._samples: dict[int, KeyedJaggedTensor] = {}

    def __call__(self, labels: torch.Tensor, dense: torch.Tensor, ids: torch.Tensor) -> Batch:
        """A batch of labels [B], dense [B, columns] and ids [columns · B]."""
        size = labels.shape[0]
        if size not in self._samples:
            self._samples[size] = KeyedJaggedTensor(
                self._keys, ids.new_empty(0), **self._constants(size)
            )
        # A copy with other values: the constructor takes as long as 50 rows of a batch.
        sparse = KeyedJaggedTensor.__new__(KeyedJaggedTensor)
        sparse.__dict__.update(self._samples[size].__dict__, _values=ids)
        return Batch(dense_features=dense, sparse_features=sparse, labels=labels)

    def jagged(
        self, labels: torch.Tensor, dense: torch.Tensor, values: torch.Tensor, **parts: object
    ) -> Batch:
        """A batch with any number of ids; ``parts`` go to KeyedJaggedTensor."""
        sparse = KeyedJaggedTensor(
            keys=self._keys,
            values=values,
            stride=labels.shape[0],
            index_per_key=self._index_per_key,
            **parts,
        )
        return Batch(dense_features=dense, sparse_features=sparse, labels=labels)

    def _constants(self, size: int) -> dict:
        """What a KeyedJaggedTensor of ``size`` rows with one id per row and key is made of."""
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
