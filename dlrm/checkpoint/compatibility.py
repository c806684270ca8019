"""What a resumed run must share with its checkpoint: the model, the data and some settings."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

from nvt_torchrec.base.errors import SchemaError, SettingsError
from nvt_torchrec.dlrm.checkpoint.store import read_model_file
from nvt_torchrec.dlrm.config import ModelConfig
from nvt_torchrec.dlrm.launch.distributed import Group
from nvt_torchrec.dlrm.settings.train_settings import TrainSettings, table_optimizer
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.workflow_description import identify

log = logging.getLogger(__name__)

#: Settings that the weights, or the steps of an epoch, depend on: a resumed run must share them.
_MUST_STAY = (
    "eps",
    "seed",
    "shuffle_training_set",
    "drop_last_training_batch",
    "limit_train_batches",
    "undersampling_rate",
    "hash_indices",
    "dataset_type",
    "dataset_subset",
    "shuffle_batches",
    "days",
    "replay",
    "label",
)
#: Settings that also change what is trained, but may change when a run is resumed.
_MAY_CHANGE = (
    "epochs",
    "learning_rate",
    "dense_learning_rate",
    "change_lr",
    "lr_change_point",
    "lr_after_change_point",
    "lr_warmup_steps",
    "lr_decay_start",
    "lr_decay_steps",
    "lr_policy",
    "decay_power",
    "decay_end_lr",
    "comm_precision",
    "max_steps",
    "amp",
)
#: The digests that a checkpoint records of its data, and their names in errors.
_DIGESTS = {"workflow_digest": "data of workflow", "data_digest": "data with statistics"}


def data_origin(settings: TrainSettings) -> dict[str, Any]:
    """Return what a checkpoint records of its data; None for what is not known.

    Returns:
        ``workflow_digest`` and ``generation`` of the workflow that made the data, if it lies where
        the ETL puts it; and ``data_digest``, of the footers of all training files, which hold each
        column's sizes, smallest and largest values, if the ETL collected them.
    """
    if settings.dataset_type != "parquet":
        return dict.fromkeys((*_DIGESTS, "generation"))
    workflow = identify(EtlOutput.of_splits(settings.binary_path).workflow)
    footers = settings.split_path("train") / "_metadata"
    found = hashlib.blake2b(footers.read_bytes()).hexdigest() if footers.is_file() else None
    return {
        "workflow_digest": workflow.digest,
        "data_digest": found,
        "generation": workflow.generation,
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


def check_resumable(path: Path, record: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Return the training record of a checkpoint, if a run may continue from it.

    Args:
        path: The checkpoint.
        record: What the run would write now: its settings.
        config: The run's model.

    Raises:
        SchemaError: The model is another.
        SettingsError: A setting that the checkpoint's weights depend on is another.
    """
    value = read_model_file(path)
    check_model(path, value["model"], config)
    training = value["training"]
    different = differences(_fixed(training["settings"]), _fixed(record["settings"]))
    if different:
        raise SettingsError(
            f"{path}: other settings than now: {different}", "resume with the same settings"
        )
    return training


def check_model(path: Path, then: Any, config: ModelConfig) -> None:
    """Check that a checkpoint's model, ``then``, is the run's.

    Raises:
        SchemaError: It is another.
    """
    different = differences(ModelConfig.from_dict(then).to_dict(), config.to_dict())
    if different:
        raise SchemaError(f"{path}: another model: {different}", "give the same model settings")


def log_changes(then: dict[str, Any], now: dict[str, Any], group: Group) -> None:
    """Log, on rank 0, which settings differ from those of the checkpoint, ``then``."""
    for name in _MAY_CHANGE:
        if group.rank == 0 and then.get(name) != now[name]:
            log.warning("--%s is %s from here on; it was %s", name, now[name], then.get(name))


def _fixed(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that a resumed run must share. The loader checks the global batch itself."""
    fixed = {name: settings.get(name) for name in _MUST_STAY}
    fixed["days"] = None if fixed["days"] == "all" else fixed["days"]
    adagrad, optimizer = settings.get("adagrad"), settings.get("optimizer")
    fixed["table_precision"] = settings.get("table_precision", "fp32")
    return {"optimizer": table_optimizer(optimizer, adagrad), **fixed}


def differences(then: dict[str, Any], now: dict[str, Any]) -> str:
    """Describe the values of ``now`` that were other ones; "" if none were."""
    return "; ".join(
        f"{name} was {then.get(name)}, is {now[name]}"
        for name in now
        if then.get(name) != now[name]
    )
