"""The vectors of rows in parts, which an interaction joins with its dense vector.

On a GPU a model's time is that of reading and writing memory. Joining the vectors of the features
with those of the dense columns, taking the linear term's coordinates out of them, rounding them,
and joining them with the dense vector would each read and write all vectors, and so would their
gradients. Given in parts, they are joined in one step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

log = logging.getLogger(__name__)

#: The rows of the first batch on which the kernel is compared with operators.
_COMPARED_ROWS = 1024


def join_by_operators(
    dense: torch.Tensor,
    vectors: torch.Tensor,
    others: torch.Tensor | None,
    sums: torch.Tensor,
    factors: torch.Tensor | None,
    coordinates: torch.Tensor,
    zeros: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the vectors of rows.

    Args:
        dense: The dense vector [B, D].
        vectors: The vectors of the features [B, F, D], float32 or bfloat16.
        others: The vectors that follow, of dense columns and of the data, [B, G, D]; None if there
            are none.
        sums: The sums of the weights of the linear term, float32 [B, T]; [B, 0] without one. They
            have a gradient only by their second return, where it goes to the coordinates of
            ``vectors`` and ``others`` that are these weights.
        factors: The factor of each coordinate of ``vectors`` and ``others``, float32 [D]; None if
            all are 1.
        coordinates: The coordinate at which the weights of each vector begin, int32 [F + G].
        zeros: How many vectors of zeros follow.

    Returns:
        The dense vector, ``vectors`` and ``others`` times the factors, and zeros,
        [B, 1 + F + G + zeros, D] in the dtype of ``dense``; and ``sums``.
    """
    if others is not None:
        vectors = torch.cat([vectors.float(), others], 1)
    num_labels = sums.shape[1]
    if num_labels:
        labels = torch.arange(num_labels, device=vectors.device)
        index = coordinates.unsqueeze(1).long() + labels
        weights = vectors.gather(2, index.expand(len(vectors), -1, -1)).float().sum(1)
        # The difference is 0, and has the gradient of the weights.
        sums = sums + (weights - weights.detach())
    if factors is not None:
        vectors = vectors * factors
    parts = [dense.unsqueeze(1), vectors.to(dense.dtype)]
    if zeros:
        parts.append(dense.new_zeros(len(dense), zeros, dense.shape[1]))
    return torch.cat(parts, 1), sums


class VectorJoin:
    """Joins vectors by a kernel if its results on the first batch are those of operators.

    Otherwise, or if it cannot be compiled, a warning says so once, and operators join them.
    """

    def __init__(self) -> None:
        #: Whether the kernel is used; None until there was a batch.
        self.uses_kernel: bool | None = None

    def __call__(self, dense: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Join the vectors of rows; arguments and results are :func:`join_by_operators`'s."""
        if not len(dense):
            return join_by_operators(dense, *rest)
        if self.uses_kernel is None:
            self.uses_kernel = self._compare(dense, *rest)
        if not self.uses_kernel:
            return join_by_operators(dense, *rest)
        from nvt_torchrec.models.cuda.join_kernels import join

        return join(dense, *rest)

    def _compare(
        self,
        dense: torch.Tensor,
        vectors: torch.Tensor,
        others: torch.Tensor | None,
        sums: torch.Tensor,
        *unsliced: Any,
    ) -> bool:
        """Return whether the kernel joins some rows as operators do, gradients included.

        Args:
            dense, vectors, others, sums: Those of :func:`join_by_operators`, of all rows.
            unsliced: Its other arguments, which are not of rows.
        """
        first = slice(0, _COMPARED_ROWS)
        others = None if others is None else others.detach()[first]
        parts = dense.detach()[first], vectors.detach()[first], others
        rest = sums.detach()[first], *unsliced
        try:
            from nvt_torchrec.models.cuda.join_kernels import join

            joined, _ = join_by_operators(*parts, *rest)
            # Gradients as large as the values, and different for each label.
            labels = torch.arange(1.0, 1 + sums.shape[1], device=sums.device)
            gradients = joined, labels.expand_as(rest[0])
            results = []
            for compute in (join_by_operators, join):
                results.append(_compute_with_gradients(compute, parts, rest, gradients))
            for expected, result in zip(*results, strict=True):
                # In bfloat16 by a unit of the last place, in float32 by the order of a product
                # and a sum.
                tolerance = 1e-6 if expected.dtype == torch.float32 else 2**-7
                torch.testing.assert_close(
                    result, expected, rtol=tolerance, atol=tolerance * 1e-3, equal_nan=True
                )
        except Exception as error:  # of Triton's compiler, of its absence, of CUDA, or a difference
            reason = " ".join(str(error).split()) or type(error).__name__
            log.warning(
                "vectors are joined by PyTorch's operators, which takes longer, because the kernel "
                "that joins them on a GPU failed or differs: %s; report this",
                f"{reason:.300}",
            )
            return False
        return True


def _compute_with_gradients(
    compute: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    parts: Sequence[torch.Tensor | None],
    rest: Sequence[Any],
    gradients: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Return the results of a function that joins vectors, and the gradients of ``parts``.

    Args:
        compute: The function.
        parts: Its first arguments, without a gradient.
        rest: Its other arguments.
        gradients: The gradients of its results.
    """
    inputs = [None if part is None else part.detach().requires_grad_() for part in parts]
    with torch.enable_grad():
        joined, sums = compute(*inputs, *rest)
    wanted = [part for part in inputs if part is not None]
    results, result_gradients = [joined], [gradients[0]]
    if sums.requires_grad:  # there is a linear term
        results.append(sums)
        result_gradients.append(gradients[1])
    found = torch.autograd.grad(results, wanted, result_gradients)
    return [joined.detach(), sums.detach(), *found]


class UnjoinedVectors:
    """The vectors of some rows in parts, as :class:`.layers.PairProducts` may get them.

    Attributes:
        sums: The sums of the weights of the linear term, float32 [B, T], or [B, 0]. After
            :meth:`join` they have a gradient.

    Args:
        vector_join: Joins the parts.
        vectors, others, sums, factors, coordinates: Those of :func:`join_by_operators`.
    """

    def __init__(
        self,
        vector_join: VectorJoin,
        vectors: torch.Tensor,
        others: torch.Tensor | None,
        sums: torch.Tensor,
        factors: torch.Tensor | None,
        coordinates: torch.Tensor,
    ) -> None:
        self._vector_join = vector_join
        self._vectors, self._others, self.sums = vectors, others, sums
        self._factors, self._coordinates = factors, coordinates

    def join(self, dense: torch.Tensor, zeros: int) -> torch.Tensor:
        """Return all vectors [B, V, D]: the dense one, those of the parts, and zeros."""
        joined, self.sums = self._vector_join(
            dense, self._vectors, self._others, self.sums, self._factors, self._coordinates, zeros
        )
        return joined
