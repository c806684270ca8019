"""An own model as checkpoints and bundles hold it: a program of PyTorch's operators.

``torch.export`` makes it of the module (:mod:`.program_export`). PyTorch's own files of programs
hold pickles, and texts that its loader evaluates as Python. Ours are JSON, and a loop here runs
their steps (:func:`_run`): no text of a file becomes Python. A program names operators of a closed
list (:mod:`.program_operators`), and before it computes anything it is run on tensors without
memory, to bound what it can take (:func:`_checked_rows`).
"""

from __future__ import annotations

import base64
import dataclasses
import re
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.interrupts import is_out_of_memory
from nvt_torchrec.models.contract import Columns, find_raw_columns
from nvt_torchrec.models.program_operators import ELEMENT, LOOKUPS, OPERATORS, cost_of

#: The largest number of steps: a recurrent layer over 1,000 columns has 15,000.
_MOST_STEPS = 20_000
#: The largest cost of three rows: half a second, and at most 512 MiB of float64.
_MOST_COST = ELEMENT << 26
#: The cost of the rows that are scored at once: 512 MiB of float32, if nothing were freed.
_COST_AT_ONCE = ELEMENT << 27
#: Options that a program does not choose: it is run on the model's device.
UNSET = ("device", "layout", "pin_memory")
#: Names of weights, which are those of files too. A ModuleDict may have columns' names as keys.
_NAME = re.compile(r"[\w -]+(\.[\w -]+)*")
#: Of weights and constants, as NumPy and PyTorch call them.
_DTYPES = ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
#: Options that PyTorch takes as numbers too, unchecked.
_KINDS = {"dtype": torch.dtype, "memory_format": torch.memory_format}
#: ``dense``, ``vectors``, and by name what else ``forward`` takes.
Inputs: TypeAlias = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
#: What arguments may name.
_CONSTANTS = {
    name: getattr(torch, name)
    for name in (*_DTYPES, "bfloat16", "contiguous_format", "preserve_format")
}


def example_inputs(
    module: object, columns: Columns, rows: int, device: torch.device | str = "cpu"
) -> Inputs:
    """Return what a module, or the program of one, is given: zeros, for some rows.

    Raises:
        ValueError: It takes ids or lengths of what is no categorical column.
    """
    raw = {}
    for argument, names in find_raw_columns(module).items():
        if unknown := [name for name in names if name not in columns.categorical]:
            known = ", ".join(columns.categorical)
            raise ValueError(f"{argument} of {unknown[0]!r:.60}: categorical columns are {known}")
        raw[argument] = torch.zeros(rows, len(names), dtype=torch.int64, device=device)
    if columns.lists:
        present = torch.zeros(rows, len(columns.lists), columns.max_events, device=device).bool()
        raw["lists"] = torch.zeros(*present.shape, columns.embedding_dim, device=device)
        raw["present"] = present
    dense = torch.zeros(rows, len(columns.dense), device=device)
    return dense, dense.new_zeros(rows, len(columns.vectors), columns.embedding_dim), raw


