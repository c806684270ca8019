"""Which data a model is trained on: by what they are, wherever they lie."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from clicklog.errors import SchemaError
from clicklog.etl_output import EtlOutput
from clicklog.files.atomic import read_json
from dlrm.settings.train_settings import TrainSettings

#: What a checkpoint records, and what it is called in errors.
_NAMES = {"workflow_digest": "data of workflow", "data_digest": "data with statistics"}


def origin_of(settings: TrainSettings) -> dict[str, str | None]:
    """What a checkpoint records of its data; None for what is not known.

    Returns:
        ``workflow_digest`` of the workflow that made them, if it lies where the ETL puts it; and
        ``data_digest`` of the footers of all training files, which hold each column's sizes,
        smallest and largest values, if the ETL collected them.
    """
    if settings.dataset_type != "parquet":
        return dict.fromkeys(_NAMES)
    workflow = EtlOutput.of_splits(settings.binary_path).workflow / "metadata.json"
    value = read_json(workflow, "a saved workflow") if workflow.is_file() else None
    digest = value.get("digest") if isinstance(value, dict) else None
    footers = settings.split_path("train") / "_metadata"
    found = hashlib.blake2b(footers.read_bytes()).hexdigest() if footers.is_file() else None
    return {"workflow_digest": digest, "data_digest": found}


def continued(
    path: Path, then: dict[str, Any], now: dict[str, str | None]
) -> dict[str, str | None]:
    """The origin of a run that goes on from a checkpoint.

    The data may have been moved without their workflow: what one of the two does not know is not
    compared, and stays known.

    Args:
        path: of the checkpoint, for errors.
        then: its training record.
        now: of the run's data, from :func:`origin_of`.

    Raises:
        SchemaError: the data are others.
    """
    for name, what in _NAMES.items():
        if then.get(name) and now[name] and then[name] != now[name]:
            raise SchemaError(
                f"{path}: trained on {what} {then[name]}, these are of {now[name]}",
                "resume on the same data, or start a new run",
            )
    return {name: now[name] or then.get(name) for name in _NAMES}
