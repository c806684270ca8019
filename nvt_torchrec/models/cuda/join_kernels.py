"""Triton kernels that join the vectors of rows for an interaction, and compute their gradients.

They have never run on a GPU: tests run them in Triton's interpreter and compile them for a GPU.
:mod:`models.vector_join` compares them with PyTorch's operators before it uses them. Importing
this module imports Triton.

A program of a kernel handles several rows of one vector, whose coordinates are contiguous in
memory. So it reads and writes whole cache lines, and all its values take the same branch. In Triton
a name must have the same type in all branches, so pointers of different types have different names.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

#: The number of values of a program, unless a row has more: 32 per thread with Triton's four warps.
_VALUES = 4096


@triton.jit
def _join(
    dense,
    vectors,
    others,
    factors,
    joined,
    rows,
    num_vectors: tl.constexpr,
    num_others: tl.constexpr,
    num_joined: tl.constexpr,
    dim: tl.constexpr,
    has_factors: tl.constexpr,
    program_rows: tl.constexpr,
    width: tl.constexpr,
):
    """Write one vector of ``program_rows`` rows to ``joined``.

    Args:
        dense, vectors, others, factors: Arguments of :class:`_Join`.
        joined: Output.
        rows: The number of rows, B.
        num_vectors, num_others, num_joined: The numbers of vectors per row.
        dim: The number of coordinates of a vector, D.
        has_factors: Whether ``factors`` are given.
        program_rows: The number of rows of a program.
        width: ``dim`` rounded up to a power of two.
    """
    # A large batch has more values than an int32 can count.
    row = tl.program_id(0).to(tl.int64) * program_rows + tl.arange(0, program_rows)[:, None]
    number = tl.program_id(1)
    coordinate = tl.arange(0, width)[None, :]
    inside = (row < rows) & (coordinate < dim)
    values = tl.zeros((program_rows, width), tl.float32)
    if number == 0:
        dense_source = dense + row * dim + coordinate
        values = tl.load(dense_source, mask=inside, other=0).to(tl.float32)
    else:
        if number <= num_vectors:
            vector_source = vectors + (row * num_vectors + number - 1) * dim + coordinate
            values = tl.load(vector_source, mask=inside, other=0).to(tl.float32)
        elif number <= num_vectors + num_others:
            index = number - 1 - num_vectors
            other_source = others + (row * num_others + index) * dim + coordinate
            values = tl.load(other_source, mask=inside, other=0).to(tl.float32)
        if has_factors:
            values *= tl.load(factors + coordinate, mask=coordinate < dim, other=0)
    target = joined + (row * num_joined + number) * dim + coordinate
    tl.store(target, values.to(joined.dtype.element_ty), mask=inside)


@triton.jit
def _split(
    gradient,
    sum_gradient,
    factors,
    coordinates,
    dense_gradient,
    vector_gradient,
    other_gradient,
    rows,
    num_vectors: tl.constexpr,
    num_others: tl.constexpr,
    num_joined: tl.constexpr,
    num_labels: tl.constexpr,
    dim: tl.constexpr,
    has_factors: tl.constexpr,
    program_rows: tl.constexpr,
    width: tl.constexpr,
):
    """Write the gradient of one vector of ``program_rows`` rows.

    Args:
        gradient: The gradient of ``joined``.
        sum_gradient: The gradient of the sums of the linear term's weights.
        factors, coordinates: Arguments of :class:`_Join`.
        dense_gradient, vector_gradient, other_gradient: Output.
        num_labels: The number of sums per row.
        rows, num_vectors, num_others, num_joined: As in :func:`_join`.
        dim, has_factors, program_rows, width: As in :func:`_join`.
    """
    row = tl.program_id(0).to(tl.int64) * program_rows + tl.arange(0, program_rows)[:, None]
    number = tl.program_id(1)
    coordinate = tl.arange(0, width)[None, :]
    inside = (row < rows) & (coordinate < dim)
    source = gradient + (row * num_joined + number) * dim + coordinate
    values = tl.load(source, mask=inside, other=0).to(tl.float32)
    if number == 0:
        dense_target = dense_gradient + row * dim + coordinate
        tl.store(dense_target, values.to(dense_gradient.dtype.element_ty), mask=inside)
    else:
        if has_factors:
            values *= tl.load(factors + coordinate, mask=coordinate < dim, other=0)
        if num_labels > 0:
            begin = tl.load(coordinates + number - 1)
            for label in tl.static_range(num_labels):
                row_gradient = tl.load(sum_gradient + row * num_labels + label, mask=row < rows)
                values += tl.where(coordinate == begin + label, row_gradient, 0)
        if number <= num_vectors:
            vector_target = vector_gradient + (row * num_vectors + number - 1) * dim + coordinate
            tl.store(vector_target, values.to(vector_gradient.dtype.element_ty), mask=inside)
        else:
            index = number - 1 - num_vectors
            other_target = other_gradient + (row * num_others + index) * dim + coordinate
            tl.store(other_target, values.to(other_gradient.dtype.element_ty), mask=inside)


def join(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Join vectors, with the arguments and results of `models.vector_join.join_by_operators`."""
    return _Join.apply(*inputs)


