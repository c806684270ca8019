"""Linear layers that map vectors of the data, such as text embeddings, to the width of the tables.

Each vector has its own layer. The scale of text embeddings is arbitrary, and some coordinates are
often far from 0, while the step size of an optimizer is fixed. So the input of the layer is
standardized: the mean over training rows is subtracted, and the difference is divided by its root
mean square. The divisor is the same for all coordinates, because the encoder's differences in
variation between coordinates are meaningful.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from nvt_torchrec.models.contract import Columns
from nvt_torchrec.models.layers import ALIGNMENT

#: The initial standard deviation of a layer's results, similar to embeddings after some steps.
_INITIAL_DEVIATION = 0.1


class DenseVectors(nn.Module):
    """A linear layer for each vector of the data.

    A row without a vector gets the layer's bias. The weight of the indicator, the last input, is an
    additional bias for rows that have a vector.

    Attributes:
        center: The mean of each value over training rows, float32 [all inputs]; 0 for indicators,
            and until a run sets it (:mod:`training.baselines.vector_statistics`).
        scale: The divisor of the values of each vector, float32 [V]; 1 until a run sets it.
        aligned: Whether inputs are padded with zeros to a multiple of :data:`.layers.ALIGNMENT`.

    Args:
        bounds: The range of the inputs of each vector (``Columns.vector_bounds``).
        dim: The width of the results, D.
        labels: T, the number of labels if there is a linear term, else 0. The first T results are
            contributions to the linear term, divided by ``ModelConfig.first_order``. Their weights
            are initially 0.
    """

    center: torch.Tensor
    scale: torch.Tensor

    def __init__(self, bounds: Sequence[tuple[int, int]], dim: int, labels: int) -> None:
        super().__init__()
        self._bounds = tuple(bounds)
        _, num_inputs = self._bounds[-1]
        self.register_buffer("center", torch.zeros(num_inputs))
        self.register_buffer("scale", torch.ones(len(bounds)))
        self.layers = nn.ModuleList()
        for begin, end in bounds:
            layer = nn.Linear(end - begin, dim)
            nn.init.normal_(layer.weight, std=_INITIAL_DEVIATION / (end - begin - 1) ** 0.5)
            nn.init.zeros_(layer.bias)
            with torch.no_grad():
                layer.weight[:, -1] = 0
                layer.weight[:labels] = 0
            self.layers.append(layer)
        self.aligned = False
        self._weights: list[torch.Tensor] | None = None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the vectors [B, V, D] for values [B, all inputs].

        The values of each vector are followed by its indicator, as in ``dense_vectors`` of
        :mod:`.contract`.
        """
        weights = self._weights or self._standardize()
        results = []
        for (begin, end), weight, layer in zip(
            self._bounds, weights, self._list_layers(), strict=True
        ):
            x = values[:, begin:end]
            if self.aligned:
                padding = 0, (begin - end) % ALIGNMENT
                x = functional.pad(x, padding)
                weight = functional.pad(weight, padding)
            results.append(functional.linear(x, weight, layer.bias))
        return torch.stack(results, 1)

    def _list_layers(self) -> list[nn.Linear]:
        """Return the layers, typed for type checkers."""
        return cast("list[nn.Linear]", list(self.layers))

    def _standardize(self) -> list[torch.Tensor]:
        """Return the weights [D, inputs] that include the standardization of the inputs.

        Changing the weights takes less time than standardizing the values of all rows. The mean is
        subtracted through the weight of the indicator, so it does not affect rows without a vector,
        whose indicator is 0.
        """
        weights = []
        for i, layer in enumerate(self._list_layers()):
            weight = layer.weight
            begin, end = self._bounds[i]
            scaled = weight[:, :-1] / self.scale[i]
            # A sum instead of a matrix product, which autocast would round to bfloat16.
            shift = (scaled * self.center[begin : end - 1]).sum(1, keepdim=True)
            weights.append(torch.cat([scaled, weight[:, -1:] - shift], 1))
        return weights

    @torch.no_grad()
    def fold(self) -> None:
        """Compute the weights that include the standardization once, for a model in evaluation.

        The state dict does not change.
        """
        self._weights = self._standardize()


def locate_vectors(columns: Columns, names: Iterable[str]) -> list[tuple[int, int]]:
    """Return the ranges [begin, end) in ``dense_vectors`` of the inputs of the named vectors.

    Raises:
        ValueError: A name is not the name of a vector.
    """
    bounds = columns.vector_bounds
    for name in names:
        if name not in bounds:
            known = ", ".join(bounds) or "none"
            raise ValueError(f"vector_columns has {name!r:.60}: vectors of the data are {known}")
    return [bounds[name] for name in names]


def take_inputs(values: torch.Tensor, bounds: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the inputs in the ranges ``bounds`` of ``values`` [B, all inputs], in that order."""
    return torch.cat([values[:, begin:end] for begin, end in bounds], 1)


def draw_random_inputs(columns: Columns, rows: int, generator: torch.Generator) -> torch.Tensor:
    """Return random ``dense_vectors`` [rows, all inputs]; the first row has no vectors."""
    values = torch.randn(rows, columns.vector_inputs, generator=generator)
    for _, end in columns.vector_bounds.values():
        values[:, end - 1] = 1
    values[:1] = 0
    return values
