"""Vectors of the data, such as embeddings of texts, made as wide as the tables.

Each vector goes through a linear layer of its own. Embeddings of texts come in any scale, often far
from 0 in some coordinates, and optimizers take steps of one size. So the layer sees the vector less
the mean of training rows, divided by one number, the root mean square of what is left. It is one
number for all coordinates, because the encoder made some of them vary more than others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from nvt_torchrec.models.contract import Columns
from nvt_torchrec.models.layers import ALIGNMENT

#: The standard deviation of the results of a layer at first, as of embeddings after some steps.
_INITIAL_DEVIATION = 0.1


class DenseVectors(nn.Module):
    """A linear layer for each vector of the data.

    A row without a vector gets the layer's bias. The layer's weight of the indicator, the last
    input, is a bias of the rows that have one.

    Attributes:
        center: The means of the values of training rows, float32 [all inputs]; 0 for indicators,
            and until a run sets them (:mod:`training.baselines.vector_statistics`).
        scale: What the values of each vector are divided by, float32 [V]; 1 until a run sets it.
        aligned: Whether inputs are padded with zeros up to a multiple of :data:`.layers.ALIGNMENT`.

    Args:
        bounds: Where the inputs of each vector begin and end (``Columns.vector_bounds``).
        dim: The width of the results, D.
        labels: T, the number of labels if there is a linear term, else 0. The first T results are
            those of its weights, divided by ``ModelConfig.first_order``; these weights start as 0.
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
        """Return the vectors [B, V, D] of the values [B, all inputs] of some rows.

        The values are those of ``dense_vectors`` of :mod:`.contract`: each vector's, then its
        indicator.
        """
        weights = self._weights or self._standardize()
        results = []
        for (begin, end), weight, layer in zip(self._bounds, weights, self._linear(), strict=True):
            x = values[:, begin:end]
            if self.aligned:
                padding = 0, (begin - end) % ALIGNMENT
                x, weight = functional.pad(x, padding), functional.pad(weight, padding)
            results.append(functional.linear(x, weight, layer.bias))
        return torch.stack(results, 1)

    def _linear(self) -> list[nn.Linear]:
        """Return the layers, with their type."""
        return cast("list[nn.Linear]", list(self.layers))

    def _standardize(self) -> list[torch.Tensor]:
        """Return weights [D, inputs] for values as they are, instead of standardized ones.

        Changing the weights takes less time than changing the values of all rows. A row without a
        vector has zeros and the indicator 0, and so no part of the mean is subtracted from it.
        """
        weights = []
        for number, layer in enumerate(self._linear()):
            weight, (begin, end) = layer.weight, self._bounds[number]
            scaled = weight[:, :-1] / self.scale[number]
            # A sum, not a product of matrices, which autocast would round to bfloat16.
            shift = (scaled * self.center[begin : end - 1]).sum(1, keepdim=True)
            weights.append(torch.cat([scaled, weight[:, -1:] - shift], 1))
        return weights

    @torch.no_grad()
    def fold(self) -> None:
        """Compute the weights for values as they are, once for all, for a model that is evaluated.

        The state dict stays as it is.
        """
        self._weights = self._standardize()


def locate_vectors(columns: Columns, names: Iterable[str]) -> list[tuple[int, int]]:
    """Return where the inputs of some vectors of the data begin and end in ``dense_vectors``.

    Raises:
        ValueError: One of the names is that of no vector.
    """
    bounds = columns.vector_bounds
    for name in names:
        if name not in bounds:
            listed = ", ".join(bounds) or "none"
            raise ValueError(f"vector_columns has {name!r:.60}: vectors of the data are {listed}")
    return [bounds[name] for name in names]


def take_inputs(values: torch.Tensor, bounds: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the inputs of some vectors of ``values``, in the order of ``bounds``."""
    return torch.cat([values[:, begin:end] for begin, end in bounds], 1)


def draw_inputs(columns: Columns, rows: int, generator: torch.Generator) -> torch.Tensor:
    """Return ``dense_vectors`` of random rows, of which the first has no vector."""
    values = torch.randn(rows, columns.vector_inputs, generator=generator)
    for _, end in columns.vector_bounds.values():
        values[:, end - 1] = 1
    values[:1] = 0
    return values
