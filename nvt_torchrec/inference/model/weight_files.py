"""The files of a bundle's weights: each tensor is written as NumPy's format, and mapped or read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from nvt_torchrec.base.files.mapping import MappedArray
from nvt_torchrec.inference.model.scoring import JoinedTable, ServingModel
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.head import Head, build_uninitialized_head
from nvt_torchrec.models.onnx_head import OnnxHead

#: The head of an own model.
HEAD = "head.onnx"
#: By type of the embeddings, that of the array in the file.
_DTYPES = {"float32": np.float32, "float16": np.float16, "int8": np.uint8}


def list_weights(model: ServingModel) -> dict[str, torch.Tensor]:
    """Return the tensors of a model by the names of their files; a head of ONNX has none."""
    weights = {"table": model.table.values}
    if model.table.ranges is not None:
        weights["ranges"] = model.table.ranges
    return weights | model.head.state_dict()


def list_weight_files(model: ServingModel) -> list[str]:
    """Return the names of the files of a model's weights."""
    names = [f"{name}.npy" for name in list_weights(model)]
    if model.config.own:
        names.append(HEAD)
    return names


def write_weights(directory: Path, model: ServingModel) -> None:
    """Write the weights of a model into a new directory."""
    directory.mkdir()
    for name, tensor in list_weights(model).items():
        save_array(directory / f"{name}.npy", np.ascontiguousarray(tensor.numpy()))
    if isinstance(model.head, OnnxHead):
        (directory / HEAD).write_bytes(model.head.content)


def save_array(file: Path, array: np.ndarray) -> None:
    """Write a contiguous array as ``np.save`` does, whose error for a full disk does not say so."""
    with open(file, "wb") as opened:
        header = np.lib.format.header_data_from_array_1_0(array)
        np.lib.format.write_array_header_1_0(opened, header)
        opened.write(array.data)


def load_table(directory: Path, kind: str, config: ModelConfig) -> JoinedTable:
    """Map the table.

    Raises:
        ValueError, OSError: A file is missing, damaged or of another shape.
    """
    num_rows = sum(config.tables.values())
    shape = num_rows, config.embedding_dim
    values = _map(directory / "table.npy", _DTYPES[kind], shape)
    if kind != "int8":
        return JoinedTable(torch.from_numpy(values.values), mapped=(values,))
    shape = num_rows, 2 + config.first_order_width
    ranges = _map(directory / "ranges.npy", np.float32, shape)
    return JoinedTable(
        torch.from_numpy(values.values), torch.from_numpy(ranges.values), mapped=(values, ranges)
    )


def load_head(directory: Path, config: ModelConfig, device: torch.device) -> Head | OnnxHead:
    """Read the weights of the head.

    They are small, so they are copied into memory: a mapped file that somebody cuts off would end
    the process. Each file is mapped before memory is taken for its values, so a wrong size in it
    is an error before it is an allocation.

    Raises:
        ValueError, OSError: A file is missing, damaged or of another shape.
        SchemaError: The configuration is not one of a model.
    """
    if config.own:
        return OnnxHead((directory / HEAD).read_bytes(), config)
    head = build_uninitialized_head(config)
    state = {}
    for name, tensor in head.state_dict().items():
        dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype.type
        values = _map(directory / f"{name}.npy", dtype, tuple(tensor.shape)).values
        state[name] = torch.tensor(values, device=device)
    head = head.to(device)
    head.load_state_dict(state, assign=True)
    return head


def _map(file: Path, dtype: type, shape: tuple[int, ...]) -> MappedArray:
    """Map an array of a given type and shape."""
    # PyTorch warns of arrays that are not writable. Pages that nobody writes to stay shared with
    # other processes.
    try:
        array = MappedArray(file, dtype, len(shape), writable=True)
    except ValueError as error:
        raise ValueError(f"{file.name} {error}") from error
    if array.values.shape != shape:
        raise ValueError(f"{file.name} is {list(array.values.shape)} instead of {list(shape)}")
    return array
