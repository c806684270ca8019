"""Read the model of a checkpoint into one process, and verify the digests of its files.

:func:`read_model` reads a checkpoint of any world size and sharding plan, without TorchRec;
:mod:`training.checkpoint.restoring` reads a whole checkpoint back into a training run. Both verify
the digests first, so that data corrupted on disk are never trained on or served. That reads each
file one more time, at 0.5 to 1 GB/s per rank. Infinite and NaN values are refused.
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

#: The names of weights in a checkpoint: those of a
#: :class:`training.sharding.train_model.TrainModel`.
_TABLE = "model.model.sparse_arch.embedding_bag_collection.embedding_bags.{}.weight"
_HEAD = "model.model.head."
#: The errors that the system and torch.load may raise when a checkpoint is read.
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
        rank, world_size: Each rank checks a share of the files; together, all ranks check all
            files.

    Raises:
        BadInputError: A file has changed since it was written.
        ClickLogError: A file cannot be read at the moment.
    """
    with explain_errors(path):
        for name in sorted(files)[rank::world_size]:
            difference = files[name].difference(path / name)
            if difference:
                raise BadInputError(difference, AGAIN)


@contextlib.contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Name the checkpoint in errors, and distinguish damage from transient errors.

    Raises:
        BadInputError: The checkpoint is damaged.
        ClickLogError: The checkpoint cannot be read at the moment.
    """
    try:
        yield
    except _READ_ERRORS as error:
        if is_transient(error):
            raise make_read_error(path, error) from error
        raise BadInputError(
            f"{path}: the checkpoint is damaged: {first_line(error)}", AGAIN
        ) from error


def is_transient(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is not the fault of the checkpoint.

    Insufficient memory and failing storage are transient errors. A missing file is not.
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
    """Make the error to raise instead of a transient one (:func:`is_transient`)."""
    return ClickLogError(
        f"{path}: cannot be read now: {first_line(error)}",
        "the checkpoint may be intact: free memory or repair the storage, and try again",
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error; for torch's CheckpointException, of one rank's error."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()), (error,))[0]
    if "enforce fail at inline_container" in str(error):  # torch's writer gives no more details
        return "one of its files could not be written completely: the disk is full or failing"
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def read_model(
    path: Path | str, device: torch.device | str = "cpu", build: Build | None = None
) -> tuple[torch.Tensor, Head, ModelConfig]:
    """Read the model of a checkpoint of any world size and sharding plan into one process.

    TorchRec is not needed.

    Args:
        path: A directory that :func:`training.checkpoint.saving.save_checkpoint` wrote.
        device: The device of the model, which must have memory for all tables.
        build: Builds the module of a custom model; it is not called for other models.

    Returns:
        The rows of all tables, concatenated, float32 [rows, D]; the head, with folded batch
        normalizations; and the configuration of both.

    Raises:
        BadInputError: The checkpoint is missing, incomplete or damaged, or a weight is infinite or
            NaN.
        SchemaError: The directory is not a checkpoint of this program, or its tensors do not match
            the model in ``model.json``.
        ClickLogError: The checkpoint cannot be read at the moment.
        RuntimeError, MemoryError: The device does not have enough memory.
    """
    path = Path(path)
    record = CheckpointRecord.read(path)
    with _explain_model_errors(path):
        config = ModelConfig.from_dict(record.model)
        build = build if config.own else None
        # Use the meta device first, so that no memory is allocated for tensors that are missing.
        wanted = _name_weights(*_allocate(config, "meta", build), config)
    check_contents(path, record.files)
    with explain_errors(path):
        tensors = read_tensors(path)
        _check_tensors(path, wanted, tensors)
    # Outside of `explain_errors`, because too little device memory does not mean damaged files.
    with _explain_model_errors(path):
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
            "use an earlier checkpoint, or train again with a lower --learning_rate",
        )
    if not config.own:
        settings = fold_layers(head.module, config.settings)
        config = dataclasses.replace(config, settings=settings)
    return rows, head, config


@contextlib.contextmanager
def _explain_model_errors(path: Path) -> Iterator[None]:
    """Name ``model.json`` in errors of its configuration."""
    try:
        yield
    except SchemaError as error:
        raise SchemaError(f"{path / MODEL_FILE}: {error.what}", error.remedy) from None


def _allocate(
    config: ModelConfig, device: torch.device | str, build: Build | None
) -> tuple[torch.Tensor, Head]:
    """Allocate the rows of all tables, float32 [rows, D], and the head."""
    rows = torch.empty(sum(config.tables.values()), config.embedding_dim, device=device)
    return rows, build_head(config, device=device, build=build).requires_grad_(False)


def _name_weights(rows: torch.Tensor, head: Head, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the weights by their names in a checkpoint; tables are views of ``rows``."""
    weights: dict[str, torch.Tensor] = {}
    parts = rows.split([*config.tables.values()])
    for name, part in zip(config.tables, parts, strict=True):
        weights[_TABLE.format(name)] = part
    for name, tensor in head.state_dict().items():
        weights[_HEAD + name] = tensor
    return weights


def _check_tensors(path: Path, wanted: dict[str, torch.Tensor], stored: Tensors) -> None:
    """Check that a checkpoint has exactly the weights of a model. Raises SchemaError."""
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