class _Join(torch.autograd.Function):
    """Joins vectors, with the arguments of :func:`models.vector_join.join_by_operators`."""

    @staticmethod
    def forward(
        ctx: Any,
        dense: torch.Tensor,
        vectors: torch.Tensor,
        others: torch.Tensor | None,
        sums: torch.Tensor,
        factors: torch.Tensor | None,
        coordinates: torch.Tensor,
        zeros: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, num_vectors, dim = vectors.shape
        num_others = 0 if others is None else others.shape[1]
        num_joined = 1 + num_vectors + num_others + zeros
        joined = dense.new_empty(rows, num_joined, dim)
        sizes = {
            "num_vectors": num_vectors,
            "num_others": num_others,
            "num_joined": num_joined,
            "dim": dim,
            "has_factors": factors is not None,
        }
        dense = dense.contiguous()
        vectors = vectors.contiguous()
        # A kernel needs a pointer even for an absent tensor, which it does not read.
        others_or_any = vectors if others is None else others.contiguous()
        factors_or_any = vectors if factors is None else factors
        grid, shape = _divide(rows, num_joined, dim)
        _join[grid](
            dense, vectors, others_or_any, factors_or_any, joined, rows, **sizes, **shape
        )  # fmt: skip
        ctx.save_for_backward(factors, coordinates)
        ctx.sizes = sizes
        ctx.dtypes = dense.dtype, vectors.dtype, None if others is None else others.dtype
        return joined, sums.view_as(sums)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: torch.Tensor, sum_gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        factors, coordinates = ctx.saved_tensors
        sizes = ctx.sizes
        dense_dtype, vector_dtype, other_dtype = ctx.dtypes
        rows = len(gradient)
        dim = sizes["dim"]
        num_vectors = sizes["num_vectors"]
        num_others = sizes["num_others"]
        dense_gradient = gradient.new_empty((rows, dim), dtype=dense_dtype)
        vector_gradient = gradient.new_empty((rows, num_vectors, dim), dtype=vector_dtype)
        other_gradient = None
        if num_others:
            other_gradient = gradient.new_empty((rows, num_others, dim), dtype=other_dtype)
        grid, shape = _divide(rows, 1 + num_vectors + num_others, dim)
        _split[grid](
            gradient.contiguous(),
            sum_gradient.contiguous(),
            vector_gradient if factors is None else factors,
            coordinates,
            dense_gradient,
            vector_gradient,
            vector_gradient if other_gradient is None else other_gradient,
            rows,
            num_labels=sum_gradient.shape[1],
            **sizes,
            **shape,
        )
        return dense_gradient, vector_gradient, other_gradient, None, None, None, None


def _divide(rows: int, count: int, dim: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid of a kernel for ``count`` vectors per row, and the shape of a program."""
    width = triton.next_power_of_2(dim)
    rows_per_program = max(1, _VALUES // width)
    grid = triton.cdiv(rows, rows_per_program), count
    return grid, {"program_rows": rows_per_program, "width": width}
