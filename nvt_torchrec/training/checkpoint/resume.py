"""Resume a run from one of its own checkpoints.

A resumed run has the weights, the optimizer state, the step (which determines the learning rate),
the loader's position in the data and the random number generators of a run that was never
interrupted. So with the same number of ranks the result is bit-identical (on CPUs). With another
number of ranks the same batches follow, but their gradients are summed in another order. Model,
data and the settings in ``_MUST_STAY`` must be the same.
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

#: Settings that affect the weights or the steps of an epoch. A resumed run must have the same ones.
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
#: The values of settings that a checkpoint of an earlier version lacks, or that are unset.
_DEFAULTS = {
    "hash_indices": False,
    "embedding_l2": 0.0,
    "weight_decay": 0.0,
    "stop_by": "log_loss",
    "log_q_correction": False,
    "average_weights": False,
}
#: The digests of its data that a checkpoint records, and their descriptions for errors.
_DIGESTS = {"workflow_digest": "data of workflow", "data_digest": "data with statistics"}


def resume_from(
    checkpoints: list[Path], record: dict[str, Any], loader: KJTLoader, run: RunState
) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Load the newest checkpoint that is complete, undamaged and finite (collective).

    Newer checkpoints are unusable. They are renamed, so that the run can write checkpoints of the
    same steps, and rank 0 logs why they cannot be used.

    Args:
        checkpoints: The checkpoints, oldest first; the same on all ranks.
        record: The training record that the run would write now: its settings and
            :func:`describe_origin`.
        loader: The loader of the training set. It is set to the position of the checkpoint.
        run: The run, which gets the state of the checkpoint.

    Returns:
        The checkpoint; its training record, with the data's origin completed; and the additional
        tensors that :func:`training.checkpoint.restoring.load_state` returns.

    Raises:
        BadInputError: No checkpoint can be used.
        ClickLogError: A checkpoint cannot be read at the moment, or memory is short; none is
            renamed.
        SchemaError, SettingsError: The newest checkpoint has another model, other data or settings.
        OutputError: A newer checkpoint cannot be renamed.
    """
    group = run.group
    refused: list[tuple[Path, str]] = []
    for path in reversed(checkpoints):
        try:
            training = call_on_all_ranks(group, path, _read_training, path, record, loader, run)
            more_tensors = load_state(path, run)
        except BadInputError as error:
            refused.append((path, error.what))
            continue
        call_on_all_ranks(group, path, _make_newest, path, refused, group)
        return path, training, more_tensors
    reasons = "\n  ".join(reason for _, reason in refused)
    raise BadInputError(
        f"{checkpoints[0].parent}: none of its {len(checkpoints)} checkpoints can be used:\n  "
        f"{reasons}",
        "restore one from a copy, or start a new run in another directory",
    )


def _make_newest(path: Path, refused: list[tuple[Path, str]], group: Group) -> None:
    """Rename the refused, newer checkpoints and log the reasons on rank 0; raise OutputError."""
    if group.rank == 0:
        for newer, reason in refused:
            log.warning("%s\n  -> skipped, and renamed to %s", reason, set_aside(newer).name)
        write_text(path.parent / LATEST_FILE, f"{path.name}\n")


def load_weights(path: Path, run: RunState) -> None:
    """Load the weights of a checkpoint of any world size and plan (collective).

    Raises:
        BadInputError: The checkpoint is missing or damaged, or holds values that are not finite.
        SchemaError: It has another model.
    """
    record = call_on_all_ranks(run.group, path, CheckpointRecord.read, path)
    check_model(path, ModelConfig.from_dict(record.model), run.config)
    load_state(path, run.weights_alone())


def _read_training(
    path: Path, record: dict[str, Any], loader: KJTLoader, run: RunState
) -> dict[str, Any]:
    """Check that a run may resume a checkpoint, set the loader, and return the training record.

    Raises:
        SchemaError: The checkpoint has another model or other data.
        SettingsError: A setting in ``_MUST_STAY`` differs.
    """
    checkpoint = CheckpointRecord.read(path)
    check_model(path, ModelConfig.from_dict(checkpoint.model), run.config)
    training = checkpoint.training
    saved = _take_fixed(training["settings"])
    current = _take_fixed(record["settings"])
    different = describe_differences(saved, current)
    if different:
        raise SettingsError(
            f"{path}: trained with other settings: {different}", "resume with the same settings"
        )
    loader.load_state_dict(training["loader"])
    return training | merge_origins(path, training, record)


def describe_origin(settings: TrainSettings) -> dict[str, Any]:
    """Return the origin of a run's data, as checkpoints record it.

    Returns:
        ``workflow_digest`` and ``generation`` of the workflow that made the data, or None if the
        workflow is not where the ETL writes it; and ``data_digest``, the digest of the footers of
        all training files, or None if the ETL did not collect them. A footer holds the size, the
        smallest and the largest value of each column.
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


def merge_origins(path: Path, saved: dict[str, Any], current: dict[str, Any]) -> dict[str, Any]:
    """Return the data's origin for a run that resumes from a checkpoint.

    The data may have been moved without their workflow. So a digest that only one side has is not
    compared, and becomes part of the result.

    Args:
        path: The checkpoint, for errors.
        saved: The checkpoint's training record.
        current: The :func:`describe_origin` of the run.

    Raises:
        SchemaError: The checkpoint was trained on other data.
    """
    for name, description in _DIGESTS.items():
        if saved.get(name) and current[name] and saved[name] != current[name]:
            raise SchemaError(
                f"{path}: trained on {description} {saved[name]}, but this run has {current[name]}",
                "resume on the same data, or start a new run",
            )
    merged = {}
    for name in (*_DIGESTS, "generation"):
        merged[name] = saved.get(name) if current[name] is None else current[name]
    return merged


def check_model(path: Path | str, saved: ModelConfig, config: ModelConfig) -> None:
    """Check that a checkpoint has the run's model; warn if a custom model's code has changed.

    Args:
        path: The checkpoint, for errors.
        saved: The checkpoint's model.
        config: The run's model.

    Raises:
        SchemaError: The models differ.
    """
    different = config.describe_differences(saved)
    if different:
        raise SchemaError(
            f"{path}: another model: {different}",
            "give the same model settings, or train from scratch",
        )
    config.warn_of_other_code(saved, path)


def _take_fixed(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a resumed run must share, except the global batch size.

    The loader compares the global batch size with its own state.
    """
    fixed: dict[str, Any] = {"optimizer": table_optimizer(settings)}
    for name in _MUST_STAY:
        value = settings.get(name)
        if not value and name in _DEFAULTS:
            value = _DEFAULTS[name]
        fixed[name] = value
    if fixed["days"] == "all":  # the same as leaving --days out
        fixed["days"] = None
    return fixed
