"""The model sizes of ``--size``. Like the flags, this module does not import torch."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Size:
    """A value of ``--size``. Except for ``min_rows``, its fields are settings of the same names.

    Attributes:
        min_rows: The smallest number of training rows for which ``--size auto`` chooses it.
    """

    min_rows: int
    optimizer: str
    embedding_dim: int
    dense_arch_layer_sizes: tuple[int, ...]
    over_arch_layer_sizes: tuple[int, ...]
    epochs: int = 1
    early_stopping: int = 0


#: The sizes, in rising order of ``min_rows``. On a small log, wide tables and many layers would
#: learn more slowly and rank worse than logistic regression (``make bench-quality``). "large" is
#: the model of TorchRec's example with another optimizer. "tiny" has time for many epochs: logs of
#: numeric columns improve over them, and logs of ids, which overfit, stop early.
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
