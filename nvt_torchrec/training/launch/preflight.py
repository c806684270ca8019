"""Try a custom model before its first step, so that a model that trains for a day can be served.

A few random rows go forward and backward; the weights are saved and loaded; the head is exported as
for a bundle (:mod:`models.onnx_head`), and its logits are compared with the module's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.models.config import ModelConfig, OwnModel
from nvt_torchrec.models.contract import (
    RAW_COLUMNS,
    VECTOR_COLUMNS,
    Build,
    Columns,
    find_raw_columns,
    find_vector_columns,
)
from nvt_torchrec.models.dense_vectors import draw_random_inputs, locate_vectors, take_inputs
from nvt_torchrec.models.head import Head, build_head, find_widest
from nvt_torchrec.models.onnx_head import (
    OnnxHead,
    digest_graph,
    export_head,
    find_lookups,
    make_example_inputs,
)
from nvt_torchrec.training.launch.distributed import Group, call_on_rank_0

#: The number of rows to try the model with.
_ROWS = 4
#: The largest allowed difference of logits, relative to the largest logit, or to 1 if that is
#: smaller.
_TOLERANCE = 1e-4
#: The number of forward and backward passes: a model may skip layers at random.
_PASSES = 8
#: Dense values, vectors, additional inputs of the module, and the vectors of the data or None.
_Inputs: TypeAlias = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], torch.Tensor | None]
#: Prefixes of file names in tracebacks that are not the user's: code without a file, PyTorch, and
#: this package.
_OTHER_CODE = ("<", str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


def trace_own_model(
    config: ModelConfig, build: Build, seed: int, group: Group, lists: Collection[str] = ()
) -> ModelConfig:
    """Try a custom model on rank 0, and record its properties in its configuration (collective).

    Args:
        config: The configuration.
        build: The function that builds the module.
        seed: The seed of the initial weights.
        group: This rank.
        lists: The multi-hot columns.

    Raises:
        SettingsError: A stage failed (on all ranks).
    """
    own = call_on_rank_0(group, _try, config, build, seed, lists)
    return dataclasses.replace(config, own=own)


def _try(config: ModelConfig, build: Build, seed: int, lists: Collection[str]) -> OwnModel:
    """Try a model stage by stage, and return its properties for the configuration."""
    name = config.model
    with torch.random.fork_rng(devices=[]):
        with _stage(name, "build"):
            head = build_head(config, seed=seed, build=build)
            module = head.module
            _check_layers(module)
        before = {key: value.clone() for key, value in module.state_dict().items()}
        generator = torch.Generator().manual_seed(seed)
        with _stage(name, "columns", module):
            inputs = _make_random_inputs(module, config.columns, lists, generator)
        dense, vectors, raw, _ = inputs
        vectors.requires_grad_()
        module.train()
        with _stage(name, "forward", module):
            outputs = []
            for _ in range(_PASSES):
                logits = module(dense, vectors, **raw)
                outputs.append(_check_logits(logits, len(config.labels)))
        with _stage(name, "backward", module):
            _go_backward(module, outputs, vectors)
        with _stage(name, "save", module):
            _check_state(module, before)
        with _stage(name, "load", module):
            again = build_head(config, seed=seed, build=build).module
            _check_same(again.state_dict(), before)
            again.load_state_dict(before)
        raw_columns: dict[str, tuple[str, ...]] = {}
        for argument, names in find_raw_columns(module).items():
            raw_columns[RAW_COLUMNS[argument]] = names
        raw_columns[VECTOR_COLUMNS] = find_vector_columns(module)
        with _stage(name, "export", module):
            content = export_head(head, config)
            widest = find_widest(module, find_lookups(content))
            own = OwnModel(**raw_columns, widest=widest, digest=digest_graph(content))
        with _stage(name, "score", module), torch.no_grad():
            exported = OnnxHead(content, dataclasses.replace(config, own=own))
            _check_scores(head, exported, len(config.features), inputs)
    return own


def _make_random_inputs(
    module: nn.Module, columns: Columns, lists: Collection[str], generator: torch.Generator
) -> _Inputs:
    """Return random inputs of ``_ROWS`` rows: those of the module, and all vectors of the data.

    Row i has the id i in each raw column, except that the last row has the largest id. Its lists
    have i ids or events, so those of the first row are empty.

    Raises:
        ValueError: The module takes the ids of a multi-hot column, or of no categorical column.
    """
    dense, vectors, raw = make_example_inputs(module, columns, _ROWS)
    id_columns = find_raw_columns(module).get("ids", ())
    for name in id_columns:
        if name in lists:
            raise ValueError(f"ids of {name!r}: it is a column of lists")
    rows = torch.arange(_ROWS).unsqueeze(1)
    if id_columns:
        sizes = dict(zip(columns.categorical, columns.num_embeddings, strict=True))
        largest = torch.tensor([sizes[name] - 1 for name in id_columns])
        raw["ids"] = torch.where(rows < _ROWS - 1, rows.minimum(largest), largest)
    if "lengths" in raw:
        raw["lengths"] += rows
    if "present" in raw:
        distances_from_end = torch.arange(raw["present"].shape[2], 0, -1)
        present = distances_from_end <= rows.unsqueeze(2)
        raw["present"] = present.expand_as(raw["present"]).contiguous()
        embeddings = torch.randn(raw["lists"].shape, generator=generator)
        raw["lists"] = embeddings * raw["present"].unsqueeze(3)
    dense = torch.randn(dense.shape, generator=generator)
    vectors = torch.randn(vectors.shape, generator=generator)
    stored = None
    if columns.dense_vectors:
        stored = draw_random_inputs(columns, _ROWS, generator)
        given = locate_vectors(columns, find_vector_columns(module))
        if given:
            raw["dense_vectors"] = take_inputs(stored, given)
    return dense, vectors, raw, stored


@contextlib.contextmanager
def _stage(name: str, stage: str, module: nn.Module | None = None) -> Iterator[None]:
    """Turn any error into a SettingsError that names the stage and the user's line."""
    try:
        yield
    except Exception as error:
        text = (str(error).strip() or "it failed").splitlines()[0]
        line = _find_line(error, module)
        where = f" ({line})" if line else ""
        remedy = _REMEDIES.get(stage, "correct the model; docs/models.md describes its inputs")
        for pattern, special_remedy in _REMEDIES_BY_TEXT.items():
            if re.search(pattern, text):
                remedy = special_remedy
                break
        raise SettingsError(
            f"--model {name}: {stage}{where}: {type(error).__name__}: {text}", remedy
        ) from error


