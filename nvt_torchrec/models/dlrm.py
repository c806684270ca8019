"""DLRM (Naumov et al. 2019, arXiv:1906.00091), with any of the interactions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.base.files.validation import convert
from nvt_torchrec.models.contract import Columns
from nvt_torchrec.models.interactions import INTERACTIONS, Interaction, sizes_of
from nvt_torchrec.models.layers import (
    ALIGNMENT,
    Layers,
    PairProducts,
    check_last,
    check_sizes,
    initialize,
)  # fmt: skip
from nvt_torchrec.models.regularization import REGULARIZATION

#: With more vectors, those of the dense columns are summed. The products of all pairs would double
#: the time of a step on Criteo's 26 + 13 columns.
_MAX_VECTORS = 24


class Dlrm(nn.Module):
    """Layers for the dense columns, an interaction, and layers at the end.

    Without dense columns there are no layers for them and no dense vector in the interaction.

    Attributes:
        sums_dense: Whether the dense columns' vectors (:mod:`.piecewise`) come summed, as one.

    Args:
        columns: The columns of the data.
        bottom: The widths of the layers for the dense columns; the last is that of the tables.
        top: The widths of the layers at the end.
        interaction: How dense vector and embeddings are combined.
        regularization: ``batch_norm`` and ``dropout`` of :class:`.layers.Layers`.
    """

    def __init__(
        self,
        columns: Columns,
        bottom: tuple[int, ...],
        top: tuple[int, ...],
        interaction: Interaction,
        **regularization: Any,
    ) -> None:
        super().__init__()
        has_dense = bool(columns.dense)
        self.bottom = None
        if has_dense:
            self.bottom = Layers(len(columns.dense), bottom, **regularization)
        vectors = len(columns.vectors) + has_dense
        of_dense = len(columns.vectors) - len(columns.features)
        self.sums_dense = of_dense > 0 and vectors > _MAX_VECTORS
        if self.sums_dense:
            vectors -= of_dense - 1
        self.interaction, width = interaction.build(vectors, columns.embedding_dim, has_dense)
        self.top = Layers(width, top, last_relu=False, **regularization)

    def forward(self, dense: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Return logits [B, T]; see :mod:`.contract`."""
        if self.bottom is not None:
            dense = self.bottom(dense)
        return self.top(self.interaction(dense, vectors))

    @property
    def widest(self) -> int:
        """The width of the widest layer, without those of the interaction."""
        layers = (layer for part in filter(None, (self.bottom, self.top)) for layer in part)
        return max(layer.out_features for layer in layers)

    def align_inputs(self) -> None:
        """Let the first layers below and above the interaction compute with padded inputs.

        Tensor cores multiply 16-bit numbers, and TensorFloat-32, at full speed only where rows
        begin at multiples of 16 bytes. The 13 dense features and the 479 inputs of the top layers
        of MLPerf's DLRM do not. Zeros beside them, and beside the columns of the weight, change no
        sum. Parameters and state dicts stay as they are: a layer pads its weight in each call.
        """
        if isinstance(self.interaction, PairProducts):
            self.interaction.align()
        for layers in filter(None, (self.bottom, self.top)):
            layers.aligned = next(iter(layers)).in_features % ALIGNMENT > 0


def choose_settings(flags: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    """Return the settings that the flags of a DLRM say, of the chosen interaction alone."""
    bottom = flags["dense_arch_layer_sizes"] if columns.dense else ()
    kind = flags["interaction_type"]
    names = ("over_arch_layer_sizes", "interaction_type", *sizes_of(INTERACTIONS[kind]))
    names += REGULARIZATION
    return {"dense_arch_layer_sizes": bottom, **{name: flags[name] for name in names}}


def build(
    columns: Columns,
    *,
    interaction_type: str,
    dense_arch_layer_sizes: tuple[int, ...],
    over_arch_layer_sizes: tuple[int, ...],
    batch_norm: bool = False,
    dropout: float = 0.0,
    **sizes: Any,
) -> Dlrm:
    """Build a DLRM whose settings are the flags of these names.

    Raises:
        SchemaError: The settings do not make a DLRM.
        ValueError: One is of another type.
    """
    if interaction_type not in INTERACTIONS:
        raise ValueError(f"interaction_type {interaction_type!r:.60} is unknown")
    interaction = convert(INTERACTIONS[interaction_type], sizes)
    bottom = convert(tuple[int, ...], dense_arch_layer_sizes, "dense_arch_layer_sizes")
    check_sizes({"dense_arch_layer_sizes": bottom, **vars(interaction)})
    top = check_last(columns, over_arch_layer_sizes)
    if bottom[-1:] != ((columns.embedding_dim,) if columns.dense else ()):
        raise SchemaError(
            f"no DLRM of {len(columns.dense)} dense features has embedding_dim "
            f"{columns.embedding_dim} and dense_arch_layer_sizes {bottom}",
            "the dense vector is combined with the embeddings: the layers end with their width",
        )
    if len(columns.vectors) + bool(columns.dense) < interaction.MIN_VECTORS:
        raise SchemaError(
            "no dense column and one categorical column: dot products need two vectors",
            "choose --interaction_type dcn",
        )
    regularization = {"batch_norm": batch_norm, "dropout": dropout}
    return initialize(Dlrm(columns, bottom, top, interaction, **regularization))
