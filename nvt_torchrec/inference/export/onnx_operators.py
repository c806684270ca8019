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

#: Keeps the lower half of an int64.
_32_BITS = 0xFFFFFFFF


class Graph(Tape):
    """Make nodes by the names of operators: ``graph.Add(x, 1)``.

    Inputs are values of the graph, or constants, whose types are those that NumPy chooses: int64
    for ints, float64 for floats; and strings.
    """

    def __getattr__(self, op: str) -> Callable[..., ir.Value]:
        domain = "ai.onnx.ml" if op == "LabelEncoder" else ""

        def make(*inputs: Any, **attributes: Any) -> ir.Value:
            values = [x if isinstance(x, ir.Value) else self.constant(x) for x in inputs]
            return self.op(op, values, attributes, domain=domain)

        return make

    def constant(self, value: Any) -> ir.Value:
        """Return a constant: a number, a text, a list of them, or an array."""
        return self.initializer(_tensor(value), f"constant_{len(self.initializers)}")

    def convert(self, value: ir.Value, dtype: str) -> ir.Value:
        """Return a value as INT64 or DOUBLE."""
        return self.Cast(value, to=ir.DataType[dtype])


def _tensor(values: Any) -> ir.TensorProtocol:
    if isinstance(values, str):
        return ir.StringTensor([values.encode()], shape=ir.Shape([]))
    if isinstance(values, list) and isinstance(values[0], bytes):
        return ir.StringTensor(values, shape=ir.Shape([len(values)]))
    return ir.tensor(np.asarray(values))


def label_encoder(graph: Graph, x: ir.Value, keys: Any, values: Any, default: int) -> ir.Value:
    """Return the value of each key; ``default`` of others."""
    return graph.LabelEncoder(
        x,
        keys_tensor=_tensor(keys),
        values_tensor=_tensor(values),
        default_tensor=_tensor([default]),
    )


def boolean(graph: Graph, texts: ir.Value) -> ir.Value:
    """Return 1 and 0 of the texts of ``bool``, in any case; MISSING for others."""
    # Each spelling is a key: StringNormalizer, which lowers the case, takes one dimension only.
    keys: list[bytes] = []
    values: list[int] = []
    for value, words in enumerate((FALSE, TRUE)):
        for word in words:
            either_case = zip(word.lower(), word.upper(), strict=True)
            spellings = {"".join(letters) for letters in itertools.product(*either_case)}
            keys += [spelling.encode() for spelling in sorted(spellings)]
            values += [value] * len(spellings)
    return label_encoder(graph, texts, keys, values, MISSING)


def hexadecimal(graph: Graph, texts: ir.Value) -> ir.Value:
    """Return the numbers that hexadecimal digits represent; MISSING for "".

    No operator reads hexadecimal digits. So each of the 32 bits is asked for by a regular
    expression: whether the digit that has it, counted from the end, is one of those with this bit.
    """
    bits = []
    for bit in range(32):
        digits_after, bit_of_digit = divmod(bit, 4)
        digits = "".join(d for d in "0123456789abcdefABCDEF" if int(d, 16) >> bit_of_digit & 1)
        pattern = f"[0-9a-fA-F]*[{digits}][0-9a-fA-F]{{{digits_after}}}"
        is_set = graph.convert(graph.RegexFullMatch(texts, pattern=pattern), "INT64")
        bits.append(graph.Mul(is_set, 1 << bit))
    number = functools.reduce(graph.Add, bits)
    return graph.Where(graph.Equal(texts, ""), MISSING, number)


def murmur3(graph: Graph, x: ir.Value) -> ir.Value:
    """Hash int64 as :func:`base.hashing.hash_murmur3_int` does, of its 8 bytes with the seed 0.

    MurmurHash3 x86_32 computes with unsigned 32 bits. Here they are the lower half of int64, as
    ONNX Runtime has few operators on uint32: products are cut to 32 bits, and shifts are products
    and quotients, which are exact below 2^63 (of larger products the lower half is still right).
    """

    def cut(y: ir.Value) -> ir.Value:
        return graph.BitwiseAnd(y, _32_BITS)

    def multiply(y: ir.Value, factor: int) -> ir.Value:
        return cut(graph.Mul(y, factor))

    def rotate(y: ir.Value, bits: int) -> ir.Value:
        return graph.BitwiseOr(multiply(y, 1 << bits), graph.Div(y, 1 << (32 - bits)))

    lower = cut(x)
    upper = cut(graph.Div(graph.Sub(x, lower), 1 << 32))
    hashed: Any = 0
    for word in (lower, upper):
        mixed = multiply(rotate(multiply(word, 0xCC9E2D51), 15), 0x1B873593)
        rotated = rotate(graph.BitwiseXor(hashed, mixed), 13)
        hashed = cut(graph.Add(graph.Mul(rotated, 5), 0xE6546B64))
    hashed = graph.BitwiseXor(hashed, 8)  # the number of bytes
    hashed = multiply(graph.BitwiseXor(hashed, graph.Div(hashed, 1 << 16)), 0x85EBCA6B)
    hashed = multiply(graph.BitwiseXor(hashed, graph.Div(hashed, 1 << 13)), 0xC2B2AE35)
    return graph.BitwiseXor(hashed, graph.Div(hashed, 1 << 16))


def vocabulary_bytes(graph: Graph) -> int:
    """Return about how many bytes the vocabularies of a graph have in a file."""
    size = 0
    for node in graph.nodes:
        if node.op_type != "LabelEncoder":
            continue
        for attribute in node.attributes.values():
            tensor = attribute.as_tensor()
            if isinstance(tensor, ir.StringTensor):
                # Protobuf writes a tag and a length before each text.
                size += sum(map(len, tensor.string_data())) + 2 * tensor.size
            else:
                size += tensor.nbytes
    return size
