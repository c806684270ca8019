"""How a module becomes a program: ``torch.export``, in PyTorch's core operators."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from nvt_torchrec.models.contract import RAW_COLUMNS, Columns, find_raw_columns
from nvt_torchrec.models.program import (
    UNSET,
    Program,
    ProgramTensor,
    Step,
    example_inputs,
    find_operator,
)

if TYPE_CHECKING:
    from torch.export import ExportedProgram

#: The rows that a module is exported with; a program takes any number.
_ROWS = 3
#: Checks of what is known when a program is made.
_CHECKS = ("_assert", "sym_constrain_range")


def make_program(module: nn.Module, columns: Columns) -> Program:
    """Export a module of the contract, in evaluation mode.

    Raises:
        NotImplementedError: It uses an operator that a program cannot hold; ends with the place in
            the module's source.
        Exception: What ``torch.export`` raises.
    """
    from torch.export import Dim, default_decompositions, export  # takes a second

    *inputs, raw = example_inputs(module, columns, _ROWS)
    rows, count = Dim("rows", min=1), len(inputs) + len(raw)
    shapes = tuple({0: rows} for _ in range(count))
    exported = export(module.eval(), tuple(inputs), raw, dynamic_shapes=shapes)
    table = default_decompositions()
    for name in ("linear", "linalg_vector_norm"):  # faster as one; not decomposed into core ones
        table.pop(getattr(torch.ops.aten, name).default, None)
    table[torch.ops.aten._trilinear.default] = _trilinear
    table[torch.ops.aten._native_batch_norm_legit_no_training.default] = _batch_norm
    exported = exported.run_decompositions(table)
    changed = {**exported.graph_signature.buffers_to_mutate}
    changed |= exported.graph_signature.user_inputs_to_mutate
    if changed:
        raise NotImplementedError(f"it changes {', '.join(map(str, changed.values()))} in place")
    taken: dict[str, Any] = {RAW_COLUMNS[k]: v for k, v in find_raw_columns(module).items()}
    return dataclasses.replace(_encoded_program(exported, count), **taken)


def _trilinear(*arguments: Any) -> torch.Tensor:
    """Compute what ``nn.Bilinear`` calls, for which PyTorch has no decomposition."""
    tensors, new_dimensions, summed = arguments[:3], arguments[3:6], arguments[6]
    product: torch.Tensor | None = None
    for tensor, dimensions in zip(tensors, new_dimensions, strict=True):
        for dimension in dimensions:
            tensor = tensor.unsqueeze(dimension)
        product = tensor if product is None else product * tensor
    assert product is not None
    return product.sum(summed)


def _batch_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float
) -> tuple[torch.Tensor, ...]:
    """Compute what BatchNorm does in evaluation; its operator does not check sizes."""
    shape = [1, -1] + [1] * (x.dim() - 2)
    scale = torch.rsqrt(variance + eps) * (1 if weight is None else weight)
    y = (x - mean.view(shape)) * scale.view(shape)
    return y if bias is None else y + bias.view(shape), mean, variance


def _encoded_program(exported: ExportedProgram, first: int) -> Program:
    weights, numbers = exported.state_dict, {}
    of_weights = {name: number for number, name in enumerate(weights, start=first)}
    tensors = [ProgramTensor.describe(tensor, name) for name, tensor in weights.items()]
    inputs, nodes = iter(range(first)), list(exported.graph.nodes)
    for node, spec in zip(nodes, exported.graph_signature.input_specs, strict=False):
        if spec.target is None:
            numbers[node] = next(inputs)
        elif spec.target in of_weights:
            numbers[node] = of_weights[spec.target]
        else:
            numbers[node] = first + len(tensors)
            tensors.append(ProgramTensor.describe(exported.constants[spec.target]))
    steps: list[Step] = []
    for node in nodes:
        if node.op == "call_function" and not _is_check(node):
            numbers[node] = first + len(tensors) + len(steps)
            options = {k: _encoded(v, numbers) for k, v in node.kwargs.items() if k not in UNSET}
            steps.append(Step(_name_of(node), _encoded(_arguments(node), numbers), options))
    (result,) = nodes[-1].args[0]
    return Program(tuple(tensors), tuple(steps), numbers[result])


def _is_check(node: fx.Node) -> bool:
    return str(node.target).removeprefix("aten.").startswith(_CHECKS)


def _arguments(node: fx.Node) -> Sequence[Any]:
    """Return a node's arguments; a size -1 of a view, which no rows would not tell, is computed."""
    if node.target is not torch.ops.aten.view.default:
        return node.args
    tensor, sizes = node.args
    assert isinstance(sizes, list)
    known = zip(sizes, node.meta["val"].shape, strict=True)
    return tensor, [
        size if isinstance(size, fx.Node) or not isinstance(n, int) else n for size, n in known
    ]


def _name_of(node: fx.Node) -> str:
    """Return the name of a node's operator, if programs may hold it."""
    target = node.target
    name = (
        target.__name__
        if target in (operator.add, operator.sub, operator.mul, operator.getitem)
        else str(target)
    )
    try:
        find_operator(name)
    except ValueError as error:
        places = re.findall(r'File "(.*)", line (\d+)', node.meta.get("stack_trace") or "")
        where = "".join(f" (called at {file}:{line})" for file, line in places[-1:])
        raise NotImplementedError(f"{error}{where}") from None
    return name


def _encoded(value: Any, numbers: dict[fx.Node, int]) -> Any:
    if isinstance(value, list | tuple):
        return [_encoded(item, numbers) for item in value]
    if isinstance(value, fx.Node):
        return {"result": numbers[value]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(value)}
    if isinstance(value, torch.dtype | torch.memory_format):
        return {"torch": str(value).removeprefix("torch.")}
    return value
