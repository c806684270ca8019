"""Target attention: the events of a history are weighted by their similarity to the row's item.

The model follows DIN (Zhou et al. 2018, arXiv:1706.06978), except that the weights are a softmax of
dot products instead of the results of layers over pairs of vectors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.models.contract import Columns
from nvt_torchrec.models.layers import Layers, check_last_layers, initialize

#: The dot product for positions without an event. It makes their weight 0, and unlike -inf it does
#: not make the weights NaN if a row has no event at all.
_MASKED = -1e4


class DeepInterest(nn.Module):
    """Attention over histories, and layers over its results and all values and vectors.

    For each column of a history, the candidate is the row's vector of the categorical column with
    the same name.

    Args:
        columns: The columns of the data.
        sizes: The widths of the layers; the last is the number of labels.
        regularization: ``batch_norm`` and ``dropout`` of :class:`.layers.Layers`.
    """

    def __init__(self, columns: Columns, sizes: tuple[int, ...], **regularization: Any) -> None:
        super().__init__()
        # The index of the candidate's vector for each column of the histories.
        self.candidates = []
        for name in columns.lists:
            self.candidates.append(columns.categorical.index(columns.features[name]))
        dim = columns.embedding_dim
        # Embeddings are small at first: without normalization all weights would be nearly equal.
        self.norm = nn.LayerNorm(dim)
        width = columns.width + len(self.candidates) * (2 * dim + 1)
        self.deep = Layers(width, sizes, last_relu=False, **regularization)

    def forward(
        self, dense: torch.Tensor, vectors: torch.Tensor, lists: torch.Tensor, present: torch.Tensor
    ) -> torch.Tensor:
        """Return logits [B, T].

        Args:
            dense: The dense values [B, N].
            vectors: The vectors [B, V, D].
            lists: The embeddings of the events [B, S, L, D].
            present: Whether a position has an event, bool [B, S, L]. An empty list contributes
                zeros.
        """
        candidates = self.norm(vectors[:, self.candidates])
        events = self.norm(lists)
        products = (events * candidates.unsqueeze(2)).sum(3) / events.shape[3] ** 0.5  # [B, S, L]
        products = products.masked_fill(~present, _MASKED)
        weights = products.softmax(2) * present
        interest = (weights.unsqueeze(3) * events).sum(2)  # [B, S, D]
        # The weights only compare events with each other. The log of the softmax's denominator adds
        # the overall similarity; an additional product of 0 makes it 0 for an empty list.
        similarity = functional.pad(products, (1, 0)).logsumexp(2)  # [B, S]
        parts = [dense, vectors.flatten(1), interest.flatten(1), (interest * candidates).flatten(1)]
        return self.deep(torch.cat([*parts, similarity], 1))


def build(
    columns: Columns, *, over_arch_layer_sizes: tuple[int, ...], **regularization: Any
) -> DeepInterest:
    """Build a model with target attention from the values of the flags with these names.

    Raises:
        SchemaError: A size is out of range or does not fit the columns, or no history provides its
            events one by one.
        ValueError: A size has a wrong type.
    """
    if not columns.lists:
        raise SchemaError(
            "the model attends to the events of histories, but the data have no histories",
            "add a [[history]] to the spec (docs/events.md), or choose another --model",
        )
    sizes = check_last_layers(columns, over_arch_layer_sizes)
    return initialize(DeepInterest(columns, sizes, **regularization))
