"""DeepFM (Guo et al. 2017, arXiv:1703.04247): products of all pairs of vectors, beside an MLP.

    nvt-train --binary_path OUT/criteo_binary/split \\
        --model examples.deepfm:build --model_settings 'hidden=[64, 32]'

Its linear part is the trainer's first-order term.
"""

import torch
from torch import nn


class DeepFM(nn.Module):
    def __init__(self, columns, hidden):
        super().__init__()
        width = len(columns.dense) + len(columns.vectors) * columns.embedding_dim
        layers = []
        for size in hidden:
            layers += [nn.Linear(width, size), nn.ReLU()]
            width = size
        self.deep = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, dense, vectors):
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2
        return pairs + self.deep(torch.cat([dense, vectors.flatten(1)], 1)).squeeze(1)


def build(columns, hidden=(64, 32)):
    return DeepFM(columns, hidden)
