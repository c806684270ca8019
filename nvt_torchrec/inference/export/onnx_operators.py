"""ONNX operators by their names, and functions of values that are made of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from nvt_torchrec.formats.feature_spec.raw_types.integers import FALSE, TRUE
from nvt_torchrec.inference.named_tensors import MISSING

_32_BITS = 0xFFFFFFFF


class Graph(Tape):
    """Makes nodes: ``graph.Add(x, 1)``. Constants are NumPy's: int64 for ints, float64, strings."""

    def __getattr__(self, op: str) -> Callable[..., ir.Value]:
        domain = "ai.onnx.ml" if op == "LabelEncoder" else ""

        def make(*inputs: Any, **attributes: Any) -> ir.Value:
            return self.op(op, [*map(self._value, inputs)], attributes, domain=domain)

        return make

    def convert(self, value: ir.Value, dtype: str) -> ir.Value:
        """Return a value as INT64 or DOUBLE."""
        return self.Cast(value, to=ir.DataType[dtype])

    def _value(self, value: Any) -> ir.Value:
        if isinstance(value, ir.Value):
            return value
        name = f"constant_{len(self.initializers)}"
        return self.initializer(_tensor(value), name)


def _tensor(values: Any) -> ir.TensorProtocol:
    if isinstance(values, str):
        return ir.StringTensor([values.encode()], shape=ir.Shape([]))
    if isinstance(values, list) and isinstance(values[0], bytes):
        return ir.StringTensor(values, shape=ir.Shape([len(values)]))
    return ir.tensor(np.asarray(values))


def label_encoder(graph: Graph, x: ir.Value, keys: Any, values: Any, default: int) -> ir.Value:
    """Return the value of each key; ``default`` of others."""
    tensors = {"keys": keys, "values": values, "default": [default]}
    return graph.LabelEncoder(x, **{f"{k}_tensor": _tensor(v) for k, v in tensors.items()})


def boolean(graph: Graph, texts: ir.Value) -> ir.Value:
    """Return 1 and 0 of the texts of ``bool``, in any case; MISSING for others."""
    spelled = {
        "".join(letters): value
        for value, words in enumerate((FALSE, TRUE))
        for word in words
        for letters in itertools.product(*zip(word.lower(), word.upper(), strict=True))
    }
    return label_encoder(graph, texts, [*map(str.encode, spelled)], [*spelled.values()], MISSING)


def hexadecimal(graph: Graph, texts: ir.Value) -> ir.Value:
    """Return the numbers that hexadecimal digits represent, bit by bit; MISSING for ""."""
    bits, any_digit = [], "[0-9a-fA-F]"
    for bit in range(32):
        digits = "".join(d for d in "0123456789abcdefABCDEF" if int(d, 16) >> bit % 4 & 1)
        pattern = f"{any_digit}*[{digits}]{any_digit}{{{bit // 4}}}"
        is_set = graph.convert(graph.RegexFullMatch(texts, pattern=pattern), "INT64")
        bits.append(graph.Mul(is_set, 1 << bit))
    return graph.Where(graph.Equal(texts, ""), MISSING, functools.reduce(graph.Add, bits))


def murmur3(graph: Graph, x: ir.Value) -> ir.Value:
    """Hash int64 as :func:`base.hashing.murmur3_of_int` does, with operators on int64."""

    def low(y: ir.Value) -> ir.Value:
        return graph.BitwiseAnd(y, _32_BITS)

    def rotate(y: ir.Value, bits: int) -> ir.Value:
        return graph.BitwiseOr(low(graph.Mul(y, 1 << bits)), graph.Div(y, 1 << (32 - bits)))

    hashed: Any = 0
    high = graph.Div(graph.Sub(x, low(x)), 1 << 32)
    for word in (low(x), low(high)):
        word = low(graph.Mul(rotate(low(graph.Mul(word, 0xCC9E2D51)), 15), 0x1B873593))
        hashed = low(
            graph.Add(graph.Mul(rotate(graph.BitwiseXor(hashed, word), 13), 5), 0xE6546B64)
        )
    hashed = graph.BitwiseXor(hashed, 8)
    for bits, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        shifted = graph.Div(hashed, 1 << bits)
        hashed = low(graph.Mul(graph.BitwiseXor(hashed, shifted), factor))
    return graph.BitwiseXor(hashed, graph.Div(hashed, 1 << 16))


def vocabulary_bytes(graph: Graph) -> int:
    """Return about how many bytes the vocabularies of a graph have in a file."""
    tensors = [
        attribute.as_tensor()
        for node in graph.nodes
        if node.op_type == "LabelEncoder"
        for attribute in node.attributes.values()
    ]
    return sum(
        sum(map(len, tensor.string_data())) + 2 * tensor.size  # tag and length of each
        if isinstance(tensor, ir.StringTensor)
        else tensor.nbytes
        for tensor in tensors
    )
