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

#: The id of the most frequent value. Lower ids are padding, null and out of vocabulary.
_FIRST_VALUE_ID = 3
#: The allowed difference of dense values: a few roundings of float32 at |z| < 10.
_DENSE_TOLERANCE = 1e-5


class DifferentOutputError(ClickLogError):
    """Two programs wrote different training data."""


def list_parts(root: Path, *splits: str) -> list[Path]:
    """List the parquet files of splits, in each split by the number in their names."""
    parts: list[Path] = []
    for split in splits:
        parts += sorted((root / split).glob("*.parquet"), key=_find_number)
    return parts


def _find_number(path: Path) -> int:
    """Return the first number in a file's name."""
    return int(re.search(r"\d+", path.name)[0])


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
    """Compare every value of two outputs; return a summary of the common output.

    Both programs read the same log. So if the ids of all rows are equal, the vocabularies are too.

    Args:
        ours: Our files, in the order of their rows.
        theirs: The files of another program.
        train_rows: The number of first rows from which the vocabularies were made.
        label: The name of the label.
        dense: The names of the dense columns.
        categorical: The names of the categorical columns.
        same_ties: Require the same ids for equally frequent values. Otherwise, ids must be equal up
            to a permutation of equally frequent values.

    Raises:
        DifferentOutputError: A value differs.
    """
    rows = values = null = unknown = checksum = 0
    for name in (label, *dense):
        a, b = _read_column(ours, name), _read_column(theirs, name)
        rows = len(a)
        _require(rows == len(b), f"{len(b):,} rows instead of {rows:,}")
        worst = float(np.abs(a - b).max(initial=0.0))
        _require(worst <= _DENSE_TOLERANCE, f"{name}: values differ by up to {worst:g}")
    for name in categorical:
        a, b = _read_column(ours, name), _read_column(theirs, name)
        counts = np.bincount(a[:train_rows])
        is_same = np.array_equal(a, b) if same_ties else _is_same_up_to_ties(a, b, counts)
        _require(is_same, f"{name}: ids differ")
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


def _require(condition: bool, difference: str) -> None:
    if not condition:
        raise DifferentOutputError(f"its output differs: {difference}")


def _is_same_up_to_ties(a: np.ndarray, b: np.ndarray, counts: np.ndarray) -> bool:
    """Return True if the ids are equal up to a permutation of equally frequent values.

    Args:
        a: Our ids of all rows.
        b: The other program's ids of the same rows.
        counts: The frequency of each of our ids.
    """
    # Only ids of the same kind may be exchanged: ids with equal counts, but no special ids.
    kinds = counts.copy()
    kinds[:_FIRST_VALUE_ID] = -np.arange(1, _FIRST_VALUE_ID + 1)
    if not 0 <= b.min() <= b.max() < len(kinds) or not np.array_equal(kinds[a], kinds[b]):
        return False
    # The distinct pairs of ids form a one-to-one mapping if no id occurs in two of them.
    pairs = np.unique(a.astype(np.int64) << 32 | b)
    num_ours = len(np.unique(pairs >> 32))
    num_theirs = len(np.unique(pairs & 0xFFFFFFFF))
    return num_ours == num_theirs == len(pairs)
