"""Make a vocabulary of counted values: which values get an id of their own, and in which order.

The result is that of NVTabular's Categorify with the same counts, with ties always ordered by
value. Needs NumPy and pyarrow only.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from clicklog.arrays import to_arrow, to_numpy
from clicklog.spec.feature_spec import CategoricalColumn

#: Values of a vocabulary: int64 [n] (raw hex32 and int) or a string array without nulls.
Values: TypeAlias = np.ndarray | pa.StringArray

#: Keys of :attr:`FittedVocabulary.observed`.
OBSERVED = ("null", "oov", "unique")


@dataclasses.dataclass(frozen=True)
class FittedVocabulary:
    """The values with the ids ``column.reserved_ids``, + 1, … in this order.

    Attributes:
        values: int64 [n] or ``pa.StringArray`` [n] without nulls; by falling count, ties by value
            (numbers by size, strings by their UTF-8 bytes).
        counts: int64 [n], number of occurrences of each value in the training days.
        observed: rows of the training days (for lists: ids) that were ``null``, ``oov`` (too rare
            for an id of their own) and ``unique`` (in the vocabulary). Missing lists have no ids
            and are not counted. All 0 for a hashed column, whose values are not counted.
    """

    values: Values
    counts: np.ndarray
    observed: dict[str, int]

    def __len__(self) -> int:
        return len(self.counts)


def finish(
    values: Values, counts: np.ndarray, column: CategoricalColumn, nulls: int
) -> FittedVocabulary:
    """Apply a column's policy to the counts of its values.

    ``freq_threshold`` drops values that occurred less often. ``max_table_size`` keeps the most
    frequent values, as many as the table has rows without the reserved ones. Columns that share a
    vocabulary share a policy: pass any of the columns, with the counts over all of them.

    Args:
        values: distinct values, in any order: int64 [n] or a string array without nulls.
        counts: int64 [n], at least 1.
        column: the column whose policy is applied.
        nulls: number of rows in which a single-hot column was missing.
    """
    if column.hash_buckets:
        return FittedVocabulary(values[:0], np.empty(0, np.int64), dict.fromkeys(OBSERVED, 0))
    counts = np.asarray(counts, np.int64)
    total = int(counts.sum())
    keep = len(counts)
    least = column.freq_threshold
    if column.max_table_size:
        keep = min(keep, column.max_table_size - column.reserved_ids)
        # Values that cannot be among the first `keep` are not sorted.
        least = int(np.partition(counts, -keep)[-keep]) if keep else int(counts.max(initial=0)) + 1
    if least > 1:
        frequent = counts >= least
        if not frequent.all():
            values, counts = _take(values, np.flatnonzero(frequent)), counts[frequent]
    values, counts = _sorted(values, counts)
    values, counts = values[:keep], counts[:keep]
    unique = int(counts.sum())
    return FittedVocabulary(
        values, counts, {"null": int(nulls), "oov": total - unique, "unique": unique}
    )


def _is_text(values: Values) -> bool:
    return isinstance(values, pa.Array)


def _take(values: Values, indices: np.ndarray) -> Values:
    return values.take(to_arrow(indices)) if _is_text(values) else values[indices]


def _sorted(values: Values, counts: np.ndarray) -> tuple[Values, np.ndarray]:
    """Sort by falling count, equal counts by value."""
    if len(counts) < 2:
        return values, counts
    if _is_text(values):
        import pyarrow.compute as pc  # slow to import, and only needed for strings

        table = pa.table({"count": to_arrow(counts), "value": values})
        order = pc.sort_indices(table, [("count", "descending"), ("value", "ascending")])
        return values.take(order), counts[to_numpy(order)]
    lowest, most = int(values.min()), int(counts.max())
    bits = (int(values.max()) - lowest).bit_length()
    if bits + most.bit_length() > 64:
        order = np.lexsort((values, -counts))
        return values[order], counts[order]
    # One key contains both: sorting 64-bit integers is many times faster than two indirect sorts.
    key = (most - counts).astype(np.uint64) << np.uint64(bits)
    key |= (values - lowest).astype(np.uint64)
    key.sort()
    low = np.uint64((1 << bits) - 1)
    sorted_values = (key & low).astype(np.int64) + lowest
    key >>= np.uint64(bits)
    return sorted_values, most - key.astype(np.int64)
