"""The order of the training rows: whether a run shuffles them, and what the files are sorted by."""

from __future__ import annotations

import numpy as np

from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.nvt_loader.parquet.dataset import error_context, read_dataset
from nvt_torchrec.training.settings.train_settings import TrainSettings

#: Splits of which no part is later than another one.
_NOT_BY_TIME = ("share", "column", "files")
#: What is read to find an order: so many rows at the beginning of so many row groups.
_ROW_GROUPS, _ROWS = 8, 4096
#: Rows are in the order of a column if its value changes from row to row this much more seldom than
#: in a random order, or if so many of the changes have one direction; fewer changes tell nothing.
_SELDOM, _ONE_WAY, _FEW = 0.5, 0.9, 50


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


def find_order(settings: TrainSettings) -> str:
    """Return the column by which the training files are sorted or grouped; "" if by none.

    Of several it is the one with the most values: a user, not the user's age. A column that only
    rises or falls, such as a row number, comes last.
    """
    dataset = read_dataset(settings.split_path("train"))
    schema, groups = dataset.stored, np.flatnonzero(dataset.source.row_counts).tolist()
    names = [name for name in schema.columns if name not in (schema.weight, *schema.multi_hot)]
    samples = []
    for group in groups[:: max(1, len(groups) // _ROW_GROUPS)]:
        with error_context(dataset, group):
            samples.append(next(iter(dataset.source.read(group, names, _ROWS))))
    columns = {name: [part[name].to_numpy() for part in samples] for name in names if samples}
    found = {name: strength for name, parts in columns.items() if (strength := _strength(parts))}
    return max(found, key=found.__getitem__, default="")


def _strength(parts: list[np.ndarray]) -> float:
    """Return 0 if a column's rows are in no order, else the more, the more values it has.

    Args:
        parts: Values of successive rows.
    """
    steps = [np.sign(np.diff(part)) for part in parts]
    shares = np.unique(np.concatenate(parts), return_counts=True)[1] / sum(map(len, parts))
    expected = sum(map(len, steps)) * (1 - np.sum(shares**2))
    changes = sum(map(np.count_nonzero, steps))
    if expected >= _FEW and changes < _SELDOM * expected:
        return float(expected)
    return float(sum(abs(step.sum()) for step in steps) > max(_ONE_WAY * changes, _FEW))
