"""Read the model of a checkpoint into one process, and compare its files with their digests.

:func:`read_model` takes a checkpoint of any world size and sharding plan, without TorchRec;
:mod:`training.checkpoint.restoring` reads the whole checkpoint back into a training run. Both
compare the digests first, so that a byte that changed on disk is never trained on or served: that
reads each file once more, at 0.5 to 1 GB/s a rank. Values that are not finite are not loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException

from nvt_torchrec.base.errors import BadInputError, ClickLogError, SchemaError
from nvt_torchrec.base.files.artifact import FileEntry
from nvt_torchrec.base.finite import find_not_finite
from nvt_torchrec.base.interrupts import is_out_of_memory
from nvt_torchrec.models.checkpoint.record import AGAIN, MODEL_FILE, CheckpointRecord
from nvt_torchrec.models.checkpoint.tensor_files import Tensors, Window, read_tensors, read_windows
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.contract import Build
from nvt_torchrec.models.head import Head, build_head
from nvt_torchrec.models.layers import fold_layers

#: The names of weights in a checkpoint, those of :class:`training.sharding.train_model.TrainModel`.
_TABLE = "model.model.sparse_arch.embedding_bag_collection.embedding_bags.{}.weight"
_HEAD = "model.model.head."
#: Errors that reading a checkpoint may raise: of the system, and of torch.load.
_READ_ERRORS = (
    OSError,
    MemoryError,
    EOFError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    pickle.UnpicklingError,
)


def check_contents(
    path: Path, files: dict[str, FileEntry], rank: int = 0, world_size: int = 1
) -> None:
    """Compare this rank's share of a checkpoint's files with their digests.

    Args:
        path: The checkpoint.
        files: The files of its record.
        rank, world_size: Each rank checks a share of the files; all ranks together check each file.

    Raises:
        BadInputError: A file is not the one that was written.
        ClickLogError: A file cannot be read now.
    """
    with explain_errors(path):
        for name in sorted(files)[rank::world_size]:
            difference = files[name].difference(path / name)
            if difference:
                raise BadInputError(difference, AGAIN)


@contextlib.contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Name the checkpoint in errors, and tell damage from errors that may be gone the next time.

    Raises:
        BadInputError: The checkpoint is damaged.
        ClickLogError: It cannot be read now.
    """
    try:
        yield
    except _READ_ERRORS as error:
        if is_momentary(error):
            raise make_read_error(path, error) from error
        raise BadInputError(
            f"{path}: the checkpoint is damaged: {first_line(error)}", AGAIN
        ) from error


def is_momentary(error: BaseException | None) -> bool:
    """Return whether an error says nothing against a checkpoint: memory is short, or reading fails.

    A missing file is an error of the checkpoint. Causes of the error are looked at as well.
    """
    while error is not None:
        if is_out_of_memory(error):
            return True
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        # Python's own OSErrors, such as those of damaged archives, have no errno.
        if isinstance(error, OSError) and error.errno and not is_missing:
            return True
        error = error.__cause__
    return False


def make_read_error(path: Path, error: BaseException) -> ClickLogError:
    """Make the error to raise instead of one that :func:`is_momentary`."""
    return ClickLogError(
        f"{path}: cannot be read now: {first_line(error)}",
        "the checkpoint may be whole: free memory or repair the storage, and try again",
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error; of torch's CheckpointException, that of a rank's error."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()), (error,))[0]
    if "enforce fail at inline_container" in str(error):  # torch's writer says no more than that
        return "a file of it could not be written whole: the disk is full, or fails"
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def read_model(
    path: Path | str, device: torch.device | str = "cpu", build: Build | None = None
) -> tuple[torch.Tensor, Head, ModelConfig]:
    """Read the model of a checkpoint of any world size and sharding plan into one process.

    Nothing of TorchRec is needed.

    Args:
        path: A directory that :func:`training.checkpoint.saving.save_checkpoint` wrote.
        device: The device of the model, which must hold all tables.
        build: Makes the module of an own model; it is not called for other models.

    Returns:
        The rows of all tables, one table after the other, float32 [rows, D]; what follows the
        lookup, with its batch normalizations folded; and the configuration of both.

    Raises:
        BadInputError: The checkpoint is missing, incomplete or damaged, or a weight is not finite.
        SchemaError: It is not a checkpoint of this program, or its tensors are not those of the
            model that ``model.json`` describes.
        ClickLogError: It cannot be read now.
        RuntimeError, MemoryError: The device has too little memory.
    """
    path = Path(path)
    record = CheckpointRecord.read(path)
    with _errors_of_model(path):
        config = ModelConfig.from_dict(record.model)
        build = build if config.own else None
        # On the meta device first: no memory is taken for tensors that the files do not hold.
        wanted = _name_weights(*_allocate(config, "meta", build), config)
    check_contents(path, record.files)
    with explain_errors(path):
        tensors = read_tensors(path)
        _check_tensors(path, wanted, tensors)
    # Not within `explain_errors`: too little memory on the device is no damage of the files.
    with _errors_of_model(path):
        rows, head = _allocate(config, device, build)
    weights = _name_weights(rows, head, config)
    with explain_errors(path):
        windows = [Window(name, (0,) * weight.dim(), weight) for name, weight in weights.items()]
        read_windows(path, tensors, windows)
    diverged = find_not_finite(weights)
    if diverged:
        raise BadInputError(
            f"{path}: {diverged} holds values that are not finite: training diverged, and scores "
            "would be NaN",
            "take an earlier checkpoint, or train again with a lower --learning_rate",
        )
    if not config.own:
        settings = fold_layers(head.module, config.settings)
        config = dataclasses.replace(config, settings=settings)
    return rows, head, config


@contextlib.contextmanager
def _errors_of_model(path: Path) -> Iterator[None]:
    """Name ``model.json`` in errors of its configuration."""
    try:
        yield
    except SchemaError as error:
        raise SchemaError(f"{path / MODEL_FILE}: {error.what}", error.remedy) from None


def _allocate(
    config: ModelConfig, device: torch.device | str, build: Build | None
) -> tuple[torch.Tensor, Head]:
    """Return memory for the rows of all tables, float32 [rows, D], and the head."""
    rows = torch.empty(sum(config.tables.values()), config.embedding_dim, device=device)
    return rows, build_head(config, device=device, build=build).requires_grad_(False)


def _name_weights(rows: torch.Tensor, head: Head, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the weights by their names in a checkpoint; tables are parts of ``rows``."""
    weights: dict[str, torch.Tensor] = {}
    parts = rows.split([*config.tables.values()])
    for name, part in zip(config.tables, parts, strict=True):
        weights[_TABLE.format(name)] = part
    for name, tensor in head.state_dict().items():
        weights[_HEAD + name] = tensor
    return weights


def _check_tensors(path: Path, wanted: dict[str, torch.Tensor], stored: Tensors) -> None:
    """Check that a checkpoint holds the weights of a model and no others. Raises SchemaError."""
    for name, tensor in wanted.items():
        if name not in stored:
            raise SchemaError(f"{path}: no weights {name!r}, which {MODEL_FILE} requires")
        if stored[name].size != tuple(tensor.shape):
            raise SchemaError(
                f"{path}: {name} is {list(stored[name].size)}, but {MODEL_FILE} says "
                f"{list(tensor.shape)}"
            )
    for name in stored:
        if name.startswith("model.") and name not in wanted:
            raise SchemaError(f"{path}: weights {name!r}, which {MODEL_FILE} does not list")
