"""DeepFM (Guo et al. 2017, arXiv:1703.04247): dot products of all pairs of vectors, plus layers.

Its linear part is the linear term, which every model has (:class:`.head.LinearTerm`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nvt_torchrec.models.contract import Columns
from nvt_torchrec.models.layers import Layers, check_last_layers, initialize


class DeepFM(nn.Module):
    """The sum of all pairs' dot products, and layers over all values and vectors.

    Args:
        columns: The columns of the data.
        sizes: The widths of the layers; the last is the number of labels.
        regularization: ``batch_norm`` and ``dropout`` of :class:`.layers.Layers`.
    """

    def __init__(self, columns: Columns, sizes: tuple[int, ...], **regularization: Any) -> None:
        super().__init__()
        self.deep = Layers(columns.width, sizes, last_relu=False, **regularization)

    def forward(self, dense: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Return logits [B, T] of dense values [B, N] and vectors [B, V, D]."""
        # The sum of the products of all pairs is (square of the sum - sum of the squares) / 2.
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True) / 2
        return pairs + self.deep(torch.cat([dense, vectors.flatten(1)], 1))


def build(
    columns: Columns, *, over_arch_layer_sizes: tuple[int, ...], **regularization: Any
) -> DeepFM:
    """Build a DeepFM from the values of the flags with the names of the arguments.

    Raises:
        SchemaError: A size is out of range or does not fit the columns.
        ValueError: A size has a wrong type.
    """
    sizes = check_last_layers(columns, over_arch_layer_sizes)
    return initialize(DeepFM(columns, sizes, **regularization))
