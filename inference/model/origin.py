"""Where the weights of a bundle come from: the checkpoint, as its bundle remembers it."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.validation import parse
from nvt_torchrec.dlrm.checkpoint.record import MODEL_FILE, CheckpointRecord, digest_of


@dataclasses.dataclass(frozen=True)
class CheckpointOrigin:
    """What a bundle records of the checkpoint that it was made from.

    Attributes:
        digest: The digest that the checkpoint's ``model.json`` holds of itself; it also holds those
            of the other files.
        steps: The number of training steps.
        samples: The number of samples trained on.
        generation: The generation of the workflow whose data it was trained on, if known.
        days: The days it was trained on, those of the checkpoints before it included, if known.
        continued_from: The digest of the checkpoint that its training continued from, if any.
        settings: The settings of the training run, but for paths.
        versions: The versions of the packages that wrote it.
    """

    digest: str
    steps: int | None
    samples: int | None
    generation: int | None
    days: tuple[int, ...] | None
    continued_from: str | None
    settings: dict[str, Any]
    versions: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a bundle comes from; its workflow is in it, and knows its own generations.

    Attributes:
        checkpoint: The checkpoint with the weights.
        versions: The versions of the packages that made the bundle.
    """

    checkpoint: CheckpointOrigin
    versions: dict[str, str]


def read_checkpoint_origin(path: Path | str) -> CheckpointOrigin:
    """Return what a bundle records of a checkpoint.

    Raises:
        BadInputError: The checkpoint is missing or damaged.
        SchemaError: It is not a checkpoint of this program.
    """
    file, record = Path(path) / MODEL_FILE, CheckpointRecord.read(path)
    remedy = "the checkpoint is damaged: copy it again"
    before, settings = (
        parse(dict[str, Any], record.training.get(key) or {}, file, remedy)
        for key in ("continued_from", "settings")
    )
    known = {key: record.training.get(key) for key in ("steps", "samples", "generation", "days")}
    value = {
        **known,
        "digest": digest_of(path),
        "continued_from": before.get("digest"),
        "settings": {key: item for key, item in settings.items() if not _is_path(item)},
        "versions": record.versions,
    }
    return parse(CheckpointOrigin, value, file, remedy)


def file_digest(file: Path) -> str:
    """Return the SHA-256 of a small file. Raises BadInputError."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise BadInputError(f"{file}: cannot be read: {error.strerror or error}") from error


def _is_path(value: Any) -> bool:
    """Whether a setting names a place of the machine, which means nothing on another one."""
    return isinstance(value, str) and "/" in value
