"""The batches of a loader: TorchRec's, with the weights of the rows."""

from __future__ import annotations

import dataclasses
from typing import Self

import torch
from torchrec.datasets.utils import Batch


@dataclasses.dataclass
class LoaderBatch(Batch):
    """A batch that TorchRec's training pipelines carry as they do :class:`Batch`.

    Attributes:
        weights: float32 [B], the weight of each row; None if the data have none.
    """

    weights: torch.Tensor | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Copy the batch to ``device``."""
        weights = self.weights
        if weights is not None:
            weights = weights.to(device=device, non_blocking=non_blocking)
        return self._with(super().to(device, non_blocking), weights)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work that is queued on ``stream`` by then is done."""
        super().record_stream(stream)
        if self.weights is not None:
            self.weights.record_stream(stream)

    def pin_memory(self) -> Self:
        """Copy the batch to page-locked memory."""
        weights = None if self.weights is None else self.weights.pin_memory()
        return self._with(super().pin_memory(), weights)

    def _with(self, batch: Batch, weights: torch.Tensor | None) -> Self:
        return dataclasses.replace(
            self,
            dense_features=batch.dense_features,
            sparse_features=batch.sparse_features,
            labels=batch.labels,
            weights=weights,
        )