@dataclasses.dataclass(frozen=True)
class ProgramTensor:
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
        if self.dtype not in _DTYPES or min(self.shape, default=0) < 0:
            raise ValueError(f"{self.name}: a tensor {self.dtype} {list(self.shape)}")

    @classmethod
    def describe(cls, tensor: torch.Tensor, name: str = "") -> ProgramTensor:
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
        operator: Its name, a key of :data:`.program_operators.OPERATORS`.
        arguments: Its arguments: numbers, texts, null, lists of these, or objects: ``{"result":
            N}``, ``{"number": "inf"}``, or ``{"torch": NAME}`` of a type or memory format.
        options: Its keyword arguments, which hold no results.
    """

    operator: str
    arguments: list[Any]
    options: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """A module; what ``forward`` is given (:func:`example_inputs`) are the first results.

    Attributes:
        tensors: Its weights and constants, which are the next results.
        steps: What it computes, in order.
        output: The result that it returns.
        id_columns, length_columns: The columns whose ids and lengths it is given.
    """

    tensors: tuple[ProgramTensor, ...]
    steps: tuple[Step, ...]
    output: int
    id_columns: tuple[str, ...] = ()
    length_columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        most = max(map(len, (self.steps, self.id_columns, self.length_columns)))
        if most > _MOST_STEPS:
            raise ValueError(f"a program of {most} steps or columns, at most {_MOST_STEPS} may be")

    def widest(self, columns: Columns) -> int:
        """Return the rows of the largest matrix that is not looked up by ids."""
        first = self.count_inputs(columns)
        lookups = (step.arguments for step in self.steps if step.operator in LOOKUPS)
        tables = [arguments[0]["result"] - first for arguments in lookups]
        layers = (t for number, t in enumerate(self.tensors) if number not in tables)
        return max((t.shape[0] for t in layers if t.name and len(t.shape) > 1), default=1)

    def count_inputs(self, columns: Columns) -> int:
        """Return the number of tensors that ``forward`` is given."""
        return 2 + len(find_raw_columns(self)) + 2 * bool(columns.lists)

    def module(self, columns: Columns, device: torch.device | str = "cpu") -> ProgramModule:
        """Return a module with the weights of these names, which have no values yet.

        On the device "meta" it computes nothing, and is not checked.

        Raises:
            ValueError: The program is damaged, is none for these columns, or takes too long.
        """
        try:
            module = ProgramModule(self, columns, device)
            if torch.device(device).type != "meta":
                module.rows_at_once = _checked_rows(self, columns)
        except Exception as error:  # PyTorch raises anything for arguments that are none
            text = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"not a program: {text:.300}") from None
        return module


class ProgramModule(nn.Module):
    """Runs a program with the weights that are registered in it under their names.

    Attributes:
        rows_at_once: The most rows that should be scored at once.
    """

    rows_at_once: int

    def __init__(self, program: Program, columns: Columns, device: torch.device | str) -> None:
        super().__init__()
        self.id_columns, self.length_columns = program.id_columns, program.length_columns
        self._steps, self._output = _prepared(program, columns, device)
        self._weights = [
            _register(self, stored, number, device) for number, stored in enumerate(program.tensors)
        ]

    def forward(self, *inputs: torch.Tensor, **raw: torch.Tensor) -> torch.Tensor:
        """Return the logits. Raises BadInputError if a step fails."""
        # contiguous as what the program was made with, which may take views
        values: list[Any] = [x.contiguous() for x in (*inputs, *raw.values())]
        values += [getattr(holder, name) for holder, name in self._weights]
        try:
            return _run(self._steps, values, self._output)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            text = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BadInputError(
                f"the model's program fails: {text:.300}",
                "score with an earlier checkpoint or bundle; if this one is not damaged, correct "
                "the model and train again",
            ) from None


#: A step as it is run: function, arguments, the arguments that are values and their numbers,
#: options, and the values that no later step takes.
_Prepared: TypeAlias = tuple[
    Callable[..., Any], list[Any], Sequence[tuple[int, int]], dict[str, Any], list[int]
]


class _Place(int):
    """The number of a value, in the place of an argument."""


def _run(steps: Sequence[_Prepared], values: list[Any], output: int) -> Any:
    """Append the results of steps to the values; return one of them."""
    for function, prepared, places, options, last in steps:
        arguments = prepared.copy()
        for at, number in places:
            arguments[at] = values[number]
        values.append(function(*arguments, **options))
        for number in last:
            values[number] = None
    return values[output]


def _listed(*items: Any) -> list[Any]:
    return list(items)


def _prepared(
    program: Program, columns: Columns, device: torch.device | str
) -> tuple[list[_Prepared], int]:
    """Return a program's steps and output as :func:`_run` takes them. Raises ValueError, …"""
    first = program.count_inputs(columns) + len(program.tensors)
    steps: list[_Prepared] = []
    places = [*range(first)]  # of results; a list that holds results is a value of its own

    def add(function: Callable[..., Any], arguments: list[Any], options: dict[str, Any]) -> _Place:
        taken = [(at, item) for at, item in enumerate(arguments) if isinstance(item, _Place)]
        steps.append((function, arguments, taken, options, []))
        return _Place(first + len(steps) - 1)

    def decoded(value: Any) -> Any:
        if isinstance(value, list):
            items = [decoded(item) for item in value]
            return add(_listed, items, {}) if any(isinstance(i, _Place) for i in items) else items
        if not isinstance(value, dict):
            return value
        ((key, held),) = value.items()
        if key == "result" and type(held) is int and 0 <= held < len(places):
            return _Place(places[held])
        if key == "number":
            return float(held)
        if key == "torch" and held in _CONSTANTS:
            return _CONSTANTS[held]
        raise ValueError(f"an argument {key!r:.60}: {held!r:.60}")

    for step in program.steps:
        function = find_operator(step.operator)
        arguments = [decoded(value) for value in step.arguments]
        options = {key: decoded(value) for key, value in step.options.items()}
        for key, value in options.items():
            if key in UNSET or not isinstance(value, (_KINDS.get(key, object), NoneType)):
                raise ValueError(f"{step.operator}: an option {key!r:.60}: {value!r:.60}")
            if isinstance(value, _Place):
                raise ValueError(f"{step.operator}: a result as an option")
        if step.operator == "mul" and all(isinstance(value, _Place) for value in arguments):
            raise ValueError("a product of two sizes")  # not linear in the number of rows
        schema = getattr(function, "_schema", None)
        if schema and any(argument.name == "device" for argument in schema.arguments):
            options["device"] = torch.device(device)
        places.append(add(function, arguments, options))
    output = decoded({"result": program.output})
    last_use = {number: step[-1] for step in steps for _, number in step[2]}
    for number, last in last_use.items():
        if number >= first and number != output:
            last.append(number)
    return steps, output


