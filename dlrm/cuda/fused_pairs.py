"""The dot products of all pairs of feature vectors as one Triton kernel, forward and backward.

The operators of :mod:`dlrm.layers` copy all vectors beside each other, write the products of
all vectors with all others, select half of them, and copy these behind the dense vector. A kernel
reads a sample's vectors once, and writes what the top layers read.

It has not run on a GPU yet: each run tries it on a few samples first, and continues with the
operators if they give something else (:func:`dlrm.layers.choose_kernel`).

Triton comes with PyTorch for CUDA only, so this module is imported where
:func:`dlrm.layers.choose_kernel` chooses it. With ``TRITON_INTERPRET=1`` in the environment,
Triton's interpreter runs the kernels on a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: The columns of the vectors that are multiplied at a time, and the fewest that Triton multiplies.
#: Without tensor cores each number has a register: 128 columns would need more than there are.
_BLOCK, _EXACT_BLOCK, _LEAST = 128, 32, 16


@triton.jit
def _sample(
    dense,
    sparse,
    row,
    columns,
    vectors: tl.constexpr,
    dim: tl.constexpr,
    has_dense: tl.constexpr,
    height: tl.constexpr,
    dtype: tl.constexpr,
):
    """Load the vectors of a sample [height, columns], the dense one first; zeros after the last.

    They are rounded to ``dtype``, which the products are made for.
    """
    number = tl.arange(0, height)[:, None] - has_dense
    inside = (number >= 0) & (number < vectors - has_dense) & (columns < dim)[None, :]
    start = sparse + row * ((vectors - has_dense) * dim)
    block = tl.load(start + number * dim + columns[None, :], mask=inside, other=0.0)
    block = block.to(dtype).to(tl.float32)
    if has_dense:
        first = tl.load(dense + row * dim + columns, mask=columns < dim, other=0.0)
        block = tl.where(number < 0, first.to(dtype).to(tl.float32)[None, :], block)
    return block


@triton.jit
def _forward(
    dense,
    sparse,
    out,
    width,
    vectors: tl.constexpr,
    dim: tl.constexpr,
    has_dense: tl.constexpr,
    height: tl.constexpr,
    block: tl.constexpr,
    precision: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dtype = out.dtype.element_ty
    target = out + row * width
    products = tl.zeros((height, height), tl.float32)
    for begin in tl.static_range(0, dim, block):
        columns = begin + tl.arange(0, block)
        sample = _sample(dense, sparse, row, columns, vectors, dim, has_dense, height, dtype)
        products += tl.dot(sample, tl.trans(sample), input_precision=precision)
        if has_dense:
            first = tl.load(dense + row * dim + columns, mask=columns < dim, other=0.0)
            tl.store(target + columns, first.to(dtype), mask=columns < dim)
    i = tl.arange(0, height)[:, None]
    j = tl.arange(0, height)[None, :]
    pair = i * (2 * vectors - i - 1) // 2 + j - i - 1
    target += has_dense * dim
    tl.store(target + pair, products.to(dtype), mask=(i < j) & (j < vectors))
    used: tl.constexpr = vectors * (vectors - 1) // 2
    pad = used + tl.arange(0, 8)
    tl.store(target + pad, tl.zeros((8,), dtype), mask=pad < width - has_dense * dim)


@triton.jit
def _backward(
    dense,
    sparse,
    gradient,
    dense_gradient,
    sparse_gradient,
    width,
    vectors: tl.constexpr,
    dim: tl.constexpr,
    has_dense: tl.constexpr,
    height: tl.constexpr,
    block: tl.constexpr,
    precision: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dtype = gradient.dtype.element_ty
    source = gradient + row * width
    i = tl.arange(0, height)[:, None]
    j = tl.arange(0, height)[None, :]
    low, high = tl.minimum(i, j), tl.maximum(i, j)
    pair = low * (2 * vectors - low - 1) // 2 + high - low - 1
    inside = (low < high) & (high < vectors)
    symmetric = tl.load(source + has_dense * dim + pair, mask=inside, other=0.0).to(tl.float32)
    number = i - has_dense
    target = sparse_gradient + row * ((vectors - has_dense) * dim)
    for begin in tl.static_range(0, dim, block):
        columns = begin + tl.arange(0, block)
        sample = _sample(dense, sparse, row, columns, vectors, dim, has_dense, height, dtype)
        gradients = tl.dot(symmetric, sample, input_precision=precision)
        kept = (number >= 0) & (number < vectors - has_dense) & (columns < dim)[None, :]
        place = target + number * dim + columns[None, :]
        tl.store(place, gradients.to(sparse_gradient.dtype.element_ty), mask=kept)
        if has_dense:
            first = tl.sum(tl.where(number < 0, gradients, 0.0), axis=0)
            first += tl.load(source + columns, mask=columns < dim, other=0.0).to(tl.float32)
            first = first.to(dense_gradient.dtype.element_ty)
            tl.store(dense_gradient + row * dim + columns, first, mask=columns < dim)


class _FusedPairs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        dense: torch.Tensor | None,
        sparse: torch.Tensor,
        width: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        sparse = sparse.contiguous()
        dense = None if dense is None else dense.contiguous()
        ctx.save_for_backward(dense, sparse)
        out = torch.empty(len(sparse), width, dtype=dtype, device=sparse.device)
        if len(sparse):
            given = sparse if dense is None else dense  # Triton has no pointer to nothing
            _forward[(len(sparse),)](given, sparse, out, width, **_constants(dense, sparse, dtype))
        return out

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        dense, sparse = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_sparse = torch.empty_like(sparse)
        of_dense = None if dense is None else torch.empty_like(dense)
        if len(sparse):
            given = (sparse, of_sparse) if dense is None else (dense, of_dense)
            _backward[(len(sparse),)](
                *(given[0], sparse, gradient, given[1], of_sparse, gradient.shape[1]),
                **_constants(dense, sparse, gradient.dtype),
            )
        return of_dense, of_sparse, None, None


def _constants(
    dense: torch.Tensor | None, sparse: torch.Tensor, dtype: torch.dtype
) -> dict[str, object]:
    vectors, dim = sparse.shape[1] + (dense is not None), sparse.shape[2]
    # numbers of 16 bits lose nothing in TensorFloat-32
    tf32 = dtype.itemsize == 2 or torch.backends.cuda.matmul.allow_tf32
    return {
        "vectors": vectors,
        "dim": dim,
        "has_dense": int(dense is not None),
        "height": max(_LEAST, triton.next_power_of_2(vectors)),
        "block": min(_BLOCK if tf32 else _EXACT_BLOCK, max(_LEAST, triton.next_power_of_2(dim))),
        "precision": "tf32" if tf32 else "ieee",
    }


def fused_pairs(
    dense_features: torch.Tensor | None, sparse_features: torch.Tensor, width: int
) -> torch.Tensor:
    """Return the dense vector, the products and zeros, as :class:`dlrm.layers.PairProducts`.

    Args:
        dense_features: The dense vectors [B, D], or None.
        sparse_features: The embeddings [B, F, D]; of at most :data:`dlrm.layers.MOST_VECTORS`.
        width: The columns of the result; zeros follow the last product, at most 7.
    """
    dtype = sparse_features.dtype if dense_features is None else dense_features.dtype
    device = sparse_features.device.type
    if dense_features is None and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return _FusedPairs.apply(dense_features, sparse_features, width, dtype)
