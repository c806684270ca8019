"""The result of a unit of work: the counts that the manifest and the report add up."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.etl.plan import Unit
from nvt_torchrec.formats.missing import WORD_BITS

_COUNTS = ("rows", "bad_count", "positives", "size")
_BY_COLUMN = ("dense_missing", "null", "oov")


class LostRowsError(BadInputError):
    """Rows of the input that are neither in the parquet nor among the rejected ones."""


class NoTrainingRowsError(BadInputError):
    """A day that cannot be added, because none of its rows is for training."""


@dataclasses.dataclass
class UnitResult:
    """The result of a unit.

    Attributes:
        unit: the unit.
        rows: rows written.
        bad_count: rows left out.
        bad: line in the unit, from 0, and reason of the first rows left out.
        positives: rows with label 1.
        size: bytes of the part.
        dense_missing: int64 [dense columns], rows in which each was missing.
        null: int64 [categorical columns], rows in which each was missing.
        oov: int64 [categorical columns], out-of-vocabulary ids.
        sha256: digest of a part without page checksums, hexadecimal; "" of others.
    """

    unit: Unit
    rows: int
    bad_count: int
    bad: list[tuple[int, str]]
    positives: int
    size: int
    dense_missing: np.ndarray
    null: np.ndarray
    oov: np.ndarray
    sha256: str = ""

    @property
    def lines(self) -> int:
        """Rows read."""
        return self.rows + self.bad_count

    @property
    def has_part(self) -> bool:
        """Whether there is a file; a divided block has none for a split without rows."""
        return self.size > 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, without the unit; :class:`UnitRecord` reads it."""
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "bad": [list(row) for row in self.bad],
            **{name: getattr(self, name).tolist() for name in _BY_COLUMN},
            **({"sha256": self.sha256} if self.sha256 else {}),
        }


@dataclasses.dataclass(frozen=True)
class UnitRecord:
    """A :class:`UnitResult` in JSON."""

    rows: int
    bad_count: int
    bad: list[list[Any]]
    positives: int
    size: int
    dense_missing: list[int]
    null: list[int]
    oov: list[int]
    sha256: str = ""

    def __post_init__(self) -> None:
        if any(len(row) != 2 for row in self.bad):
            raise ValueError("bad is not a list of lines and reasons")

    def result(self, unit: Unit) -> UnitResult:
        """The result of the unit."""
        return UnitResult(
            unit=unit,
            bad=[(line, reason) for line, reason in self.bad],
            sha256=self.sha256,
            **{name: getattr(self, name) for name in _COUNTS},
            **{name: np.array(getattr(self, name), np.int64) for name in _BY_COLUMN},
        )


def by_source(results: list[UnitResult]) -> dict[str, list[UnitResult]]:
    """The results of each input file, in the order of its blocks."""
    own: dict[str, list[UnitResult]] = {}
    for result in sorted(results, key=lambda result: result.unit.block.begin):
        own.setdefault(result.unit.block.source, []).append(result)
    return {result.unit.block.source: own[result.unit.block.source] for result in results}


def count_missing(mask: np.ndarray, columns: int) -> np.ndarray:
    """In how many rows each column is missing: a mask uint64 [words, n] → int64 [columns]."""
    counts = np.empty(columns, np.int64)
    for word, begin in zip(mask, range(0, columns, WORD_BITS), strict=False):
        _count_bits(word, counts[begin : begin + WORD_BITS])
    return counts


@compiled()
def _count_bits(mask, counts):
    for bit in range(len(counts)):
        count = np.uint64(0)
        for i in range(len(mask)):  # an index: LLVM vectorizes no iterator
            count += (mask[i] >> np.uint64(bit)) & np.uint64(1)
        counts[bit] = count
