"""The checkpoint of an earlier generation that a run continues from, ``--continue_from``.

The data of that checkpoint were made by the workflow of the run's data, or by one of the
generations before it. The run's own checkpoints record it, so that a restarted run goes on with the
same days even if the checkpoint is gone by then.
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
from nvt_torchrec.training.checkpoint.resume import check_model, data_origin, merge_origins
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

#: Settings in which two runs may differ and still be the same run.
_ANY_VALUE = ("size", "resume", "keep", "log_path", "json")
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
    """What a run records of the checkpoint that it continues from.

    Attributes:
        checkpoint: The path of the checkpoint.
        digest: The digest of its ``model.json``, which holds those of all its files.
        optimizer_steps: The steps of the optimizer until then, over all runs.
        epochs: The passes of the last of these runs over its days.
        workflow_digest: The workflow of its data; None if it is unknown.
        generation: The generation of that workflow; None if it is unknown.
        days: The days that it has been trained on; None if they are unknown.
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

    If the run has checkpoints of its own, it continues from them, and from the ancestor that they
    name. Without ``--continue_from`` or such checkpoints there is none.

    Raises:
        BadInputError: There is no such checkpoint, or it is damaged.
        SchemaError: It is of another program or version.
        SettingsError: The run so far continued from another checkpoint, or from none.
    """
    checkpoints = list_checkpoints(settings.checkpoint_dir) if settings.checkpoint_dir else []
    path = Path(settings.continue_from or "")
    return call_on_all_ranks(
        group, path, _find_ancestor, settings, broadcast_object(group, checkpoints)
    )


def _find_ancestor(settings: TrainSettings, checkpoints: list[Path]) -> Ancestor | None:
    """Return the checkpoint that a run continues from; see :func:`agree_on_ancestor`.

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
    if given is None or (recorded and _may_be(given.absolute(), recorded)):
        return recorded
    began = f"continued from {recorded.checkpoint}" if recorded else "began from scratch"
    raise SettingsError(
        f"{path.parent}: holds a run that {began}, not from {given}",
        "give each run a --checkpoint_dir of its own, or leave --continue_from out",
    )


def _may_be(given: Path, before: Ancestor) -> bool:
    """Return whether a path names a recorded checkpoint; True if there is none any more."""
    recorded = Path(before.checkpoint)
    try:
        # A directory of checkpoints may have newer ones by now: the recorded one is compared.
        now = _describe(recorded if given == recorded.parent else resolve(given))
    except BadInputError:
        return True
    return now.digest == before.digest


def find_ancestor(path: Path, training: dict[str, Any]) -> Ancestor | None:
    """Return the checkpoint that the run of a training record continued from, if any.

    Raises:
        BadInputError: The record is damaged.
    """
    value = training.get("continued_from")
    return None if value is None else parse(Ancestor, value, path / MODEL_FILE, AGAIN)


def finished_run(settings: TrainSettings) -> dict[str, Any] | None:
    """Return the training record of ``--save_checkpoint_path`` if the same run has written it.

    None if there is no checkpoint, or one of other data or other settings.
    """
    path = Path(settings.save_checkpoint_path or "")
    if settings.mode != "train" or not (path / MODEL_FILE).is_file():
        return None
    training = CheckpointRecord.read(path).training
    before = find_ancestor(path, training)
    then = training["settings"]
    now: dict[str, Any] = {}
    # Through JSON and back, as the settings in the record: tuples become lists.
    for name, value in json.loads(json.dumps(settings.to_dict())).items():
        if name in _ANY_VALUE:
            continue
        now[name] = then.get(name) if value is None and name in _CHOSEN else value
    if describe_differences(then, now):
        return None
    if before and not _may_be(Path(now["continue_from"] or "").absolute(), before):
        return None  # the checkpoint that it continues from was trained again
    with contextlib.suppress(SchemaError):
        merge_origins(path, training, data_origin(settings))
        return training
    return None


