"""Target attention: an event of a history counts by how well it fits the row's own item.

    nvt-train --binary_path OUT/criteo_binary/split --sequences recent \\
        --model examples.attention:build --model_settings places=true

``recent`` is a history of the spec; the item is the row's value in the column of the same name.
With ``places`` the newest event may count more than an old one.
"""

import torch
from torch import nn


class Attention(nn.Module):
    """An MLP of the row, of the mean of the events by attention, and of its product with the item.

    ``columns`` says which columns there are (docs/models.md).
    """

    def __init__(self, columns, hidden, places):
        super().__init__()
        dim = columns.embedding_dim
        self.items = [columns.vectors.index(columns.features[name]) for name in columns.lists]
        self.norm = nn.LayerNorm(
            dim
        )  # without it all weights are equal at first: vectors are small
        shape = len(columns.lists), columns.max_events
        self.age = nn.Parameter(torch.zeros(shape)) if places else None
        width = columns.width + 2 * len(self.items) * dim
        self.layers = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, len(columns.labels))
        )

    def forward(self, dense, vectors, lists, present):
        # vectors [rows, columns, dim]; lists [rows, lists, events, dim], where present is set
        items = self.norm(vectors[:, self.items])
        events = self.norm(lists)
        scores = (events * items.unsqueeze(2)).sum(3) / events.shape[3] ** 0.5
        if self.age is not None:
            scores = scores + self.age  # the newest event is the last one of each list
        # A list may be empty: then all of its weights are 0.
        weights = scores.masked_fill(~present, -1e4).softmax(2) * present
        found = (weights.unsqueeze(3) * events).sum(2)
        parts = torch.cat([vectors, found, found * items], 1)
        return self.layers(torch.cat([dense, parts.flatten(1)], 1))


def build(columns, hidden=64, places=False):
    return Attention(columns, hidden, places)
