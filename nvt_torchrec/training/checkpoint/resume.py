"""Resume a run from one of its own checkpoints.

A resumed run has the weights, the optimizer state, the step (which the learning rate follows), the
loader's position in the data and the random number generators of a run that was never interrupted.
So on the same number of ranks the result is the same bit by bit (on CPUs); on another number the
same batches follow, summed in another order. For this, model, data and some settings must be the
same.
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
from nvt_torchrec.models.config import ModelConfig, describe_differences
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.training.checkpoint.directories import LATEST_FILE, set_aside
from nvt_torchrec.training.checkpoint.restoring import call_on_all_ranks, load_state
from nvt_torchrec.training.launch.distributed import Group
from nvt_torchrec.training.launch.run_state import RunState
from nvt_torchrec.training.settings.train_settings import TrainSettings, table_optimizer

log = logging.getLogger(__name__)

#: Settings that the weights, or the steps of an epoch, depend on: a resumed run must share them.
_MUST_STAY = (
    "eps",
    "seed",
    "shuffle_training_set",
    "drop_last_training_batch",
    "limit_train_batches",
    "undersampling_rate",
    "days",
    "label",
    "table_precision",
    "hash_indices",
    "embedding_l2",
    "weight_decay",
    "stop_by",
    "log_q_correction",
    "average_weights",
)
#: The values of settings that a checkpoint of an earlier version does not know, or a run lacks.
_DEFAULTS = {
    "hash_indices": False,
    "embedding_l2": 0.0,
    "weight_decay": 0.0,
    "stop_by": "log_loss",
    "log_q_correction": False,
    "average_weights": False,
}
#: The digests that a checkpoint records of its data, and their names in errors.
_DIGESTS = {"workflow_digest": "data of workflow", "data_digest": "data with statistics"}


def resume_from(
    checkpoints: list[Path], record: dict[str, Any], loader: KJTLoader, run: RunState
) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Load the newest checkpoint that is whole, undamaged and finite (collective).

    Newer ones are renamed, so that the run can write checkpoints of these steps itself. Rank 0 logs
    which ones they are, and why they cannot be used.

    Args:
        checkpoints: The checkpoints, oldest first; the same on all ranks.
        record: The training record that the run would write now: its settings and
            :func:`data_origin`.
        loader: The loader of the training set. It is set to the position of the checkpoint.
        run: The run, which is filled from the checkpoint.

    Returns:
        The checkpoint; its training record with what is known of its data; and what it holds
        beside the run (:func:`training.checkpoint.restoring.load_state`).

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
            beside = load_state(path, run)
        except BadInputError as error:
            refused.append((path, error.what))
            continue
        call_on_all_ranks(group, path, _make_newest, path, refused, group)
        return path, training, beside
    reasons = "\n  ".join(reason for _, reason in refused)
    raise BadInputError(
        f"{checkpoints[0].parent}: none of its {len(checkpoints)} checkpoints can be used:\n  "
        f"{reasons}",
        "restore one from a copy, or start a new run in another directory",
    )


def _make_newest(path: Path, refused: list[tuple[Path, str]], group: Group) -> None:
    """Rename the newer checkpoints, with the reasons in the log, on rank 0. Raises OutputError."""
    if group.rank == 0:
        for newer, reason in refused:
            log.warning("%s\n  -> passed over, renamed to %s", reason, set_aside(newer).name)
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
        SchemaError: It is of another model or of other data.
        SettingsError: A setting that its weights depend on differs.
    """
    checkpoint = CheckpointRecord.read(path)
    check_model(path, ModelConfig.from_dict(checkpoint.model), run.config)
    training = checkpoint.training
    then, now = _take_fixed(training["settings"]), _take_fixed(record["settings"])
    different = describe_differences(then, now)
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
        the ETL puts it; and ``data_digest``, that of the footers of all training files, if the ETL
        collected them. A footer has the size, the smallest and the largest value of each column.
    """
    origin: dict[str, Any] = dict.fromkeys(("workflow_digest", "data_digest", "generation"))
    workflow = identify(EtlOutput.from_splits(settings.binary_path).workflow)
    if workflow:
        origin["workflow_digest"] = workflow.digest
        origin["generation"] = workflow.generation
    footers = settings.split_path("train") / "_metadata"
    if footers.is_file():
        origin["data_digest"] = hashlib.blake2b(footers.read_bytes()).hexdigest()
    return origin


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
    merged = {}
    for name in (*_DIGESTS, "generation"):
        merged[name] = then.get(name) if now[name] is None else now[name]
    return merged


def check_model(path: Path | str, then: ModelConfig, config: ModelConfig) -> None:
    """Check that a checkpoint's model is the run's; warn if the code of an own model has changed.

    Args:
        path: The checkpoint, for errors.
        then: Its model.
        config: The run's model.

    Raises:
        SchemaError: They differ.
    """
    different = config.describe_differences(then)
    if different:
        raise SchemaError(
            f"{path}: another model: {different}",
            "give the same model settings, or train from scratch",
        )
    config.warn_of_other_code(then, path)


def _take_fixed(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a resumed run must share, without the global batch size.

    The loader compares that with its own state.
    """
    fixed: dict[str, Any] = {"optimizer": table_optimizer(settings)}
    for name in _MUST_STAY:
        value = settings.get(name)
        if not value and name in _DEFAULTS:
            value = _DEFAULTS[name]
        fixed[name] = value
    if fixed["days"] == "all":  # as without --days
        fixed["days"] = None
    return fixed