def _find_line(error: Exception, module: nn.Module | None) -> str:
    """Return the last line of the user's code that an error passed through, as FILE:LINE.

    If it passed through none, as an error of the exporter does, return the line of the module's
    ``forward``, or "" without a module.
    """
    line = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith(_OTHER_CODE):
            line = f"{frame.filename}:{frame.lineno}"
    if not line and module is not None:
        forward = inspect.unwrap(type(module).forward).__code__
        line = f"{forward.co_filename}:{forward.co_firstlineno}"
    return line


#: Remedies by patterns in the text of an error; the first match counts.
_REMEDIES_BY_TEXT = {
    "BFloat16|bfloat16": "keep weights and logits in float32; --amp computes in bfloat16",
    "'cond'|data-dependent": "a bundle cannot hold a branch on values: compute both sides, and use "
    "torch.where",
    "categorical columns are": "id_columns and length_columns hold names of columns.categorical",
    "vectors of the data are": "vector_columns holds names of the data's vectors",
    "a column of lists": "take its vector; length_columns give the number of its ids",
    "not finite": "a list may be empty: use lengths.clamp(min=1), or weights * present",
    "argument 'lists'": "with --sequences the signature is forward(dense, vectors, lists, present)",
    "argument: 'lists'|arguments: 'lists'": "give --sequences HISTORY to get its events as lists",
    "a branch or a loop": "compute it with the operators of common layers",
    "No ONNX function|No decompositions": "compute it with the operators of common layers",
    "Could not find an implementation": "compute in float32, with the operators of common layers",
    "shapes cannot be multiplied|must match|normalized_shape|size mismatch": "vectors holds a "
    "vector for each name in columns.vectors, including the dense columns; columns.width is the "
    "width of dense and vectors together; --dense_bins 0 leaves out the vectors of dense columns",
    "BatchNorm": "use nn.BatchNorm1d, which is synchronized over ranks, or nn.LayerNorm",
}
#: Remedies of other errors, by stage.
_REMEDIES = {
    "build": "correct the function, or --model_settings, its keyword arguments",
    "export": "a bundle holds the model for any number of rows: use tensor.shape[0], "
    "not len(tensor) (torch.export)",
    "load": "build the same weights for the same PyTorch seed on every rank",
}


def _check_layers(module: nn.Module) -> None:
    """Reject lazy layers, whose weights have no shape before the first rows; raise TypeError."""
    for name, value in module.state_dict(keep_vars=True).items():
        if is_lazy(value):
            raise TypeError(f"{name} has no shape yet: use nn.Linear instead of nn.LazyLinear")