def _checked_rows(program: Program, columns: Columns) -> int:
    """Run a program on tensors without memory, and return how many rows may be scored at once.

    Sizes are linear in the number of rows (:data:`.program_operators.OPERATORS`), so that 0, 1 and
    3 rows tell what any number costs.

    Raises:
        ValueError: It costs too much, or its results are no logits.
        Exception: What PyTorch raises for arguments that are none of an operator.
    """
    steps, output = _prepared(program, columns, "meta")
    total = 0

    def measured(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal total
            result = function(*arguments, **options)
            total += cost_of(function, arguments, result)
            if total > _MOST_COST:
                raise ValueError("its results are too large, or take too long")
            return result

        return function if function is _listed else call

    steps = [(measured(step[0]), *step[1:]) for step in steps]
    weights = [stored.tensor("meta") for stored in program.tensors]
    costs, labels = [], len(columns.labels)
    for rows in (0, 1, 3):
        *inputs, raw = example_inputs(program, columns, rows, "meta")
        total = ELEMENT * sum(values.numel() for values in raw.values())
        logits = _run(steps, [*inputs, *raw.values(), *weights], output)
        if not isinstance(logits, torch.Tensor) or logits.dtype != torch.float32 or (
            tuple(logits.shape) not in ((rows, labels), (rows,) if labels == 1 else ())
        ):  # fmt: skip
            what = getattr(logits, "dtype", ""), [*getattr(logits, "shape", ())]
            raise ValueError(
                f"{rows} rows give {what[0]} {what[1]}, not float32 [{rows}, {labels}]"
            )
        costs.append(total)
    of_row = costs[1] - costs[0]
    if costs[2] - costs[0] != 3 * of_row:
        raise ValueError("a row costs more where there are more rows")
    return max(1, _COST_AT_ONCE // max(1, of_row))


def find_operator(name: str) -> Callable[..., Any]:
    """Return a function by its name. Raises ValueError."""
    if name not in OPERATORS:
        raise ValueError(f"{name!r:.80} is not one of the operators of programs")
    return OPERATORS[name]


def _register(
    root: nn.Module, stored: ProgramTensor, number: int, device: torch.device | str
) -> tuple[nn.Module, str]:
    """Register a tensor in a module, or one below it; return which, and its name there."""
    *path, leaf = (stored.name or f"_constant_{number}").split(".")
    holder: nn.Module = root
    for part in path:
        if part not in holder._modules:
            holder.add_module(part, nn.Module())
        holder = holder.get_submodule(part)
    holder.register_buffer(leaf, stored.tensor(device), persistent=bool(stored.name))
    return holder, leaf
