"""What a batch is made of where TorchRec is not installed: plain tensors, under TorchRec's names.

The classes have those of TorchRec's methods that hand out tensors, and no more.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, Self

import torch


@dataclasses.dataclass
class Batch:
    """Dense features, ids and labels of some rows."""

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor


class JaggedTensor:
    """Ids of a column: all of them, how many each row has, and where those of each row begin."""

    def __init__(
        self, values: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor, **_: Any
    ) -> None:
        self._values, self._lengths, self._offsets = values, lengths, offsets

    def values(self) -> torch.Tensor:
        """The ids: int32."""
        return self._values

    def lengths(self) -> torch.Tensor:
        """The number of ids in each row: int32."""
        return self._lengths

    def offsets(self) -> torch.Tensor:
        """Where the ids of each row begin, and where the last ones end: int32."""
        return self._offsets


class KeyedJaggedTensor(JaggedTensor):
    """Ids of several columns, one column after another; ``ids[key]`` are those of one."""

    def __init__(
        self,
        keys: list[str],
        values: torch.Tensor,
        stride: int,
        **of: Any,
    ) -> None:
        super().__init__(values, **of)
        self._keys, self._stride = keys, stride

    def keys(self) -> list[str]:
        """The names of the columns."""
        return self._keys

    def stride(self) -> int:
        """The number of rows."""
        return self._stride

    def __getitem__(self, key: str) -> JaggedTensor:
        rows = self._stride
        first = self._keys.index(key) * rows
        offsets = self._offsets[first : first + rows + 1]
        begin, end = offsets[[0, -1]].tolist()
        lengths = self._lengths[first : first + rows]
        return JaggedTensor(self._values[begin:end], lengths, offsets - begin)

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Copy the tensors to a device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Copy the tensors to page-locked memory."""
        return self._each(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work that is queued on ``stream`` by then is done."""
        for tensor in (self._values, self._lengths, self._offsets):
            tensor.record_stream(stream)

    def _each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        made = copy.copy(self)
        parts = (self._values, self._lengths, self._offsets)
        made._values, made._lengths, made._offsets = map(function, parts)
        return made