def _check_logits(logits: object, labels: int) -> torch.Tensor:
    """Check that a module's result is logits, and return them as [rows] or [rows, labels].

    Raises:
        TypeError, ValueError: The result has another type, shape or dtype, or is not finite.
    """
    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"forward returns {type(logits).__name__}, not a tensor of logits")
    shapes = [[_ROWS], [_ROWS, 1]] if labels == 1 else [[_ROWS, labels]]
    if list(logits.shape) not in shapes or logits.dtype != torch.float32:
        raise ValueError(
            f"forward returns {logits.dtype} {list(logits.shape)} for {_ROWS} rows; expected a "
            f"logit for each row and label, {' or '.join(map(str, shapes))}"
        )
    if not logits.isfinite().all():
        raise ValueError("forward returns a logit that is not finite")
    return logits.squeeze(-1)


def _go_backward(module: nn.Module, outputs: list[torch.Tensor], vectors: torch.Tensor) -> None:
    """Compute gradients of the model's own loss, or of the sum of logits; check that they arrive.

    Raises:
        ValueError: The loss has the wrong shape, or a parameter gets no gradient or a sparse one.
    """
    loss = getattr(module, "loss", _sum_logits)
    for logits in outputs:
        labels = torch.arange(logits.numel(), dtype=torch.float32) % 2
        losses = loss(logits, labels.reshape(logits.shape), None)
        if tuple(losses.shape) != (_ROWS,):
            raise ValueError(f"loss returns {list(losses.shape)} for {_ROWS} rows, not [{_ROWS}]")
        losses.sum().backward()
    if vectors.grad is None:
        raise ValueError("no gradient reaches the embeddings: forward does not use vectors")
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            raise ValueError(f"no gradient reaches {name}: use it, or set requires_grad to False")
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise ValueError(f"the gradient of {name} is sparse: leave out sparse=True")


def _sum_logits(logits: torch.Tensor, _labels: torch.Tensor, _weights: None) -> torch.Tensor:
    """Return a stand-in for a loss, [rows]."""
    return logits.reshape(_ROWS, -1).sum(1)


def _check_state(module: nn.Module, before: dict[str, torch.Tensor]) -> None:
    """Check that training only changes the buffers of BatchNorm1d, which ranks synchronize.

    Raises:
        ValueError: It changes another buffer.
    """
    synchronized = set()
    for prefix, part in module.named_modules():
        if type(part) is nn.BatchNorm1d:
            for name, _ in part.named_buffers():
                synchronized.add(f"{prefix}.{name}" if prefix else name)
    for name, value in module.state_dict().items():
        if name not in synchronized and not torch.equal(value, before[name]):
            raise ValueError(
                f"forward changes {name}, which each rank would do for its own rows: only "
                "BatchNorm1d may keep statistics of a batch"
            )


def _check_same(again: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    """Check that building a module twice gives the same initial values; raise ValueError."""
    for name, value in before.items():
        if name not in again or not torch.equal(again[name], value):
            raise ValueError(f"{name} has other initial values when it is built again")


def _check_scores(
    head: Head,
    exported: OnnxHead,
    num_features: int,
    inputs: _Inputs,
) -> None:
    """Check that the exported head computes the module's logits, for all rows and for single ones.

    Args:
        head: The head.
        exported: The exported head.
        num_features: The number of vectors of features. The vectors of dense columns follow them,
            but the head makes those itself.
        inputs: The inputs from :func:`_make_random_inputs`.

    Raises:
        ValueError: The logits differ.
    """
    dense, vectors, raw, stored = inputs
    vectors = vectors[:, :num_features]
    expected = head.eval()(dense, vectors, raw, stored)
    single = []
    for row in range(_ROWS):
        part = slice(row, row + 1)
        raw_row = {name: values[part] for name, values in raw.items()}
        stored_row = None if stored is None else stored[part]
        single.append(exported(dense[part], vectors[part], raw_row, stored_row))
    together = exported(dense, vectors, raw, stored)
    _check_close("the exported model's scores", together, expected)
    _check_close("scores of a row alone", torch.cat(single), expected)


def _check_close(name: str, logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that logits equal the expected ones up to rounding; raise ValueError if not."""
    difference = float((logits - expected).abs().max())
    # Not written as ">", so that NaN fails, too.
    if not difference <= _TOLERANCE * max(1.0, float(expected.abs().max())):
        raise ValueError(f"{name} differ from those of {_ROWS} rows by {difference:g}")
