"""A workflow and a model in one directory that can be moved: what a server needs, and no more.

Layout::

    bundle.json            shape of the model, digest of the workflow, where the weights come from;
                           size and SHA-256 of every other file. Written last
    workflow/              the saved workflow, with its compiled form
    .merlin/schema.json    columns and table sizes
    weights/table.npy      [rows of all tables, embedding dim], one table after the other: float32,
                           float16, or uint8 with weights/ranges.npy, float32 [rows, 2]; see
                           :mod:`inference.model.tables`
    weights/GROUP.N.weight.npy, .bias.npy              the dense layers, by their groups in
                           :class:`inference.model.scoring.ServingModel`

No pickle, no absolute path. The table is mapped into memory, not read: a bundle opens at once
whatever its size, and processes on a machine share it.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import torch

from clicklog.errors import BadInputError, OutputError, SchemaError
from clicklog.files.atomic import read_json, write_json
from clicklog.files.mapping import MappedArray
from clicklog.files.validation import parse
from clicklog.finite import not_finite
from inference.directories import new_directory
from inference.model.scoring import GROUPS, Layer, ServingModel
from inference.model.tables import KINDS, Table
from inference.model.weights import ModelShape, check_pair, read_checkpoint
from workflows import compiled
from workflows.description import FileEntry, inspect, sha256, verify

FORMAT = "nvt-torchrec bundle"
VERSION = 1
BUNDLE_FILE, WORKFLOW, WEIGHTS = "bundle.json", "workflow", "weights"
_NUMPY_KINDS = {"float32": np.float32, "float16": np.float16, "int8": np.uint8}
_AGAIN = "copy the whole bundle again, or make it again with `python -m inference bundle`"


def write_bundle(
    workflow: Path | str, checkpoint: Path | str, path: Path | str, *, tables: str = "float32"
) -> None:
    """Put a saved workflow and a training checkpoint into a new directory ``path``.

    Args:
        workflow: its directory.
        checkpoint: its directory.
        path: that will be the bundle.
        tables: the type that embeddings are kept in, one of :data:`inference.model.tables.KINDS`.

    Raises:
        BadInputError: one of them is missing or damaged (all bytes of the workflow are checked).
        SchemaError: they do not belong together.
        OutputError: ``path`` exists, or cannot be written.
    """
    workflow, path = Path(workflow), Path(path)
    if path.exists():  # before anything is read
        raise OutputError(f"{path} exists", "choose another --output, or remove it first")
    description = inspect(workflow)
    verify(workflow, description)
    model, shape = read_checkpoint(checkpoint, torch.device("cpu"))
    opened = compiled.load(workflow, verify=True)
    check_pair(opened.schema, opened.digest, shape, workflow, checkpoint)
    table = model.table.convert(tables)
    save_bundle(path, workflow, dataclasses.replace(model, table=table), shape)


def save_bundle(path: Path, workflow: Path, model: ServingModel, shape: ModelShape) -> None:
    """Put a workflow's directory and a model on the CPU into a new directory ``path``."""
    opened = compiled.load(workflow)
    with new_directory(path) as temporary:
        shutil.copytree(workflow, temporary / WORKFLOW)
        opened.schema.write(temporary)
        _write_weights(temporary / WEIGHTS, model)
        files = sorted(file for file in temporary.rglob("*") if file.is_file())
        value = {
            "format": FORMAT,
            "version": VERSION,
            "workflow_digest": opened.digest,
            "model": dataclasses.asdict(shape),
            "tables": model.table.kind,
            "layers": {group: len(layers) for group, layers in model.layers.items()},
            "files": {
                str(file.relative_to(temporary)): {
                    "bytes": file.stat().st_size,
                    "sha256": sha256(file),
                }
                for file in files
            },
        }
        write_json(temporary / BUNDLE_FILE, value)


def _write_weights(directory: Path, model: ServingModel) -> None:
    directory.mkdir()
    _save(directory / "table.npy", model.table.values)
    if model.table.ranges is not None:
        _save(directory / "ranges.npy", model.table.ranges)
    for group, layers in model.layers.items():
        for index, (weight, bias) in enumerate(layers):
            _save(directory / f"{group}.{index}.weight.npy", weight)
            _save(directory / f"{group}.{index}.bias.npy", bias)


def _save(file: Path, tensor: torch.Tensor) -> None:
    np.save(file, tensor.numpy(), allow_pickle=False)


def read_bundle(
    path: Path | str, device: torch.device, *, check: bool = False
) -> tuple[compiled.CompiledWorkflow, ServingModel]:
    """Open what :func:`write_bundle` wrote.

    Args:
        path: the directory.
        device: where the model goes; on the CPU its table stays on disk, and is mapped.
        check: read all files, compare their SHA-256, check every id and offset in them, and look
            for tables that are not finite.

    Raises:
        BadInputError: no bundle there, or a file missing, damaged or not finite.
        SchemaError: of another version, or its parts do not belong together.
    """
    path = Path(path)
    value = _read_description(path, check=check)
    workflow = compiled.load(path / WORKFLOW, verify=check)
    if workflow.digest != value.workflow_digest:
        raise SchemaError(
            f"{path}: the workflow in it is another one (digest {workflow.digest[:12]}…) than it "
            f"was made with ({value.workflow_digest[:12]}…)",
            _AGAIN,
        )
    shape = value.model
    check_pair(workflow.schema, workflow.digest, shape, path / WORKFLOW, path)
    weights = path / WEIGHTS
    try:
        table = _load_table(weights, value.tables, sum(shape.num_embeddings))
        model = ServingModel.make(
            table.to(device),
            shape.num_embeddings,
            {
                group: _layers(weights, group, count, device)
                for group, count in value.layers.items()
            },
        )
        model.check(len(shape.dense))
    except (ValueError, OSError) as error:
        raise BadInputError(f"{path}: damaged: {error}", _AGAIN) from error
    _check_finite(path, model, tables=check)
    return workflow, model


