"""The sizes of a model and of its batches, by the number of training rows.

A small log has too few rows for wide tables and many layers: they learn more slowly and rank worse
than logistic regression. ``make bench-quality`` prints what these sizes reach.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Size:
    """A value of ``--size``; its other fields are the settings of these names.

    Attributes:
        least_rows: The number of training rows from which ``--size auto`` chooses it.
    """

    least_rows: int
    optimizer: str
    embedding_dim: int
    dense_arch_layer_sizes: tuple[int, ...]
    over_arch_layer_sizes: tuple[int, ...]


#: By rising number of rows. The large one is that of TorchRec's example, but for its optimizer.
SIZES = {
    "small": Size(0, "adagrad", 16, (64, 16), (64, 1)),
    "medium": Size(20_000_000, "adagrad", 32, (256, 32), (256, 128, 1)),
    "large": Size(200_000_000, "rowwise_adagrad", 128, (512, 256, 128), (1024, 1024, 512, 256, 1)),
}
#: The steps of an epoch that the default batch gives at least, and the bounds of that batch.
_STEPS, _LEAST_BATCH, _MOST_BATCH = 350, 32, 16_384


def size_for(rows: int) -> str:
    """Return the largest size that so many training rows can train."""
    return [name for name, size in SIZES.items() if size.least_rows <= rows][-1]


def global_batch_for(rows: int) -> int:
    """Return the samples of a step, on all ranks: a power of two."""
    most = 1 << max(0, (rows // _STEPS).bit_length() - 1)
    return max(_LEAST_BATCH, min(most, _MOST_BATCH))
