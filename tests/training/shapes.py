"""Models of given sizes, for tests that make them themselves."""

from __future__ import annotations

from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.interactions import DotProducts, Interaction

#: The dot products of pairs.
PAIRS = DotProducts()


def dlrm(
    dense: tuple[str, ...],
    categorical: tuple[str, ...],
    rows: tuple[int, ...],
    dim: int,
    bottom: tuple[int, ...],
    top: tuple[int, ...],
    first_order: float = 0.0,
    interaction: Interaction = PAIRS,
) -> ModelConfig:
    """Return a DLRM with these columns, tables and layers."""
    settings = {
        "dense_arch_layer_sizes": list(bottom),
        "over_arch_layer_sizes": list(top),
        "interaction_type": interaction.NAME,
        **{key: list(x) if isinstance(x, tuple) else x for key, x in vars(interaction).items()},
    }
    return ModelConfig(dense, categorical, rows, dim, ("label",), first_order, "dlrm", settings)
