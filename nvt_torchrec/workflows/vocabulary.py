"""Vocabularies: arrays of distinct values, the policy that gives them ids, and reading saved ones.

:func:`apply_policy` has the same result as NVTabular's Categorify for the same counts, except that
ties are always ordered by value. This module needs only NumPy and pyarrow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import mask_to_numpy, strings, to_arrow, to_numpy
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec import CategoricalColumn
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.workflow_description import WorkflowDescription

#: int64 [n], or a string array [n] without nulls (32-bit offsets).
Values: TypeAlias = np.ndarray | pa.StringArray


def make_empty_values(raw: str) -> Values:
    """Return an empty array of values of a raw type."""
    return strings([]) if RAW_TYPES[raw].is_text else np.empty(0, np.int64)


def is_text(values: Values) -> bool:
    """Return whether values are strings."""
    return isinstance(values, pa.Array)


def to_arrow_array(values: Values) -> pa.Array:
    """Return values as an Arrow array of int64 or string."""
    return values if isinstance(values, pa.Array) else to_arrow(values)


def take(values: Values, indices: np.ndarray) -> Values:
    """Return the values at indices."""
    return values.take(to_arrow(indices)) if is_text(values) else values[indices]


def concatenate(parts: Sequence[Values], column: str) -> Values:
    """Join values of one raw type.

    Raises:
        SettingsError: They are strings of more than 2 GiB in all; the message names ``column``.
    """
    if not is_text(parts[0]):
        return np.concatenate(parts)
    try:
        return pa.concat_arrays(parts)
    except pa.ArrowInvalid:
        raise SettingsError(
            f"column {column}: {sum(map(len, parts))} distinct strings have more than 2 GiB in all",
            "set hash_buckets for this column in the spec, and fit again",
        ) from None


def order_by_value(values: Values) -> np.ndarray:
    """Return the indices that sort values: numbers by size, strings by their UTF-8 bytes."""
    if not is_text(values):
        return np.argsort(values, kind="stable")
    import pyarrow.compute as pc  # slow to import, and only needed for strings

    return to_numpy(pc.array_sort_indices(values)).astype(np.int64)


def find_unequal(first: Values, second: Values) -> np.ndarray:
    """Compare two arrays of the same length: bool [n], True where the values differ."""
    if not is_text(first):
        return first != second
    import pyarrow.compute as pc

    return mask_to_numpy(pc.not_equal(first, second))


#: Keys of :attr:`FittedVocabulary.observed`.
OBSERVED = ("null", "oov", "unique")
#: The maximum number of values of a vocabulary that may wait for an id. On disk, an integer takes
#: 16 bytes, a string its length and 12 bytes.
PENDING_LIMIT = 8_000_000


@dataclasses.dataclass(frozen=True)
class FittedVocabulary:
    """The values that have the ids ``column.reserved_ids``, ``column.reserved_ids`` + 1, …

    Attributes:
        values: int64 [n] or ``pa.StringArray`` [n] without nulls, in the order of the ids. In
            generation 0 they are ordered by falling count, ties by value (numbers by size, strings
            by their UTF-8 bytes). Each later generation appends its values in the same order.
        counts: int64 [n], number of occurrences of each value in the days counted.
        observed: Number of rows (for lists: of items) in the days counted that were ``null``,
            ``oov`` (not in the vocabulary) and ``unique`` (in the vocabulary). Missing lists have
            no items and are not counted. All 0 for a hashed column, whose values are not counted.
    """

    values: Values
    counts: np.ndarray
    observed: dict[str, int]

    def __len__(self) -> int:
        return len(self.counts)


@dataclasses.dataclass(frozen=True)
class PendingValues:
    """Values that were seen and have no id.

    Attributes:
        values: Distinct, in ascending order (numbers by size, strings by their UTF-8 bytes).
        counts: int64 [n], number of occurrences of each, at least 1.
    """

    values: Values
    counts: np.ndarray

    def __len__(self) -> int:
        return len(self.counts)

    def take(self, indices: np.ndarray) -> PendingValues:
        """Return the values at indices."""
        return PendingValues(take(self.values, indices), self.counts[indices])


def has_pending(column: CategoricalColumn) -> bool:
    """Return whether values of a column may wait for an id: too rare, or above the table's cap."""
    return column.freq_threshold > 1 or column.max_table_size > 0


