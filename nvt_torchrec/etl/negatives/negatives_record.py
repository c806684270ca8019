"""The record ``negatives.json`` of the data from which negatives are drawn."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nvt_torchrec.base.files.artifact import FileEntry, Format, check_digests, check_sizes

# The files alongside the items; see prepare_negatives.
PAIRS = "pairs.npy"
COUNTS = "counts.npy"
FORMAT = Format("nvt-torchrec negatives", 1, "the record of negatives")
RECORD = "negatives.json"
_COPY_AGAIN = "copy the whole output again, or run the ETL again"


@dataclasses.dataclass(frozen=True)
class NegativesRecord:
    """The content of ``negatives.json``.

    Attributes:
        files: Size and digest of the other files.
        log_mean_weight: The logarithm of the mean weight of the items of the first run, where items
            are drawn in proportion to their weights; 0 if all weights are equal. It does not change
            when days are added, so that an item's log-Q correction does not change either.
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
