"""Choose the days of the training set that a run reads, by the ETL's manifest."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.formats.day_names import days_text, parse_days
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import PartFile
from nvt_torchrec.nvt_loader.selection import Selection
from nvt_torchrec.training.settings.train_settings import TrainSettings

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TrainingDays:
    """The part of the training set that a run reads.

    Attributes:
        days: The days that it trains on, ascending; None if the data do not say.
        replayed: Earlier days, of which it reads a share of the rows, ascending.
        selection: The files; None for all of them.
    """

    days: tuple[int, ...] | None
    replayed: tuple[int, ...] = ()
    selection: Selection | None = None

    def add_earlier(self, days: Sequence[int] | None) -> list[int] | None:
        """Return all days that a model has seen; ``days`` are those before this run."""
        return None if days is None or self.days is None else sorted({*days, *self.days})


def choose_days(settings: TrainSettings, trained: Sequence[int] | None) -> TrainingDays:
    """Return the days that a run reads.

    Args:
        settings: The settings of the run.
        trained: The days that the checkpoint of ``--continue_from`` has been trained on; None if
            they are unknown.

    Raises:
        SettingsError: There is no such day, or no new one.
        BadInputError: The manifest is missing or damaged, or does not say which days there are.
    """
    output = EtlOutput.from_splits(settings.binary_path)
    everything = settings.days in (None, "all")
    try:
        parts = output.parts("train")
    except BadInputError:
        if everything:  # data of another program
            return TrainingDays(None)
        raise
    known = sorted({part.day for part in parts})
    if everything:
        return TrainingDays(tuple(known))
    if settings.days == "new":
        days = _new_days(settings, known, trained)
        replayed = [day for day in known if day not in days] if settings.replay else []
    else:
        days, replayed = _listed_days(settings, known), []
    selection = Selection(
        files=_files(parts, days),
        sampled=tuple(_files(parts, [day]) for day in replayed),
        share=settings.replay or 0.0,
        # other rows of the older days for each new day
        seed=(settings.seed, max(days)),
    )
    return TrainingDays(tuple(days), tuple(replayed), selection)


def log_days(chosen: TrainingDays, rows: int) -> None:
    """Log which days a run reads, if it does not read all."""
    if chosen.selection is None or chosen.days is None:
        return
    replayed = ""
    if chosen.replayed:
        replayed = f", and {chosen.selection.share:g} of the rows of {_text(chosen.replayed)}"
    log.info("training on %s%s: %s rows", _text(chosen.days), replayed, f"{rows:,}")


def _new_days(
    settings: TrainSettings, known: list[int], trained: Sequence[int] | None
) -> list[int]:
    if trained is None:
        raise SettingsError(
            f"--days new: {settings.continue_from} does not say which days it was trained on",
            "list the days, for example --days "
            f"{known[-1]}; checkpoints of the runs from now on say it",
        )
    new = sorted(set(known) - set(trained))
    if new:
        return new
    raise SettingsError(
        f"--days new: {settings.continue_from} has been trained on {_text(trained)}, and the "
        f"training set has no other day",
        "add a day with `python -m etl extend`",
    )


def _listed_days(settings: TrainSettings, known: list[int]) -> list[int]:
    days = sorted(parse_days(str(settings.days)))
    missing = sorted(set(days) - set(known))
    if missing:
        raise SettingsError(
            f"--days {settings.days}: the training set has no {_text(missing)}",
            f"it has {_text(known)}",
        )
    return days


def _files(parts: list[PartFile], days: Collection[int]) -> tuple[str, ...]:
    return tuple(Path(part.file).name for part in parts if part.day in days)


def _text(days: Sequence[int]) -> str:
    """Describe ascending days, for example ``days 0-3, 7``."""
    return f"{'day' if len(days) == 1 else 'days'} {days_text(days)}"
