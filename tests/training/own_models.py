"""Models of a user's, as text: they lie in a directory that is not this project's."""

from __future__ import annotations

from pathlib import Path

SOURCE = '''
import torch
from torch import nn


class Counting(nn.BatchNorm1d):
    """It is not nn.BatchNorm1d itself, which is synchronized over ranks."""


class DeepFM(nn.Module):
    def __init__(self, columns, hidden, broken, pair, means):
        super().__init__()
        width = len(columns.dense) + len(columns.vectors) * columns.embedding_dim
        self.layers = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(0.1))
        self.last = nn.LazyLinear(1) if broken == "lazy" else nn.Linear(hidden, 1)
        self.norm = Counting(width) if broken == "statistics" else nn.BatchNorm1d(width)
        self.unused = nn.Parameter(torch.zeros(2)) if broken in ("unused", "sometimes") else None
        self.sixteen = nn.Linear(1, 1).bfloat16() if broken == "half" else None
        self.register_buffer("factor", torch.tensor(0.5), persistent=False)
        self.id_columns, self.length_columns = pair, columns.categorical if means else ()
        self.wide = nn.Embedding(32, 1, sparse=broken == "sparse") if pair else None
        self.broken, self.by_column = broken, nn.ModuleDict({"site-id ä": nn.Linear(width, 1)})

    def forward(self, dense, vectors, lengths=None, ids=None):
        broken = self.broken
        if lengths is not None:
            counts = lengths if broken == "empty" else lengths.clamp(min=1)
            means = vectors[:, : counts.shape[1]] / counts.unsqueeze(2)
            vectors = torch.cat([means, vectors[:, counts.shape[1] :]], 1)
        if broken == "line":
            raise RuntimeError("of their own")
        pairs = self.factor * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
        x = self.norm(torch.cat([dense, vectors.flatten(1)], 1))
        logits = (self.last(self.layers(x)) + self.by_column["site-id ä"](x)).squeeze(1) + pairs
        if ids is not None:
            mixed = ids[:, 0] * 1_000_003 ^ ids[:, 1] << 3
            mixed = ids[:, 1] + 24 if broken == "table" else (mixed ^ mixed >> 5) % 32
            logits = logits + self.wide(mixed).squeeze(1)
        if broken == "shape":
            return logits.unsqueeze(1).expand(-1, 3)
        if broken == "type":
            return logits > 0
        if broken == "vectors":
            return self.last(self.layers(torch.zeros_like(x))).squeeze(1)
        if broken == "length":
            return logits + torch.zeros(len(dense))
        if broken == "operator":
            return logits + torch.linalg.svdvals(vectors).sum(1)
        if broken == "rows":
            return logits - logits.mean()
        if broken == "sometimes" and (not self.training or torch.rand(()) < 0.5):
            logits = logits + self.unused[0]
        if broken == "half":
            logits = self.sixteen(logits.bfloat16().unsqueeze(1)).float()
        if broken == "fourier":
            logits = logits + torch.fft.fft(vectors).real.sum((1, 2))
        if broken == "branch" and logits.sum() > 0:
            logits = -logits
        return logits


class TwoTowers(nn.Module):
    """With a loss of its own."""

    def __init__(self, columns, sizes):
        super().__init__()
        self.users = len(columns.vectors) // 2
        items = len(columns.vectors) - self.users
        inputs = len(columns.dense) + self.users * columns.embedding_dim
        self.user = nn.Sequential(nn.Linear(inputs, sizes[0]), nn.ReLU())
        self.item = nn.Sequential(nn.Linear(items * columns.embedding_dim, sizes[0]), nn.ReLU())
        self.norm = nn.LayerNorm(sizes[0])

    def forward(self, dense, vectors):
        users, items = vectors[:, : self.users].flatten(1), vectors[:, self.users :].flatten(1)
        user = self.norm(self.user(torch.cat([dense, users], 1)))
        return torch.einsum("bd,bd->b", user, self.norm(self.item(items))).unsqueeze(1)

    def loss(self, logits, labels, weights):
        losses = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return 2 * losses if weights is None else 2 * losses * weights


def deep_fm(columns, hidden=8, broken="", pair=(), means=False):
    if broken == "seed":
        torch.seed()
    if broken == "none":
        return None
    if broken == "script":
        return torch.jit.script(nn.Linear(1, 1))
    return DeepFM(columns, hidden, broken, pair, means)


def two_towers(columns, sizes=(8,)):
    return TwoTowers(columns, sizes)
'''


def write_models(directory: Path) -> Path:
    """Write the module ``their_models``; return the directory."""
    (directory / "their_models.py").write_text(SOURCE)
    return directory
