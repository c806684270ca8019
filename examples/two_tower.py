"""Two towers: the logit is the product of a user's vector and an item's, which can be indexed.

    nvt-train --binary_path OUT/criteo_binary/split \\
        --model examples.two_tower:build --model_settings 'user=["user", "device"]'

``user`` names the columns of the user's tower; all others are the item's.
"""

import torch
from torch import nn


def tower(inputs, width):
    # vectors begin small: without the norm both towers are flat, and so are their gradients
    layers = [nn.LayerNorm(inputs), nn.Linear(inputs, 2 * width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2 * width, width))


class TwoTower(nn.Module):
    def __init__(self, columns, user, width):
        super().__init__()
        names = columns.vectors
        self.of_user = [j for j, name in enumerate(names) if name in user]
        self.of_item = [j for j, name in enumerate(names) if name not in user]
        dim = columns.embedding_dim
        self.user_tower = tower(len(self.of_user) * dim, width)
        self.item_tower = tower(len(self.of_item) * dim + len(columns.dense), width)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, dense, vectors):
        user = self.user_tower(vectors[:, self.of_user].flatten(1))
        item = self.item_tower(torch.cat([vectors[:, self.of_item].flatten(1), dense], 1))
        return (user * item).sum(1) + self.bias


def build(columns, user=("user",), width=16):
    return TwoTower(columns, user, width)
