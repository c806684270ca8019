"""Write, map and read the weights of a bundle: a file in NumPy's format for each tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from nvt_torchrec.base.files.mapping import MappedArray
from nvt_torchrec.inference.model.scoring import JoinedTable, ServingModel
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.head import Head, build_uninitialized_head
from nvt_torchrec.models.onnx_head import OnnxHead

#: The head of a custom model.
HEAD = "head.onnx"
#: Type of the embeddings → type of the array in the file.
_DTYPES = {"float32": np.float32, "float16": np.float16, "int8": np.uint8}


def list_weights(model: ServingModel) -> dict[str, torch.Tensor]:
    """Return the tensors of a model by the names of their files; an ONNX head has no tensors."""
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
    """Write a contiguous array as ``np.save`` does, but with a clear error if the disk is full."""
    with open(file, "wb") as opened:
        header = np.lib.format.header_data_from_array_1_0(array)
        np.lib.format.write_array_header_1_0(opened, header)
        opened.write(array.data)


def load_table(directory: Path, kind: str, config: ModelConfig) -> JoinedTable:
    """Map the joined table.

    Raises:
        ValueError, OSError: A file is missing, damaged, or has another shape.
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

    They are small, so they are copied into memory: if a mapped file is truncated, the process ends.
    Each file is mapped before memory is allocated for its values, so that a wrong size in its
    header is an error, not an allocation.

    Raises:
        ValueError, OSError: A file is missing, damaged, or has another shape.
        SchemaError: The configuration does not describe a model.
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
    """Map an array. Raises ValueError if it does not have the given type and shape."""
    # PyTorch warns about arrays that are not writable. Pages that are never written stay shared
    # with other processes even so.
    try:
        array = MappedArray(file, dtype, len(shape), writable=True)
    except ValueError as error:
        raise ValueError(f"{file.name} {error}") from error
    if array.values.shape != shape:
        raise ValueError(
            f"{file.name} has the shape {list(array.values.shape)} instead of {list(shape)}"
        )
    return array
