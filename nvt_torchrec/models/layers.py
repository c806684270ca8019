"""Layers of the models, without the copies and scatters of TorchRec's; their sizes and weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.base.files.validation import convert
from nvt_torchrec.formats.feature_spec.feature_spec import MAX_COLUMNS
from nvt_torchrec.formats.schema import LARGEST_TABLE
from nvt_torchrec.models.contract import Columns
from nvt_torchrec.models.regularization import REGULARIZATION

#: Tensor cores take rows of so many numbers, and multiples of it, at full speed.
ALIGNMENT = 8


_Module = TypeVar("_Module", bound=nn.Module)


def check_sizes(sizes: Mapping[str, int | tuple[int, ...]]) -> None:
    """Check the widths and numbers of layers that a file says; those of layers are tuples.

    Raises:
        SchemaError: No model has them: they would take time and memory before weights are read.
        ValueError: One is of another type.
    """
    for name, value in sizes.items():
        numbers = value if isinstance(value, tuple) else (convert(int, value, name),)
        count = numbers[0] if name.endswith("num_layers") else len(numbers)
        if count > MAX_COLUMNS:
            raise SchemaError(f"no model has {count} {name}")
        for size in numbers:
            if not 1 <= size <= LARGEST_TABLE:
                raise SchemaError(f"no model has a size of {size} in {name}")


def check_last(columns: Columns, over_arch_layer_sizes: Any) -> tuple[int, ...]:
    """Return the widths of the layers at the end, the last of which are the logits.

    Raises:
        SchemaError: There are fewer than two, or as many logits as labels are not their end.
        ValueError: They are no widths.
    """
    sizes = convert(tuple[int, ...], over_arch_layer_sizes, "over_arch_layer_sizes")
    check_sizes({"over_arch_layer_sizes": sizes})
    if len(sizes) < 2 or sizes[-1] != len(columns.labels):
        raise SchemaError(
            f"no model of {len(columns.labels)} labels has over_arch_layer_sizes {sizes}",
            "give two layers or more, the last of which are the logits of the labels",
        )
    return sizes


def initialize(model: _Module) -> _Module:
    """Initialize the linear layers, and return the model: normal weights, biases of 0.

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
    return model


class Layers(nn.Sequential):
    """Linear layers, each followed by a ReLU, perhaps but for the last.

    Attributes:
        aligned: Whether the first layer computes with zeros beside its inputs, up to a multiple of
            :data:`ALIGNMENT`; it then takes inputs that have them already.
        norms: The batch normalizations, by the number of the layer before; empty: there are none.

    Args:
        inputs: The width of the input.
        sizes: The width of each layer.
        last_relu: Whether a ReLU follows the last one, too.
        batch_norm: Whether layers with a ReLU are normalized before it, over the rows of a step
            (Ioffe & Szegedy 2015, arXiv:1502.03167).
        dropout: The share of a ReLU's results that a training step sets to 0 (Srivastava et al.
            2014); the others are divided by the rest.

    Raises:
        SchemaError: No layers can be trained with this dropout.
        ValueError: It, or ``batch_norm``, is of another type.
    """

    def __init__(
        self,
        inputs: int,
        sizes: tuple[int, ...],
        *,
        last_relu: bool = True,
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        batch_norm = convert(bool, batch_norm, "batch_norm")
        dropout = convert(float, dropout, "dropout")
        if not 0 <= dropout < 1:
            raise SchemaError(f"no model has a dropout of {dropout}")
        relus = len(sizes) - (not last_relu)
        layers, width = [], inputs
        for number, size in enumerate(sizes):
            # a normalization takes away a bias before it, and has one of its own
            layers.append(nn.Linear(width, size, bias=not (batch_norm and number < relus)))
            width = size
        super().__init__(*layers)
        self.aligned, self._relus, self._dropout = False, relus, dropout
        self.norms = nn.ModuleList(nn.BatchNorm1d(size) for size in sizes[:relus] if batch_norm)

    def __iter__(self) -> Iterator[nn.Linear]:
        return (layer for layer in self._modules.values() if isinstance(layer, nn.Linear))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, the last size] for [B, inputs]."""
        for number, layer in enumerate(self):
            weight = layer.weight
            if self.aligned and not number:
                width = layer.in_features + -layer.in_features % ALIGNMENT
                x = functional.pad(x, (0, width - x.shape[1]))
                weight = functional.pad(weight, (0, width - layer.in_features))
            x = functional.linear(x, weight, layer.bias)
            if number >= self._relus:
                continue
            if len(self.norms):
                x = self.norms[number](x)
            x = x.relu_()
            if self._dropout:
                x = functional.dropout(x, self._dropout, self.training)
        return x

    @torch.no_grad()
    def fold(self) -> None:
        """Write the batch normalizations of an evaluation into the linear layers before them.

        A layer W x that is normalized, γ (W x − μ) / √(σ² + ε) + β, is again a linear one.
        """
        for layer, norm in zip(self, self.norms, strict=False):
            assert isinstance(norm, nn.BatchNorm1d)
            assert norm.running_mean is not None
            assert norm.running_var is not None
            scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
            layer.weight.mul_(scale.unsqueeze(1))
            layer.bias = nn.Parameter(norm.bias - norm.running_mean * scale)
        self.norms = nn.ModuleList()
        self._dropout = 0.0


def fold_layers(module: nn.Module, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fold the layers of a model for evaluation alone; return the settings of what is left.

    Args:
        module: The module of a model of this project, changed in place.
        settings: Its settings.
    """
    for part in module.modules():
        if isinstance(part, Layers):
            part.fold()
    return {name: value for name, value in settings.items() if name not in REGULARIZATION}


