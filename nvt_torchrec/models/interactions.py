"""The interactions, which combine the vectors of a DLRM: one class for each ``--interaction_type``.

A class defines an interaction completely: its sizes, which are flags, and the module that computes
it in training and serving. New interactions are added to :data:`INTERACTIONS`. PyTorch is imported
inside functions, so that ``--help`` is fast.
"""

# ruff: noqa: D102, the base class describes the methods

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, ClassVar

from nvt_torchrec.base.command_line import flag

if TYPE_CHECKING:
    from torch import nn


@dataclasses.dataclass(frozen=True)
class Interaction:
    """The base class of interactions. The fields of a class are sizes, and flags of the same names.

    Attributes:
        NAME: The value of ``--interaction_type``.
        MIN_VECTORS: The minimum number of vectors that it can combine.
    """

    NAME: ClassVar[str]
    MIN_VECTORS: ClassVar[int] = 1

    def build(self, vectors: int, dim: int, has_dense: bool) -> tuple[nn.Module, int]:
        """Return the module and the width of its output.

        The module's ``forward(dense, vectors)`` returns [B, width]. Its arguments are the dense
        vector [B, D] ([B, 0] without a dense vector) and the other vectors [B, V, D].

        Args:
            vectors: The number of vectors, including the dense vector.
            dim: The width of each vector, D.
            has_dense: Whether there is a dense vector, which represents all dense columns.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class DotProducts(Interaction):
    """The dot products of all pairs of vectors (Naumov et al. 2019, arXiv:1906.00091)."""

    NAME = "original"
    MIN_VECTORS = 2

    def build(self, vectors: int, dim: int, has_dense: bool) -> tuple[nn.Module, int]:
        from nvt_torchrec.models.layers import PairProducts

        num_pairs = vectors * (vectors - 1) // 2
        return PairProducts(vectors), num_pairs + dim if has_dense else num_pairs


_cross_flag = functools.partial(
    flag, minimum=1, needs="--interaction_type dcn or --model dcn_v2", group="model"
)


@dataclasses.dataclass(frozen=True)
class LowRankCross(Interaction):
    """The low-rank cross network of DCN v2 (Wang et al. 2020, arXiv:2008.13535, §3.4)."""

    NAME = "dcn"

    dcn_num_layers: int = _cross_flag("layers of the cross network", 3)
    dcn_low_rank_dim: int = _cross_flag("rank of the cross network's weights", 512)

    def build(self, vectors: int, dim: int, has_dense: bool) -> tuple[nn.Module, int]:
        from nvt_torchrec.models.layers import CrossNetwork

        width = vectors * dim
        return CrossNetwork(width, self.dcn_num_layers, self.dcn_low_rank_dim), width


#: The interactions by the value of ``--interaction_type``.
INTERACTIONS: dict[str, type[Interaction]] = {
    DotProducts.NAME: DotProducts,
    LowRankCross.NAME: LowRankCross,
}


def list_sizes(kind: type[Interaction]) -> tuple[str, ...]:
    """Return the names of an interaction's sizes."""
    return tuple(field.name for field in dataclasses.fields(kind))
