"""Keys of tables are found whatever their number, and however they are spread."""

from __future__ import annotations

import numpy as np
import pytest

from nvt_torchrec.workflows.table_kernels import find_rows, find_versions, make_buckets

_INT64 = np.iinfo(np.int64)


def make_keys(rows: int, spread: str) -> np.ndarray:
    rng = np.random.default_rng(rows)
    if spread == "even":
        keys = rng.integers(_INT64.min, _INT64.max, rows)
    else:  # a damaged file: most buckets are empty
        keys = rng.integers(-40, 40, rows)
    return np.sort(np.repeat(keys, 3)[:rows])


@pytest.mark.parametrize("rows", [0, 1, 2, 9, 700, 20_000])
@pytest.mark.parametrize("spread", ["even", "narrow"])
@pytest.mark.parametrize("bucket_rows", [1, 8, 10**6])
def test_found_as_by_a_plain_search(rows: int, spread: str, bucket_rows: int) -> None:
    keys = make_keys(rows, spread)
    starts = np.arange(rows) - np.searchsorted(keys, keys)  # 0, 1 and 2 for each key
    rng = np.random.default_rng(1)
    ends = [0, 1, -1, _INT64.min, _INT64.max]
    asked = np.concatenate([keys, rng.integers(_INT64.min, _INT64.max, 500), ends])
    rng.shuffle(asked)
    cuts = rng.integers(-1, 5, len(asked))
    buckets = make_buckets(keys, bucket_rows)
    first = np.searchsorted(keys, asked)
    end = np.searchsorted(keys, asked, "right")
    is_there = (first < end) & (asked != 0)
    np.testing.assert_array_equal(find_rows(keys, *buckets, asked), np.where(is_there, first, -1))
    versions = np.full(len(asked), -1)
    for i in np.flatnonzero(is_there):
        known = np.flatnonzero(starts[first[i] : end[i]] < cuts[i])
        if len(known):
            versions[i] = first[i] + known[-1]
    found = find_versions(keys, starts, *buckets, asked, cuts)
    np.testing.assert_array_equal(found, versions)
