"""The ancestor of a run: the checkpoint that it continues from (``--continue_from``).

The ancestor's data were made by the workflow of the run's data, or by an earlier generation of it.
The run's own checkpoints record the ancestor, so that a restarted run continues with the same days
even if the ancestor has been deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from nvt_torchrec.base.errors import BadInputError, ClickLogError, SchemaError, SettingsError
from nvt_torchrec.base.files.validation import parse
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.models.checkpoint.record import (
    AGAIN,
    MODEL_FILE,
    CheckpointRecord,
    compute_digest,
    is_checkpoint_alone,
)
from nvt_torchrec.models.config import ModelConfig, describe_differences
from nvt_torchrec.training.checkpoint.directories import (
    list_checkpoints,
    newest_record,
    remove,
    resolve,
)
from nvt_torchrec.training.checkpoint.restoring import (
    GrownTable,
    call_on_all_ranks,
    grow_tables,
    load_state,
)
from nvt_torchrec.training.checkpoint.resume import check_model, describe_origin, merge_origins
from nvt_torchrec.training.launch.distributed import Group, broadcast_object
from nvt_torchrec.training.launch.run_state import RunState
from nvt_torchrec.training.settings.train_settings import (
    MODEL_SIZES,
    RATES,
    TABLE_SIZES,
    TrainSettings,
    table_optimizer,
)

log = logging.getLogger(__name__)

#: Settings that do not affect whether two runs are the same run.
_IGNORED = ("size", "resume", "keep", "log_path", "json")
#: Settings that a run chooses by itself if they are None.
_CHOSEN = (
    *MODEL_SIZES,
    *TABLE_SIZES,
    *RATES,
    "optimizer",
    "eps",
    "batch_size",
    "test_batch_size",
    "shuffle_training_set",
    "model_settings",
    "epochs",
    "early_stopping",
    "sharding",
    "embedding_l2",
    "average_weights",
)


@dataclasses.dataclass(frozen=True)
class Ancestor:
    """The checkpoint that a run continues from, as the run records it.

    Attributes:
        checkpoint: The path of the checkpoint.
        digest: The digest of its ``model.json``, which contains the digests of its other files.
        optimizer_steps: The number of optimizer steps up to the checkpoint, over all runs.
        epochs: The number of passes of the checkpoint's run over its days.
        workflow_digest: The digest of the workflow of its data; None if it is unknown.
        generation: The generation of that workflow; None if it is unknown.
        days: The days that the checkpoint has been trained on; None if they are unknown.
    """

    checkpoint: str
    digest: str
    optimizer_steps: int
    epochs: float
    workflow_digest: str | None
    generation: int | None
    days: list[int] | None


def agree_on_ancestor(settings: TrainSettings, group: Group) -> Ancestor | None:
    """Return the checkpoint that a run continues from, the same on all ranks (collective).

    If the run already has checkpoints, it is the ancestor that they record. Otherwise it is the
    checkpoint of ``--continue_from``, or None without the flag.

    Raises:
        BadInputError: The checkpoint is missing or damaged.
        SchemaError: Another program or version wrote it.
        SettingsError: The run's own checkpoints record another ancestor, or none.
    """
    checkpoints = list_checkpoints(settings.checkpoint_dir) if settings.checkpoint_dir else []
    path = Path(settings.continue_from or "")
    return call_on_all_ranks(
        group, path, _find_ancestor, settings, broadcast_object(group, checkpoints)
    )


def _find_ancestor(settings: TrainSettings, checkpoints: list[Path]) -> Ancestor | None:
    """Return the checkpoint that a run continues from, for :func:`agree_on_ancestor`.

    Args:
        settings: The settings of the run.
        checkpoints: The run's own checkpoints, oldest first.
    """
    given = Path(settings.continue_from) if settings.continue_from else None
    newest = newest_record(checkpoints)
    if newest is None:
        return _describe(resolve(given)) if given else None
    path, record = newest
    recorded = find_ancestor(path, record.training)
    if given is None or (recorded and _may_be_ancestor(given.absolute(), recorded)):
        return recorded
    start = f"continued from {recorded.checkpoint}" if recorded else "started from scratch"
    raise SettingsError(
        f"{path.parent}: holds a run that {start}, not from {given}",
        "give each run its own --checkpoint_dir, or leave --continue_from out",
    )


def _may_be_ancestor(given: Path, ancestor: Ancestor) -> bool:
    """Return whether a path may name a recorded ancestor; True if the checkpoint is gone."""
    recorded = Path(ancestor.checkpoint)
    try:
        # If a directory of checkpoints is given, it may hold newer ones by now. The one that was
        # recorded counts.
        current = _describe(recorded if given == recorded.parent else resolve(given))
    except BadInputError:
        return True
    return current.digest == ancestor.digest


def find_ancestor(path: Path, training: dict[str, Any]) -> Ancestor | None:
    """Return the ancestor in the training record of the checkpoint at ``path``, if any.

    Raises:
        BadInputError: The record is damaged.
    """
    value = training.get("continued_from")
    return None if value is None else parse(Ancestor, value, path / MODEL_FILE, AGAIN)


def read_finished_run(settings: TrainSettings) -> dict[str, Any] | None:
    """Return the training record of ``--save_checkpoint_path`` if the same run has written it.

    Returns:
        The record; None if there is no checkpoint, or it has other data or other settings.
    """
    path = Path(settings.save_checkpoint_path or "")
    if settings.mode != "train" or not (path / MODEL_FILE).is_file():
        return None
    training = CheckpointRecord.read(path).training
    ancestor = find_ancestor(path, training)
    saved = training["settings"]
    current: dict[str, Any] = {}
    # The round trip through JSON turns tuples into lists, as in the record.
    for name, value in json.loads(json.dumps(settings.to_dict())).items():
        if name in _IGNORED:
            continue
        current[name] = saved.get(name) if value is None and name in _CHOSEN else value
    if describe_differences(saved, current):
        return None
    given = Path(current["continue_from"] or "").absolute()
    if ancestor and not _may_be_ancestor(given, ancestor):
        return None  # the ancestor was trained again
    with contextlib.suppress(SchemaError):
        merge_origins(path, training, describe_origin(settings))
        return training
    return None


def remove_older(path: Path, keep: int) -> None:
    """Remove the older checkpoints in the chain of ancestors of a checkpoint.

    Only checkpoints in the same directory are removed, and only if they still have the digest that
    their successor records.

    Args:
        path: The checkpoint.
        keep: The number of checkpoints to keep, including the checkpoint itself.
    """
    chain = [path.absolute()]
    with contextlib.suppress(ClickLogError):  # a damaged checkpoint ends the chain
        while True:
            ancestor = find_ancestor(chain[-1], CheckpointRecord.read(chain[-1]).training)
            if ancestor is None:
                break
            older = Path(ancestor.checkpoint)
            if older.parent != chain[0].parent:
                break
            if compute_digest(older) != ancestor.digest or not is_checkpoint_alone(older):
                break
            chain.append(older)
    for older in chain[keep:]:
        remove(older)
        log.info("removed %s (--keep %d)", older, keep)


def list_earlier_days(ancestor: Ancestor | None, settings: TrainSettings) -> list[int] | None:
    """Return the days that a run's initial weights were trained on; None if they are unknown."""
    if ancestor:
        return ancestor.days
    if settings.load_checkpoint_path:
        return _describe(Path(settings.load_checkpoint_path)).days
    return []


