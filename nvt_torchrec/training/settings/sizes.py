"""The sizes of models that ``--size`` names. Knows no torch, as the flags do not."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Size:
    """A value of ``--size``; its other fields are the settings of these names.

    Attributes:
        min_rows: The number of training rows from which ``--size auto`` chooses it.
    """

    min_rows: int
    optimizer: str
    embedding_dim: int
    dense_arch_layer_sizes: tuple[int, ...]
    over_arch_layer_sizes: tuple[int, ...]
    epochs: int = 1
    early_stopping: int = 0


#: By rising number of rows: a small log has too few for wide tables and many layers, which learn
#: more slowly and rank worse than logistic regression (``make bench-quality``). The large one is
#: that of TorchRec's example, but for its optimizer. Logs of numbers gain by many epochs, which a
#: tiny one has the time for; logs of ids overfit, and stop early.
SIZES = {
    "tiny": Size(
        min_rows=0,
        optimizer="adagrad",
        embedding_dim=16,
        dense_arch_layer_sizes=(64, 16),
        over_arch_layer_sizes=(64, 1),
        epochs=15,
        early_stopping=8,
    ),
    "small": Size(
        min_rows=1_000_000,
        optimizer="adagrad",
        embedding_dim=16,
        dense_arch_layer_sizes=(64, 16),
        over_arch_layer_sizes=(64, 1),
    ),
    "medium": Size(
        min_rows=20_000_000,
        optimizer="adagrad",
        embedding_dim=32,
        dense_arch_layer_sizes=(256, 32),
        over_arch_layer_sizes=(256, 128, 1),
    ),
    "large": Size(
        min_rows=200_000_000,
        optimizer="rowwise_adagrad",
        embedding_dim=128,
        dense_arch_layer_sizes=(512, 256, 128),
        over_arch_layer_sizes=(1024, 1024, 512, 256, 1),
    ),
}