def remove_older(path: Path, keep: int) -> None:
    """Remove the checkpoints that a checkpoint continues from, except the newest.

    Only checkpoints beside it are removed whose digest is the one that the next of them records.

    Args:
        path: The checkpoint.
        keep: How many are kept, with the checkpoint itself.
    """
    chain = [path.absolute()]
    with contextlib.suppress(ClickLogError):  # a damaged checkpoint ends the chain
        while True:
            before = find_ancestor(chain[-1], CheckpointRecord.read(chain[-1]).training)
            if before is None:
                break
            older = Path(before.checkpoint)
            is_beside = older.parent == chain[0].parent
            if (
                not is_beside
                or compute_digest(older) != before.digest
                or not is_checkpoint_alone(older)
            ):
                break
            chain.append(older)
    for older in chain[keep:]:
        remove(older)
        log.info("removed %s, which --keep %d leaves out", older, keep)


def earlier_days(ancestor: Ancestor | None, settings: TrainSettings) -> list[int] | None:
    """Return the days that a run's weights have seen before it begins; None if they are unknown."""
    if ancestor:
        return ancestor.days
    if settings.load_checkpoint_path:
        return _describe(Path(settings.load_checkpoint_path)).days
    return []


def _describe(path: Path) -> Ancestor:
    """Return what a run records of a checkpoint. Raises BadInputError, SchemaError."""
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
    """Return how each table of a run follows from that of the checkpoint it continues from.

    Args:
        ancestor: The checkpoint.
        settings: The settings of the run.
        config: The run's model.

    Raises:
        SchemaError: The checkpoint is of another line of descent or of another model.
        SettingsError: It was trained with another optimizer.
        BadInputError: The checkpoint or the workflow is missing or damaged.
    """
    path = Path(ancestor.checkpoint)
    record = CheckpointRecord.read(path)
    then = ModelConfig.from_dict(record.model)
    # Tables may have grown: all else of the model must be the same.
    now = config
    if then.categorical == config.categorical:
        now = dataclasses.replace(config, num_embeddings=then.num_embeddings)
    check_model(f"--continue_from {path}", then, now)
    optimizer = table_optimizer(record.training["settings"])
    if settings.mode == "train" and optimizer != settings.table_optimizer:
        raise SettingsError(
            f"--continue_from {path}: optimizer was {optimizer}, is {settings.table_optimizer}",
            f"give --optimizer {optimizer}, or train from scratch without --continue_from",
        )
    workflow = EtlOutput.from_splits(settings.binary_path).workflow
    if ancestor.workflow_digest is None:
        raise SchemaError(
            f"--continue_from {path}: does not name the workflow of its data",
            "train from scratch, on data that lie beside their workflow as the ETL writes them",
        )
    description = WorkflowDescription.read(workflow)
    generation = description.ancestor(ancestor.workflow_digest)
    if generation is None:
        number = "" if ancestor.generation is None else f" (generation {ancestor.generation})"
        raise SchemaError(
            f"--continue_from {path}: trained on data of workflow "
            f"{ancestor.workflow_digest:.12}…{number}, which is none of the generations 0 to "
            f"{description.generation} of {workflow} (workflow {description.digest:.12}…)",
            "continue from a checkpoint of an earlier generation of these data, or train from "
            "scratch without --continue_from",
        )
    return grow_tables(then, config, generation, description)


def load_ancestor(ancestor: Ancestor, settings: TrainSettings, run: RunState) -> int:
    """Load the weights and, to train, the optimizer state that a run starts from (collective).

    Args:
        ancestor: The checkpoint.
        settings: The settings of the run.
        run: The run, before its first step.

    Returns:
        The number of rows of all tables that are new.

    Raises:
        BadInputError, SchemaError, SettingsError: As :func:`read_growth`, and for a checkpoint
            that is damaged or holds values that are not finite.
    """
    path, group = Path(ancestor.checkpoint), run.group
    tables = call_on_all_ranks(group, path, read_growth, ancestor, settings, run.config)
    load_state(path, run if settings.mode == "train" else run.weights_alone(), tables)
    new_rows = sum(table.rows - table.kept for table in tables.values())
    if group.rank == 0:
        log.info("continues from %s: %s new rows", path, f"{new_rows:,}")
        if settings.days == "new" and ancestor.epochs < 1:
            log.warning(
                "%s was written after %.0f %% of the first epoch: --days new leaves out the rest "
                "of its days\n  -> list the days to train on them again",
                path,
                100 * ancestor.epochs,
            )
    return new_rows
