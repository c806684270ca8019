"""Read a checkpoint's weights and optimizer state into a model whose tables have grown.

Rows are read where they lie, whatever the world size and the sharding plan of either run: each rank
reads the parts of the checkpoint that its shards overlap, one part at a time. A part is what one
rank of the earlier run held of a table.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.base.finite import flat
from nvt_torchrec.dlrm.checkpoint.growth import GrownTable
from nvt_torchrec.dlrm.checkpoint.tensors import Chunk, Reader, Tensors, check_places, read_tensors
from nvt_torchrec.formats.spec.feature_spec import FIRST_OOV_ID

#: The rows that are copied at a time from the rows of out of vocabulary.
_COPIED_ROWS = 65536
#: The first column of a column shard, and its width.
Columns = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Window:
    """A rectangle of a stored tensor, and where it is read to.

    Attributes:
        name: The name of the tensor in the checkpoint.
        offsets: Its first index in each dimension.
        target: A tensor of its size.
    """

    name: str
    offsets: tuple[int, ...]
    target: torch.Tensor


def read_windows(path: Path, tensors: Tensors, windows: list[Window]) -> None:
    """Read windows of a checkpoint's tensors; each part of a tensor is read once.

    Raises:
        BadInputError: The checkpoint is damaged: a window is not covered by parts.
        OSError, EOFError, RuntimeError, pickle.UnpicklingError: A part cannot be read.
    """
    wanted: dict[Chunk, list[Window]] = {}
    for window in windows:
        covered = 0
        for chunk in tensors[window.name].chunks:
            sizes = [end - begin for begin, end in _overlap(chunk, window)]
            if all(size > 0 for size in sizes):
                wanted.setdefault(chunk, []).append(window)
                covered += int(np.prod(sizes, dtype=np.int64))
        if covered != window.target.numel():
            raise BadInputError(
                f"{path}: {window.name} has no values from {list(window.offsets)} on",
                "the checkpoint is damaged: copy it again, or use another one",
            )
    reader = Reader(path)
    for chunk, own in wanted.items():
        part = reader.read_chunk(chunk)
        for window in own:
            source, target = part, window.target
            for dim, (begin, end) in enumerate(_overlap(chunk, window)):
                source = source.narrow(dim, begin - chunk.offsets[dim], end - begin)
                target = target.narrow(dim, begin - window.offsets[dim], end - begin)
            target.copy_(source)


def _overlap(chunk: Chunk, window: Window) -> list[tuple[int, int]]:
    """Return the indices that a chunk and a window have in common, by dimension."""
    return [
        (max(a, b), min(a + m, b + n))
        for a, m, b, n in zip(
            chunk.offsets, chunk.sizes, window.offsets, window.target.shape, strict=True
        )
    ]


def read_grown(path: Path, state: dict[str, Any], tables: dict[str, GrownTable]) -> bool:
    """Fill this rank's ``state`` from a checkpoint whose tables are smaller.

    Args:
        path: The checkpoint.
        state: Weights and optimizer state as the run begins with them.
        tables: How each table follows from that of the checkpoint.

    Returns:
        Whether moments of row-wise Adagrad had to be converted between column shards.

    Raises:
        BadInputError: The checkpoint is damaged.
        SchemaError: Its tensors are not those of the run.
    """
    tensors = read_tensors(path)
    check_places(path, tensors)
    filling = _Filling(path, tensors)
    weights: dict[str, tuple[str, Any]] = {}  # of the model, which comes first
    for name, tensor in flat(state):
        if name not in tensors:
            raise SchemaError(
                f"{path}: holds no {name!r}, which this run needs",
                "continue with the same optimizer and model",
            )
        table = next((table for table in tables if _is_of(name, table)), None)
        if table is None:
            filling.whole(name, tensor)
        elif name.endswith(f".{table}.weight"):
            weights[table] = name, tensor
            filling.weights(name, tensor, tables[table])
        elif len(tensor.shape) == 1:
            filling.row_moments(name, tensor, tables[table], *weights[table])
        else:
            filling.moments(name, tensor, tables[table])
    read_windows(path, tensors, filling.windows)
    for finish in filling.finishing:
        finish()
    return filling.converted


def _is_of(name: str, table: str) -> bool:
    """Return whether a tensor holds the weights or the optimizer state of a table."""
    return name.endswith(f".{table}.weight") or f".{table}.weight.{table}." in name


class _Filling:
    """What has to be read for one rank, and what has to be done afterwards.

    Attributes:
        windows: What has to be read.
        finishing: The functions to call then, in order.
        converted: Whether row-wise moments are converted between column shards.
    """

    def __init__(self, path: Path, tensors: Tensors) -> None:
        self.windows: list[Window] = []
        self.finishing: list[Callable[[], None]] = []
        self.converted = False
        self._path, self._tensors = path, tensors

    def whole(self, name: str, tensor: torch.Tensor) -> None:
        """Read a tensor that does not depend on the sizes of tables."""
        self._check_size(name, tuple(tensor.shape))
        self.windows.append(Window(name, (0,) * tensor.dim(), tensor.detach()))

    def weights(self, name: str, tensor: Any, table: GrownTable) -> None:
        """Read the weights of a table; rows that start anew are copies of its other rows."""
        self._check_size(name, (table.rows_then, *tensor.shape[1:]))
        for shard in tensor.local_shards():
            (first, column), (height, width) = (
                shard.metadata.shard_offsets,
                shard.metadata.shard_sizes,
            )
            part = shard.tensor.detach()
            self._kept_rows(name, (first, column), part, table)
            rows, origins = table.anew(first, first + height)
            if len(rows):
                sources = torch.empty(table.oov_ids, width, device=part.device, dtype=part.dtype)
                self.windows.append(Window(name, (FIRST_OOV_ID, column), sources))
                self.finishing.append(
                    functools.partial(
                        _copy_rows, part, rows - first, sources, origins - FIRST_OOV_ID
                    )
                )

    def moments(self, name: str, tensor: Any, table: GrownTable) -> None:
        """Read a moment per weight; those of rows that start anew stay as they are."""
        self._check_size(name, (table.rows_then, *tensor.shape[1:]))
        for shard in tensor.local_shards():
            first, column = shard.metadata.shard_offsets
            part = shard.tensor.detach()
            self._kept_rows(name, (first, column), part, table)
            self._restore(part, first, table)

    def row_moments(
        self, name: str, tensor: Any, table: GrownTable, weight_name: str, weight: Any
    ) -> None:
        """Read a moment per row and column shard, as row-wise Adagrad keeps it.

        A moment is the sum of the squared gradients of the shard's columns, each a mean over the
        columns. So that of a wider shard is the mean of those of its parts, and the best estimate
        for a part is that of the whole.
        """
        then = _column_shards(
            (chunk.offsets[1], chunk.sizes[1]) for chunk in self._tensors[weight_name].chunks
        )
        now = _column_shards(
            (shard.shard_offsets[1], shard.shard_sizes[1])
            for shard in weight.metadata().shards_metadata
        )
        self._check_size(name, (len(then) * table.rows_then,))
        self.converted |= then != now
        for shard in tensor.local_shards():
            (offset,), (height,) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            number, first = divmod(offset, table.rows)
            kept = min(first + height, table.kept) - first
            if kept <= 0:
                continue
            part = shard.tensor.detach()
            shares = _shares(now[number], then)
            if len(shares) == 1:
                sources = [part[:kept]]
            else:
                sources = [torch.empty_like(part[:kept]) for _ in shares]
                self.finishing.append(
                    functools.partial(_average, part[:kept], sources, list(shares.values()))
                )
            for other, source in zip(shares, sources, strict=True):
                self.windows.append(Window(name, (other * table.rows_then + first,), source))
            self._restore(part, first, table)

    def _kept_rows(
        self, name: str, offsets: tuple[int, int], part: torch.Tensor, table: GrownTable
    ) -> None:
        kept = min(offsets[0] + len(part), table.kept) - offsets[0]
        if kept > 0:
            self.windows.append(Window(name, offsets, part[:kept]))

    def _restore(self, part: torch.Tensor, first: int, table: GrownTable) -> None:
        """Give the reused rows of a shard, after it has been read, what they have now."""
        rows = table.reused[slice(*np.searchsorted(table.reused, [first, first + len(part)]))]
        if len(rows):
            places = torch.from_numpy(rows - first).to(part.device)
            self.finishing.append(functools.partial(part.index_copy_, 0, places, part[places]))

    def _check_size(self, name: str, size: tuple[int, ...]) -> None:
        found = self._tensors[name].size
        if found != size:
            raise SchemaError(
                f"{self._path}: {name} is {list(found)}, but the run needs {list(size)}",
                "continue with the same optimizer and model",
            )


def _copy_rows(
    part: torch.Tensor, rows: np.ndarray, sources: torch.Tensor, origins: np.ndarray
) -> None:
    for begin in range(0, len(rows), _COPIED_ROWS):
        block = slice(begin, begin + _COPIED_ROWS)
        places, own = (
            torch.from_numpy(numbers[block]).to(part.device) for numbers in (rows, origins)
        )
        part.index_copy_(0, places, sources[own])


def _column_shards(found: Any) -> list[Columns]:
    """Return the column shards of a table, each once, in their order."""
    return sorted(set(map(tuple, found)))


def _shares(columns: Columns, others: list[Columns]) -> dict[int, float]:
    """Return which of the other column shards overlap one, and on which share of its columns."""
    begin, end = columns[0], columns[0] + columns[1]
    overlaps = [min(end, first + width) - max(begin, first) for first, width in others]
    return {number: overlap / columns[1] for number, overlap in enumerate(overlaps) if overlap > 0}


def _average(target: torch.Tensor, sources: list[torch.Tensor], shares: list[float]) -> None:
    total = torch.zeros_like(target, dtype=torch.float64)
    for source, share in zip(sources, shares, strict=True):
        total.add_(source, alpha=share)
    target.copy_(total)
