"""Continue a run where training was when a checkpoint of it was written.

A resumed run shares with one that was never interrupted the weights, the optimizer state, the step
(which the learning rate follows), the loader's place in the data, and the random number generators.
On the same number of ranks the result is therefore the same bit by bit (on CPUs); on another number
the same batches follow, summed in another order. So model, data and some settings must be the same.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

from nvt_torchrec.base.errors import BadInputError, SchemaError, SettingsError
from nvt_torchrec.base.files.atomic import write_text
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.workflow_description import identify
from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.models.config import ModelConfig, differences
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.training.checkpoint.directories import LATEST_FILE, set_aside
from nvt_torchrec.training.checkpoint.restoring import call_on_all_ranks, load_state
from nvt_torchrec.training.launch.distributed import Group
from nvt_torchrec.training.launch.run_state import RunState
from nvt_torchrec.training.settings.train_settings import TrainSettings, table_optimizer

log = logging.getLogger(__name__)

#: Settings that the weights, or the steps of an epoch, depend on: a resumed run must share them.
_MUST_STAY = (
    *("eps", "seed", "shuffle_training_set", "drop_last_training_batch", "limit_train_batches"),
    *("undersampling_rate", "days", "label", "table_precision", "hash_indices"),
    *("embedding_l2", "weight_decay", "stop_by"),
)
#: What settings are where a checkpoint, of an earlier version, does not know them, or a run has
#: none.
_WITHOUT = {"hash_indices": False, "embedding_l2": 0.0, "weight_decay": 0.0, "stop_by": "log_loss"}
#: The digests that a checkpoint records of its data, and their names in errors.
_DIGESTS = {"workflow_digest": "data of workflow", "data_digest": "data with statistics"}


def resume_from(
    checkpoints: list[Path], record: dict[str, Any], loader: KJTLoader, run: RunState
) -> tuple[Path, dict[str, Any], dict[str, Any] | None]:
    """Load the newest checkpoint that is whole, undamaged and finite (collective).

    Newer ones are renamed, so that the run can write its own of these steps.

    Args:
        checkpoints: The checkpoints, oldest first; the same on all ranks.
        record: What the run would write now: its settings and
            :func:`data_origin`.
        loader: The loader of the training set; it continues where the checkpoint was.
        run: What is filled from the checkpoint; its rank 0 logs which ones are passed over, and
            why.

    Returns:
        The checkpoint, its training record with what is known of its data, and what it holds of
        the best evaluation (:func:`training.checkpoint.restoring.load_state`).

    Raises:
        BadInputError: None of them can be used.
        ClickLogError: One cannot be read now, or memory is short; none is renamed.
        SchemaError, SettingsError: The newest is of another model, of other data or settings.
        OutputError: A newer one cannot be renamed.
    """
    group = run.group
    refused: list[tuple[Path, str]] = []
    for path in reversed(checkpoints):
        try:
            training = call_on_all_ranks(group, path, _read_training, path, record, loader, run)
            best = load_state(path, run)
        except BadInputError as error:
            refused.append((path, error.what))
            continue
        call_on_all_ranks(group, path, _make_newest, path, refused, group)
        return path, training, best
    raise BadInputError(
        f"{checkpoints[0].parent}: none of its {len(checkpoints)} checkpoints can be used:\n  "
        + "\n  ".join(why for _, why in refused),
        "restore one from a copy, or start a new run in another directory",
    )


def _make_newest(path: Path, refused: list[tuple[Path, str]], group: Group) -> None:
    if group.rank == 0:
        for newer, why in refused:
            log.warning("%s\n  -> passed over, renamed to %s", why, set_aside(newer).name)
        write_text(path.parent / LATEST_FILE, f"{path.name}\n")


def load_weights(path: Path, run: RunState) -> None:
    """Load the weights of a checkpoint, of any world size and plan (collective).

    Raises:
        BadInputError: There is no checkpoint, it is damaged, or holds values that are not finite.
        SchemaError: It is of another model.
    """
    record = call_on_all_ranks(run.group, path, CheckpointRecord.read, path)
    check_model(path, ModelConfig.from_dict(record.model), run.config)
    load_state(path, run.weights_alone())


def _read_training(
    path: Path, record: dict[str, Any], loader: KJTLoader, run: RunState
) -> dict[str, Any]:
    """Return the training record of a checkpoint, if a run may continue it; set the loader.

    Raises:
        SchemaError: The model or the data are others.
        SettingsError: A setting that the checkpoint's weights depend on is another.
    """
    checkpoint = CheckpointRecord.read(path)
    check_model(path, ModelConfig.from_dict(checkpoint.model), run.config)
    training = checkpoint.training
    different = differences(_fixed(training["settings"]), _fixed(record["settings"]))
    if different:
        raise SettingsError(
            f"{path}: other settings than now: {different}", "resume with the same settings"
        )
    loader.load_state_dict(training["loader"])
    return training | merge_origins(path, training, record)


def data_origin(settings: TrainSettings) -> dict[str, Any]:
    """Return what a checkpoint records of its data; None for what is not known.

    Returns:
        ``workflow_digest`` and ``generation`` of the workflow that made the data, if it lies where
        the ETL puts it; and ``data_digest``, of the footers of all training files, which hold each
        column's sizes, smallest and largest values, if the ETL collected them.
    """
    workflow = identify(EtlOutput.from_splits(settings.binary_path).workflow)
    footers = settings.split_path("train") / "_metadata"
    digest = hashlib.blake2b(footers.read_bytes()).hexdigest() if footers.is_file() else None
    return {
        "workflow_digest": workflow and workflow.digest,
        "data_digest": digest,
        "generation": workflow and workflow.generation,
    }


def merge_origins(path: Path, then: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the data's origin for a run that resumes from a checkpoint.

    The data may have been moved without their workflow: a digest that one of the two lacks is not
    compared, and taken from the other.

    Args:
        path: The checkpoint, for errors.
        then: Its training record.
        now: The :func:`data_origin` of the run.

    Raises:
        SchemaError: The data are not those of the checkpoint.
    """
    for name, what in _DIGESTS.items():
        if then.get(name) and now[name] and then[name] != now[name]:
            raise SchemaError(
                f"{path}: trained on {what} {then[name]}, these are of {now[name]}",
                "resume on the same data, or start a new run",
            )
    return {
        name: then.get(name) if now[name] is None else now[name]
        for name in (*_DIGESTS, "generation")
    }


def check_model(path: Path | str, then: ModelConfig, config: ModelConfig) -> None:
    """Check that the model of a checkpoint, ``then``, is the run's; warn of other code.

    Raises:
        SchemaError: It is another.
    """
    if different := config.differences(then):
        raise SchemaError(
            f"{path}: another model: {different}",
            "give the same model settings, or train from scratch",
        )
    config.warn_of_other_code(then, path)


def _fixed(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings that a resumed run must share; the loader checks the global batch."""
    fixed = {name: settings.get(name) for name in _MUST_STAY}
    fixed["days"] = None if fixed["days"] == "all" else fixed["days"]
    fixed |= {name: fixed[name] or value for name, value in _WITHOUT.items()}
    return {"optimizer": table_optimizer(settings), **fixed}
