"""Check the ONNX file of a bundle (:mod:`.onnx_head`).

A bundle may come from anywhere, so the file is checked before ONNX Runtime opens it. It must be a
single graph of standard operators. External files, functions, and operators that contain graphs
(whose loops may never end) are not allowed. Its results and its running time can only be found by
running it, which :mod:`inference.publish.trial` does in a separate process.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import numpy_helper, shape_inference

#: The maximum size of the file. A protobuf is limited to 2 GiB, and layers are small compared with
#: tables.
MAX_BYTES = 1 << 30
#: The maximum number of values of a tensor for one row: 512 MiB of float32.
_MAX_VALUES = 1 << 27
#: The names of the domain of ONNX's standard operators.
_STANDARD_DOMAINS = ("", "ai.onnx")
#: The names of floating-point types.
_FLOATS = ("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16")

#: The type and the shape of each value, by its name. Dimensions that depend on the number of rows
#: are 0.
Types = dict[str, tuple[str, tuple[int, ...]]]


def check_graph(content: bytes, output: str, max_opset: int) -> None:
    """Parse an ONNX file and check that it is allowed in a bundle, without running it.

    Args:
        content: The file.
        output: The name of its only output.
        max_opset: The newest allowed version of ONNX's operators.

    Raises:
        ValueError: The file is damaged or too large, or contains something that is not allowed:
            external data, operators of other domains, functions, subgraphs, a too large tensor, or
            an integer division that may crash the process.
    """
    if len(content) > MAX_BYTES:
        raise ValueError(f"a model of {len(content) >> 20} MiB; the limit is {MAX_BYTES >> 20} MiB")
    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:  # the classes of protobuf's errors depend on its implementation
        raise ValueError(f"not a model of ONNX: {_first_line(error)}") from None
    _check_parts(model, max_opset)
    names = [value.name for value in model.graph.output]
    if names != [output]:
        raise ValueError(f"outputs {names!r:.80}, not {output}")
    types = _infer_types(model)
    for name, (_, sizes) in types.items():
        if math.prod(max(size, 1) for size in sizes) > _MAX_VALUES:
            raise ValueError(f"a too large tensor: {name!r:.60} of shape {[*sizes]}")
    constants = _find_constants(model.graph)
    for node in model.graph.node:
        if node.op_type in ("Div", "Mod"):
            _check_division(node, types, constants)


def _check_parts(model: onnx.ModelProto, max_opset: int) -> None:
    """Check that a model is a single graph of standard operators without external data.

    Raises:
        ValueError: It is not.
    """
    for opset in model.opset_import:
        if opset.domain not in _STANDARD_DOMAINS:
            raise ValueError(f"operators of {opset.domain!r:.60}, which are not standard")
        if not 1 <= opset.version <= max_opset:
            raise ValueError(
                f"version {opset.version} of ONNX's operators; the newest allowed is {max_opset}"
            )
    if model.functions or model.training_info:
        raise ValueError("the definition of a function")
    if model.graph.sparse_initializer:
        raise ValueError("a sparse tensor")
    tensors = [*model.graph.initializer]
    for node in model.graph.node:
        if node.domain not in _STANDARD_DOMAINS:
            raise ValueError(f"the operator {node.op_type!r:.60} of {node.domain!r:.60}")
        for attribute in node.attribute:
            if attribute.HasField("g") or attribute.graphs:
                raise ValueError(f"the operator {node.op_type!r:.60}, which is a branch or a loop")
            if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
                raise ValueError("a sparse tensor")
            tensors += [attribute.t, *attribute.tensors]
    for tensor in tensors:
        if tensor.external_data or tensor.data_location:
            raise ValueError(f"a tensor {tensor.name!r:.60} whose data are in another file")


def _infer_types(model: onnx.ModelProto) -> Types:
    """Return the types of all values, inferred only from inputs and operators.

    The file may declare wrong types of intermediate values, so these are removed first.

    Raises:
        ValueError: The types of the operators do not match.
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
    """Refuse an integer division that may be by 0 or -1.

    Division by 0, and of the smallest integer by -1, makes the processor raise SIGFPE, which kills
    the process. ONNX Runtime does not check for it.

    Raises:
        ValueError: The divisor is not a constant, or contains 0 or -1.
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
