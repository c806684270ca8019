"""A graph builder whose methods are ONNX operators, and functions composed of operators."""

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

#: Mask of the lower half of an int64.
_32_BITS = 0xFFFFFFFF


class Graph(Tape):
    """Add nodes by calling operators by name: ``graph.Add(x, 1)``.

    Inputs are values of the graph or constants: strings, or numbers with NumPy's default types
    (int64 for ints, float64 for floats).
    """

    def __getattr__(self, op: str) -> Callable[..., ir.Value]:
        domain = "ai.onnx.ml" if op == "LabelEncoder" else ""

        def make(*inputs: Any, **attributes: Any) -> ir.Value:
            values = [x if isinstance(x, ir.Value) else self.add_constant(x) for x in inputs]
            return self.op(op, values, attributes, domain=domain)

        return make

    def add_constant(self, value: Any) -> ir.Value:
        """Add a constant: a number, a string, a list of numbers or of bytes, or an array."""
        return self.initializer(_to_tensor(value), f"constant_{len(self.initializers)}")

    def convert(self, value: ir.Value, dtype: str) -> ir.Value:
        """Cast a value to ``dtype``, "INT64" or "DOUBLE"."""
        return self.Cast(value, to=ir.DataType[dtype])


def _to_tensor(values: Any) -> ir.TensorProtocol:
    if isinstance(values, str):
        return ir.StringTensor([values.encode()], shape=ir.Shape([]))
    if isinstance(values, list) and isinstance(values[0], bytes):
        return ir.StringTensor(values, shape=ir.Shape([len(values)]))
    return ir.tensor(np.asarray(values))


def add_label_encoder(graph: Graph, x: ir.Value, keys: Any, values: Any, default: int) -> ir.Value:
    """Map each key to its value, and anything else to ``default``."""
    return graph.LabelEncoder(
        x,
        keys_tensor=_to_tensor(keys),
        values_tensor=_to_tensor(values),
        default_tensor=_to_tensor([default]),
    )


def parse_bool(graph: Graph, texts: ir.Value) -> ir.Value:
    """Map the spellings of the raw type ``bool``, in any case, to 1 and 0; others to MISSING."""
    # Each mix of cases is a key, because StringNormalizer, which lowers the case, accepts only one
    # dimension.
    keys: list[bytes] = []
    values: list[int] = []
    for value, words in enumerate((FALSE, TRUE)):
        for word in words:
            both_cases = zip(word.lower(), word.upper(), strict=True)
            spellings = {"".join(letters) for letters in itertools.product(*both_cases)}
            keys += [spelling.encode() for spelling in sorted(spellings)]
            values += [value] * len(spellings)
    return add_label_encoder(graph, texts, keys, values, MISSING)


def parse_hex(graph: Graph, texts: ir.Value) -> ir.Value:
    """Parse hexadecimal digits as numbers; "" becomes MISSING.

    No operator parses hexadecimal digits, so 32 regular expressions find one bit each: they match
    if the digit that contains the bit, counted from the end, is one of the eight that set it.
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


def hash_murmur3(graph: Graph, x: ir.Value) -> ir.Value:
    """Hash the 8 bytes of int64 values with seed 0, as :func:`base.hashing.hash_murmur3_int` does.

    MurmurHash3 x86_32 computes with unsigned 32-bit integers, for which ONNX Runtime has few
    operators. So they are held in the lower half of an int64. Products are cut to 32 bits: when one
    overflows int64, its lower half is still right. Shifts are products and quotients.
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


def count_vocabulary_bytes(graph: Graph) -> int:
    """Estimate the bytes that the vocabularies of a graph take in a file."""
    size = 0
    for node in graph.nodes:
        if node.op_type != "LabelEncoder":
            continue
        for attribute in node.attributes.values():
            tensor = attribute.as_tensor()
            if isinstance(tensor, ir.StringTensor):
                # Protobuf writes a tag and a length before each string.
                size += sum(map(len, tensor.string_data())) + 2 * tensor.size
            else:
                size += tensor.nbytes
    return size
