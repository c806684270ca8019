"""Check a file of ONNX that a bundle brings (:mod:`.onnx_head`).

A bundle may come from anywhere, so the file is checked before ONNX Runtime sees it. It must be one
graph of standard operators. Files beside it, functions, and operators that hold graphs, whose loops
need not end, are excluded. Only running it shows what it computes and how long that takes:
:mod:`inference.publish.trial` does so in a process of its own.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import numpy_helper, shape_inference

#: The largest file. A protobuf has less than 2 GiB, and layers are small beside tables.
MAX_BYTES = 1 << 30
#: The largest number of values of a tensor, for one row: 512 MiB of float32.
_MAX_VALUES = 1 << 27
#: The names of the domain of ONNX's own operators.
_STANDARD_DOMAINS = ("", "ai.onnx")
_FLOATS = ("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16")

#: The type and the sizes of each value, by its name; 0 for sizes that depend on the rows.
Types = dict[str, tuple[str, tuple[int, ...]]]


def check_graph(content: bytes, output: str, max_opset: int) -> None:
    """Parse a file of ONNX, and check that a bundle may hold it, without computing anything of it.

    Args:
        content: The file.
        output: The name of its only output.
        max_opset: The newest version of ONNX's operators that it may need.

    Raises:
        ValueError: It is damaged or too large, or has a part that is excluded: files beside it,
            operators of other domains, functions, graphs of operators, a tensor too large, or a
            division of integers that may end the process.
    """
    if len(content) > MAX_BYTES:
        raise ValueError(f"a model of {len(content) >> 20} MiB; the limit is {MAX_BYTES >> 20} MiB")
    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:  # protobuf's, whose classes depend on its implementation
        raise ValueError(f"not a model of ONNX: {_first_line(error)}") from None
    _check_parts(model, max_opset)
    names = [value.name for value in model.graph.output]
    if names != [output]:
        raise ValueError(f"outputs {names!r:.80}, not {output}")
    types = _infer_types(model)
    for name, (_, sizes) in types.items():
        if math.prod(max(size, 1) for size in sizes) > _MAX_VALUES:
            raise ValueError(f"a tensor {name!r:.60} of the sizes {[*sizes]}")
    constants = _find_constants(model.graph)
    for node in model.graph.node:
        if node.op_type in ("Div", "Mod"):
            _check_division(node, types, constants)


def _check_parts(model: onnx.ModelProto, max_opset: int) -> None:
    """Refuse what is not one graph of standard operators with its own data. Raises ValueError."""
    for opset in model.opset_import:
        if opset.domain not in _STANDARD_DOMAINS:
            raise ValueError(f"operators of {opset.domain!r:.60}, which are not of the standard")
        if not 1 <= opset.version <= max_opset:
            raise ValueError(f"version {opset.version} of ONNX's operators, at most {max_opset}")
    if model.functions or model.training_info:
        raise ValueError("functions of its own")
    if model.graph.sparse_initializer:
        raise ValueError("a sparse tensor")
    tensors = [*model.graph.initializer]
    for node in model.graph.node:
        if node.domain not in _STANDARD_DOMAINS:
            raise ValueError(f"the operator {node.op_type!r:.60} of {node.domain!r:.60}")
        for attribute in node.attribute:
            if attribute.HasField("g") or attribute.graphs:
                raise ValueError(f"the operator {node.op_type!r:.60}: a branch or a loop")
            if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
                raise ValueError("a sparse tensor")
            tensors += [attribute.t, *attribute.tensors]
    for tensor in tensors:
        if tensor.external_data or tensor.data_location:
            raise ValueError(f"a tensor {tensor.name!r:.60} whose data are in another file")


def _infer_types(model: onnx.ModelProto) -> Types:
    """Return the types of all values, inferred from inputs and operators alone.

    What the file itself says of values in between may be wrong, so it is removed first.

    Raises:
        ValueError: The operators do not fit together.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.value_info[:]
    try:
        graph = shape_inference.infer_shapes(
            copy, check_type=True, strict_mode=True, data_prop=True
        ).graph
    except Exception as error:  # onnx's exceptions have no common class
        raise ValueError(f"not a graph of ONNX: {_first_line(error)}") from None
    to_name = onnx.TensorProto.DataType.Name
    types = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        sizes = tuple(dimension.dim_value for dimension in tensor.shape.dim)
        types[value.name] = to_name(tensor.elem_type), sizes
    for constant in graph.initializer:
        types[constant.name] = to_name(constant.data_type), tuple(constant.dims)
    return types


def _find_constants(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    """Return the values of initializers and of the operator ``Constant``."""
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value":
                constants[node.output[0]] = numpy_helper.to_array(attribute.t)
    return constants


def _check_division(node: onnx.NodeProto, types: Types, constants: dict[str, np.ndarray]) -> None:
    """Refuse a division of integers by 0, or of the smallest one by -1.

    ONNX Runtime does not check for these, and the processor raises SIGFPE, which ends the process.
    """
    for name in (*node.input, *node.output):
        if name in types and types[name][0] in _FLOATS:
            return
    divisor = constants.get(node.input[1]) if len(node.input) > 1 else None
    if divisor is None:
        raise ValueError(f"{node.op_type} of integers by a value that is not a constant")
    if ((divisor == 0) | (divisor == -1)).any():
        raise ValueError(f"{node.op_type} of integers by 0 or -1")


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return f"{text.splitlines()[0]:.300}"
