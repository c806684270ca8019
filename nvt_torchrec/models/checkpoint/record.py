"""The record of a checkpoint, ``model.json``: the model, its origin, and the files.

This module does not import PyTorch, so that the record can be read quickly.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from nvt_torchrec.base.command_line import parse_words
from nvt_torchrec.base.errors import BadInputError, ClickLogError, SchemaError
from nvt_torchrec.base.files.artifact import FileEntry, Format, check_sizes, holds_only
from nvt_torchrec.base.files.atomic import read_json

MODEL_FILE = "model.json"
TENSORS_FILE = "tensors.json"
FORMAT = Format(
    "nvt-torchrec DLRM checkpoint",
    4,
    "a checkpoint of train_torchrec.py",
    version_key="version",
    digest_key="blake2b",
    foreign=SchemaError,
)
AGAIN = "the checkpoint is damaged or incomplete: copy it again, or use another one"


@dataclasses.dataclass(frozen=True)
class CheckpointRecord:
    """The content of ``model.json``.

    Attributes:
        model: The model, in the form of :meth:`models.config.ModelConfig.to_dict`.
        training: The run's own record: its settings, steps, days and data.
        world_size: The number of ranks that wrote the checkpoint.
        versions: The versions of the packages that wrote it.
        files: The sizes and BLAKE2b digests of all other files, by name.
    """

    model: dict[str, Any]
    training: dict[str, Any]
    world_size: int
    versions: dict[str, str]
    files: dict[str, FileEntry]

    def __post_init__(self) -> None:
        if TENSORS_FILE not in self.files:
            raise ValueError(f"files.{TENSORS_FILE} is missing")

    @classmethod
    def read(cls, path: Path | str) -> CheckpointRecord:
        """Read the record of a checkpoint, and check that all files exist with the right sizes.

        :func:`models.checkpoint.reading.check_contents` verifies their content.

        Raises:
            BadInputError: The checkpoint does not exist, a file is missing or truncated, or
                ``model.json`` was modified.
            SchemaError: The directory is not a checkpoint of this program, or has another version.
        """
        path = Path(path)
        if not path.is_dir():
            raise BadInputError(f"{path}: no such checkpoint directory", "check the path")
        record = FORMAT.read(
            cls,
            path / MODEL_FILE,
            AGAIN,
            other_format="give the directory that --save_checkpoint_path named",
            other_version="use the program that wrote it, or train again",
        )
        check_sizes(path, record.files, AGAIN)
        for file in (path / TENSORS_FILE, *path.glob("*.distcp")):
            if file.exists() and file.name not in record.files:
                raise BadInputError(
                    f"{file}: not a file of this checkpoint: {MODEL_FILE} does not list it",
                    "copy the checkpoint again",
                )
        return record

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels that the model was trained on; () for the main label of the data."""
        return parse_words(str(self.training["settings"].get("label") or ""))

    def write(self, directory: Path) -> None:
        """Write ``model.json``. Raises OutputError."""
        files = {name: entry.to_dict() for name, entry in sorted(self.files.items())}
        FORMAT.write(directory / MODEL_FILE, {**vars(self), "files": files})


def is_checkpoint_alone(path: Path) -> bool:
    """Return whether a directory contains only a checkpoint, so that it is safe to delete."""
    try:
        return holds_only(path, [*CheckpointRecord.read(path).files, MODEL_FILE])
    except ClickLogError:
        return False


def compute_digest(path: Path | str) -> str:
    """Return the digest of a checkpoint, which ``model.json`` stores.

    It covers ``model.json``, which contains the digests of all other files.
    """
    value = read_json(Path(path) / MODEL_FILE, FORMAT.what)
    return str(value.get(FORMAT.digest_key)) if isinstance(value, dict) else ""
