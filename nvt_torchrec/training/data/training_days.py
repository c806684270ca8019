"""Choose the days of the training set that a run reads."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.formats.day_names import format_days, parse_days
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.training.launch.distributed import Group
from nvt_torchrec.training.settings.train_settings import TrainSettings

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TrainingDays:
    """The part of the training set that a run reads.

    Attributes:
        days: The days that the run trains on, ascending; None if the data do not name days.
        files: The files of these days; None for all files.
    """

    days: tuple[int, ...] | None
    files: tuple[Path, ...] | None = None

    def add_earlier(self, days: Sequence[int] | None) -> list[int] | None:
        """Return all days that a model has seen after this run; None if some are unknown.

        Args:
            days: The days that the model had seen before this run; None if they are unknown.
        """
        if days is None or self.days is None:
            return None
        return sorted({*days, *self.days})


def choose_days(settings: TrainSettings, trained: Sequence[int] | None) -> TrainingDays:
    """Return the days that a run reads.

    Args:
        settings: The settings of the run.
        trained: The days that the checkpoint of ``--continue_from`` has been trained on; None if
            they are unknown.

    Raises:
        SettingsError: A day does not exist, or no day is new.
        BadInputError: The manifest is missing or damaged, or does not name days.
    """
    output = EtlOutput.from_splits(settings.binary_path)
    everything = settings.days in (None, "all")
    try:
        parts = output.parts("train")
    except BadInputError:
        if everything:  # another program wrote the data
            return TrainingDays(None)
        raise
    known = sorted({part.day for part in parts})
    if everything:
        return TrainingDays(tuple(known))
    if settings.days == "new":
        days = _find_new_days(settings, known, trained)
    else:
        days = _read_days(settings, known)
    files = [Path(settings.binary_path) / part.file for part in parts if part.day in days]
    return TrainingDays(tuple(days), tuple(files))


def log_days(chosen: TrainingDays, rows: int, group: Group) -> None:
    """Log on rank 0 which days a run reads, unless it reads all days."""
    if group.rank == 0 and chosen.files and chosen.days:
        log.info("training on %s: %s rows", _describe_days(chosen.days), f"{rows:,}")


def _find_new_days(
    settings: TrainSettings, known: list[int], trained: Sequence[int] | None
) -> list[int]:
    """Return the known days that a checkpoint was not trained on.

    Raises:
        SettingsError: No day is new, or the checkpoint does not say which days it was trained on.
        BadInputError: The manifest is missing or damaged.
    """
    if trained is None:
        raise SettingsError(
            f"--days new: {settings.continue_from} does not say which days it was trained on",
            f"list the days, for example --days {known[-1]}; new checkpoints record their days",
        )
    new = sorted(set(known) - set(trained))
    if new:
        return new
    seen = f"--days new: {settings.continue_from} has been trained on {_describe_days(trained)}"
    output = EtlOutput.from_splits(settings.binary_path)
    manifest = Manifest.read(output.manifest)
    added = {extension.day for extension in manifest.extensions}
    no_rows = sorted(added - set(known) - set(trained))
    # A log that is split by days has no [split], and its newest day becomes training data once
    # another day is added. With cuts in time, rows of later days never become training data.
    if no_rows and manifest.split is not None:
        raise SettingsError(
            f"{seen}, and no row of {_describe_days(no_rows)} is training data",
            "this checkpoint needs no training: bundle it with the current workflow, `python -m "
            f"inference bundle --workflow {output.workflow} --checkpoint {settings.continue_from} "
            "--output BUNDLE`; to train on newer rows, run the ETL again with later cuts in the "
            "spec's [split]",
        )
    raise SettingsError(
        f"{seen}, and the training set has no other day", "add a day with `python -m etl extend`"
    )


def _read_days(settings: TrainSettings, known: list[int]) -> list[int]:
    """Return the days that ``--days`` lists; raise SettingsError if one does not exist."""
    days = sorted(parse_days(str(settings.days)))
    missing = sorted(set(days) - set(known))
    if missing:
        raise SettingsError(
            f"--days {settings.days}: the training set has no {_describe_days(missing)}",
            f"it has {_describe_days(known)}",
        )
    return days


def _describe_days(days: Sequence[int]) -> str:
    """Describe ascending days, for example ``days 0-3, 7``."""
    noun = "day" if len(days) == 1 else "days"
    return f"{noun} {format_days(days)}"
