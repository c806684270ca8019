"""DeepFM (Guo et al. 2017, arXiv:1703.04247): products of all pairs of vectors, plus an MLP.

    nvt-train --binary_path OUT/criteo_binary/split \\
        --model examples.deepfm:build --model_settings 'hidden=[64, 32]'

It has a logit for each label (``--label clicked,bought``). Its linear part is the trainer's
linear term. With ``'crosses=[["user", "item"]]'`` it also has a wide part like Wide & Deep (Cheng
et al. 2016, arXiv:1606.07792): a weight for each pair of ids, found by hashing the pair.
"""

import torch
from torch import nn


class DeepFM(nn.Module):
    """``columns`` describes the columns of the data (docs/models.md)."""

    def __init__(self, columns, hidden, crosses, buckets):
        super().__init__()
        width = columns.width
        labels = len(columns.labels)
        layers = []
        for size in hidden:
            layers += [nn.Linear(width, size), nn.ReLU()]
            width = size
        self.deep = nn.Sequential(*layers, nn.Linear(width, labels))
        self.pairs = nn.Parameter(torch.ones(labels))
        self.id_columns = [name for pair in crosses for name in pair]
        self.wide = nn.Parameter(torch.zeros(buckets, labels)) if crosses else None

    def forward(self, dense, vectors, ids=None):
        # The sum of the products of all pairs is half of (square of the sum − sum of the squares).
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True) / 2
        logits = pairs * self.pairs + self.deep(torch.cat([dense, vectors.flatten(1)], 1))
        if ids is not None:
            # ids holds the two columns of each pair next to each other.
            hashes = (ids[:, ::2] * 1_000_003 + ids[:, 1::2]) % len(self.wide)
            logits = logits + self.wide[hashes].sum(1)
        return logits


def build(columns, hidden=(64, 32), crosses=(), buckets=65536):
    return DeepFM(columns, hidden, crosses, buckets)
