"""The layers of TorchRec's DLRM between tables and top layers, without its copies and scatters."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torchrec.models.dlrm import DLRM, SparseArch
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

#: Tensor cores take rows of so many numbers, and multiples of it, at full speed.
ALIGNMENT = 8


class PairProducts(nn.Module):
    """The dot products of all pairs of feature vectors.

    ``torchrec.models.dlrm.InteractionArch`` computes the same. It selects the pairs from all
    products with two index tensors, whose gradient is a scatter, element by element. Here whole
    columns are selected, and the gradient is one product of matrices, of the pairs' gradients and
    the vectors.

    Attributes:
        aligned: Whether zeros follow the products up to a multiple of :data:`ALIGNMENT` columns.
        dense: Whether there is a dense vector.

    Args:
        num_sparse_features: The number of categorical features, F.
        dense: Whether there is a dense vector.
    """

    def __init__(self, num_sparse_features: int, *, dense: bool = True) -> None:
        super().__init__()
        self.aligned, self.dense = False, dense
        vectors = num_sparse_features + dense
        low, high = torch.triu_indices(vectors, vectors, offset=1)
        self.register_buffer("pairs", low * vectors + high, persistent=False)
        # the pair of each product; a product of a vector with itself gets the pair after the last
        of_pair = torch.full((vectors, vectors), len(low))
        of_pair[low, high] = of_pair[high, low] = torch.arange(len(low))
        self.register_buffer("of_pair", of_pair.flatten(), persistent=False)

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """Return the dense vector and the products.

        Args:
            dense_features: The dense vectors [B, D]; without a dense vector [B, 0].
            sparse_features: The embeddings [B, F, D].

        Returns:
            [B, D + F (F + 1) / 2]: The dense vector, then the products of vectors i < j by rising
            i, then j, in the dense vector's dtype; vector 0 is the dense one. Without a dense
            vector, [B, F (F - 1) / 2]: the products alone. With ``aligned``, then zeros.
        """
        width = len(self.pairs) + self.dense * dense_features.shape[1]
        more = -width % ALIGNMENT if self.aligned else 0
        if self.dense:
            sparse_features = sparse_features.to(dense_features.dtype)  # which autocast chose
            vectors = torch.cat((dense_features.unsqueeze(1), sparse_features), dim=1)
            pairs = _Pairs.apply(vectors, self.pairs, self.of_pair)
            parts = [dense_features, pairs]
        else:
            pairs = _Pairs.apply(sparse_features, self.pairs, self.of_pair)
            parts = [pairs]
        if more:
            parts.append(pairs.new_zeros(len(pairs), more))
        return torch.cat(parts, dim=1) if len(parts) > 1 else pairs


class EmbeddingsCross(nn.Module):
    """A cross network over embeddings, as TorchRec's InteractionDCNArch without a dense vector.

    Args:
        crossnet: The cross network, from [B, F · D] to [B, F · D].
    """

    def __init__(self, crossnet: nn.Module) -> None:
        super().__init__()
        self.crossnet = crossnet

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """Return [B, F · D] for ``sparse_features`` [B, F, D]; ``dense_features`` are [B, 0]."""
        return self.crossnet(sparse_features.flatten(1))


class EmbeddingsProjection(nn.Module):
    """The products of two projections of the embeddings, without a dense vector.

    With one, ``torchrec.models.dlrm.InteractionProjectionArch`` computes them.

    Args:
        interaction_branch1: The first projection, from [B, F · D] to [B, F1 · D].
        interaction_branch2: The second projection, from [B, F · D] to [B, F2 · D].
        dim: The width of the embeddings, D.
    """

    def __init__(
        self, interaction_branch1: nn.Module, interaction_branch2: nn.Module, dim: int
    ) -> None:
        super().__init__()
        self.interaction_branch1 = interaction_branch1
        self.interaction_branch2 = interaction_branch2
        self._dim = dim

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """Return [B, F1 · F2] for ``sparse_features`` [B, F, D]; ``dense_features`` are [B, 0]."""
        flat = sparse_features.flatten(1)
        first = self.interaction_branch1(flat).unflatten(1, (-1, self._dim))
        second = self.interaction_branch2(flat).unflatten(1, (self._dim, -1))
        return torch.bmm(first, second).flatten(1)


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
        return torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, pairs)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        vectors, of_pair = ctx.saved_tensors
        with_zero = nn.functional.pad(gradient, (0, 1)).to(vectors.dtype)
        size, count = vectors.shape[:2]
        symmetric = with_zero.index_select(1, of_pair).view(size, count, count)
        return torch.bmm(symmetric, vectors), None, None


class PooledVectors(SparseArch):
    """TorchRec's ``SparseArch``, which returns the lookup's output instead of copying it twice.

    Args:
        embedding_bag_collection: The tables, all of one width D.
    """

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__(embedding_bag_collection)
        self.in_order = _InOrder(self.sparse_feature_names, self.D)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Return the features' vectors [B, F, D], in the order of the tables' configuration."""
        return self.in_order(self.embedding_bag_collection(features))


class _InOrder(nn.Module):
    """A module of its own, because TorchRec's pipeline traces modules that hold sharded tables."""

    def __init__(self, names: list[str], dim: int) -> None:
        super().__init__()
        self._names, self._dim = names, dim

    def forward(self, pooled: KeyedTensor) -> torch.Tensor:
        if list(pooled.keys()) == self._names:
            return pooled.values().view(-1, len(self._names), self._dim)
        vectors = pooled.to_dict()  # a plan may have them in another order
        return torch.stack([vectors[name] for name in self._names], dim=1)


def align_inputs(dlrm: DLRM) -> None:
    """Let the first layers below and above the interaction compute with padded inputs.

    Tensor cores multiply 16-bit numbers, and TensorFloat-32, at full speed only where rows begin at
    multiples of 16 bytes. The 13 dense features and the 479 inputs of the top layers of MLPerf's
    DLRM do not. Zeros beside them, and beside the columns of the weight, change no sum.
    Parameters and state dicts stay as they are: a layer pads its weight in each call.
    """
    if isinstance(dlrm.inter_arch, PairProducts):
        dlrm.inter_arch.aligned = True
    for part in (dlrm.dense_arch, dlrm.over_arch):
        layer = next((module for module in part.modules() if isinstance(module, nn.Linear)), None)
        if layer is not None and layer.in_features % ALIGNMENT:  # else there is no dense feature
            layer.forward = functools.partial(_aligned_linear, layer)


def _aligned_linear(layer: nn.Linear, values: torch.Tensor) -> torch.Tensor:
    """Compute ``layer``; ``values`` may already have zeros behind the layer's inputs."""
    width = layer.in_features + -layer.in_features % ALIGNMENT
    values = nn.functional.pad(values, (0, width - values.shape[1]))
    weight = nn.functional.pad(layer.weight, (0, width - layer.in_features))
    return nn.functional.linear(values, weight, layer.bias)
