"""FinalMLP (Mao et al. 2023, arXiv:2304.00902): two gated streams of layers, and their product."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nvt_torchrec.models.contract import Columns
from nvt_torchrec.models.layers import Layers, check_last_layers


class FinalMLP(nn.Module):
    """Two streams of layers over all values and vectors, combined by a bilinear form.

    The gates of the streams (equation 6 of the paper) do not depend on a row's values: each gate is
    the weight of one input.

    Args:
        columns: The columns of the data.
        sizes: The widths of the layers of both streams, followed by the number of labels.
        regularization: ``batch_norm`` and ``dropout`` of :class:`.layers.Layers`.
    """

    def __init__(self, columns: Columns, sizes: tuple[int, ...], **regularization: Any) -> None:
        super().__init__()
        self.gates = nn.Parameter(torch.zeros(2, columns.width))
        self.first = Layers(columns.width, sizes[:-1], **regularization)
        self.second = Layers(columns.width, sizes[:-1], **regularization)
        self.linear = nn.Linear(2 * sizes[-2], sizes[-1])
        self.products = nn.Linear(sizes[-2], sizes[-2] * sizes[-1], bias=False)

    def forward(self, dense: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Return logits [B, T] of dense values [B, N] and vectors [B, V, D]."""
        values = torch.cat([dense, vectors.flatten(1)], 1)
        first, second = 2 * self.gates.sigmoid()
        left = self.first(first * values)
        right = self.second(second * values)
        # leftᵀ W right, with a matrix W for each label.
        product = self.products(left).view(left.shape[0], -1, right.shape[1]) @ right.unsqueeze(2)
        return self.linear(torch.cat([left, right], 1)) + product.squeeze(2)


def build(
    columns: Columns, *, over_arch_layer_sizes: tuple[int, ...], **regularization: Any
) -> FinalMLP:
    """Build a FinalMLP from the values of the flags with the names of the arguments.

    Both streams have the same sizes.

    Raises:
        SchemaError: A size is out of range or does not fit the columns.
        ValueError: A size has a wrong type.
    """
    sizes = check_last_layers(columns, over_arch_layer_sizes)
    return FinalMLP(columns, sizes, **regularization)
