"""DeepFM (Guo et al. 2017, arXiv:1703.04247): products of all pairs of vectors, beside an MLP.

    nvt-train --binary_path OUT/criteo_binary/split \\
        --model examples.deepfm:build --model_settings 'hidden=[64, 32]'

It has a logit for each label (``--label clicked,bought``). Its linear part is the trainer's
linear term. With ``'crosses=[["user", "item"]]'`` it has a wide part, too, as Wide & Deep
(Cheng et al. 2016, arXiv:1606.07792): a weight for each pair of ids, by its hash.
"""

import torch
from torch import nn


class DeepFM(nn.Module):
    """``columns`` says which columns there are (docs/models.md)."""

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
        # The products of all pairs: half of what the square of the sum has beside the squares.
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True) / 2
        logits = pairs * self.pairs + self.deep(torch.cat([dense, vectors.flatten(1)], 1))
        if ids is not None:
            # ids has the two columns of each pair, one after the other.
            hashes = (ids[:, ::2] * 1_000_003 + ids[:, 1::2]) % len(self.wide)
            logits = logits + self.wide[hashes].sum(1)
        return logits


def build(columns, hidden=(64, 32), crosses=(), buckets=65536):
    return DeepFM(columns, hidden, crosses, buckets)
