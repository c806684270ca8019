"""Batch-major blocks: several steps are written to memory at once, and batches are views of them.

The ids of a block are in the order of each batch's KeyedJaggedTensor: step, column, row. With one
id per row and column, all other members of a KeyedJaggedTensor are constant for a given B. With
multi-hot columns, lengths and offsets are views as well, and lengths per key are computed for each
step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from nvt_torchrec.base.untraced import make_untraced
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset
from nvt_torchrec.nvt_loader.parquet.parquet_kernels import find_copies
from nvt_torchrec.nvt_loader.parquet.row_chunks import RowChunk, ShardReader

#: A block's labels, weights, log-Q corrections and dense columns, as in :class:`LoaderBlock`.
FloatViews: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]
#: The fields of a batch that :meth:`LoaderBatch.to` and similar methods apply to.
_PARTS = (
    "dense_features",
    "sparse_features",
    "labels",
    "weights",
    "dense_vectors",
    "log_q_correction",
)


@dataclasses.dataclass
class LoaderBatch(Batch):
    """A batch that works in TorchRec's training pipelines like :class:`Batch`.

    Attributes:
        dense_features: float32 [B, dense columns].
        sparse_features: The ids of the categorical columns and histories.
        labels: float32 [B], or [B, labels].
        weights: float32 [B], the weight of each row; None if the data have none.
        dense_vectors: float32 [B, all inputs], the vectors of each row, each followed by its
            indicator (:mod:`nvt_torchrec.formats.vectors`); None if the data have none.
        log_q_correction: float32 [B], a correction that training may add to the logit of each row
            (docs/negatives.md); None if the data have none.
    """

    # Repeat the fields of Batch with types, because TorchRec publishes none for type checkers.
    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor
    weights: torch.Tensor | None = None
    dense_vectors: torch.Tensor | None = None
    log_q_correction: torch.Tensor | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Copy the batch to ``device``."""
        return self._map_parts(lambda part: part.to(device=device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory, once freed, from being reused before the work of ``stream`` is done."""
        self._map_parts(lambda part: part.record_stream(stream))

    def pin_memory(self) -> Self:
        """Copy the batch to page-locked memory."""
        return self._map_parts(lambda part: part.pin_memory())

    def _map_parts(self, function: Callable[[Any], Any]) -> Self:
        """Return a batch whose parts are the results of a function of this batch's parts."""
        results = {}
        for name in _PARTS:
            part = getattr(self, name)
            if part is not None:
                results[name] = function(part)
        return dataclasses.replace(self, **results)


@dataclasses.dataclass(frozen=True)
class LoaderBlock:
    """The base class of blocks.

    Attributes:
        labels: float32 [steps, B], or [steps, B, labels].
        row_weights: float32 [steps, B]; None if the data have none.
        log_q_correction: float32 [steps, B]; None if the data have none.
        dense: float32 [steps, B, dense columns].
    """

    labels: torch.Tensor
    row_weights: torch.Tensor | None
    log_q_correction: torch.Tensor | None
    dense: torch.Tensor

    def take_floats(self, steps: slice) -> FloatViews:
        """Return the labels, weights, log-Q corrections and dense columns of a slice of steps."""
        weights = self.row_weights
        correction = self.log_q_correction
        return (
            self.labels[steps],
            None if weights is None else weights[steps],
            None if correction is None else correction[steps],
            self.dense[steps],
        )

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors, by the names of their fields."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def to(self, device: torch.device) -> Self:
        """Copy the block to ``device``. From pinned memory, the copy is asynchronous."""
        copies = {}
        for name, tensor in self.tensors.items():
            copies[name] = tensor.to(device, non_blocking=True)
        return dataclasses.replace(self, **copies)


@dataclasses.dataclass(frozen=True)
class FlatBlock(LoaderBlock):
    """Several steps of one rank, with one id per row and column.

    Attributes:
        labels, row_weights, log_q_correction, dense: As in :class:`LoaderBlock`.
        ids: int32 [steps, categorical columns, B].
        dense_vectors: float32 [steps, B, all inputs]; None if the data have no vectors.
    """

    ids: torch.Tensor
    dense_vectors: torch.Tensor | None = None

    def iterate_batches(self, steps: slice, make_batch: BatchFactory) -> Iterator[LoaderBatch]:
        """Yield the batches of a slice of the block's steps."""
        ids = self.ids.view(self.ids.shape[0], self.ids.shape[1] * self.ids.shape[2])
        parts: list[Iterable[Any]] = [self.labels[steps], self.dense[steps], ids[steps]]
        optional = [self.row_weights, self.dense_vectors, self.log_q_correction]
        # Leave trailing arguments out: passing None for each batch takes longer.
        while optional and optional[-1] is None:
            optional.pop()
        for tensor in optional:
            parts.append(itertools.repeat(None) if tensor is None else tensor[steps])
        return map(make_batch, *parts)


@dataclasses.dataclass(frozen=True)
class JaggedBlock(LoaderBlock):
    """Several steps of one rank, with any number of ids in multi-hot columns.

    Attributes:
        labels, row_weights, log_q_correction, dense, dense_vectors: As in :class:`FlatBlock`.
        values: int32 [ids of all steps].
        lengths: int32 [steps, categorical columns · B].
        offsets: int32 [steps, categorical columns · B + 1]; they begin at 0 in each step.
        bounds: The index in ``values`` where the ids of each step and column begin, followed by the
            number of ids: steps · columns + 1 integers.
    """

    values: torch.Tensor
    lengths: torch.Tensor
    offsets: torch.Tensor
    bounds: Sequence[int]
    dense_vectors: torch.Tensor | None = None

    def iterate_batches(self, steps: slice, make_batch: BatchFactory) -> Iterator[LoaderBatch]:
        """Yield the batches of a slice of the block's steps."""
        size = self.labels.shape[1]
        columns = self.lengths.shape[1] // size if size else 0
        for step in range(self.labels.shape[0])[steps]:
            bounds = self.bounds[step * columns : (step + 1) * columns + 1]
            begin = bounds[0]
            end = bounds[-1]
            row_weights = None if self.row_weights is None else self.row_weights[step]
            vectors = None if self.dense_vectors is None else self.dense_vectors[step]
            correction = None if self.log_q_correction is None else self.log_q_correction[step]
            rest = row_weights, vectors, correction
            if size == 0:
                yield make_batch(self.labels[step], self.dense[step], self.values, *rest)
                continue
            yield make_batch.make_jagged(
                self.labels[step],
                self.dense[step],
                self.values[begin:end],
                *rest,
                lengths=self.lengths[step],
                offsets=self.offsets[step],
                offset_per_key=[bound - begin for bound in bounds],
                length_per_key=[stop - start for start, stop in itertools.pairwise(bounds)],
            )


@dataclasses.dataclass(frozen=True)
class ShardRows:
    """The rows that a virtual shard gives to a block: ``width`` in each of its steps.

    Attributes:
        reader: Reads the shard's rows.
        width: g, the number of the shard's rows in each step.
        begin, end: Rows [begin, end) of these belong to this rank.
        first: The row of this rank's batch where they begin.
        order: A function that returns the order of the rows, int64 [steps · width]: the row of the
            shard at each position. None if rows are not shuffled.
    """

    reader: ShardReader
    width: int
    begin: int
    end: int
    first: int
    order: Callable[[], np.ndarray] | None = None

    @property
    def drawn(self) -> ShardRows:
        """The source after shuffling, which keeps only this rank's rows."""
        if self.order is None:
            return self
        rows = self.end - self.begin
        return dataclasses.replace(self, width=rows, begin=0, end=rows)


def make_empty_block(dataset: Dataset, steps: int, device: torch.device) -> FlatBlock | JaggedBlock:
    """Return a block of ``steps`` steps without rows."""
    columns = len(dataset.schema.features)
    widths = count_float_columns(dataset.schema)
    floats = [torch.empty(0, width, device=device) for width in widths]
    views = split_floats(dataset, steps, floats)
    ids = torch.empty(steps, columns, 0, dtype=torch.int32, device=device)
    if not dataset.jagged:
        return FlatBlock(*views, ids)
    offsets = torch.zeros(steps, 1, dtype=torch.int32, device=device)
    bounds = [0] * (steps * columns + 1)
    return JaggedBlock(*views, ids.view(-1), ids.view(steps, 0), offsets, bounds)


def count_float_columns(schema: TableSchema) -> tuple[int, int, int]:
    """Return the numbers of labels, optional columns (weight, log-Q correction), dense columns."""
    optional = bool(schema.weight) + bool(schema.log_q_correction)
    return len(schema.labels), optional, len(schema.dense)


def split_floats(dataset: Dataset, steps: int, parts: Sequence[torch.Tensor]) -> FloatViews:
    """Return a block's labels, weights, log-Q corrections and dense columns.

    Args:
        dataset: The data.
        steps: The number of steps of the block.
        parts: Three tensors float32 [steps · B, columns], with the numbers of columns of
            :func:`count_float_columns`.
    """
    by_step = [part.view(steps, part.shape[0] // steps, part.shape[1]) for part in parts]
    labels, optional, dense = by_step
    if not dataset.several_labels:
        labels = labels[..., 0]
    # A single column is already contiguous. Two are copied, because copying a tensor with strides
    # to a device is synchronous.
    columns = list(optional.movedim(2, 0).contiguous())
    weights = columns.pop(0) if dataset.schema.weight else None
    correction = columns.pop(0) if dataset.schema.log_q_correction else None
    return labels, weights, correction, dense


class BatchFactory:
    """Makes :class:`LoaderBatch` objects from views.

    Members of a KeyedJaggedTensor that depend only on B are made once per B and shared by all
    batches of B rows, so they must not be modified.
    """

    def __init__(self, keys: tuple[str, ...], device: torch.device) -> None:
        self._keys = list(keys)
        self._index_per_key = {key: i for i, key in enumerate(keys)}
        self._device = device
        self._samples: dict[int, KeyedJaggedTensor] = {}

    def __call__(
        self,
        labels: torch.Tensor,
        dense: torch.Tensor,
        ids: torch.Tensor,
        row_weights: torch.Tensor | None = None,
        dense_vectors: torch.Tensor | None = None,
        log_q_correction: torch.Tensor | None = None,
    ) -> LoaderBatch:
        """Make a batch with one id per key and row.

        Args:
            labels: float32 [B], or [B, labels].
            dense: float32 [B, dense columns].
            ids: int32 [categorical columns · B].
            row_weights: float32 [B], or None.
            dense_vectors: float32 [B, all inputs], or None.
            log_q_correction: float32 [B], or None.
        """
        size = labels.shape[0]
        if size not in self._samples:
            self._samples[size] = make_untraced(
                KeyedJaggedTensor, self._keys, ids.new_empty(0), **self._make_constants(size)
            )
        # Copy a sample and replace the values: the constructor takes as long as 50 rows of a batch.
        sparse = KeyedJaggedTensor.__new__(KeyedJaggedTensor)
        sparse.__dict__.update(self._samples[size].__dict__, _values=ids)
        return LoaderBatch(dense, sparse, labels, row_weights, dense_vectors, log_q_correction)

    def make_jagged(
        self,
        labels: torch.Tensor,
        dense: torch.Tensor,
        values: torch.Tensor,
        row_weights: torch.Tensor | None,
        dense_vectors: torch.Tensor | None = None,
        log_q_correction: torch.Tensor | None = None,
        **parts: object,
    ) -> LoaderBatch:
        """Make a batch with any number of ids per key and row.

        ``values`` are the ids; ``parts`` are further arguments of KeyedJaggedTensor, and all others
        are the same as for :meth:`__call__`.
        """
        sparse = make_untraced(
            KeyedJaggedTensor,
            keys=self._keys,
            values=values,
            stride=labels.shape[0],
            index_per_key=self._index_per_key,
            **parts,
        )
        return LoaderBatch(dense, sparse, labels, row_weights, dense_vectors, log_q_correction)

    def _make_constants(self, size: int) -> dict:
        """Return the arguments of a KeyedJaggedTensor of ``size`` rows with one id per key."""
        keys = len(self._keys)

        def copy_to_device(tensor: torch.Tensor) -> torch.Tensor:
            # A synchronous copy, so that every stream may use the result.
            return tensor.to(self._device, torch.int32)

        constants = {
            "lengths": copy_to_device(torch.ones(keys * size)),
            "offsets": copy_to_device(torch.arange(keys * size + 1)),
            "stride": size,
            "length_per_key": [size] * keys,
            "offset_per_key": [size * i for i in range(keys + 1)],
            "index_per_key": self._index_per_key,
        }
        if size == 0:  # KeyedJaggedTensor.to_dict fails without rows
            empty = copy_to_device(torch.empty(0))
            zero = copy_to_device(torch.zeros(1))
            tensors = {}
            for key in self._keys:
                tensors[key] = make_untraced(JaggedTensor, empty, lengths=empty, offsets=zero)
            constants["jt_dict"] = tensors
        return constants


def view_flat(tensor: torch.Tensor) -> np.ndarray:
    """Return a flat NumPy view of a contiguous tensor."""
    return tensor.view(-1).numpy()


def write_offsets(offsets: np.ndarray, starts: np.ndarray) -> None:
    """Write the offsets of each step's ids, which begin at 0 in each step.

    Args:
        offsets: Output, int32 [steps, columns · B + 1].
        starts: int64 [steps · columns · B + 1], the index in the block where the ids of each row
            and column begin, followed by the number of ids.
    """
    steps, length = offsets.shape
    begins = starts[:-1].reshape(steps, -1)
    np.subtract(begins, begins[:, :1], out=offsets[:, :-1], casting="same_kind")
    offsets[:, -1] = starts[length - 1 :: length - 1] - begins[:, 0]


def list_source_copies(
    source: ShardRows, steps: int, rows: list[int], first_chunk: int
) -> np.ndarray:
    """Return the copies of one source, as :mod:`nvt_loader.parquet.parquet_kernels` defines them.

    Args:
        source: The source.
        steps: The number of steps of the block.
        rows: The number of rows of each of the source's chunks.
        first_chunk: The index of the first of these chunks.

    Returns:
        int64 [copies, 5].
    """
    found = np.empty((steps + len(rows), 5), np.int64)
    shard = source.width, source.begin, source.end, source.first
    count = find_copies(found, steps, *shard, np.array(rows, np.int64), first_chunk)
    return found[:count]


def find_moves(
    chunks: list[RowChunk], order: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, RowChunk]]:
    """Yield, for each chunk, the moves of its rows to a new order.

    Args:
        chunks: The chunks.
        order: int64 [rows], the index of each row of the new order in the concatenated chunks.

    Yields:
        The rows of the new order that come from the chunk, uint32 [moves], ascending; the row of
        the chunk for each of them, uint32 [moves]; and the chunk.
    """
    first = 0
    for chunk in chunks:
        row_in_chunk = order - first
        to_rows = np.flatnonzero((row_in_chunk >= 0) & (row_in_chunk < chunk.rows))
        yield to_rows.astype(np.uint32), row_in_chunk[to_rows].astype(np.uint32), chunk
        first += chunk.rows
