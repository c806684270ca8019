"""DLRM (Naumov et al. 2019, arXiv:1906.00091), with any of the interactions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.base.files.validation import convert
from nvt_torchrec.formats.feature_spec.feature_spec import MAX_COLUMNS
from nvt_torchrec.formats.schema import LARGEST_TABLE
from nvt_torchrec.models.contract import Columns
from nvt_torchrec.models.interactions import INTERACTIONS, Interaction
from nvt_torchrec.models.layers import ALIGNMENT, Layers, PairProducts

#: With more vectors, those of the dense columns are summed. The products of all pairs would double
#: the time of a step on Criteo's 26 + 13 columns.
_MOST_VECTORS = 24


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
    """

    def __init__(
        self,
        columns: Columns,
        bottom: tuple[int, ...],
        top: tuple[int, ...],
        interaction: Interaction,
    ) -> None:
        super().__init__()
        has_dense = bool(columns.dense)
        self.bottom = Layers(len(columns.dense), bottom) if has_dense else None
        vectors = len(columns.vectors) + has_dense
        of_dense = len(columns.vectors) - len(columns.categorical)
        self.sums_dense = of_dense > 0 and vectors > _MOST_VECTORS
        if self.sums_dense:
            vectors -= of_dense - 1
        self.interaction, width = interaction.build(vectors, columns.embedding_dim, has_dense)
        self.top = Layers(width, top, last_relu=False)

    def forward(self, dense: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Return logits [B, T]; see :mod:`.contract`."""
        if self.bottom is not None:
            dense = self.bottom(dense)
        return self.top(self.interaction(dense, vectors))


def build(
    columns: Columns,
    *,
    interaction_type: str,
    dense_arch_layer_sizes: tuple[int, ...],
    over_arch_layer_sizes: tuple[int, ...],
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
    top = convert(tuple[int, ...], over_arch_layer_sizes, "over_arch_layer_sizes")
    layers = {"dense_arch_layer_sizes": bottom, "over_arch_layer_sizes": top}
    for name, value in {**layers, **vars(interaction)}.items():
        numbers = value if isinstance(value, tuple) else (value,)
        count = value if name == "dcn_num_layers" else len(numbers)
        if count > MAX_COLUMNS:  # each takes time and memory, before the weights are looked for
            raise SchemaError(f"no DLRM has {count} {name}")
        for size in numbers:
            if not 1 <= size <= LARGEST_TABLE:
                raise SchemaError(f"no DLRM has a size of {size} in {name}")
    last = (columns.embedding_dim,) if columns.dense else ()
    if bottom[-1:] != last or len(top) < 2 or top[-1] != len(columns.labels):
        raise SchemaError(
            f"no DLRM of {len(columns.dense)} dense features and {len(columns.labels)} labels has "
            f"embedding_dim {columns.embedding_dim}, dense_arch_layer_sizes {bottom} and "
            f"over_arch_layer_sizes {top}"
        )
    if len(columns.vectors) + bool(columns.dense) < interaction.LEAST_VECTORS:
        raise SchemaError(
            "no dense column and one categorical column: dot products need two vectors",
            "choose --interaction_type dcn",
        )
    model = Dlrm(columns, bottom, top, interaction)
    _initialize(model)
    return model


def _initialize(model: Dlrm) -> None:
    """Initialize the linear layers: normal weights, biases of 0.

    Their variance is 2/(inputs + outputs) (Glorot & Bengio 2010, equation 12), as in DLRM's
    published code. The default of torch.nn.Linear, which TorchRec's DLRM keeps, has a third of
    that or less: after several layers the logits hardly depend on the sample, and the first tens
    of steps on large batches teach the model nothing.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def align_inputs(model: nn.Module) -> None:
    """Let the first layers below and above the interaction compute with padded inputs.

    Tensor cores multiply 16-bit numbers, and TensorFloat-32, at full speed only where rows begin at
    multiples of 16 bytes. The 13 dense features and the 479 inputs of the top layers of MLPerf's
    DLRM do not. Zeros beside them, and beside the columns of the weight, change no sum.
    Parameters and state dicts stay as they are: a layer pads its weight in each call.
    """
    if not isinstance(model, Dlrm):
        return
    if isinstance(model.interaction, PairProducts):
        model.interaction.aligned = True
    for layers in filter(None, (model.bottom, model.top)):
        layers.aligned = next(iter(layers)).in_features % ALIGNMENT > 0
