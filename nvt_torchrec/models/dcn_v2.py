"""DCN v2 (Wang et al. 2020, arXiv:2008.13535): a low-rank cross network parallel to layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nvt_torchrec.models.contract import Columns
from nvt_torchrec.models.layers import (
    CrossNetwork,
    Layers,
    check_last_layers,
    check_sizes,
    initialize,
)


class DcnV2(nn.Module):
    """A cross network and layers over all values and vectors, in parallel (figure 1b of the paper).

    Args:
        columns: The columns of the data.
        sizes: The widths of the layers, followed by the number of labels.
        cross_layers: The number of layers of the cross network.
        rank: The rank of the weights of the cross network.
        regularization: ``batch_norm`` and ``dropout`` of :class:`.layers.Layers`.
    """

    def __init__(
        self,
        columns: Columns,
        sizes: tuple[int, ...],
        cross_layers: int,
        rank: int,
        **regularization: Any,
    ) -> None:
        super().__init__()
        self.cross = CrossNetwork(columns.width, cross_layers, rank)
        self.deep = Layers(columns.width, sizes[:-1], **regularization)
        self.top = nn.Linear(columns.width + sizes[-2], sizes[-1])

    def forward(self, dense: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Return logits [B, T] of dense values [B, N] and vectors [B, V, D]."""
        deep = self.deep(torch.cat([dense, vectors.flatten(1)], 1))
        return self.top(torch.cat([self.cross(dense, vectors), deep], 1))


def build(
    columns: Columns,
    *,
    over_arch_layer_sizes: tuple[int, ...],
    dcn_num_layers: int,
    dcn_low_rank_dim: int,
    **regularization: Any,
) -> DcnV2:
    """Build a DCN v2 from the values of the flags with the names of the arguments.

    The rank is limited to the width of the input.

    Raises:
        SchemaError: A size is out of range or does not fit the columns.
        ValueError: A size has a wrong type.
    """
    check_sizes({"dcn_num_layers": dcn_num_layers, "dcn_low_rank_dim": dcn_low_rank_dim})
    sizes = check_last_layers(columns, over_arch_layer_sizes)
    rank = min(dcn_low_rank_dim, columns.width)
    return initialize(DcnV2(columns, sizes, dcn_num_layers, rank, **regularization))