def fit_vocabulary(
    values: Values, counts: np.ndarray, column: CategoricalColumn, nulls: int
) -> FittedVocabulary:
    """Apply a column's policy to the counts of its values.

    ``freq_threshold`` drops values that occurred less often. ``max_table_size`` keeps the most
    frequent values, as many as the table has rows besides the reserved ones. Columns that share a
    vocabulary share a policy: pass any of these columns, and counts over all of them.

    Args:
        values: Distinct values, in any order: int64 [n] or a string array without nulls.
        counts: int64 [n], at least 1.
        column: The column whose policy is applied.
        nulls: Number of rows in which a single-hot column was missing.
    """
    return apply_policy(values, counts, column, nulls)[0]


def apply_policy(
    values: Values, counts: np.ndarray, column: CategoricalColumn, nulls: int
) -> tuple[FittedVocabulary, PendingValues]:
    """Apply a column's policy like :func:`fit_vocabulary`, and also return the values without id.

    At most :data:`PENDING_LIMIT` values without id are returned, the most frequent ones.
    """
    if column.hash_buckets:
        nothing = np.empty(0, np.int64)
        none = FittedVocabulary(values[:0], nothing, dict.fromkeys(OBSERVED, 0))
        return none, PendingValues(values[:0], nothing)
    counts = np.asarray(counts, np.int64)
    total = int(counts.sum())
    num_kept = len(counts)
    min_count = column.freq_threshold
    if column.max_table_size:
        num_kept = min(num_kept, column.max_table_size - column.reserved_ids)
        # Sorting takes longest, so values rarer than the last one kept are set aside before.
        if num_kept:
            min_count = int(np.partition(counts, -num_kept)[-num_kept])
        else:
            min_count = int(counts.max(initial=0)) + 1
    rare_values = values[:0]
    rare_counts = counts[:0]
    if min_count > 1:
        is_rare = counts < min_count
        if is_rare.any():
            rare_values = take(values, np.flatnonzero(is_rare))
            rare_counts = counts[is_rare]
            values = take(values, np.flatnonzero(~is_rare))
            counts = counts[~is_rare]
    values, counts = _sort_by_count(values, counts)
    rare_values = concatenate([rare_values, values[num_kept:]], column.name)
    rare_counts = np.concatenate([rare_counts, counts[num_kept:]])
    values = values[:num_kept]
    counts = counts[:num_kept]
    unique = int(counts.sum())
    observed = {"null": int(nulls), "oov": total - unique, "unique": unique}
    pending = PendingValues(rare_values, rare_counts).take(order_by_value(rare_values))
    return FittedVocabulary(values, counts, observed), keep_pending(pending)


def keep_pending(pending: PendingValues) -> PendingValues:
    """Return the pending values with the highest counts, at most :data:`PENDING_LIMIT`.

    The order does not change. Among equal counts, the values that come first are kept.
    """
    if len(pending) <= PENDING_LIMIT:
        return pending
    most_frequent = np.argsort(-pending.counts, kind="stable")[:PENDING_LIMIT]
    return pending.take(np.sort(most_frequent))


def _sort_by_count(values: Values, counts: np.ndarray) -> tuple[Values, np.ndarray]:
    """Sort by falling count, equal counts by value."""
    if len(counts) < 2:
        return values, counts
    if is_text(values):
        import pyarrow.compute as pc  # slow to import, and only needed for strings

        table = pa.table({"count": to_arrow(counts), "value": values})
        order = pc.sort_indices(table, [("count", "descending"), ("value", "ascending")])
        return values.take(order), counts[to_numpy(order)]
    min_value = int(values.min())
    max_count = int(counts.max())
    value_bits = (int(values.max()) - min_value).bit_length()
    if value_bits + max_count.bit_length() > 64:
        order = np.lexsort((values, -counts))
        return values[order], counts[order]
    # One 64-bit key holds the inverted count (high bits) and the value (low bits): sorting integers
    # is many times faster than np.lexsort, which sorts indices twice.
    keys = (max_count - counts).astype(np.uint64) << np.uint64(value_bits)
    keys |= (values - min_value).astype(np.uint64)
    keys.sort()
    value_mask = np.uint64((1 << value_bits) - 1)
    sorted_values = (keys & value_mask).astype(np.int64) + min_value
    keys >>= np.uint64(value_bits)
    return sorted_values, max_count - keys.astype(np.int64)


def read_vocabulary(
    description: WorkflowDescription, column: CategoricalColumn
) -> FittedVocabulary:
    """Read the vocabulary of a column of a saved workflow, with its counts.

    Raises:
        BadInputError: Its file is damaged.
    """
    values, counts = description.read_values(column)
    numbers = values if RAW_TYPES[column.raw].is_text else to_numpy(values)
    observed = dict(description.vocabularies[column.name].observed)
    return FittedVocabulary(numbers, to_numpy(counts), observed)
