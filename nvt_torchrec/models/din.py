"""Target attention: events of a history count by how they fit the row's own item.

As in DIN (Zhou et al. 2018, arXiv:1706.06978), but the weights are a softmax of dot products
instead of layers over pairs of vectors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.models.contract import Columns
from nvt_torchrec.models.layers import Layers, check_last, initialize

#: What a position without an event has instead of a product: its weight is 0.
_NEVER = -1e4


class DeepInterest(nn.Module):
    """Attention of the columns of histories, and layers over it and all values and vectors.

    The candidate of a column of a history is the row's vector in the column of that name.

    Args:
        columns: The columns of the data.
        sizes: The widths of the layers; the last is the number of labels.
        regularization: ``batch_norm`` and ``dropout`` of :class:`.layers.Layers`.
    """

    def __init__(self, columns: Columns, sizes: tuple[int, ...], **regularization: Any) -> None:
        super().__init__()
        own = (columns.features[name] for name in columns.lists)
        self.candidates = [columns.categorical.index(name) for name in own]
        dim = columns.embedding_dim
        self.norm = nn.LayerNorm(dim)  # vectors begin small, and so would all weights be equal
        width = columns.width + len(self.candidates) * (2 * dim + 1)
        self.deep = Layers(width, sizes, last_relu=False, **regularization)

    def forward(
        self, dense: torch.Tensor, vectors: torch.Tensor, lists: torch.Tensor, present: torch.Tensor
    ) -> torch.Tensor:
        """Return logits [B, T]; see :mod:`.contract`. An empty list adds zeros.

        The logarithm of the softmax's sum, with a product of 0 more, says how well anything fits.
        """
        candidates, events = self.norm(vectors[:, self.candidates]), self.norm(lists)
        fit = (events * candidates.unsqueeze(2)).sum(3) / events.shape[3] ** 0.5  # [B, S, L]
        fit = fit.masked_fill(~present, _NEVER)
        interest = ((fit.softmax(2) * present).unsqueeze(3) * events).sum(2)
        sums = functional.pad(fit, (1, 0)).logsumexp(2)
        parts = [dense, vectors.flatten(1), interest.flatten(1), (interest * candidates).flatten(1)]
        return self.deep(torch.cat([*parts, sums], 1))


def build(
    columns: Columns, *, over_arch_layer_sizes: tuple[int, ...], **regularization: Any
) -> DeepInterest:
    """Build it with the settings of the flags of these names.

    Raises:
        SchemaError: The sizes do not make the model, or no history gives its events.
        ValueError: One is of another type.
    """
    if not columns.lists:
        raise SchemaError(
            "a model that attends to the events of histories, and there are none",
            "add a [[history]] to the spec (docs/events.md), or choose another --model",
        )
    sizes = check_last(columns, over_arch_layer_sizes)
    return initialize(DeepInterest(columns, sizes, **regularization))
