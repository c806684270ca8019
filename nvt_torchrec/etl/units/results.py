"""The result of a unit of work: the counts that the manifest and the report add up."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.etl.units.plan import Unit
from nvt_torchrec.formats.rows import WORD_BITS


class LostRowsError(BadInputError):
    """Rows of the input that are neither in the parquet nor among the rejected ones."""


class NoTrainingRowsError(BadInputError):
    """A day that cannot be added, because none of its rows is for training."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitRecord:
    """The result of a unit in JSON, without the unit.

    Attributes:
        rows: Rows written.
        bad_count: Rows left out.
        bad: Line in the unit, from 0, and reason of the first rows left out.
        positives: Rows with label 1.
        size: Bytes of the part.
        dense_missing: By dense column, rows in which it was missing.
        null: By categorical column, rows in which it was missing.
        oov: By categorical column, out-of-vocabulary ids.
    """

    rows: int
    bad_count: int
    bad: list[list[Any]]
    positives: int
    size: int
    dense_missing: list[int]
    null: list[int]
    oov: list[int]

    def __post_init__(self) -> None:
        if any(len(row) != 2 for row in self.bad):
            raise ValueError("bad is not a list of lines and reasons")

    def result(self, unit: Unit) -> UnitResult:
        """Return the result of the unit."""
        return UnitResult(unit=unit, **vars(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitResult(UnitRecord):
    """The result of a unit."""

    unit: Unit

    @property
    def lines(self) -> int:
        """Rows read."""
        return self.rows + self.bad_count

    @property
    def has_part(self) -> bool:
        """Whether there is a file; a divided block has none for a split without rows."""
        return self.size > 0

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form, which :class:`UnitRecord` reads."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(UnitRecord)}


def by_source(results: list[UnitResult]) -> dict[str, list[UnitResult]]:
    """The results of each input file, in the order of its blocks."""
    sources: dict[str, list[UnitResult]] = {result.unit.block.source: [] for result in results}
    for result in sorted(results, key=lambda result: result.unit.block.begin):
        sources[result.unit.block.source].append(result)
    return sources


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
