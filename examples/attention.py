"""Target attention: an event of a history is weighted by how well it fits the row's item.

    nvt-train --binary_path OUT/criteo_binary/split --sequences recent \\
        --model examples.attention:build --model_settings positions=true

``recent`` is a history of the spec; the item is the row's value in the column of the same name.
With ``positions``, the newest event may count more than an old one.
"""

import torch
from torch import nn


class Attention(nn.Module):
    """An MLP over the row, the attention-weighted mean of its events, and their product.

    ``columns`` describes the columns of the data (docs/models.md).
    """

    def __init__(self, columns, hidden, positions):
        super().__init__()
        dim = columns.embedding_dim
        self.items = [columns.vectors.index(columns.features[name]) for name in columns.lists]
        # Vectors are small at first. Without normalization, all events would get equal weights.
        self.norm = nn.LayerNorm(dim)
        shape = len(columns.lists), columns.max_events
        self.age = nn.Parameter(torch.zeros(shape)) if positions else None
        width = columns.width + 2 * len(self.items) * dim
        self.layers = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, len(columns.labels))
        )

    def forward(self, dense, vectors, lists, present):
        # vectors: [rows, columns, dim]; lists: [rows, lists, events, dim]; present: [rows, lists,
        # events], True if the event exists.
        items = self.norm(vectors[:, self.items])
        events = self.norm(lists)
        scores = (events * items.unsqueeze(2)).sum(3) / events.shape[3] ** 0.5
        if self.age is not None:
            scores = scores + self.age  # the newest event is the last one of each list
        # Multiplying by present gives empty lists weights of 0.
        weights = scores.masked_fill(~present, -1e4).softmax(2) * present
        interest = (weights.unsqueeze(3) * events).sum(2)
        parts = torch.cat([vectors, interest, interest * items], 1)
        return self.layers(torch.cat([dense, parts.flatten(1)], 1))


def build(columns, hidden=64, positions=False):
    return Attention(columns, hidden, positions)
