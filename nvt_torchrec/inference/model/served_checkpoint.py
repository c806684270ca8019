"""Read a training checkpoint for serving; check that model, workflow and clients fit together."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nvt_torchrec.base.errors import SchemaError, SettingsError
from nvt_torchrec.base.files.validation import parse
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.vectors import StoredVectors
from nvt_torchrec.inference.model.scoring import JoinedTable, ServingModel
from nvt_torchrec.models.checkpoint.record import MODEL_FILE, CheckpointRecord, compute_digest
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.contract import Build, load_build

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CheckpointOrigin:
    """The checkpoint from which a bundle was made, as the bundle records it.

    Attributes:
        digest: The checkpoint's digest: that of its ``model.json``, which contains the digests of
            its other files.
        steps: The number of training steps.
        samples: The number of samples it was trained on.
        workflow_digest: The digest of the workflow on whose data it was trained; "" if unknown.
        generation: The generation of that workflow, if known.
        days: The days it was trained on, including those of earlier checkpoints that it continues,
            if known.
        continued_from: The digest of the checkpoint that its training continued, if any.
        settings: The settings of the training run, without paths.
        versions: The versions of the packages that wrote it.
    """

    digest: str
    steps: int | None
    samples: int | None
    workflow_digest: str
    generation: int | None
    days: tuple[int, ...] | None
    continued_from: str | None
    settings: dict[str, Any]
    versions: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Origin:
    """Origin of a bundle. (The workflow in the bundle records its own generations.)

    Attributes:
        checkpoint: The checkpoint with the weights.
        versions: The versions of the packages that made the bundle.
    """

    checkpoint: CheckpointOrigin
    versions: dict[str, str]


def check_device(device: torch.device | str) -> torch.device:
    """Return the device. Raises SettingsError if it cannot be used."""
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)  # torch.device also accepts devices that do not exist
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SettingsError(f"--device {device}: {reason}", "--device cpu always works") from error
    return chosen


def read_checkpoint(
    path: Path | str, device: torch.device, build: Build | None = None
) -> tuple[ServingModel, CheckpointOrigin]:
    """Read the model of a training checkpoint of any world size and sharding plan.

    Args:
        path: The directory of the checkpoint.
        device: The device of the model.
        build: The function that builds the module of a custom model.

    Raises:
        BadInputError: The checkpoint is missing, incomplete or damaged, or weights are not finite.
        SchemaError: It is not a checkpoint of this program.
    """
    # This module imports torch.distributed, which a server does not need.
    from nvt_torchrec.models.checkpoint.reading import read_model

    origin = _read_origin(Path(path))
    rows, head, config = read_model(path, device, build)
    return ServingModel.make(JoinedTable(rows), config, head), origin


def import_model(name: str | None, checkpoint: Path | str | None) -> Build | None:
    """Import the function ``MODULE:FUNCTION`` that the caller names for a checkpoint.

    Raises:
        SettingsError: The function cannot be imported, or ``name`` does not name a function.
    """
    if name is None:
        return None
    build = load_build(name)
    if build is None:
        raise SettingsError(
            f"--model {name}: built-in models need no --model here",
            "leave it out; for a model of your own pass --model MODULE:FUNCTION",
        )
    trained = CheckpointRecord.read(checkpoint or "").model.get("model")
    if trained != name:
        log.warning("--model %s: %s was trained with --model %s", name, checkpoint, trained)
    return build


def _read_origin(path: Path) -> CheckpointOrigin:
    """Read what a bundle records of a checkpoint.

    Raises:
        BadInputError: The checkpoint is missing or damaged.
        SchemaError: It is not a checkpoint of this program.
    """
    file = path / MODEL_FILE
    record = CheckpointRecord.read(path)
    remedy = "the checkpoint is damaged: copy it again"
    training = record.training
    before = parse(dict[str, Any], training.get("continued_from") or {}, file, remedy)
    settings = parse(dict[str, Any], training.get("settings") or {}, file, remedy)
    # Paths mean nothing on another machine.
    for key, value in list(settings.items()):
        if isinstance(value, str) and "/" in value:
            del settings[key]
    content = {
        "digest": compute_digest(path),
        "steps": training.get("steps"),
        "samples": training.get("samples"),
        "workflow_digest": training.get("workflow_digest") or "",
        "generation": training.get("generation"),
        "days": training.get("days"),
        "continued_from": before.get("digest"),
        "settings": settings,
        "versions": record.versions,
    }
    return parse(CheckpointOrigin, content, file, remedy)


def check_pair(
    schema: TableSchema,
    digest: str,
    config: ModelConfig,
    trained_on: str,
    workflow: Path | str,
    model: Path | str,
) -> None:
    """Check that a model was trained on the data of a workflow.

    Args:
        schema: The schema of the data that the workflow writes.
        digest: The workflow's digest.
        config: The model.
        trained_on: The digest of the workflow on whose data it was trained; "" if unknown.
        workflow: The name of the workflow in errors.
        model: The name of the model in errors.

    Raises:
        SchemaError: The model was trained on other data.
    """
    remedy = "pass the workflow whose data the model was trained on"
    if trained_on and trained_on != digest:
        raise SchemaError(
            f"{model} was trained on data of another workflow (digest "
            f"{trained_on[:12]}…) than {workflow} (digest {digest[:12]}…)",
            "pass the OUT/workflow next to the OUT/criteo_binary that it was trained on",
        )
    if not {*config.labels} <= {*schema.labels}:
        raise SchemaError(
            f"{model} predicts {', '.join(config.labels)}, but {workflow} has the labels "
            f"{', '.join(schema.labels)}",
            remedy,
        )
    data_columns = schema.dense + schema.categorical
    model_columns = config.dense + config.categorical
    if data_columns != model_columns:
        raise SchemaError(
            f"{workflow} has the columns {', '.join(data_columns)}, but {model} has "
            f"{', '.join(model_columns)}",
            remedy,
        )
    # The constructor of a schema raises SchemaError if histories have columns that it lacks.
    dataclasses.replace(schema, histories=config.histories)
    if config.dense_vectors and config.dense_vectors != schema.vectors:
        raise SchemaError(
            f"{workflow} has the vectors {_list_vectors(schema.vectors)}, but {model} "
            f"has {_list_vectors(config.dense_vectors)}",
            remedy,
        )
    if config.own:
        for name in sorted(config.own.id_columns):
            if name in schema.multi_hot:
                raise SchemaError(
                    f"{model} takes the ids of {name}, which is multi-hot in {workflow}",
                    remedy,
                )
    for name, needed, rows in zip(
        schema.categorical, schema.table_sizes, config.num_embeddings, strict=True
    ):
        if needed > rows and not config.hash_indices:
            raise SchemaError(
                f"column {name}: {workflow} gives ids up to {needed - 1}, but the table of {model} "
                f"has {rows} rows",
                remedy,
            )


def _list_vectors(vectors: Sequence[StoredVectors]) -> str:
    """Describe vectors for an error: name, width and data type of each."""
    listed = [f"{vector.name} ({vector.width} of {vector.dtype})" for vector in vectors]
    return ", ".join(listed) or "none"


def check_same_interface(
    served: FeatureSpec,
    new: FeatureSpec,
    labels: tuple[tuple[str, ...], tuple[str, ...]],
    new_name: str,
) -> None:
    """Check that a bundle accepts the rows that clients already send, and gives the same answers.

    Args:
        served: The spec of the served bundle.
        new: The spec of the bundle that shall replace it.
        labels: The labels of the served bundle, and of the new one.
        new_name: The name of the new bundle in errors.

    Raises:
        SchemaError: A column is missing or new, or has another position, type or format; or the
            labels differ, and either bundle predicts several.
    """
    if labels[0] != labels[1] and any(len(names) > 1 for names in labels):
        raise SchemaError(
            f"{new_name} predicts {', '.join(labels[1])}, but the served bundle "
            f"predicts {', '.join(labels[0])}",
            "answers would have another form: serve it at another address, from a separate "
            "directory",
        )
    for column, other in itertools.zip_longest(_list_columns(served), _list_columns(new)):
        if column == other:
            continue
        name = (column or other)[1]
        raise SchemaError(
            f"{new_name}: its columns differ from the served bundle's: {name} has another "
            "position, type or format, or only one of the bundles has it",
            "clients send the columns of the served bundle in its formats: serve the new one at "
            "another address, from a separate directory",
        )


def _list_columns(spec: FeatureSpec) -> list[tuple]:
    """Return everything about a spec's columns that clients depend on."""
    columns: list[tuple] = [("dense", c.name, c.raw) for c in spec.dense]
    columns += [("categorical", c.name, c.raw, c.multi_hot) for c in spec.categorical]
    columns += [("vector", vector.name, vector.width) for vector in spec.vectors]
    reads = {("read", read.source, repr(read)) for read in spec.read_plan(label=False).reads}
    return columns + sorted(reads)
