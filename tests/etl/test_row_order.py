"""Rows of a table are ordered by buckets of their keys as sorting all of them would order them."""

import numpy as np
import pytest

from nvt_torchrec.etl.tables.coded_values import (
    CodedValues,
    concatenate_coded,
    encode_values,
    make_categorical_arrays,
)
from nvt_torchrec.etl.tables.row_order import sort_keys
from nvt_torchrec.formats.feature_spec import CategoricalColumn

LOWEST, HIGHEST = -(2**63), 2**63 - 1


def draw_keys(random: np.random.Generator, rows: int, kind: str) -> np.ndarray:
    """Draw keys, some of them alike."""
    if kind == "hashes":
        return random.integers(LOWEST, HIGHEST, max(1, rows // 3))[
            random.integers(0, max(1, rows // 3), rows)
        ]
    if kind == "one bucket":  # they differ in their lowest bits alone
        return random.integers(0, 50, rows)
    return np.full(rows, HIGHEST)


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 64, 65, 3000])
@pytest.mark.parametrize("kind", ["hashes", "one bucket", "one key"])
def test_keys_are_sorted_as_lexsort_sorts_them(rows: int, kind: str) -> None:
    random = np.random.default_rng(rows)
    keys = draw_keys(random, rows, kind).astype(np.int64)
    starts = random.integers(-3, 3, rows)
    assert sort_keys(keys, starts).tolist() == np.lexsort((starts, keys)).tolist()


def test_buckets_of_very_different_sizes() -> None:
    random = np.random.default_rng(0)
    keys = np.concatenate([random.integers(LOWEST, HIGHEST, 500), np.repeat([-5, 9], 200)])
    random.shuffle(keys)
    starts = random.integers(0, 1000, len(keys))
    assert sort_keys(keys, starts).tolist() == np.lexsort((starts, keys)).tolist()


def test_joined_pieces_are_numbered_like_one() -> None:
    column = CategoricalColumn("c", raw="int")
    values = np.array([7, 3, 7, 5, -1, 3, 9])
    whole = encode_values(values)
    joined = concatenate_coded(encode_values(values[:3]), encode_values(values[3:]))
    taken = np.array([6, 0, 1, 1, 4])
    missing = np.zeros(len(taken), np.bool_)
    for coded in (whole, joined):
        arrays = make_categorical_arrays(column, coded.take(taken), missing)
        assert arrays["values"].tolist() == [-1, 3, 7, 9]  # 5 is in no row any more
        assert arrays["values"][arrays["codes"]].tolist() == values[taken].tolist()


def test_lists_of_pieces_are_joined() -> None:
    first = CodedValues(np.array([0, 1, 0], np.int32), np.array([0, 2, 2, 3]), np.array([4, 8]))
    second = CodedValues(np.array([0], np.int32), np.array([0, 1]), np.array([8]))
    joined = concatenate_coded(first, second)
    assert joined.offsets is not None
    assert joined.offsets.tolist() == [0, 2, 2, 3, 4]
    assert np.asarray(joined.distinct)[joined.codes].tolist() == [4, 8, 4, 8]
