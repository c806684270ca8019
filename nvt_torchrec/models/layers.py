"""Layers of the models, which avoid the copies and scatters of TorchRec's layers."""

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
from nvt_torchrec.models.vector_join import UnjoinedVectors

#: Tensor cores compute at full speed on rows whose length is a multiple of this.
ALIGNMENT = 8

_Module = TypeVar("_Module", bound=nn.Module)


def check_sizes(sizes: Mapping[str, int | tuple[int, ...]]) -> None:
    """Check widths and numbers of layers that were read from a file.

    Refuse absurd sizes early: building such a model would take time and memory before the weights
    turn out to be missing.

    Args:
        sizes: A number, or the widths of several layers, by the name of the setting.

    Raises:
        SchemaError: A size is out of range.
        ValueError: A size has a wrong type.
    """
    for name, value in sizes.items():
        widths = value if isinstance(value, tuple) else (convert(int, value, name),)
        num_layers = widths[0] if name.endswith("num_layers") else len(widths)
        if num_layers > MAX_COLUMNS:
            raise SchemaError(f"no model has {num_layers} {name}")
        for width in widths:
            if not 1 <= width <= LARGEST_TABLE:
                raise SchemaError(f"no model has a size of {width} in {name}")


def check_last_layers(columns: Columns, over_arch_layer_sizes: Any) -> tuple[int, ...]:
    """Return the widths of the layers at the end of a model, the last of which computes the logits.

    Raises:
        SchemaError: There are fewer than two layers, or the width of the last layer is not the
            number of labels.
        ValueError: The widths are not integers.
    """
    sizes = convert(tuple[int, ...], over_arch_layer_sizes, "over_arch_layer_sizes")
    check_sizes({"over_arch_layer_sizes": sizes})
    if len(sizes) < 2 or sizes[-1] != len(columns.labels):
        raise SchemaError(
            f"no model of {len(columns.labels)} labels has over_arch_layer_sizes {sizes}",
            "give at least two sizes, the last of which is the number of labels",
        )
    return sizes


def initialize(model: _Module) -> _Module:
    """Initialize the linear layers with normal weights and biases of 0, and return the model.

    The variance of the weights is 2/(inputs + outputs) (Glorot & Bengio 2010, equation 12), as in
    DLRM's published code. The default of torch.nn.Linear, which TorchRec's DLRM keeps, has at most
    a third of it. Then after several layers the logits hardly depend on the sample, and the model
    learns nothing in the first tens of steps on large batches.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model


class Layers(nn.Sequential):
    """Linear layers, each followed by a ReLU.

    Attributes:
        aligned: Whether the first layer pads its inputs with zeros to a multiple of
            :data:`ALIGNMENT`. It also accepts padded inputs.
        norms: The batch normalization after each layer with a ReLU; empty without normalization.

    Args:
        inputs: The width of the input.
        sizes: The width of each layer.
        last_relu: Whether the last layer is followed by a ReLU, too.
        batch_norm: Whether the inputs of each ReLU are normalized over the rows of a step (Ioffe &
            Szegedy 2015, arXiv:1502.03167).
        dropout: The share p of each ReLU's results that a training step sets to 0 (Srivastava et
            al. 2014). The others are divided by 1 - p.

    Raises:
        SchemaError: ``dropout`` is not in [0, 1).
        ValueError: ``dropout`` or ``batch_norm`` has a wrong type.
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
        num_relus = len(sizes) if last_relu else len(sizes) - 1
        layers = []
        width = inputs
        for i, size in enumerate(sizes):
            # A layer before a normalization needs no bias: the normalization would subtract it, and
            # has its own.
            is_normalized = batch_norm and i < num_relus
            layers.append(nn.Linear(width, size, bias=not is_normalized))
            width = size
        super().__init__(*layers)
        self.aligned = False
        self._num_relus = num_relus
        self._dropout = dropout
        self.norms = nn.ModuleList()
        if batch_norm:
            self.norms.extend(nn.BatchNorm1d(size) for size in sizes[:num_relus])

    def __iter__(self) -> Iterator[nn.Linear]:
        return (layer for layer in self._modules.values() if isinstance(layer, nn.Linear))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the results [B, sizes[-1]] for inputs [B, inputs]."""
        for i, layer in enumerate(self):
            weight = layer.weight
            if self.aligned and i == 0:
                padding = -layer.in_features % ALIGNMENT
                x = functional.pad(x, (0, layer.in_features + padding - x.shape[1]))
                weight = functional.pad(weight, (0, padding))
            x = functional.linear(x, weight, layer.bias)
            if i >= self._num_relus:
                continue
            if len(self.norms):
                x = self.norms[i](x)
            x = x.relu_()
            if self._dropout:
                x = functional.dropout(x, self._dropout, self.training)
        return x

    @torch.no_grad()
    def fold(self) -> None:
        """Fold the batch normalizations, with their running statistics, into the linear layers.

        The normalization of a layer W x is γ (W x − μ) / √(σ² + ε) + β, which is a linear layer.
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
    """Fold the layers of a model that will only be evaluated.

    Args:
        module: The module of a model of this project, which is modified in place.
        settings: The settings of the model.

    Returns:
        The settings of the folded model.
    """
    for part in module.modules():
        if isinstance(part, Layers):
            part.fold()
    return {name: value for name, value in settings.items() if name not in REGULARIZATION}


