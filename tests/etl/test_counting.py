"""Counting values and measuring columns, against Python's own counters and exact sums."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvt_torchrec.etl.units.counting import (
    Counts,
    compute_moments,
    compute_statistics,
    count,
    merge,
    merge_moments,
)
from nvt_torchrec.formats.feature_spec import DenseColumn, FeatureSpec
from nvt_torchrec.formats.rows import add_missing, make_empty_mask
from tests.logs import CRITEO

#: The first call compiles.
patient = settings(deadline=None)

KINDS = {
    "hex32": (st.integers(0, 40) | st.integers(0, 2**32 - 1), np.uint32),
    "int": (st.integers(-9, 9) | st.integers(-(2**53), 2**53), np.int64),
    "string": (st.text("aé\x00", max_size=3), None),
}


def _column(values: list, dtype) -> np.ndarray | pa.Array:
    return pa.array(values, pa.string()) if dtype is None else np.array(values, dtype)


def _counter(counts: Counts) -> Counter:
    values = counts.values.to_pylist() if isinstance(counts.values, pa.Array) else counts.values
    pairs = list(zip(map(_plain, values), counts.counts.tolist(), strict=True))
    assert len(dict(pairs)) == len(pairs), "a value twice"
    assert counts.counts.dtype == np.int64
    return Counter(dict(pairs))


def _plain(value):
    return value if isinstance(value, str) else int(value)


@pytest.mark.parametrize("kind", KINDS)
@patient
@given(data=st.data())
def test_counts_are_those_of_a_counter_whatever_the_pieces(kind: str, data: st.DataObject) -> None:
    strategy, dtype = KINDS[kind]
    pieces = data.draw(st.lists(st.lists(strategy, max_size=30), min_size=1, max_size=9))
    cut = data.draw(st.integers(1, len(pieces)))  # some at once, the others one by one
    columns = [_column(piece, dtype) for piece in pieces]
    counted = [count(columns[:cut]), *(count([column]) for column in columns[cut:])]
    expected = Counter(value for piece in pieces for value in piece)
    del expected[""]  # the empty string is a missing one
    merged = merge(iter(counted))
    assert _counter(merged) == expected
    if dtype is not None:
        assert merged.values.dtype == dtype
        assert (merged.values[1:] > merged.values[:-1]).all()


@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
@patient
@given(values=st.lists(st.integers(0, 3), max_size=20), missing=st.integers(0, 5))
def test_zeros_that_stand_for_missing_values_are_not_counted(dtype, values, missing) -> None:
    column = np.array([-1 * (dtype is np.int64), *values, *[0] * missing], np.int64).astype(dtype)
    expected = Counter(column.tolist())
    expected[0] -= missing
    assert _counter(count([column], missing)) == +expected


def _rows(columns: np.ndarray, missing: np.ndarray):
    from nvt_torchrec.formats.rows import RawRows

    n = columns.shape[1]
    masks = make_empty_mask(len(columns), n)
    for j in range(len(columns)):
        add_missing(masks, j, missing[j])
    columns = np.where(missing, columns.dtype.type(0), columns)
    empty = make_empty_mask(0, n)
    return RawRows(np.empty((0, n), np.uint8), columns, masks, [], empty, np.arange(n), [], 0, n)


def _spec(transform: str, fills: list[int], raw: str = "int32") -> FeatureSpec:
    dense = tuple(DenseColumn(f"d{j}", fill, raw) for j, fill in enumerate(fills))
    return FeatureSpec("label", dense, CRITEO.categorical, transform)


def _exact(values: list[float]) -> dict[str, float]:
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return {"mean": mean, "std": math.sqrt(squares / max(1, len(values) - 1))}


@pytest.mark.parametrize("raw", ["int32", "float"])
@pytest.mark.parametrize("transform", ["log_normalize", "normalize"])
@patient
@given(data=st.data())
def test_moments_of_pieces_are_those_of_the_whole(transform: str, raw: str, data) -> None:
    kinds = {
        "int32": (st.integers(-5, 9) | st.integers(-(2**31), 2**31 - 1), np.int32),
        "float": (st.floats(-9, 9) | st.floats(-1e9, 1e9), np.float64),
    }
    strategy, dtype = kinds[raw]
    n = data.draw(st.integers(1, 25))
    values = data.draw(st.lists(strategy, min_size=2 * n, max_size=2 * n))
    missing = np.array(data.draw(st.lists(st.booleans(), min_size=2 * n, max_size=2 * n)))
    columns, missing = np.array(values, dtype).reshape(2, n), missing.reshape(2, n)
    fills = [0, -7]
    spec = _spec(transform, fills, raw)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
    edges = [0, *cuts, n]
    parts = [
        compute_moments(_rows(columns[:, a:b], missing[:, a:b]), spec)
        for a, b in itertools.pairwise(edges)
    ]
    got = compute_statistics(merge_moments(parts), spec)
    for j, fill in enumerate(fills):
        filled = [
            float(fill if absent else value)
            for value, absent in zip(columns[j].tolist(), missing[j].tolist(), strict=True)
        ]
        if transform == "log_normalize":
            filled = [math.log(max(value, -2.0) + 3.0) for value in filled]
        expected = _exact(filled)
        scale = max(map(abs, filled))
        assert got[f"d{j}"]["mean"] == pytest.approx(expected["mean"], rel=1e-12, abs=1e-14 * scale)
        assert got[f"d{j}"]["std"] == pytest.approx(expected["std"], rel=1e-9, abs=1e-14 * scale)


def test_equal_values_have_no_spread_and_one_row_has_none() -> None:
    spec = _spec("log_normalize", [0])
    same = np.full((1, 1001), 12345, np.int32)
    parts = [
        compute_moments(_rows(part, part < 0), spec) for part in np.array_split(same, 3, axis=1)
    ]
    assert compute_statistics(merge_moments(parts), spec)["d0"]["std"] == 0.0
    one = compute_statistics(compute_moments(_rows(same[:, :1], same[:, :1] < 0), spec), spec)
    assert one["d0"] == {"mean": pytest.approx(math.log(12348), rel=1e-15), "std": 0.0}
