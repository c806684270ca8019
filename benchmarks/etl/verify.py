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
from nvt_torchrec.formats.spec.feature_spec import FIRST_OOV_ID, NULL_ID

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

    def split_of_rows(self) -> np.ndarray:
        """The number of the split of each row."""
        rows = [sum(pq.read_metadata(file).num_rows for file in split) for split in self.splits]
        return np.repeat(np.arange(len(rows)), rows)


def parts(directory: Path) -> list[Path]:
    """List the parquet files of a directory in the order of the numbers in their names."""
    found = [path for path in directory.iterdir() if path.suffix == ".parquet"]
    return sorted(found, key=lambda path: int(re.search(r"\d+", path.name)[0]))


def read_parquet_column(path: Path, name: str) -> np.ndarray:
    """Read a column of a parquet file."""
    return pq.ParquetFile(path).read(columns=[name]).column(0).to_numpy()


@dataclasses.dataclass
class Summary:
    """A summary of the comparison, to be printed."""

    rows: int = 0
    vocabulary: int = 0
    null: int = 0
    oov: int = 0
    checksum: int = 0

    def __str__(self) -> str:
        return (
            f"{self.rows:,} rows, {self.vocabulary:,} values in the vocabularies, "
            f"{self.null:,} null and {self.oov:,} out-of-vocabulary ids, "
            f"CRC-32 of the ids {self.checksum:08x}"
        )


def compare(
    ours: Output,
    theirs: Output,
    label: str,
    dense: Sequence[str],
    categorical: Sequence[str],
    *,
    same_ties: bool = True,
    same_order: bool = True,
) -> Summary:
    """Compare every value of two outputs.

    Args:
        ours: what all are compared with.
        theirs: of another program.
        label, dense, categorical: column names.
        same_ties: equally frequent values have the same ids in both. Without, the ids must be equal
            up to a permutation of values that occur equally often.
        same_order: the rows have the same order. Without, the rows of a split are compared as a
            set (label and ids together, each dense column by itself).

    Raises:
        DifferentOutputError: the first difference.
    """
    summary = Summary()
    rows = [one.split_of_rows().astype(np.uint64) for one in (ours, theirs)]
    for name in (label, *dense):
        a, b = ours.column(name), theirs.column(name)
        _require(len(a) == len(b), f"{len(b):,} rows, and not {len(a):,}")
        summary.rows = len(a)
        if not same_order:
            if name == label:
                rows = [_mixed(hashes, column) for hashes, column in zip(rows, (a, b), strict=True)]
            a, b = np.sort(a), np.sort(b)
        worst = float(np.abs(a - b).max(initial=0.0))
        _require(worst <= _DENSE_TOLERANCE, f"{name}: values differ by up to {worst:g}")
    for name in categorical:
        _compare_vocabularies(name, ours, theirs, same_ties=same_ties)
        a, b = ours.column(name), theirs.column(name)
        counts = ours.counts(name)
        if not same_order:
            rows = [_mixed(hashes, column) for hashes, column in zip(rows, (a, b), strict=True)]
        elif same_ties:
            _require(np.array_equal(a, b), f"{name}: ids differ")
        else:
            _require(_same_but_for_ties(a, b, counts), f"{name}: ids differ")
        summary.vocabulary += len(counts)
        summary.null += int(np.count_nonzero(a == NULL_ID))
        summary.oov += int(np.count_nonzero(a == FIRST_OOV_ID))
        summary.checksum = zlib.crc32(a.astype("<i4").data, summary.checksum)
    if not same_order:
        _require(np.array_equal(*map(np.sort, rows)), "labels and ids differ, in whatever order")
    return summary


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


def _mixed(hashes: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Add a column to the hash of each row (SplitMix64's mixer)."""
    bits = column.astype(np.float64) if column.dtype.kind == "f" else column.astype(np.int64)
    mixed = hashes * np.uint64(0x9E3779B97F4A7C15) + bits.view(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


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