def join_vectors(dense: torch.Tensor, vectors: torch.Tensor, zeros: int = 0) -> torch.Tensor:
    """Join the vectors of rows.

    Args:
        dense: The dense vector [B, D]; [B, 0] without one.
        vectors: The other vectors [B, F, D].
        zeros: The number of zero vectors to append.

    Returns:
        All vectors [B, V, D].
    """
    parts = [vectors]
    if dense.shape[1]:
        parts.insert(0, dense.unsqueeze(1))
    if zeros:
        parts.append(vectors.new_zeros(len(vectors), zeros, vectors.shape[2]))
    return torch.cat(parts, 1) if len(parts) > 1 else vectors


class PairProducts(nn.Module):
    """The dot products of all pairs of vectors.

    ``torchrec.models.dlrm.InteractionArch`` computes the same result. It selects the pairs from all
    products with two index tensors, whose gradient is an element-wise scatter. This class selects
    whole columns, and the gradient is one product of matrices: of the gradients of the pairs and
    the vectors.

    Attributes:
        aligned: Whether :meth:`align` was called.
        pairs: int64 [V (V - 1) / 2], the index of each pair among the products of all vectors.
        pair_of_product: int64 [products], the index of each product's pair. For products of a
            vector with itself or with zeros it is V (V - 1) / 2, a pair whose gradient is 0.

    Args:
        vectors: The number of vectors, V, including the dense one.
    """

    pairs: torch.Tensor
    pair_of_product: torch.Tensor

    def __init__(self, vectors: int) -> None:
        super().__init__()
        self.aligned = False
        self._vectors = vectors
        self._zeros = 0
        pairs, pair_of_product = self._number_pairs()
        self.register_buffer("pairs", pairs, persistent=False)
        self.register_buffer("pair_of_product", pair_of_product, persistent=False)

    def _number_pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``pairs`` and ``pair_of_product`` for the current numbers of vectors and zeros."""
        rows = self._vectors + self._zeros
        low, high = torch.triu_indices(self._vectors, self._vectors, offset=1)
        pair_of_product = torch.full((rows, rows), len(low))
        pair_of_product[low, high] = torch.arange(len(low))
        pair_of_product[high, low] = torch.arange(len(low))
        return low * rows + high, pair_of_product.flatten()

    def align(self) -> None:
        """Pad the vectors with zero vectors, and the products with zeros.

        Both are padded to a multiple of :data:`ALIGNMENT`, because tensor cores are slow if rows do
        not begin at multiples of 16 bytes. Without padding, the products of MLPerf's 27 vectors
        take 1.5 of the 6.8 ms of a step of its DLRM on an H200 (65,536 rows in bfloat16).
        """
        self.aligned = True
        self._zeros = -self._vectors % ALIGNMENT
        device = self.pairs.device
        pairs, pair_of_product = self._number_pairs()
        self.pairs = pairs.to(device)
        self.pair_of_product = pair_of_product.to(device)

    def forward(self, dense: torch.Tensor, vectors: torch.Tensor | UnjoinedVectors) -> torch.Tensor:
        """Return the dense vector and the products.

        Args:
            dense: The dense vectors [B, D]; [B, 0] without a dense vector.
            vectors: The other vectors [B, F, D]. With a dense vector, they may be in parts.

        Returns:
            [B, D + V (V - 1) / 2], in the dtype of the dense vector: the dense vector (if there is
            one), then the products of vectors i < j in ascending order of i, then j. Vector 0 is
            the dense vector. If ``aligned``, zeros follow.
        """
        has_dense = dense.shape[1] > 0
        if isinstance(vectors, UnjoinedVectors):
            vectors = vectors.join(dense, self._zeros)
        else:
            if has_dense:
                vectors = vectors.to(dense.dtype)  # the dtype that autocast chose for the layers
            vectors = join_vectors(dense, vectors, self._zeros)
        if torch.is_grad_enabled():
            products = _PairProductsFunction.apply(vectors, self.pairs, self.pair_of_product)
        else:
            products = _multiply_pairs(vectors, self.pairs)
        parts = [dense, products] if has_dense else [products]
        if self.aligned:
            padding = -sum(part.shape[1] for part in parts) % ALIGNMENT
            parts.append(products.new_zeros(len(products), padding))
        return torch.cat(parts, dim=1) if len(parts) > 1 else products


def _multiply_pairs(vectors: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Return the dot products [B, pairs] of pairs of vectors [B, V, D]."""
    return torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, pairs)


class _PairProductsFunction(torch.autograd.Function):
    """Multiply the pairs of vectors: [B, V, D] → [B, V (V - 1) / 2]."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        vectors: torch.Tensor,
        pairs: torch.Tensor,
        pair_of_product: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(vectors, pair_of_product)
        return _multiply_pairs(vectors, pairs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # The products are P = X Xᵀ, so the gradient of X is (G + Gᵀ) X, where G is 0 except for the
        # pairs. Selecting columns of the gradient, padded with a 0, gives G + Gᵀ.
        vectors, pair_of_product = ctx.saved_tensors
        with_zero = functional.pad(gradient, (0, 1)).to(vectors.dtype)
        size, count = vectors.shape[:2]
        symmetric = with_zero.index_select(1, pair_of_product).view(size, count, count)
        return torch.bmm(symmetric, vectors), None, None


class CrossNetwork(nn.Module):
    """A low-rank cross network over all dense values and vectors.

    Args:
        width: The number of inputs, N + V · D.
        layers: The number of layers.
        rank: The rank of the layers' weights.
    """

    def __init__(self, width: int, layers: int, rank: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.outer = nn.ModuleList(nn.Linear(rank, width) for _ in range(layers))

    def forward(self, dense: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Return the results [B, N + V · D] for dense values [B, N] and vectors [B, V, D]."""
        y = x0 = torch.cat([dense, vectors.flatten(1)], 1)
        for inner, outer in zip(self.inner, self.outer, strict=True):
            y = x0 * outer(inner(y)) + y
        return y
