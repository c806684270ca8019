"""Count the values of categorical columns, and compute the moments of dense ones.

Numbers are sorted, then counted in one pass: numpy's vectorized sort takes 1–4 ns per value, a hash
table 2–14 ns. Counts stay sorted by value, so the counts of two blocks are merged in one pass too.
Sorting more values at once is cheaper than merging counts, so whole blocks are counted. Strings
are counted by Arrow's hash tables. All of this releases the interpreter lock.

Moments are float64 [dense columns, 4]: count, origin (the first value), mean − origin, and the sum
of squared deviations from the mean (M2); all 0 for columns that are not normalized. They are merged
by the formula of Chan, Golub and LeVeque (Updating formulae and a pairwise algorithm for computing
sample variances, 1979), in the order of the rows, so that the result does not depend on which
worker computed which block. The mean and the standard deviation equal those of NVTabular's
Normalize with ``nvt_compat.operators`` up to the rounding of float64.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import to_arrow, to_numpy
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.transforms import LOG_SHIFT, TRANSFORMS
from nvt_torchrec.formats.rows import RawRows, get_bit, get_word

#: Bytes of text to parse at once. Small enough that the text and the parsed columns stay in a
#: core's caches, and that freed memory is reused instead of returned to the system. The last bits
#: of the moments depend on this size.
PIECE_BYTES = 2 << 20


@dataclasses.dataclass(frozen=True)
class Counts:
    """Distinct values and how often each occurred.

    Attributes:
        values: The distinct values: uint32 or int64 [n] in ascending order, or a
            ``pa.LargeStringArray`` [n] without nulls in any order (32-bit offsets would limit it to
            2 GiB of text).
        counts: How often each occurred, int64 [n].
    """

    values: np.ndarray | pa.LargeStringArray
    counts: np.ndarray

    def __len__(self) -> int:
        return len(self.counts)


def count(pieces: Sequence[np.ndarray] | Sequence[pa.Array], placeholders: int = 0) -> Counts:
    """Count the values of a column.

    Args:
        pieces: The parts of the column, at least one: uint32 or int64 [n], or string arrays without
            nulls.
        placeholders: The number of zeros that stand for missing values, which are not counted. In
            string columns every ``""`` stands for a missing value.
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
    import pyarrow.compute as pc  # takes 0.2 s to import, and a log of numbers does not need it

    counted = pc.value_counts(values.cast(pa.large_string()))
    text = counted.field("values")
    counts = counted.field("counts")
    present = pc.not_equal(text, "")  # an empty string stands for a missing value
    return Counts(text.filter(present), to_numpy(counts.filter(present)))


def merge(several: Iterable[Counts]) -> Counts:
    """Add up one or more counts of the same type of values, which are consumed one by one.

    Each counts object is merged with another one of about the same size, as in a merge sort. So a
    value is copied at most log2(number of counts) times, and few counts are in memory at once.
    """
    # A stack of partial sums: the sizes decrease towards the top.
    stack: list[Counts] = []
    for counts in several:
        while stack and len(stack[-1]) <= len(counts):
            counts = _merge_two(stack.pop(), counts)
        stack.append(counts)
    while len(stack) > 1:
        last = stack.pop()
        stack.append(_merge_two(stack.pop(), last))
    return stack[0]


def _merge_two(a: Counts, b: Counts) -> Counts:
    if not len(a) or not len(b):
        return a if len(a) else b
    if isinstance(a.values, pa.Array):
        return _merge_text(a, b)
    values = np.empty(len(a) + len(b), a.values.dtype)
    counts = np.empty(len(values), np.int64)
    used = _merge_sorted(a.values, a.counts, b.values, b.counts, values, counts)
    if used < len(values) * 3 // 4:  # release the unused memory
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
    """Write the distinct values of a sorted array and their counts; return their number."""
    used = 0
    end = 0
    while end < len(ordered):
        value = ordered[end]
        begin = end
        end += 1
        while end < len(ordered) and ordered[end] == value:
            end += 1
        length = end - begin - (placeholders if value == 0 else 0)
        if length > 0:
            values[used] = value
            counts[used] = length
            used += 1
    return used


@compiled()
def _merge_sorted(a_values, a_counts, b_values, b_counts, values, counts):
    """Merge two sorted counts; return the number of distinct values.

    The main loop has no branches that depend on the values: half of them would be mispredicted.
    """
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


# ---- moments

#: The columns of moments: number of values, first value, mean − first value, and sum of squared
#: deviations from the mean.
COUNT = 0
ORIGIN = 1
OFFSET = 2
M2 = 3

#: The smallest value whose logarithm is computed; smaller values are raised to it.
_MINIMUM = TRANSFORMS["log"].minimum
#: Logarithms of small integers: most values are small, and a look-up is faster than np.log.
_LOGARITHMS = np.log(np.maximum(np.arange(1 << 16), 1))


