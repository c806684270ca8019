"""Read the key and the time of each click from the files of a label."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

import numpy as np

from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.readers.log_format import UnparsedRows, get_format
from nvt_torchrec.etl.tables.keyed_rows import KeyedRows, parse_keyed
from nvt_torchrec.etl.tables.table_spec import make_keyed_spec
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.label_files import LabelFile

log = logging.getLogger(__name__)

#: Bytes of a file that are parsed at once.
_BLOCK_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class ClickLog:
    """Distinct clicks, ordered by key and time.

    Attributes:
        keys: int64 [n], the hashes of their keys, ascending.
        times: int64 [n], ascending within a key.
        taken: bool [n], whether the click belongs to a row that was written before.
    """

    keys: np.ndarray
    times: np.ndarray
    taken: np.ndarray

    @classmethod
    def join(cls, keys: np.ndarray, times: np.ndarray, taken: np.ndarray) -> ClickLog:
        """Sort clicks and remove duplicates; a click is taken if any of its duplicates is."""
        order = np.lexsort((~taken, times, keys))
        keys = keys[order]
        times = times[order]
        taken = taken[order]
        is_first = np.ones(len(keys), np.bool_)
        is_first[1:] = (keys[1:] != keys[:-1]) | (times[1:] != times[:-1])
        return cls(keys[is_first], times[is_first], taken[is_first])

    def take(self, mask: np.ndarray) -> ClickLog:
        """Return the clicks where ``mask``, bool [n], is True."""
        return ClickLog(self.keys[mask], self.times[mask], self.taken[mask])

    def to_rows(self) -> np.ndarray:
        """Return all attributes as one array, int64 [3, n]."""
        return np.stack([self.keys, self.times, self.taken.astype(np.int64)])

    @classmethod
    def from_rows(cls, rows: np.ndarray) -> ClickLog:
        """Return the clicks that :meth:`to_rows` wrote into an array."""
        return cls(rows[0], rows[1], rows[2] != 0)

    def __len__(self) -> int:
        return len(self.keys)


def read_clicks(
    label: LabelFile,
    spec: FeatureSpec,
    files: Sequence[DayFile],
    *,
    threads: int = 1,
    reject: bool = False,
    report: Callable[[float], object] = lambda rows: None,
) -> tuple[ClickLog, list[bytes]]:
    """Read the clicks of a label.

    Args:
        label: The label.
        spec: The columns of the log.
        files: Its files.
        threads: Number of pieces of a file that are parsed at once.
        reject: Whether malformed rows are left out.
        report: Called with the number of rows read since the last call.

    Returns:
        The clicks, with ``taken`` False; and lines that describe malformed rows.

    Raises:
        BadRowError: A row is malformed, or has no time.
        BadInputError: A file cannot be read.
    """
    log_time = spec.label_time
    assert log_time is not None
    time = label.make_time_read(log_time)
    keys = [np.empty(0, np.int64)]
    times = [np.empty(0, np.int64)]
    rejected: list[bytes] = []
    num_without = 0
    for file in files:
        click_spec = make_keyed_spec(
            spec,
            file.path,
            columns=[],
            key=dict(zip(label.key, label.file_key, strict=True)),
            time=time,
            given=label.input,
        )

        def parse(unparsed: UnparsedRows, source: str = file.source) -> KeyedRows:
            what = f"label {label.name}"
            return parse_keyed(
                unparsed, source, what, label.file_key, time=time.source, reject=reject
            )

        pieces = get_format(click_spec).stream(file.path, _BLOCK_BYTES)
        for piece in map_in_order(parse, pieces, threads, "labels"):
            assert piece.times is not None
            has_key = piece.keys != 0
            keys.append(piece.keys[has_key])
            times.append(piece.times[has_key])
            num_without += int(np.count_nonzero(~has_key))
            rejected += piece.rejected
            report(piece.rows.lines)
    if num_without:
        log.info("label %s: %d clicks without a key belong to no row", label.name, num_without)
    every_key = np.concatenate(keys)
    clicks = ClickLog.join(every_key, np.concatenate(times), np.zeros(len(every_key), np.bool_))
    return clicks, rejected
