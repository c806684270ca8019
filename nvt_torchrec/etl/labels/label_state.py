"""The state of labels from other files, which later days need, in ``OUT/extension``.

Files::

    labels.json    see :class:`LabelRecord`
    labels.N.npy   int64 [3, n]: the clicks of label N that later rows may have: the hash of the
                   key, the time, and 1 if the click belongs to a row that is written
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.artifact import FileEntry, Format, check_digests, check_sizes
from nvt_torchrec.base.files.mapping import MappedArray, write_array
from nvt_torchrec.etl.labels.click_files import ClickLog
from nvt_torchrec.formats.feature_spec import FeatureSpec

FORMAT = Format("nvt-torchrec labels", 1, "what is kept of the clicks of earlier days")
_RECORD = "labels.json"
_COPY_AGAIN = "copy the extension again from the same output directory, or run the ETL again"


@dataclasses.dataclass(frozen=True)
class LabelRecord:
    """The content of ``labels.json``.

    Attributes:
        cut: The newest time of a row that is written, in microseconds since 1970.
        newest: The time until which the log is complete.
        waiting: By file of the log, the number of rows that wait for a later day.
        files: Size and digest of the other files.
    """

    cut: int
    newest: int
    waiting: dict[str, int]
    files: dict[str, FileEntry]


@dataclasses.dataclass(frozen=True)
class EarlierLabels:
    """The record, and for each label from other files the clicks that later rows may have."""

    record: LabelRecord
    clicks: list[ClickLog]

    @classmethod
    def read(cls, directory: Path, spec: FeatureSpec) -> EarlierLabels:
        """Read ``OUT/extension``. Raises :class:`BadInputError`."""
        file = directory / _RECORD
        record = FORMAT.read(LabelRecord, file, _COPY_AGAIN)
        names = [_clicks_file(number) for number in range(len(spec.label_files))]
        if sorted(record.files) != sorted(names):
            raise BadInputError(f"{file}: damaged: it lists other files", _COPY_AGAIN)
        check_sizes(directory, record.files, _COPY_AGAIN)
        check_digests(directory, record.files, _COPY_AGAIN)
        try:
            arrays = [MappedArray(directory / name, np.int64, 2).values for name in names]
            if any(len(array) != 3 for array in arrays):
                raise ValueError("arrays of another shape")
        except (OSError, ValueError) as error:
            raise BadInputError(f"{directory}: damaged: {error}", _COPY_AGAIN) from error
        return cls(record, [ClickLog.from_rows(array) for array in arrays])


def write_labels(
    directory: Path,
    cut: int,
    newest: int,
    waiting: Mapping[str, int],
    clicks: Sequence[ClickLog],
) -> None:
    """Write the state for later days. Raises :class:`OutputError`.

    Args:
        directory: ``OUT/extension``.
        cut, newest, waiting: See :class:`LabelRecord`.
        clicks: See :class:`EarlierLabels`.
    """
    entries = {}
    for number, label_clicks in enumerate(clicks):
        path = directory / _clicks_file(number)
        write_array(path, label_clicks.to_rows())
        entries[path.name] = FileEntry.from_file(path)
    record = LabelRecord(cut, newest, dict(waiting), entries)
    FORMAT.write(directory / _RECORD, dataclasses.asdict(record))


def _clicks_file(number: int) -> str:
    return f"labels.{number}.npy"
