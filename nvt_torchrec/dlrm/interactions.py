"""How a DLRM combines its vectors: one class for each ``--interaction_type``.

A class holds all that is particular to an interaction: its sizes, which are flags, its modules in
training, and its layers and arithmetic in serving. Add another one to :data:`INTERACTIONS`.
PyTorch and TorchRec are imported where they are used, so that ``--help`` answers at once and
serving imports no TorchRec.
"""

# ruff: noqa: D102, the base class describes the methods

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from nvt_torchrec.base.command_line import as_text, flag
from nvt_torchrec.base.errors import SettingsError

if TYPE_CHECKING:
    import torch
    from torch import nn

    #: Weight [out, in] and bias [out] of the linear layers of a group.
    Layers: TypeAlias = dict[str, list[tuple[torch.Tensor, torch.Tensor]]]


@dataclasses.dataclass(frozen=True)
class Interaction:
    """An interaction of certain sizes; they are its fields, and flags of the same names.

    Attributes:
        NAME: The value of ``--interaction_type``.
        TORCHREC: The model in ``torchrec.models.dlrm``, whose arguments include the fields.
        GROUPS: The names of its layers in a bundle, which knows its interaction by them.
        LEAST_VECTORS: The fewest vectors that it combines.
    """

    NAME: ClassVar[str]
    TORCHREC: ClassVar[str]
    GROUPS: ClassVar[tuple[str, ...]] = ()
    LEAST_VECTORS: ClassVar[int] = 1

    def check_width(self, dim: int) -> None:
        """Check that the sizes go with vectors of width ``dim``. Raises SettingsError."""

    def replacement(self, features: int) -> nn.Module | None:
        """Return what takes the place of that model's interaction; None: it stays.

        Args:
            features: The number of embeddings; the dense vector comes before them.
        """
        return None

    def of_embeddings(self, features: int, dim: int) -> tuple[nn.Module, int]:
        """Return the module for data without a dense vector, and the width of its output."""
        raise NotImplementedError

    def serving_layers(self, module: nn.Module) -> Layers:
        """Return the trained layers of the module, by :attr:`GROUPS`."""
        return {}

    @staticmethod
    def combine(
        layers: Layers, dense: torch.Tensor, vectors: torch.Tensor, pairs: torch.Tensor
    ) -> torch.Tensor:
        """Compute the input of the top layers in serving.

        Args:
            layers: The layers of a bundle.
            dense: The dense vector [n, D], or [n, 0] without one.
            vectors: All vectors [n, V, D]; the first is the dense one, if there is one.
            pairs: Int64, the pairs i < j of V vectors, as i · V + j.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class DotProducts(Interaction):
    """The dot products of all pairs of vectors (Naumov et al. 2019, arXiv:1906.00091)."""

    NAME, TORCHREC = "original", "DLRM"
    LEAST_VECTORS = 2

    def replacement(self, features: int) -> nn.Module:
        from nvt_torchrec.dlrm.layers import PairProducts

        return PairProducts(features)

    def of_embeddings(self, features: int, dim: int) -> tuple[nn.Module, int]:
        from nvt_torchrec.dlrm.layers import PairProducts

        return PairProducts(features, dense=False), features * (features - 1) // 2

    @staticmethod
    def combine(
        layers: Layers, dense: torch.Tensor, vectors: torch.Tensor, pairs: torch.Tensor
    ) -> torch.Tensor:
        import torch

        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return torch.cat([dense, products.index_select(1, pairs)], 1)


_cross = functools.partial(flag, least=1, needs="--interaction_type dcn", group="model")


@dataclasses.dataclass(frozen=True)
class LowRankCross(Interaction):
    """The low-rank cross network of DCN v2 (Wang et al. 2020, arXiv:2008.13535, §3.4)."""

    NAME, TORCHREC = "dcn", "DLRM_DCN"
    GROUPS = ("cross_in", "cross_out")

    dcn_num_layers: int = _cross("layers of the cross network", 3)
    dcn_low_rank_dim: int = _cross("rank of the cross network's weights", 512)

    def of_embeddings(self, features: int, dim: int) -> tuple[nn.Module, int]:
        from torchrec.modules.crossnet import LowRankCrossNet

        from nvt_torchrec.dlrm.layers import EmbeddingsCross

        width = features * dim
        crossnet = LowRankCrossNet(width, self.dcn_num_layers, self.dcn_low_rank_dim)
        return EmbeddingsCross(crossnet), width

    def serving_layers(self, module: nn.Module) -> Layers:
        cross = module.crossnet
        inner = [kernel.detach() for kernel in cross.V_kernels]
        outer = zip(cross.W_kernels, cross.bias, strict=True)
        return {
            "cross_in": [(weight, weight.new_zeros(len(weight))) for weight in inner],
            "cross_out": [(kernel.detach(), bias.detach()) for kernel, bias in outer],
        }

    @staticmethod
    def combine(
        layers: Layers, dense: torch.Tensor, vectors: torch.Tensor, pairs: torch.Tensor
    ) -> torch.Tensor:
        from torch.nn import functional

        y = x0 = vectors.flatten(1)
        for inner, outer in zip(layers["cross_in"], layers["cross_out"], strict=True):
            y = x0 * functional.linear(functional.linear(y, *inner), *outer) + y
        return y


_projection = functools.partial(flag, least=1, needs="--interaction_type projection", group="model")


@dataclasses.dataclass(frozen=True)
class Projection(Interaction):
    """The products of two projections of the vectors."""

    NAME, TORCHREC = "projection", "DLRM_Projection"
    GROUPS = ("branch1", "branch2")

    interaction_branch1_layer_sizes: tuple[int, ...] = _projection(
        "layers of the first projection; ends with a multiple of embedding_dim", (2048, 2048)
    )
    interaction_branch2_layer_sizes: tuple[int, ...] = _projection(
        "layers of the second projection; ends with a multiple of embedding_dim", (2048, 2048)
    )

    def check_width(self, dim: int) -> None:
        for name, sizes in vars(self).items():
            if sizes[-1] % dim:
                raise SettingsError(
                    f"--{name} {as_text(sizes)} ends with {sizes[-1]}",
                    f"a projection makes vectors of --embedding_dim: end with a multiple of {dim}",
                )

    def of_embeddings(self, features: int, dim: int) -> tuple[nn.Module, int]:
        from torchrec.models.dlrm import DenseArch

        from nvt_torchrec.dlrm.layers import EmbeddingsProjection

        sizes = self.interaction_branch1_layer_sizes, self.interaction_branch2_layer_sizes
        first, second = (DenseArch(features * dim, list(layers)) for layers in sizes)
        width = sizes[0][-1] // dim * (sizes[1][-1] // dim)
        return EmbeddingsProjection(first, second, dim), width

    def serving_layers(self, module: nn.Module) -> Layers:
        return {
            "branch1": linear_layers(module.interaction_branch1),
            "branch2": linear_layers(module.interaction_branch2),
        }

    @staticmethod
    def combine(
        layers: Layers, dense: torch.Tensor, vectors: torch.Tensor, pairs: torch.Tensor
    ) -> torch.Tensor:
        import torch

        flat, dim = vectors.flatten(1), vectors.shape[2]
        left = with_relu(flat, layers["branch1"]).unflatten(1, (-1, dim))
        right = with_relu(flat, layers["branch2"]).unflatten(1, (dim, -1))
        return torch.cat([dense, torch.bmm(left, right).flatten(1)], 1)


#: By the value of ``--interaction_type``; no two may have the same groups of layers.
INTERACTIONS: dict[str, type[Interaction]] = {
    kind.NAME: kind for kind in (DotProducts, LowRankCross, Projection)
}


def sizes_of(kind: type[Interaction]) -> tuple[str, ...]:
    """Return the names of an interaction's sizes."""
    return tuple(field.name for field in dataclasses.fields(kind))


def interaction_of(groups: set[str]) -> type[Interaction] | None:
    """Return the interaction of a bundle with these groups of layers; None if there is none."""
    names = groups - {"top", "bottom", "first_order"}
    return next((kind for kind in INTERACTIONS.values() if set(kind.GROUPS) == names), None)


def linear_layers(module: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return weight and bias of the linear layers in a module, in order."""
    from torch import nn

    linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
    return [(layer.weight.detach(), layer.bias.detach()) for layer in linear]


def with_relu(x: torch.Tensor, layers: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Compute linear layers, each followed by a ReLU."""
    from torch.nn import functional

    for weight, bias in layers:
        x = functional.linear(x, weight, bias).relu_()
    return x
