"""The record of what negatives are drawn by: ``negatives.json``, beside the files it lists."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nvt_torchrec.base.files.artifact import FileEntry, Format, check_digests, check_sizes

#: The files beside the items.
PAIRS, COUNTS = "pairs.npy", "counts.npy"
FORMAT = Format("nvt-torchrec negatives", 1, "what negatives are drawn by")
RECORD = "negatives.json"
_COPY_AGAIN = "copy the whole output again, or run the ETL again"


@dataclasses.dataclass(frozen=True)
class NegativesRecord:
    """What ``negatives.json`` holds.

    Attributes:
        files: The other files.
        log_mean_weight: The logarithm of the mean, over the items of the first run, of what items
            are drawn in proportion to; 0 if all are drawn alike. It stays the same when days are
            added, so that an item's log-Q correction does.
    """

    files: dict[str, FileEntry]
    log_mean_weight: float = 0.0


def read_record(directory: Path) -> NegativesRecord:
    """Read the record in a directory. Raises :class:`BadInputError`."""
    return FORMAT.read(NegativesRecord, directory / RECORD, _COPY_AGAIN)


def check_directory(directory: Path) -> NegativesRecord:
    """Read a record and check that its files are whole. Raises :class:`BadInputError`."""
    record = read_record(directory)
    check_sizes(directory, record.files, _COPY_AGAIN)
    check_digests(directory, record.files, _COPY_AGAIN)
    return record
