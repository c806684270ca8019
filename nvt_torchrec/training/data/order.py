"""The order of the training rows: whether a run shuffles them."""

from __future__ import annotations

from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.training.settings.train_settings import TrainSettings

#: Splits of which no part is later than another one.
_NOT_BY_TIME = ("share", "column", "files")


def choose_order(settings: TrainSettings) -> TrainSettings:
    """Fill in whether the training rows are shuffled, if ``settings`` do not say it.

    They are unless the data are divided by time or days, where the order of the log is that of time
    and the newest rows should be trained last; nothing is known; or Merlin's loader reads them,
    which cannot.
    """
    try:
        manifest = Manifest.read(EtlOutput.from_splits(settings.binary_path).manifest)
    except ClickLogError:  # data of another program
        return settings.filled({"shuffle_training_set": False})
    by = (manifest.split or {}).get("by")
    shuffled = by in _NOT_BY_TIME and settings.loader != "merlin"
    return settings.filled({"shuffle_training_set": shuffled})
