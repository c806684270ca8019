"""The operators that a program of an own model may call, and what a call costs.

The list is closed: a name that a file gives is looked up here and nowhere else. It holds what
``torch.export`` makes of the layers and functions of published models of click logs (DCN, DCN-Mix,
xDeepFM, AutoInt, FiBiNET, MaskNet, GDCN, FinalMLP, DIN, FGCNN, MMoE, recurrent and convolutional
ones), and of hashes of ids, which look up a wide part (Cheng et al. 2016). Not in it: what changes
its arguments or leaves values unset (``set_``, ``resize_``, ``empty``), reads memory by strides
(``as_strided``), has a size that depends on values (``nonzero``), draws random numbers, only serves
a backward pass, reads beyond tensors of the wrong size
(``_native_batch_norm_legit_no_training``), or which no such model needs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

#: Of ``torch.ops.aten``; without an overload, "default".
_ATEN = """
abs acos add.Scalar add.Tensor asin asinh atan atan2 ceil clamp.Tensor clamp cos cosh div.Tensor
div.Tensor_mode erf exp expm1 floor fmod.Scalar fmod.Tensor log log10 log1p log2 maximum minimum
mul.Scalar mul.Tensor neg pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal remainder.Scalar
remainder.Tensor round rsqrt sign sin sinh sqrt sub.Scalar sub.Tensor tan tanh trunc

elu gelu hardtanh leaky_relu relu sigmoid _softmax _log_softmax

bitwise_and.Scalar bitwise_and.Tensor bitwise_not bitwise_or.Scalar bitwise_or.Tensor
bitwise_xor.Scalar bitwise_xor.Tensor eq.Scalar eq.Tensor ge.Scalar ge.Tensor gt.Scalar gt.Tensor
isinf isnan le.Scalar le.Tensor __lshift__.Scalar logical_and logical_not logical_or logical_xor
lt.Scalar lt.Tensor ne.Scalar ne.Tensor __rshift__.Scalar where.self

amax amin any any.dim any.dims argmax argmin cumsum linalg_vector_norm max.dim mean mean.dim min.dim
prod.dim_int sort sum.dim_IntList topk var.correction

native_group_norm native_layer_norm

addmm bmm convolution linear max_pool2d_with_indices mm

_to_copy alias cat clone constant_pad_nd diagonal expand flip permute repeat select.int slice.Tensor
slice_scatter split_with_sizes squeeze.dims sym_size.int unsqueeze view

embedding gather index.Tensor index_select

arange.start_step full full_like scalar_tensor triu_indices
"""
#: Those whose first argument may be a table that ids look up.
LOOKUPS = ("aten.embedding.default", "aten.index.Tensor", "aten.index_select.default")
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


def _apply_to_sizes(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
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


def _aten(name: str) -> torch._ops.OpOverload:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


#: By their names in a program. Sizes are added, subtracted and multiplied by constants, so that
#: they are linear in the number of rows.
OPERATORS: dict[str, Callable[..., Any]] = {
    **{str(function): function for function in map(_aten, _ATEN.split())},
    **{name: _apply_to_sizes(getattr(operator, name)) for name in ("add", "sub", "mul")},
    "getitem": _item,
}