def compute_moments(rows: RawRows, spec: FeatureSpec) -> np.ndarray:
    """Compute the moments of the dense columns before normalization.

    Missing values are filled first, so each counts as a value.

    Returns:
        float64 [dense columns, 4]: for each dense column, count, origin (the first value), mean −
        origin, sum of squared deviations from the mean. All 0 for a column that is not normalized,
        and for an aggregate that is not in ``rows``.
    """
    result = np.zeros((len(spec.dense), 4))
    if not len(rows):
        return result
    scratch = np.empty(len(rows))
    for j, column in enumerate(spec.dense):
        transform = spec.get_transform(column)
        if not transform.normalized or (column.aggregate and not rows.has_aggregates):
            continue
        values = rows.dense[j]
        fill = rows.dense.dtype.type(column.fill)
        missing = get_word(rows.dense_missing, j)
        bit = np.uint64(1) << get_bit(j)
        if transform.function != TRANSFORMS["log"].function:
            _fill(values, missing, bit, fill, scratch)
            result[j] = _compute_moments(transform.apply(scratch, np))
            continue
        if values.dtype == np.int32:
            _take_logarithm_of_int(values, missing, bit, fill, _LOGARITHMS, scratch)
        else:
            _take_logarithm(values, missing, bit, fill, scratch)
        result[j] = _compute_moments(scratch)
    return result


@compiled()
def _take_logarithm(values, missing, bit, fill, out):
    """Compute log(max(value, minimum) + shift) in float64, with ``fill`` for missing values."""
    for i in range(len(values)):
        value = fill if missing[i] & bit else values[i]
        out[i] = np.log(max(value, _MINIMUM) + LOG_SHIFT)


@compiled()
def _take_logarithm_of_int(values, missing, bit, fill, table, out):
    """Compute what :func:`_take_logarithm` computes for int32 values, faster.

    Two simple loops, which LLVM vectorizes, clip all values to the table and look them up. Values
    above the table, which are rare, are computed in a third loop.
    """
    minimum = np.int32(_MINIMUM)
    maximum = np.int32(len(table) - LOG_SHIFT - 1)
    indices = np.empty(len(values), np.int32)
    num_above = 0
    for i in range(len(values)):
        value = fill if missing[i] & bit else values[i]
        num_above += np.int32(value > maximum)
        indices[i] = min(max(value, minimum), maximum) + np.int32(LOG_SHIFT)
    for i in range(len(values)):
        out[i] = table[np.uint32(indices[i])]
    if num_above:
        for i in range(len(values)):
            value = fill if missing[i] & bit else values[i]
            if value > maximum:
                out[i] = np.log(np.float64(value) + LOG_SHIFT)


@compiled()
def _fill(values, missing, bit, fill, out):
    """Copy values as float64, with ``fill`` for missing ones."""
    for i in range(len(values)):
        out[i] = fill if missing[i] & bit else values[i]


@compiled()
def _compute_moments(values):
    """Compute count, origin, mean − origin and M2.

    Four partial sums are added in parallel: one sum would wait for the latency of each addition.
    """
    count = len(values)
    origin = values[0]
    even = count - count % 4
    a = b = c = d = 0.0
    for i in range(0, even, 4):
        a += values[i] - origin
        b += values[i + 1] - origin
        c += values[i + 2] - origin
        d += values[i + 3] - origin
    for i in range(even, count):
        a += values[i] - origin
    offset = ((a + b) + (c + d)) / count
    a = b = c = d = 0.0
    for i in range(0, even, 4):
        a += (values[i] - origin - offset) ** 2
        b += (values[i + 1] - origin - offset) ** 2
        c += (values[i + 2] - origin - offset) ** 2
        d += (values[i + 3] - origin - offset) ** 2
    for i in range(even, count):
        a += (values[i] - origin - offset) ** 2
    return count, origin, offset, (a + b) + (c + d)


def has_moments(spec: FeatureSpec) -> bool:
    """Return True if the workflow has moments.

    Without dense columns, the default transform of the spec decides.
    """
    if spec.dense:
        return bool(spec.normalized_names)
    return TRANSFORMS[spec.dense_transform].normalized


def merge_moments(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Merge the moments of disjoint rows, at least one, in their order."""
    merged = parts[0].copy()
    for other in parts[1:]:
        for j in range(len(merged)):
            merged[j] = _add_moments(merged[j], other[j])
    return merged


def _add_moments(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if not a[COUNT] or not b[COUNT]:
        return a if a[COUNT] else b
    count = a[COUNT] + b[COUNT]
    share = b[COUNT] / count
    delta = b[ORIGIN] - a[ORIGIN] + (b[OFFSET] - a[OFFSET])
    m2 = a[M2] + b[M2] + delta**2 * a[COUNT] * share
    return np.array([count, a[ORIGIN], a[OFFSET] + delta * share, m2])


def compute_statistics(merged: np.ndarray, spec: FeatureSpec) -> dict[str, dict[str, float]]:
    """Return mean and std of each normalized column.

    The std is the sample's (divided by n − 1), and 0 with fewer than two rows.
    """
    result = {}
    wanted = set(spec.normalized_names)
    for name, (count, origin, offset, m2) in zip(spec.dense_names, merged, strict=True):
        if name not in wanted:
            continue
        std = math.sqrt(m2 / (count - 1)) if count > 1 else 0.0
        result[name] = {"mean": float(origin + offset), "std": std}
    return result
