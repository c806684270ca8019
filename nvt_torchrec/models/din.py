"""Target attention: the events of a history are weighted by their similarity to the row's item.

As in DIN (Zhou et al. 2018, arXiv:1706.06978), but the weights are a softmax of dot products
instead of the results of layers over pairs of vectors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.models.contract import Columns
from nvt_torchrec.models.layers import Layers, check_last_layers, initialize

#: Replaces the dot product of a position without an event. Its weight is then 0, and unlike -inf it
#: leaves no NaN where a row has no event at all.
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
        # For each column of the histories, the position of the row's own vector.
        self.candidates = []
        for name in columns.lists:
            self.candidates.append(columns.categorical.index(columns.features[name]))
        dim = columns.embedding_dim
        # Embeddings begin small; without normalization all weights would be nearly equal.
        self.norm = nn.LayerNorm(dim)
        width = columns.width + len(self.candidates) * (2 * dim + 1)
        self.deep = Layers(width, sizes, last_relu=False, **regularization)

    def forward(
        self, dense: torch.Tensor, vectors: torch.Tensor, lists: torch.Tensor, present: torch.Tensor
    ) -> torch.Tensor:
        """Return logits [B, T]; see :mod:`.contract`. An empty list contributes zeros."""
        candidates, events = self.norm(vectors[:, self.candidates]), self.norm(lists)
        products = (events * candidates.unsqueeze(2)).sum(3) / events.shape[3] ** 0.5  # [B, S, L]
        products = products.masked_fill(~present, _NEVER)
        weights = products.softmax(2) * present
        interest = (weights.unsqueeze(3) * events).sum(2)  # [B, S, D]
        # Weights are relative. The log of the softmax's denominator says how similar the events are
        # altogether; one more product, of 0, makes it 0 for an empty list.
        similarity = functional.pad(products, (1, 0)).logsumexp(2)  # [B, S]
        parts = [dense, vectors.flatten(1), interest.flatten(1), (interest * candidates).flatten(1)]
        return self.deep(torch.cat([*parts, similarity], 1))


def build(
    columns: Columns, *, over_arch_layer_sizes: tuple[int, ...], **regularization: Any
) -> DeepInterest:
    """Build it with the settings of the flags of the same names.

    Raises:
        SchemaError: The sizes do not make the model, or no history gives its events.
        ValueError: One is of another type.
    """
    if not columns.lists:
        raise SchemaError(
            "the model attends to the events of histories, and there are none in the data",
            "add a [[history]] to the spec (docs/events.md), or choose another --model",
        )
    sizes = check_last_layers(columns, over_arch_layer_sizes)
    return initialize(DeepInterest(columns, sizes, **regularization))
