"""An own model as checkpoints and bundles hold it: a program of PyTorch's core operators.

``torch.export`` makes it of the module. PyTorch's own files of programs hold pickles, and texts
that its loader evaluates as Python; so ours are JSON, and reading one runs no code in it. A program
names operators that compute tensors of tensors (:func:`_operator`), none that reads a file.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx, nn

from nvt_torchrec.dlrm.models.contract import Columns

if TYPE_CHECKING:
    from torch.export import ExportedProgram

#: The rows that a module is exported with; a program takes any number.
_ROWS = 3
#: What may compute a size from sizes, or take a tensor out of several.
_PYTHON: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "mod", "getitem")
}
#: Checks of what is known when a program is made.
_CHECKS = ("_assert", "sym_constrain_range")
#: Operators beside PyTorch's core: a layer that is faster as one, and what has no decomposition:
#: ``F.normalize``, ``F.cosine_similarity`` and ``nn.Bilinear``.
_MORE = tuple(
    getattr(torch.ops.aten, name).default for name in ("linear", "linalg_vector_norm", "_trilinear")
)
_NAME = re.compile(r"\w+(\.\w+)*", re.ASCII)
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a program.

    Attributes:
        name: Its name in the module, or "" for a constant.
        dtype: Its type, a name of NumPy's.
        shape: Its shape.
        data: The bytes of a constant, in base64.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: str = ""

    def __post_init__(self) -> None:
        if self.name and not _NAME.fullmatch(self.name):
            raise ValueError(f"a tensor {self.name!r:.60}")
        if np.dtype(self.dtype).kind not in "fiub" or min(self.shape, default=0) < 0:
            raise ValueError(f"{self.name}: a tensor {self.dtype} {list(self.shape)}")

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str = "") -> StoredTensor:
        """Describe a weight by its name, or store a constant."""
        values = tensor.detach().cpu().numpy()
        data = "" if name else base64.b64encode(values.tobytes()).decode()
        return cls(name, str(values.dtype), tuple(values.shape), data)

    def tensor(self, device: torch.device | str) -> torch.Tensor:
        """Return the constant, or an empty tensor for a weight."""
        if self.name:
            dtype = torch.from_numpy(np.empty(0, self.dtype)).dtype
            return torch.empty(self.shape, dtype=dtype, device=device)
        values = np.frombuffer(base64.b64decode(self.data), self.dtype).reshape(self.shape)
        return torch.tensor(values).to(device)


@dataclasses.dataclass(frozen=True)
class Step:
    """A call of an operator; results are numbered after the inputs and tensors.

    Attributes:
        operator: Its name, see :func:`_operator`.
        arguments: Its arguments: numbers, texts, null, lists of these, or objects: ``{"result":
            N}``, ``{"number": "inf"}``, ``{"torch": NAME}`` of a type or memory format, or
            ``{"device": true}``.
        options: Its keyword arguments.
    """

    operator: str
    arguments: list[Any]
    options: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """A module ``forward(dense, vectors)``, which are the results 0 and 1.

    Attributes:
        tensors: Its weights and constants, which are the next results.
        steps: What it computes, in order.
        output: The result that it returns.
    """

    tensors: tuple[StoredTensor, ...]
    steps: tuple[Step, ...]
    output: int

    @property
    def widest(self) -> int:
        """The width of the widest layer: the rows of the largest matrix among the weights."""
        matrices = (t.shape[0] for t in self.tensors if t.name and len(t.shape) > 1)
        return max(matrices, default=1)

    def module(self, device: torch.device | str = "cpu") -> nn.Module:
        """Return a module with the weights of these names, which have no values yet.

        Raises:
            ValueError: The program is damaged.
        """
        module, graph = fx.GraphModule(nn.Module(), fx.Graph()), fx.Graph()
        try:
            inputs = [graph.placeholder(name) for name in ("dense", "vectors")]
            # as the tensors were that the program was made with: it may take views of them
            results = [graph.call_method("contiguous", (tensor,)) for tensor in inputs]
            for number, stored in enumerate(self.tensors):
                name = stored.name or f"constant_{number}"
                _register(module, name, stored.tensor(device), persistent=bool(stored.name))
                results.append(graph.get_attr(name))
            for step in self.steps:
                arguments = [_decoded(value, results, device) for value in step.arguments]
                options = {k: _decoded(value, results, device) for k, value in step.options.items()}
                function = _operator(step.operator)
                results.append(graph.call_function(function, tuple(arguments), options))
            graph.output(results[self.output])
            module.graph = graph
        except (LookupError, TypeError, AttributeError, RuntimeError, SyntaxError) as error:
            raise ValueError(f"not a program: {error}") from None
        return module


def make_program(module: nn.Module, columns: Columns) -> Program:
    """Export a module of the contract, in evaluation mode.

    Raises:
        NotImplementedError: It uses an operator that a program cannot hold; ends with the place in
            the module's source.
        Exception: What ``torch.export`` raises.
    """
    from torch.export import Dim, default_decompositions, export  # takes a second

    dense = torch.randn(_ROWS, len(columns.dense))
    vectors = torch.randn(_ROWS, len(columns.categorical), columns.embedding_dim)
    rows = Dim("rows", min=1)
    exported = export(module.eval(), (dense, vectors), dynamic_shapes=({0: rows}, {0: rows}))
    table = default_decompositions()
    for operation in _MORE:
        table.pop(operation, None)
    exported = exported.run_decompositions(table)
    changed = {**exported.graph_signature.buffers_to_mutate}
    changed |= exported.graph_signature.user_inputs_to_mutate
    if changed:
        raise NotImplementedError(f"it changes {', '.join(map(str, changed.values()))} in place")
    return _encoded_program(exported)


def _encoded_program(exported: ExportedProgram) -> Program:
    weights, numbers = exported.state_dict, {}
    of_weights = {name: number for number, name in enumerate(weights, start=2)}
    tensors = [StoredTensor.of(tensor, name) for name, tensor in weights.items()]
    inputs, nodes = iter(range(2)), list(exported.graph.nodes)
    for node, spec in zip(nodes, exported.graph_signature.input_specs, strict=False):
        if spec.target is None:
            numbers[node] = next(inputs)
        elif spec.target in of_weights:
            numbers[node] = of_weights[spec.target]
        else:
            numbers[node] = 2 + len(tensors)
            tensors.append(StoredTensor.of(exported.constants[spec.target]))
    steps: list[Step] = []
    for node in nodes:
        if node.op == "call_function" and not _is_check(node):
            numbers[node] = 2 + len(tensors) + len(steps)
            options = {key: _encoded(value, numbers) for key, value in node.kwargs.items()}
            steps.append(Step(_name_of(node), _encoded(node.args, numbers), options))
    (result,) = nodes[-1].args[0]
    return Program(tuple(tensors), tuple(steps), numbers[result])


def _is_check(node: fx.Node) -> bool:
    return str(node.target).removeprefix("aten.").startswith(_CHECKS)


def _name_of(node: fx.Node) -> str:
    """Return the name of a node's operator, if programs may hold it."""
    target = node.target
    if _PYTHON.get(getattr(target, "__name__", "")) is target:
        return target.__name__
    try:
        _operator(str(target))
    except ValueError as error:
        places = re.findall(r'File "(.*)", line (\d+)', node.meta.get("stack_trace") or "")
        where = "".join(f" (called at {file}:{line})" for file, line in places[-1:])
        raise NotImplementedError(f"{error}{where}") from None
    return str(target)


