"""DLRM (Naumov et al. 2019, arXiv:1906.00091), with any of the interactions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.base.files.validation import convert
from nvt_torchrec.models.contract import Columns
from nvt_torchrec.models.interactions import INTERACTIONS, Interaction, list_sizes
from nvt_torchrec.models.layers import (
    ALIGNMENT,
    Layers,
    PairProducts,
    check_last_layers,
    check_sizes,
    initialize,
)  # fmt: skip
from nvt_torchrec.models.regularization import REGULARIZATION
from nvt_torchrec.models.vector_join import UnjoinedVectors

#: With more vectors, the vectors of the dense columns are summed to one. For Criteo's 26 + 13
#: columns, the products of all pairs would double the time of a step.
_MAX_VECTORS = 24


class Dlrm(nn.Module):
    """Layers for the dense columns, an interaction, and layers at the end.

    Without dense columns, the layers for them and the dense vector of the interaction are absent.

    Attributes:
        sums_dense: Whether the model gets the vectors of the dense columns (:mod:`.piecewise`)
            summed to one vector.
        joins_vectors: Whether ``forward`` also takes vectors in parts
            (:class:`.vector_join.UnjoinedVectors`), which are first rounded to the dtype of the
            layers.

    Args:
        columns: The columns of the data.
        bottom: The widths of the layers for the dense columns; the last is the width of the tables.
        top: The widths of the layers at the end; the last is the number of labels.
        interaction: Combines the dense vector and the embeddings.
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
        num_vectors = len(columns.vectors)
        if has_dense:
            num_vectors += 1
        num_piecewise = len(columns.dense) if columns.dense_bins else 0
        self.sums_dense = num_piecewise > 0 and num_vectors > _MAX_VECTORS
        if self.sums_dense:
            num_vectors -= num_piecewise - 1
        self.interaction, width = interaction.build(num_vectors, columns.embedding_dim, has_dense)
        self.joins_vectors = has_dense and isinstance(self.interaction, PairProducts)
        self.top = Layers(width, top, last_relu=False, **regularization)

    def forward(self, dense: torch.Tensor, vectors: torch.Tensor | UnjoinedVectors) -> torch.Tensor:
        """Return logits [B, T] of dense values [B, N] and vectors [B, V, D]."""
        if self.bottom is not None:
            dense = self.bottom(dense)
        return self.top(self.interaction(dense, vectors))

    @property
    def widest(self) -> int:
        """The width of the widest layer, not counting the layers of the interaction."""
        widths = []
        for layers in self._layers:
            widths += [layer.out_features for layer in layers]
        return max(widths)

    @property
    def _layers(self) -> list[Layers]:
        return [self.top] if self.bottom is None else [self.bottom, self.top]

    def align_inputs(self) -> None:
        """Pad the inputs of the first layers below and above the interaction.

        Tensor cores multiply 16-bit numbers and TensorFloat-32 at full speed only if rows begin at
        multiples of 16 bytes. Those of MLPerf's DLRM (13 dense features, 479 inputs of the top
        layers) do not. Padding the inputs and the weights with zeros does not change the results.
        Parameters and state dicts do not change, because a layer pads its weight in each call.
        """
        if isinstance(self.interaction, PairProducts):
            self.interaction.align()
        for layers in self._layers:
            layers.aligned = next(iter(layers)).in_features % ALIGNMENT > 0


def choose_settings(flags: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    """Return the settings of a DLRM from the values of the flags.

    The sizes of interactions that are not chosen are left out.
    """
    settings = {"dense_arch_layer_sizes": flags["dense_arch_layer_sizes"] if columns.dense else ()}
    interaction = INTERACTIONS[flags["interaction_type"]]
    names = ["over_arch_layer_sizes", "interaction_type", *list_sizes(interaction), *REGULARIZATION]
    for name in names:
        settings[name] = flags[name]
    return settings


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
    """Build a DLRM from the values of the flags with the names of the arguments.

    Raises:
        SchemaError: A setting is out of range or does not fit the columns.
        ValueError: A setting has a wrong type or is unknown.
    """
    if interaction_type not in INTERACTIONS:
        raise ValueError(f"interaction_type {interaction_type!r:.60} is unknown")
    interaction = convert(INTERACTIONS[interaction_type], sizes)
    bottom = convert(tuple[int, ...], dense_arch_layer_sizes, "dense_arch_layer_sizes")
    check_sizes({"dense_arch_layer_sizes": bottom, **vars(interaction)})
    top = check_last_layers(columns, over_arch_layer_sizes)
    dense_width = bottom[-1] if bottom else None
    if dense_width != (columns.embedding_dim if columns.dense else None):
        raise SchemaError(
            f"no DLRM of {len(columns.dense)} dense features has embedding_dim "
            f"{columns.embedding_dim} and dense_arch_layer_sizes {bottom}",
            "end dense_arch_layer_sizes with embedding_dim: the dense vector is combined with the "
            "embeddings",
        )
    if len(columns.vectors) + bool(columns.dense) < interaction.MIN_VECTORS:
        raise SchemaError(
            "one categorical column and no dense column: dot products need two vectors",
            "choose --interaction_type dcn",
        )
    regularization = {"batch_norm": batch_norm, "dropout": dropout}
    return initialize(Dlrm(columns, bottom, top, interaction, **regularization))
