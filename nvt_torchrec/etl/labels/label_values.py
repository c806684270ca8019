"""Add labels from other files to rows, and leave out rows that wait for their clicks.

A run keeps these files in the directory of its state::

    labels/record.json     see :class:`LabelCut`; written last
    labels/clicked.N.npy   int64 [2, n], the keys, ascending, and times of the rows clicked by label
                           N
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from nvt_torchrec.base.files.atomic import read_json
from nvt_torchrec.base.files.mapping import map_array
from nvt_torchrec.base.files.validation import parse
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.clicklog.text.assemble import take
from nvt_torchrec.etl.labels.click_kernels import choose_shift, find_clicked, index_keys
from nvt_torchrec.etl.state.output import LABELS
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import RawRows

RECORD_FILE = "record.json"


@dataclasses.dataclass(frozen=True)
class LabelCut:
    """The range of times of the rows that a run or an extension writes.

    Attributes:
        after: Rows until this time were written before, in microseconds since 1970; None for a run.
        cut: The newest time of rows that are written now.
        newest: The time until which the log is complete.
        again: The files of the log that earlier days have read, too.
        unfinished: The files of the log with rows that later days will write.
    """

    after: int | None
    cut: int
    newest: int
    again: list[str]
    unfinished: list[str]

    @classmethod
    def read(cls, directory: Path) -> LabelCut:
        """Read the record of a run's state. Raises :class:`BadInputError`."""
        file = directory / RECORD_FILE
        return parse(cls, read_json(file, "the record of labels"), file)

    def mark_ready(self, times: np.ndarray) -> np.ndarray:
        """Return whether rows are written now, bool [n], given their times, int64 [n]."""
        ready = times <= self.cut
        if self.after is not None:
            ready &= times > self.after
        return ready


def clicked_file_name(number: int) -> str:
    """Return the name of the file with the clicked rows of a label."""
    return f"clicked.{number}.npy"


class LabelValues:
    """Adds labels from other files to rows, and leaves out rows that wait. Thread-safe.

    Args:
        directory: The directory of the labels in the state of a run.
        spec: The columns.
    """

    def __init__(self, directory: Path, spec: FeatureSpec) -> None:
        self.record = LabelCut.read(directory)
        self._again = frozenset(self.record.again)
        self._indices = [spec.labels.index(file.name) for file in spec.label_files]
        #: For each label, the keys and times of its clicked rows, and the index of the keys.
        self._clicked: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for number in range(len(self._indices)):
            keys, times = map_array(directory / clicked_file_name(number))
            self._clicked.append((keys, times, index_keys(keys)))

    def add(self, pieces: Iterable[RawRows], block: Block) -> Iterator[RawRows]:
        """Yield the rows of a block that are written now, with their labels."""
        for rows in pieces:
            yield self._add_labels(self._leave_out(rows, again=block.source in self._again))

    def _leave_out(self, rows: RawRows, *, again: bool) -> RawRows:
        """Return the rows that are written now: those that neither wait nor were written before.

        Args:
            rows: The rows, with the times of their labels.
            again: Whether earlier days have read their file, too.
        """
        assert rows.label_times is not None
        times = rows.label_times
        waiting = int(np.count_nonzero(times > self.record.cut))
        if again:
            # The malformed rows were counted when the file was read for the first time.
            num_written = int(np.count_nonzero(times <= self.record.after))
            rows = dataclasses.replace(rows, bad=[], bad_count=0, done=rows.bad_count + num_written)
        ready = self.record.mark_ready(times)
        if ready.all():
            return rows
        taken = take(rows, ready)
        return dataclasses.replace(taken, bad=rows.bad, bad_count=rows.bad_count, waiting=waiting)

    def _add_labels(self, rows: RawRows) -> RawRows:
        """Return the rows with labels: 1 if a click of the label belongs to the row, else 0."""
        assert rows.label_keys is not None
        labels = rows.labels.copy()
        for index, keys, (clicked_keys, clicked_times, begins) in zip(
            self._indices, rows.label_keys, self._clicked, strict=True
        ):
            find_clicked(
                clicked_keys,
                clicked_times,
                begins,
                choose_shift(begins),
                np.ascontiguousarray(keys),
                rows.label_times,
                labels[index],
            )
        return dataclasses.replace(rows, labels=labels, label_keys=None, label_times=None)


@functools.lru_cache(1)
def open_labels(work: Path, spec: FeatureSpec) -> LabelValues | None:
    """Open the labels in the state of a run; None for a spec without labels from other files."""
    return LabelValues(work / LABELS, spec) if spec.label_files else None
