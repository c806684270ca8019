"""The operators that a program of an own model may call, and what a call costs.

The list is closed: a name that a file gives is looked up here and nowhere else. It holds what
``torch.export`` makes of the layers and functions of published models of click logs (DCN, DCN-Mix,
xDeepFM, AutoInt, FiBiNET, MaskNet, GDCN, FinalMLP, DIN, FGCNN, MMoE, recurrent and convolutional
ones). Not in it: what changes its arguments or leaves values unset (``set_``, ``resize_``,
``empty``), reads memory by strides (``as_strided``), has a size that depends on values
(``nonzero``), draws random numbers, only serves a backward pass, reads beyond tensors of the wrong
size (``_native_batch_norm_legit_no_training``), or which no such model needs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

_ATEN = """
abs.default acos.default add.Scalar add.Tensor asin.default asinh.default atan.default
atan2.default ceil.default clamp.Tensor clamp.default cos.default cosh.default div.Tensor
div.Tensor_mode erf.default exp.default expm1.default floor.default fmod.Scalar fmod.Tensor
log.default log10.default log1p.default log2.default maximum.default minimum.default mul.Scalar
mul.Tensor neg.default pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal.default
remainder.Scalar remainder.Tensor round.default rsqrt.default sign.default sin.default sinh.default
sqrt.default sub.Scalar sub.Tensor tan.default tanh.default trunc.default

elu.default gelu.default hardtanh.default leaky_relu.default relu.default sigmoid.default
_softmax.default _log_softmax.default

bitwise_and.Tensor bitwise_not.default bitwise_or.Tensor bitwise_xor.Tensor eq.Scalar eq.Tensor
ge.Scalar ge.Tensor gt.Scalar gt.Tensor isinf.default isnan.default le.Scalar le.Tensor
logical_and.default logical_not.default logical_or.default logical_xor.default lt.Scalar lt.Tensor
ne.Scalar ne.Tensor where.self

amax.default amin.default any.default any.dim any.dims argmax.default argmin.default cumsum.default
linalg_vector_norm.default max.dim mean.default mean.dim min.dim prod.dim_int sort.default
sum.dim_IntList topk.default var.correction

native_group_norm.default native_layer_norm.default

addmm.default bmm.default convolution.default linear.default max_pool2d_with_indices.default
mm.default

_to_copy.default alias.default cat.default clone.default constant_pad_nd.default diagonal.default
expand.default flip.default permute.default repeat.default select.int slice.Tensor
slice_scatter.default split_with_sizes.default squeeze.dims sym_size.int unsqueeze.default
view.default

embedding.default gather.default index.Tensor index_select.default

arange.start_step full.default full_like.default scalar_tensor.default triu_indices.default
"""
#: Products of matrices, and the argument whose last dimension they sum over.
_PRODUCTS = {"mm": 0, "bmm": 0, "linear": 0, "addmm": 1}
#: A product of 64 pairs of numbers takes about as long as writing a number.
ELEMENT = 64


def cost_of(function: Callable[..., Any], arguments: Sequence[Any], result: Any) -> int:
    """Return what a call costs: its products, and :data:`ELEMENT` for each element of its results.

    Convolutions also hold an element for each product.
    """
    tensors = [item for item in _several(result) if isinstance(item, torch.Tensor)]
    elements, products = sum(tensor.numel() for tensor in tensors), 0
    name = getattr(function, "__name__", "").partition(".")[0]
    if name in _PRODUCTS:
        products = elements * arguments[_PRODUCTS[name]].shape[-1]
    elif name == "convolution":
        elements += elements * arguments[1].shape[1:].numel()
    elif name == "max_pool2d_with_indices":
        products = elements * math.prod(arguments[1])
    return elements * ELEMENT + products


def _several(result: Any) -> Sequence[Any]:
    return result if isinstance(result, list | tuple) else [result]


def _of_sizes(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a function of two sizes, which may be symbols of ``torch.export``."""

    def compute(first: Any, second: Any) -> Any:
        if not all(isinstance(size, int | torch.SymInt) for size in (first, second)):
            raise TypeError(f"{function.__name__} takes two sizes")
        result = function(first, second)
        if type(result) is int and abs(result) >= 2**63:
            raise OverflowError("a size of more than 64 bits")
        return result

    return compute


def _item(items: Any, index: Any) -> Any:
    """Return one of several results."""
    if not isinstance(items, list | tuple) or type(index) is not int:
        raise TypeError("getitem takes several results and a number")
    return items[index]


def _aten(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


#: By their names in a program. Sizes are added, subtracted and multiplied by constants, so that
#: they are linear in the number of rows.
OPERATORS: dict[str, Callable[..., Any]] = {
    **{f"aten.{name}": _aten(name) for name in _ATEN.split()},
    **{name: _of_sizes(getattr(operator, name)) for name in ("add", "sub", "mul")},
    "getitem": _item,
}
