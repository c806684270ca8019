"""The vectors of rows in parts, which an interaction joins with its dense vector in one step.

On a GPU, a model spends most of its time on memory accesses. With separate operators, each of these
steps would read and write all vectors: joining the vectors of the features with those of the dense
columns, removing the linear term's coordinates, rounding, and joining with the dense vector. The
same holds for the gradients. A kernel that gets the vectors in parts does all of it in one step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

log = logging.getLogger(__name__)

#: The number of rows of the first batch on which the kernel is compared with operators.
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
        others: The vectors of dense columns and of the data [B, G, D]; None without such vectors.
        sums: The sums of the weights of the linear term, float32 [B, T]; [B, 0] without a linear
            term. They have no gradient themselves, but the returned ``sums`` do.
        factors: The factor of each coordinate of ``vectors`` and ``others``, float32 [D]; None if
            all are 1.
        coordinates: The first coordinate of the linear term's weights in each vector, int32
            [F + G].
        zeros: The number of zero vectors to append.

    Returns:
        The joined vectors [B, 1 + F + G + zeros, D] in the dtype of ``dense``: the dense vector,
        ``vectors`` and ``others`` times the factors, and zeros. And ``sums``, whose gradient is
        that of the coordinates of ``vectors`` and ``others`` that are the weights.
    """
    if others is not None:
        vectors = torch.cat([vectors.float(), others], 1)
    num_labels = sums.shape[1]
    if num_labels:
        labels = torch.arange(num_labels, device=vectors.device)
        index = coordinates.unsqueeze(1).long() + labels
        weights = vectors.gather(2, index.expand(len(vectors), -1, -1)).float().sum(1)
        # The difference is 0, but it has the gradient of the weights.
        sums = sums + (weights - weights.detach())
    if factors is not None:
        vectors = vectors * factors
    parts = [dense.unsqueeze(1), vectors.to(dense.dtype)]
    if zeros:
        parts.append(dense.new_zeros(len(dense), zeros, dense.shape[1]))
    return torch.cat(parts, 1), sums


class VectorJoin:
    """Joins vectors by a kernel if its results on the first batch agree with those of operators.

    If they do not, or if the kernel cannot be compiled, log a warning once and use operators.
    """

    def __init__(self) -> None:
        #: Whether the kernel is used; None before the first batch.
        self.uses_kernel: bool | None = None

    def __call__(self, dense: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Join the vectors of rows, with the arguments and results of :func:`join_by_operators`."""
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
        """Return whether the results and gradients of the kernel agree with those of operators.

        Args:
            dense, vectors, others, sums: Arguments of :func:`join_by_operators` for all rows, of
                which the first rows are compared.
            unsliced: Its other arguments, which do not depend on the rows.
        """
        first = slice(0, _COMPARED_ROWS)
        others = None if others is None else others.detach()[first]
        parts = dense.detach()[first], vectors.detach()[first], others
        rest = sums.detach()[first], *unsliced
        try:
            from nvt_torchrec.models.cuda.join_kernels import join

            joined, _ = join_by_operators(*parts, *rest)
            # Use gradients of the magnitude of the values, which differ between labels.
            labels = torch.arange(1.0, 1 + sums.shape[1], device=sums.device)
            gradients = joined, labels.expand_as(rest[0])
            results = []
            for compute in (join_by_operators, join):
                results.append(_compute_with_gradients(compute, parts, rest, gradients))
            for expected, result in zip(*results, strict=True):
                # Allow a difference of one unit in the last place of bfloat16, and for float32 the
                # difference that another order of a product and a sum makes.
                tolerance = 1e-6 if expected.dtype == torch.float32 else 2**-7
                torch.testing.assert_close(
                    result, expected, rtol=tolerance, atol=tolerance * 1e-3, equal_nan=True
                )
        # Triton is missing or cannot compile the kernel, CUDA fails, or the results differ.
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            log.warning(
                "vectors are joined by PyTorch's operators, which takes longer, because the GPU "
                "kernel failed or its results differ: %s; please report this",
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
        parts: Its first arguments, which do not require gradients yet.
        rest: Its other arguments.
        gradients: The gradients of its results.
    """
    inputs = [None if part is None else part.detach().requires_grad_() for part in parts]
    with torch.enable_grad():
        joined, sums = compute(*inputs, *rest)
    wanted = [part for part in inputs if part is not None]
    results = [joined]
    result_gradients = [gradients[0]]
    if sums.requires_grad:  # the model has a linear term
        results.append(sums)
        result_gradients.append(gradients[1])
    found = torch.autograd.grad(results, wanted, result_gradients)
    return [joined.detach(), sums.detach(), *found]


class UnjoinedVectors:
    """The vectors of rows in parts, which :class:`.layers.PairProducts` joins.

    Attributes:
        sums: The sums of the weights of the linear term, float32 [B, T], or [B, 0] without one.
            They have a gradient only after :meth:`join`.

    Args:
        vector_join: Joins the parts.
        vectors, others, sums, factors, coordinates: Arguments of :func:`join_by_operators`.
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
        self._vectors = vectors
        self._others = others
        self.sums = sums
        self._factors = factors
        self._coordinates = coordinates

    def join(self, dense: torch.Tensor, zeros: int) -> torch.Tensor:
        """Return all vectors [B, V, D]: the dense vector, the parts, and ``zeros`` zero vectors."""
        joined, self.sums = self._vector_join(
            dense, self._vectors, self._others, self.sums, self._factors, self._coordinates, zeros
        )
        return joined
