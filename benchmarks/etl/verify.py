"""Check that two programs wrote the same training data, so that their speeds are comparable."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.formats.feature_spec.columns import FIRST_OOV_ID, NULL_ID

#: Ids below it are padding, null and out of vocabulary; the most frequent value has this one.
_FIRST_VALUE_ID = 3
#: How far dense values may be apart: a few roundings of float32 at |z| < 10.
_DENSE_TOLERANCE = 1e-5


class DifferentOutputError(ClickLogError):
    """Two programs wrote different training data."""


@dataclasses.dataclass(frozen=True)
class Output:
    """The output of a program.

    Attributes:
        splits: parquet files of each split, in the order of their rows.
        counts: of a column's vocabulary: occurrences int64 [n] per value, in the order of ids.
        values: of a column's vocabulary, in the order of ids; or None.
    """

    splits: Sequence[Sequence[Path]]
    counts: Callable[[str], np.ndarray]
    values: Callable[[str], np.ndarray] | None = None

    def column(self, name: str) -> np.ndarray:
        """All rows of a column, in order."""
        files = [file for split in self.splits for file in split]
        return np.concatenate([read_parquet_column(file, name) for file in files])


def parts(directory: Path) -> list[Path]:
    """List the parquet files of a directory in the order of the numbers in their names."""
    files = [path for path in directory.iterdir() if path.suffix == ".parquet"]
    return sorted(files, key=lambda path: int(re.search(r"\d+", path.name)[0]))


def read_parquet_column(path: Path, name: str) -> np.ndarray:
    """Read a column of a parquet file."""
    return pq.ParquetFile(path).read(columns=[name]).column(0).to_numpy()


def compare(
    ours: Output,
    theirs: Output,
    label: str,
    dense: Sequence[str],
    categorical: Sequence[str],
    *,
    same_ties: bool = True,
) -> str:
    """Compare every value of two outputs; return a summary of what they have in common.

    Args:
        ours: What all are compared with.
        theirs: The output of another program.
        label: The name of the label.
        dense: The names of the dense columns.
        categorical: The names of the categorical columns.
        same_ties: Whether equally frequent values have the same ids in both. Without, the ids must
            be equal up to a permutation of values that occur equally often.

    Raises:
        DifferentOutputError: A value differs.
    """
    rows = values = null = unknown = checksum = 0
    for name in (label, *dense):
        a, b = ours.column(name), theirs.column(name)
        rows = len(a)
        _require(rows == len(b), f"{len(b):,} rows, and not {rows:,}")
        worst = float(np.abs(a - b).max(initial=0.0))
        _require(worst <= _DENSE_TOLERANCE, f"{name}: values differ by up to {worst:g}")
    for name in categorical:
        _compare_vocabularies(name, ours, theirs, same_ties=same_ties)
        a, b, counts = ours.column(name), theirs.column(name), ours.counts(name)
        same = np.array_equal(a, b) if same_ties else _same_but_for_ties(a, b, counts)
        _require(same, f"{name}: ids differ")
        values += len(counts)
        null += int(np.count_nonzero(a == NULL_ID))
        unknown += int(np.count_nonzero(a == FIRST_OOV_ID))
        checksum = zlib.crc32(a.astype("<i4").data, checksum)
    return (
        f"{rows:,} rows, {values:,} values in the vocabularies, {null:,} null and {unknown:,} "
        f"out-of-vocabulary ids, CRC-32 of the ids {checksum:08x}"
    )


def _compare_vocabularies(name: str, ours: Output, theirs: Output, *, same_ties: bool) -> None:
    counts, other = ours.counts(name), theirs.counts(name)
    _require(
        np.array_equal(counts, other),
        f"{name}: another vocabulary: {len(other):,} values, and not {len(counts):,}, or other "
        "counts",
    )
    if same_ties and theirs.values:
        same = np.array_equal(ours.values(name), theirs.values(name))
        _require(same, f"{name}: the vocabulary's values differ")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise DifferentOutputError(f"its output is another: {what}")


def _same_but_for_ties(a: np.ndarray, b: np.ndarray, counts: np.ndarray) -> bool:
    """Return whether ids ``a`` and ``b`` of the same rows stand for the same values."""
    if int(b.min()) < 0 or int(b.max()) >= _FIRST_VALUE_ID + len(counts):
        return False
    reserved = -np.arange(1, _FIRST_VALUE_ID + 1)  # each of its own kind
    kind = np.concatenate([reserved, counts])
    pairs = np.unique(a.astype(np.int64) << 32 | b)  # one for each value, if they agree
    return (
        np.array_equal(kind[a], kind[b])
        and len(np.unique(pairs >> 32)) == len(pairs)
        and len(np.unique(pairs & 0xFFFFFFFF)) == len(pairs)
    )