def _operator(name: str) -> Callable[..., Any]:
    """Return a function by its name: an operator that PyTorch tags "core", or one of sizes.

    Raises:
        ValueError: It is another one.
    """
    if name in _PYTHON:
        return _PYTHON[name]
    space, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    found = None
    if space == "aten" and packet.isidentifier() and overload.isidentifier():
        found = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if not isinstance(found, torch._ops.OpOverload) or (
        torch.Tag.core not in found.tags and found not in _MORE
    ):
        raise ValueError(f"{name!r:.80} is not one of PyTorch's core operators")
    return found


def _encoded(value: Any, numbers: dict[fx.Node, int]) -> Any:
    if isinstance(value, list | tuple):
        return [_encoded(item, numbers) for item in value]
    if isinstance(value, fx.Node):
        return {"result": numbers[value]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(value)}
    if isinstance(value, _CONSTANTS):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": True}
    return value


def _decoded(value: Any, results: list[fx.Node], device: torch.device | str) -> Any:
    if isinstance(value, list):
        return [_decoded(item, results, device) for item in value]
    if not isinstance(value, dict):
        return value
    ((key, held),) = value.items()
    if key == "result":
        return results[held]
    if key == "number":
        return float(held)
    if key == "device":
        return torch.device(device)
    constant = getattr(torch, held) if key == "torch" else None
    if not isinstance(constant, _CONSTANTS):
        raise TypeError(f"an argument {key} {held!r:.60}")
    return constant


def _register(root: nn.Module, name: str, tensor: torch.Tensor, *, persistent: bool) -> None:
    *path, leaf = name.split(".")
    holder: nn.Module = root
    for part in path:
        if part not in holder._modules:
            holder.add_module(part, nn.Module())
        holder = holder.get_submodule(part)
    holder.register_buffer(leaf, tensor, persistent=persistent)