def joined(dense: torch.Tensor, vectors: torch.Tensor, zeros: int = 0) -> torch.Tensor:
    """Return all vectors [B, V, D]: the dense one, if there is one, the embeddings, and zeros."""
    parts = [dense.unsqueeze(1), vectors] if dense.shape[1] else [vectors]
    if zeros:
        parts.append(vectors.new_zeros(len(vectors), zeros, vectors.shape[2]))
    return torch.cat(parts, 1) if len(parts) > 1 else vectors


class PairProducts(nn.Module):
    """The dot products of all pairs of vectors.

    ``torchrec.models.dlrm.InteractionArch`` computes the same. It selects the pairs from all
    products with two index tensors, whose gradient is a scatter, element by element. Here whole
    columns are selected, and the gradient is one product of matrices, of the pairs' gradients and
    the vectors.

    Attributes:
        aligned: Whether :meth:`align` was called.

    Args:
        vectors: The number of vectors, V; the dense one included.
    """

    pairs: torch.Tensor
    of_pair: torch.Tensor

    def __init__(self, vectors: int) -> None:
        super().__init__()
        self.aligned, self._vectors, self._zeros = False, vectors, 0
        pairs, of_pair = self._places()
        self.register_buffer("pairs", pairs, persistent=False)
        self.register_buffer("of_pair", of_pair, persistent=False)

    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the product of each pair, and the pair of each product.

        A product of a vector with itself, or with zeros, gets the pair after the last.
        """
        rows = self._vectors + self._zeros
        low, high = torch.triu_indices(self._vectors, self._vectors, offset=1)
        of_pair = torch.full((rows, rows), len(low))
        of_pair[low, high] = of_pair[high, low] = torch.arange(len(low))
        return low * rows + high, of_pair.flatten()

    def align(self) -> None:
        """Let vectors of zeros follow the others, and zeros the products.

        Both up to a multiple of :data:`ALIGNMENT`: of 27 vectors, tensor cores take the products in
        1.5 of the 6.8 ms that an H200 computes in a step of MLPerf's DLRM (65,536 rows in
        bfloat16), because their rows begin at no multiple of 16 bytes.
        """
        self.aligned, self._zeros = True, -self._vectors % ALIGNMENT
        self.pairs, self.of_pair = (t.to(self.pairs.device) for t in self._places())

    def forward(self, dense: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Return the dense vector and the products.

        Args:
            dense: The dense vectors [B, D]; without a dense vector [B, 0].
            vectors: The embeddings [B, F, D].

        Returns:
            [B, D + V (V - 1) / 2]: The dense vector, then the products of vectors i < j by rising
            i, then j, in the dense vector's dtype; vector 0 is the dense one. Without a dense
            vector, the products alone. With ``aligned``, then zeros.
        """
        has_dense = dense.shape[1] > 0
        if has_dense:
            vectors = vectors.to(dense.dtype)  # which autocast chose
        vectors = joined(dense, vectors, self._zeros)
        if torch.is_grad_enabled():
            pairs = _Pairs.apply(vectors, self.pairs, self.of_pair)
        else:
            pairs = _products(vectors, self.pairs)
        parts = [dense, pairs] if has_dense else [pairs]
        if self.aligned:
            more = -sum(part.shape[1] for part in parts) % ALIGNMENT
            parts.append(pairs.new_zeros(len(pairs), more))
        return torch.cat(parts, dim=1) if len(parts) > 1 else pairs


def _products(vectors: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    return torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, pairs)


class _Pairs(torch.autograd.Function):
    """[B, V, D] → the products of its pairs [B, V (V - 1) / 2]."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        vectors: torch.Tensor,
        pairs: torch.Tensor,
        of_pair: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(vectors, of_pair)
        return _products(vectors, pairs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        vectors, of_pair = ctx.saved_tensors
        with_zero = functional.pad(gradient, (0, 1)).to(vectors.dtype)
        size, count = vectors.shape[:2]
        symmetric = with_zero.index_select(1, of_pair).view(size, count, count)
        return torch.bmm(symmetric, vectors), None, None


class CrossNetwork(nn.Module):
    """A low-rank cross network over all dense values and vectors.

    Args:
        width: N + V · D.
        layers: The number of layers.
        rank: The rank of their weights.
    """

    def __init__(self, width: int, layers: int, rank: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.outer = nn.ModuleList(nn.Linear(rank, width) for _ in range(layers))

    def forward(self, dense: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Return [B, N + V · D] of values [B, N] and vectors [B, V, D]."""
        y = x0 = torch.cat([dense, vectors.flatten(1)], 1)
        for inner, outer in zip(self.inner, self.outer, strict=True):
            y = x0 * outer(inner(y)) + y
        return y