def _check_finite(path: Path, model: ServingModel, *, tables: bool) -> None:
    """Refuse weights of a run that diverged; ``tables``: read those for it, too."""
    weights = {
        f"{group}.{index}.{part}": tensor
        for group, layers in model.layers.items()
        for index, layer in enumerate(layers)
        for part, tensor in zip(("weight", "bias"), layer, strict=True)
    }
    if tables:
        weights["table"] = model.table.values
    if model.table.ranges is not None:
        weights["ranges"] = model.table.ranges
    name = not_finite(weights)
    if name:
        raise BadInputError(
            f"{path / WEIGHTS / name}.npy holds values that are not finite: training diverged, and "
            "scores would be NaN",
            "make the bundle again, from an earlier checkpoint",
        )


def is_bundle(path: Path | str) -> bool:
    """Whether a directory says it is one."""
    return (Path(path) / BUNDLE_FILE).is_file()


@dataclasses.dataclass(frozen=True)
class _Description:
    """What ``bundle.json`` holds."""

    format: str
    version: int
    workflow_digest: str
    model: ModelShape
    layers: dict[str, int]
    files: dict[str, FileEntry]
    tables: str = "float32"

    def __post_init__(self) -> None:
        bottom = "bottom" in self.layers  # exactly where there are dense columns
        if set(self.layers) not in GROUPS or bottom != bool(self.model.dense):
            raise ValueError(f"layers {', '.join(self.layers)}")
        if self.tables not in KINDS:
            raise ValueError(f"tables {self.tables!r:.60}")
        if not all(0 <= count <= len(self.files) for count in self.layers.values()):
            raise ValueError(f"layers {self.layers}, and {len(self.files)} files")
        missing = sorted(set(_weight_files(self.tables, self.layers)) - self.files.keys())
        if missing:
            raise ValueError(f"{missing[0]} is not among its files")


def _weight_files(tables: str, layers: dict[str, int]) -> list[str]:
    """What is read of a bundle beside its workflow, which lists its own files."""
    names = ["table", "ranges"] if tables == "int8" else ["table"]
    for group, count in layers.items():
        for index in range(count):
            names += [f"{group}.{index}.weight", f"{group}.{index}.bias"]
    return [f"{WEIGHTS}/{name}.npy" for name in names]


def _read_description(path: Path, *, check: bool) -> _Description:
    value = read_json(path / BUNDLE_FILE, "a bundle of `python -m inference bundle`")
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise SchemaError(f"{path / BUNDLE_FILE}: no bundle of this program", _AGAIN)
    if value.get("version") != VERSION:
        raise SchemaError(
            f"{path}: bundle of version {value.get('version')}, this program reads {VERSION}",
            _AGAIN,
        )
    read = parse(_Description, value, path / BUNDLE_FILE, _AGAIN)
    for name, expected in read.files.items():
        file = path / name
        inside = file.is_relative_to(path) and ".." not in Path(name).parts
        if not inside or not file.is_file():
            raise BadInputError(f"{file}: missing", _AGAIN)
        if file.stat().st_size != expected.bytes:
            raise BadInputError(
                f"{file}: {file.stat().st_size} bytes instead of {expected.bytes}", _AGAIN
            )
        if check and sha256(file) != expected.sha256:
            raise BadInputError(f"{file}: not the file that was written (SHA-256)", _AGAIN)
    return read


def _load_table(weights: Path, kind: str, rows: int) -> Table:
    values = _map(weights / "table.npy", _NUMPY_KINDS[kind])
    ranges = _map(weights / "ranges.npy", np.float32) if kind == "int8" else None
    if len(values.values) != rows or (ranges is not None and ranges.values.shape != (rows, 2)):
        raise ValueError(f"{len(values.values)} rows instead of {rows}")
    if ranges is None:
        return Table(torch.from_numpy(values.values), mapped=(values,))
    tensors = map(torch.from_numpy, (values.values, ranges.values))
    return Table(*tensors, mapped=(values, ranges))


def _map(file: Path, dtype: type, dimensions: int = 2) -> MappedArray:
    # writable: pages are shared with other processes until someone writes to them, and nobody does
    try:
        return MappedArray(file, dtype, dimensions, writable=True)
    except ValueError as error:
        raise ValueError(f"{file.name} {error}") from error


def _layers(weights: Path, group: str, count: int, device: torch.device) -> list[Layer]:
    """In memory, not mapped: they are small, and nobody can cut them short there."""
    layers = []
    for index in range(count):
        weight, bias = (
            torch.tensor(_map(weights / f"{group}.{index}.{part}.npy", np.float32, rank).values)
            for part, rank in (("weight", 2), ("bias", 1))
        )
        if len(weight) != len(bias):  # one number would do for all of them, silently
            raise ValueError(f"{group}.{index}: {len(bias)} biases of {len(weight)} outputs")
        layers.append((weight.to(device), bias.to(device)))
    return layers
