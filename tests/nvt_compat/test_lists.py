"""List columns of pandas frames: types of empty ones, indexes, hashes as cuDF's."""

from __future__ import annotations

from pathlib import Path

import nvt_torchrec.nvt_compat  # noqa: F401

import dask.dataframe as dd
import numpy as np
import nvtabular
import pandas as pd
import pyarrow as pa
import pytest
from merlin.core import dispatch
from nvtabular import ops

from nvt_torchrec.base.hashing import murmur3_int, murmur3_string


def _lists(*rows: list, dtype: str = "int64") -> pd.Series:
    arrays = np.empty(len(rows), object)
    for i, row in enumerate(rows):
        arrays[i] = np.array(row, dtype)
    return pd.Series(arrays, name="l")


def test_flat_values_keep_their_type() -> None:
    assert dispatch.flatten_list_column_values(_lists([], [])).dtype == np.int64
    flat = dispatch.flatten_list_column_values(_lists([3, 1], [], [2]))
    assert flat.tolist() == [3, 1, 2]
    assert flat.dtype == np.int64
    assert dispatch.list_val_dtype(_lists([], [4])) == np.int64
    assert dispatch.list_val_dtype(_lists([], [])) == np.int64
    plain = pd.Series([["a"], [], ["b", "c"]])  # lists that are no arrays
    assert dispatch.flatten_list_column_values(plain).tolist() == ["a", "b", "c"]


def test_encoded_lists_keep_the_index() -> None:
    original = _lists([3, 1], [], [2]).set_axis([7, 5, 9])
    encoded = dispatch.encode_list_column(original, np.array([10, 11, 12]), dtype=np.int32)
    assert encoded.index.tolist() == [7, 5, 9]
    assert [x.tolist() for x in encoded] == [[10, 11], [], [12]]
    assert {x.dtype for x in encoded} == {np.dtype(np.int32)}


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_categorify_lists_over_partitions(tmp_path: Path, order: list[int]) -> None:
    """A partition of empty lists only, and a slice of a frame, give what the others do."""
    parts = [_lists([5, 5], [7]), _lists([], []), _lists([7, 8], [5], [])]
    frames = [parts[i].to_frame() for i in order]
    frame = dd.from_map(lambda part: part, frames, meta=frames[0][:0], enforce_metadata=False)
    workflow = nvtabular.Workflow(["l"] >> ops.Categorify(out_path=str(tmp_path), dtype="int32"))
    workflow.fit(nvtabular.Dataset(frame, cpu=True))
    whole = pd.concat([part.to_frame() for part in parts], ignore_index=True)
    result = workflow.transform(whole[3:])["l"]
    assert [x.tolist() for x in result] == [[], [4, 5], [3], []]
    assert result.index.tolist() == [3, 4, 5, 6]
    assert [x.tolist() for x in workflow.transform(parts[1].to_frame())["l"]] == [[], []]


def test_only_empty_lists_give_an_empty_vocabulary(tmp_path: Path) -> None:
    workflow = nvtabular.Workflow(["l"] >> ops.Categorify(out_path=str(tmp_path)))
    workflow.fit(nvtabular.Dataset(_lists([], []).to_frame(), cpu=True))
    assert len(pd.read_parquet(tmp_path / "categories" / "unique.l.parquet")) == 0
    assert [x.tolist() for x in workflow.transform(_lists([9], []).to_frame())["l"]] == [[2], []]


def test_hash_is_of_the_value_and_not_of_what_holds_it() -> None:
    values = [0, 5, -7, 2**53, 5]
    expected = murmur3_int(np.array(values)).tolist()
    for series in (
        pd.Series(values),
        pd.Series(values, dtype="float64"),
        pd.Series(values, dtype="Int64"),
        pd.Series(values, index=[9, 9, 8, 7, 6]),
    ):
        assert dispatch.hash_series(series).tolist() == expected
    assert dispatch.hash_series(_lists(values[:2], [], values[2:])).tolist() == expected
    missing = dispatch.hash_series(pd.Series([*values, np.nan]))
    assert missing[:-1].tolist() == expected
    words = ["é", "", "a" * 9]
    expected = murmur3_string(pa.array(words)).tolist()
    assert dispatch.hash_series(pd.Series(words, dtype=object)).tolist() == expected
    assert dispatch.hash_series(pd.Series(words, dtype="str")).tolist() == expected
    assert dispatch.hash_series(pd.Series([None, *words])).tolist()[1:] == expected
    assert dispatch.hash_series(_lists(words, dtype="object")).tolist() == expected
    assert len(dispatch.hash_series(pd.Series([None, None]))) == 2


@pytest.mark.parametrize("values", [[1.5], ["a", 1], [b"a"]])
def test_what_has_no_hash(values: list) -> None:
    with pytest.raises(TypeError, match=r"no categories to hash|expected numbers or strings"):
        dispatch.hash_series(pd.Series(values))


@pytest.mark.parametrize(
    ("known", "asked", "expected"),
    [(["16", "16", "10"], [10, 16], "strings"), ([16, 16, 10], ["10"], "numbers")],
)
def test_numbers_are_not_looked_up_among_strings(tmp_path: Path, known, asked, expected) -> None:
    """Nor strings, which would be read as decimal, among numbers."""
    workflow = nvtabular.Workflow(["c"] >> ops.Categorify(out_path=str(tmp_path)))
    workflow.fit(nvtabular.Dataset(pd.DataFrame({"c": known}), cpu=True))
    with pytest.raises(RuntimeError) as caught:
        workflow.transform(pd.DataFrame({"c": asked}))
    assert f"expected {expected}" in str(caught.value.__cause__)
    assert workflow.transform(pd.DataFrame({"c": [None, known[2]]}))["c"].tolist() == [1, 4]
    assert workflow.transform(pd.DataFrame({"c": [np.nan, np.nan]}))["c"].tolist() == [1, 1]
