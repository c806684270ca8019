"""Check that two programs wrote the same training data, so that their speeds are comparable."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
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


def list_parts(root: Path, *splits: str) -> list[Path]:
    """List the parquet files of splits in the order of the numbers in their names."""
    found = ([p for p in (root / split).iterdir() if p.suffix == ".parquet"] for split in splits)
    return [
        path
        for paths in found
        for path in sorted(paths, key=lambda path: int(re.search(r"\d+", path.name)[0]))
    ]


def compare(
    ours: Sequence[Path],
    theirs: Sequence[Path],
    train_rows: int,
    label: str,
    dense: Sequence[str],
    categorical: Sequence[str],
    *,
    same_ties: bool = True,
) -> str:
    """Compare every value of two outputs; return a summary of what they have in common.

    Both read the same log. So if the ids of all rows are the same, the vocabularies are, too.

    Args:
        ours: The files that all are compared with, in the order of their rows.
        theirs: The files of another program.
        train_rows: How many rows, from the first on, the vocabularies were made of.
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
        a, b = _read_column(ours, name), _read_column(theirs, name)
        rows = len(a)
        _require(rows == len(b), f"{len(b):,} rows, and not {rows:,}")
        worst = float(np.abs(a - b).max(initial=0.0))
        _require(worst <= _DENSE_TOLERANCE, f"{name}: values differ by up to {worst:g}")
    for name in categorical:
        a, b = _read_column(ours, name), _read_column(theirs, name)
        counts = np.bincount(a[:train_rows])
        same = np.array_equal(a, b) if same_ties else _same_but_for_ties(a, b, counts)
        _require(same, f"{name}: ids differ")
        values += len(counts) - _FIRST_VALUE_ID
        null += int(np.count_nonzero(a == NULL_ID))
        unknown += int(np.count_nonzero(a == FIRST_OOV_ID))
        checksum = zlib.crc32(a.astype("<i4").data, checksum)
    return (
        f"{rows:,} rows, {values:,} values in the vocabularies, {null:,} null and {unknown:,} "
        f"out-of-vocabulary ids, CRC-32 of the ids {checksum:08x}"
    )


def _read_column(files: Sequence[Path], name: str) -> np.ndarray:
    """Return all rows of a column, in order."""
    return pq.read_table(list(files), columns=[name]).column(0).to_numpy()


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise DifferentOutputError(f"its output is another: {what}")


def _same_but_for_ties(a: np.ndarray, b: np.ndarray, counts: np.ndarray) -> bool:
    """Return whether ids ``a`` and ``b`` of the same rows stand for the same values."""
    kind = counts.copy()
    kind[:_FIRST_VALUE_ID] = -np.arange(1, _FIRST_VALUE_ID + 1)  # each of its own kind
    pairs = np.unique(a.astype(np.int64) << 32 | b)  # one for each value, if they agree
    return (
        0 <= b.min() <= b.max() < len(kind)
        and np.array_equal(kind[a], kind[b])
        and len(np.unique(pairs >> 32)) == len(pairs)
        and len(np.unique(pairs & 0xFFFFFFFF)) == len(pairs)
    )
