"""How often each value of a column occurs: counted by sorting, merged run by run.

Numbers are sorted (numpy's vectorized sort: 1–4 ns a value, where a hash table takes 2–14) and
counted in one pass; what is counted stays sorted, so that counts of two blocks merge in one pass
too. To sort more values at once costs less than to merge counts: count whole blocks. Strings are
counted by Arrow's hash tables. None of it holds the interpreter lock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from clicklog.arrays import to_arrow, to_numpy
from clicklog.kernels import compiled


@dataclasses.dataclass(frozen=True)
class Counts:
    """Distinct values and how often each occurred.

    Attributes:
        values: uint32 or int64 [n], ascending; or ``pa.LargeStringArray`` [n] without nulls, in
            any order (large: 32-bit offsets end at 2 GiB of text).
        counts: int64 [n].
    """

    values: np.ndarray | pa.LargeStringArray
    counts: np.ndarray

    def __len__(self) -> int:
        return len(self.counts)


def count(pieces: Sequence[np.ndarray] | Sequence[pa.Array], placeholders: int = 0) -> Counts:
    """Count the values of a column.

    Args:
        pieces: of the column, at least one: uint32 or int64 [n], or string arrays without nulls.
        placeholders: so many values are 0, or ``""``, that only stand for missing ones.
    """
    if isinstance(pieces[0], pa.Array):
        return _count_text(pa.chunked_array(pieces))
    ordered = np.concatenate(pieces)
    ordered.sort()
    distinct = np.empty_like(ordered)
    counts = np.empty(len(ordered), np.int64)
    used = _run_lengths(ordered, placeholders, distinct, counts)
    return Counts(distinct[:used].copy(), counts[:used].copy())


def _count_text(values: pa.ChunkedArray) -> Counts:
    import pyarrow.compute as pc  # a fifth of a second, which a log of numbers need not wait

    counted = pc.value_counts(values.cast(pa.large_string()))
    text, counts = counted.field("values"), counted.field("counts")
    there = pc.not_equal(text, "")  # an empty string is a missing one
    return Counts(text.filter(there), to_numpy(counts.filter(there)))


def merge(several: Iterable[Counts]) -> Counts:
    """The sum of at least one, of the same kind of values; taken one by one.

    Each is merged with those of about the same size, so that no value is moved more often than the
    logarithm of their number, and few wait in memory.
    """
    waiting: list[Counts] = []
    for counts in several:
        while waiting and len(waiting[-1]) <= len(counts):
            counts = _merge_two(waiting.pop(), counts)
        waiting.append(counts)
    while len(waiting) > 1:
        last = waiting.pop()
        waiting.append(_merge_two(waiting.pop(), last))
    return waiting[0]


def _merge_two(a: Counts, b: Counts) -> Counts:
    if not len(a) or not len(b):
        return a if len(a) else b
    if isinstance(a.values, pa.Array):
        return _merge_text(a, b)
    values = np.empty(len(a) + len(b), a.values.dtype)
    counts = np.empty(len(values), np.int64)
    used = _merge_sorted(a.values, a.counts, b.values, b.counts, values, counts)
    if used < len(values) * 3 // 4:  # give the rest back
        return Counts(values[:used].copy(), counts[:used].copy())
    return Counts(values[:used], counts[:used])


def _merge_text(a: Counts, b: Counts) -> Counts:
    table = pa.table(
        {
            "value": pa.chunked_array([a.values, b.values]),
            "count": pa.chunked_array([to_arrow(a.counts), to_arrow(b.counts)]),
        }
    )
    merged = table.group_by("value", use_threads=False).aggregate([("count", "sum")])
    values = merged["value"].combine_chunks()
    return Counts(values, to_numpy(merged["count_sum"].combine_chunks()))


@compiled()
def _run_lengths(ordered, placeholders, values, counts):
    """Distinct values of a sorted array and their counts; how many there are."""
    used = 0
    at = 0
    while at < len(ordered):
        value = ordered[at]
        begin = at
        at += 1
        while at < len(ordered) and ordered[at] == value:
            at += 1
        length = at - begin - (placeholders if value == 0 else 0)
        if length > 0:
            values[used] = value
            counts[used] = length
            used += 1
    return used


@compiled()
def _merge_sorted(a_values, a_counts, b_values, b_counts, values, counts):
    """Merge without a branch that depends on the values: half of those would be mispredicted."""
    i = j = used = 0
    while i < len(a_values) and j < len(b_values):
        a, b = a_values[i], b_values[j]
        from_a, from_b = np.int64(a <= b), np.int64(b <= a)
        values[used] = min(a, b)
        counts[used] = a_counts[i] * from_a + b_counts[j] * from_b
        i += from_a
        j += from_b
        used += 1
    while i < len(a_values):
        values[used] = a_values[i]
        counts[used] = a_counts[i]
        i += 1
        used += 1
    while j < len(b_values):
        values[used] = b_values[j]
        counts[used] = b_counts[j]
        j += 1
        used += 1
    return used
