"""Which label a run trains or evaluates, where the data have several.

Settings name it, None standing for the main label of the data, so that checkpoints of data with one
label do not depend on its name.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.dlrm.checkpoint.ancestor import resolve
from nvt_torchrec.dlrm.checkpoint.record import CheckpointRecord
from nvt_torchrec.dlrm.settings.train_settings import TrainSettings
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.spec.feature_spec import did_you_mean

log = logging.getLogger(__name__)


def choose_label(settings: TrainSettings, schema: TableSchema) -> TrainSettings:
    """Return the settings with the label of the run; None for the main one.

    A run that only evaluates a checkpoint takes the checkpoint's label unless it names one.

    Raises:
        SettingsError: The data have no such label, or the checkpoint that the run continues from
            was trained on another one.
        BadInputError, SchemaError: The checkpoint cannot be read.
    """
    given = settings.label
    if given is not None and given not in schema.labels:
        raise SettingsError(
            f"--label {given}: the data have no such label", did_you_mean(given, schema.labels)
        )
    label = None if given == schema.label else given
    if schema.more_labels:  # otherwise there is nothing to choose
        path = _checkpoint(settings)
        if path is not None:
            label = _compared(settings, schema, label, path)
    return dataclasses.replace(settings, label=label)


def _checkpoint(settings: TrainSettings) -> Path | None:
    if settings.continue_from:
        return resolve(Path(settings.continue_from))
    return Path(settings.load_checkpoint_path) if settings.load_checkpoint_path else None


def _compared(
    settings: TrainSettings, schema: TableSchema, label: str | None, path: Path
) -> str | None:
    then = label_of(CheckpointRecord.read(path).training)
    if settings.mode != "train" and settings.label is None:
        return then
    if then == label:
        return label
    before, now = then or schema.label, label or schema.label
    if settings.mode == "train" and settings.continue_from:
        raise SettingsError(
            f"--continue_from {path}: trained on label {before}, now it is {now}",
            f"give --label {before}; to train another label from these weights, give "
            "--load_checkpoint_path instead of --continue_from",
        )
    log.warning("%s was trained on label %s, now the label is %s", path, before, now)
    return label


def label_of(training: dict[str, Any]) -> str | None:
    """Return the label that a checkpoint's training record names; None for the main one."""
    label = training["settings"].get("label")
    return None if label is None else str(label)