def _describe(path: Path) -> Ancestor:
    """Return the checkpoint at ``path`` as an ancestor; raise BadInputError or SchemaError."""
    training = CheckpointRecord.read(path).training
    content: dict[str, Any] = {}
    for field in dataclasses.fields(Ancestor):
        if field.name in training:
            content[field.name] = training[field.name]
    content["checkpoint"] = str(path.absolute())
    content["digest"] = compute_digest(path)
    return parse(Ancestor, content, path / MODEL_FILE, AGAIN)


def read_growth(
    ancestor: Ancestor, settings: TrainSettings, config: ModelConfig
) -> dict[str, GrownTable]:
    """Return how the ancestor's tables grow into those of a run, by table.

    Args:
        ancestor: The checkpoint that the run continues from.
        settings: The settings of the run.
        config: The run's model.

    Raises:
        SchemaError: The checkpoint's workflow is not an earlier generation of the run's, or it has
            another model.
        SettingsError: It was trained with another optimizer.
        BadInputError: The checkpoint or the workflow is missing or damaged.
    """
    path = Path(ancestor.checkpoint)
    record = CheckpointRecord.read(path)
    old_model = ModelConfig.from_dict(record.model)
    # Tables may have grown; everything else in the model must be the same.
    new_model = config
    if old_model.categorical == config.categorical:
        new_model = dataclasses.replace(config, num_embeddings=old_model.num_embeddings)
    check_model(f"--continue_from {path}", old_model, new_model)
    optimizer = table_optimizer(record.training["settings"])
    if settings.mode == "train" and optimizer != settings.table_optimizer:
        raise SettingsError(
            f"--continue_from {path}: trained with optimizer {optimizer}, but this run has "
            f"{settings.table_optimizer}",
            f"give --optimizer {optimizer}, or train from scratch without --continue_from",
        )
    workflow = EtlOutput.from_splits(settings.binary_path).workflow
    if ancestor.workflow_digest is None:
        raise SchemaError(
            f"--continue_from {path}: does not name the workflow of its data",
            "train from scratch, on data that are next to their workflow, as the ETL writes them",
        )
    description = WorkflowDescription.read(workflow)
    generation = description.ancestor(ancestor.workflow_digest)
    if generation is None:
        number = "" if ancestor.generation is None else f" (generation {ancestor.generation})"
        raise SchemaError(
            f"--continue_from {path}: trained on data of workflow "
            f"{ancestor.workflow_digest:.12}…{number}, which is not one of the generations 0 to "
            f"{description.generation} of {workflow} (workflow {description.digest:.12}…)",
            "continue from a checkpoint of an earlier generation of these data, or train from "
            "scratch without --continue_from",
        )
    return grow_tables(old_model, config, generation, description)


def load_ancestor(ancestor: Ancestor, settings: TrainSettings, run: RunState) -> int:
    """Load the weights and, for training, the optimizer state of an ancestor (collective).

    Args:
        ancestor: The checkpoint that the run continues from.
        settings: The settings of the run.
        run: The run, before its first step.

    Returns:
        The number of new rows in all tables.

    Raises:
        BadInputError, SchemaError, SettingsError: As for :func:`read_growth`, or if the checkpoint
            is damaged or holds values that are not finite.
    """
    path = Path(ancestor.checkpoint)
    group = run.group
    tables = call_on_all_ranks(group, path, read_growth, ancestor, settings, run.config)
    load_state(path, run if settings.mode == "train" else run.weights_alone(), tables)
    new_rows = sum(table.rows - table.kept for table in tables.values())
    if group.rank == 0:
        log.info("continuing from %s: %s new table rows", path, f"{new_rows:,}")
        if settings.days == "new" and ancestor.epochs < 1:
            log.warning(
                "%s was written after %.0f %% of the first epoch: --days new skips the rest of its "
                "days\n  -> list the days to train on them again",
                path,
                100 * ancestor.epochs,
            )
    return new_rows
