"""The kernels that join vectors, beside PyTorch's operators."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from nvt_torchrec.models.cuda import join_kernels
from nvt_torchrec.models.vector_join import VectorJoin, join_by_operators


def make_inputs(rows, dim, num_vectors, num_others, labels, dense_dtype, vector_dtype, factor=0.5):
    """Return the arguments of a join; weights of the linear term begin at several coordinates."""
    generator = torch.Generator().manual_seed(rows + dim)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(dtype)

    others = draw(rows, num_others, dim) if num_others else None
    coordinates = torch.tensor([0, labels, *[0] * (num_vectors + num_others - 2)])
    factors = None
    if labels:
        factors = torch.full((dim,), factor)
        factors[: 2 * labels] = 0
    return (
        draw(rows, dim, dtype=dense_dtype),
        draw(rows, num_vectors, dim, dtype=vector_dtype),
        others,
        draw(rows, labels),
        factors,
        coordinates.to(torch.int32),
    )


def compute(join, inputs, zeros):
    """Return joined vectors, sums, and the gradients of what has one."""
    inputs = [*inputs]
    wanted = [part.detach().requires_grad_() for part in inputs[:3] if part is not None]
    inputs[: len(wanted)] = wanted
    joined, sums = join(*inputs, zeros)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(part.shape, generator=generator) for part in (joined, sums)]
    total = (joined * gradients[0].to(joined.dtype)).sum() + (sums * gradients[1]).sum()
    return [joined.detach(), sums.detach(), *torch.autograd.grad(total, wanted)]


_FLOAT, _HALF = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("rows", "dim", "num_vectors", "num_others", "labels", "zeros"),
    [
        (67, 128, 26, 1, 1, 4),  # MLPerf's model
        (64, 128, 26, 0, 0, 5),
        (1, 16, 3, 13, 1, 0),
        (5, 20, 2, 2, 3, 1),
        (3, 1000, 2, 1, 2, 7),  # wider than a power of 2 that divides it
        (2, 5000, 2, 1, 1, 1),  # a program has a part of the values that it may have
    ],
)
@pytest.mark.parametrize("vector", [_FLOAT, _HALF])
@pytest.mark.parametrize("dense", [_FLOAT, _HALF])
def test_the_kernels_are_the_operators(
    rows, dim, num_vectors, num_others, labels, zeros, dense, vector
):
    inputs = make_inputs(rows, dim, num_vectors, num_others, labels, dense, vector)
    expected = compute(join_by_operators, inputs, zeros)
    for result, part in zip(compute(join_kernels.join, inputs, zeros), expected, strict=True):
        assert result.dtype == part.dtype
        # The interpreter cuts what a GPU rounds to bfloat16.
        tolerance = 2**-7 if part.dtype == _HALF else 1e-6
        torch.testing.assert_close(result, part, rtol=tolerance, atol=tolerance * 1e-3)


def test_parts_need_not_be_contiguous():
    dense, vectors, *rest = make_inputs(8, 16, 26, 1, 1, _FLOAT, _FLOAT)
    apart = torch.stack([vectors, vectors], 1)[:, 0]
    transposed = dense.T.contiguous().T
    expected = join_kernels.join(dense, vectors, *rest, 2)
    for result, part in zip(join_kernels.join(transposed, apart, *rest, 2), expected, strict=True):
        assert torch.equal(result, part)


@pytest.mark.parametrize("vector", [_FLOAT, _HALF])
def test_the_first_batch_decides(vector, monkeypatch, caplog):
    inputs = make_inputs(2_000, 16, 4, 1, 1, _HALF, vector)
    join = VectorJoin()
    assert join(*make_inputs(0, 16, 4, 1, 1, _HALF, vector), 3)[0].shape == (0, 9, 16)
    assert join.uses_kernel is None
    with torch.no_grad():  # an evaluation may be first
        joined, _ = join(*inputs, 3)
    assert join.uses_kernel
    assert joined.shape == (2_000, 9, 16)
    assert not caplog.records

    wrong = SimpleNamespace(join=lambda *parts: join_by_operators(parts[0] * 1.1, *parts[1:]))
    monkeypatch.setitem(sys.modules, join_kernels.__name__, wrong)
    join = VectorJoin()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            joined, _ = join(*inputs, 3)
    assert torch.equal(joined, join_by_operators(*inputs, 3)[0])
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "vectors are joined by PyTorch's operators, which takes longer, because the GPU kernel "
        "failed or its results differ"
    ]
