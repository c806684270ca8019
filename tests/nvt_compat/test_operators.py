"""Operators that failed on pandas 3 or made NaN silently, and operators on arrays."""

from __future__ import annotations

import warnings
from pathlib import Path

import nvt_torchrec.nvt_compat  # noqa: F401

import dask.dataframe as dd
import numpy as np
import nvtabular
import pandas as pd
import pytest
from merlin.dag import DataFormats
from nvtabular import ops

from nvt_torchrec.base.errors import SchemaError


def _fit(node, frame: pd.DataFrame) -> nvtabular.Workflow:
    workflow = nvtabular.Workflow(node)
    workflow.fit(nvtabular.Dataset(frame, cpu=True))
    return workflow


def test_difference_lag() -> None:
    frame = pd.DataFrame(
        {"user": [1, 1, 1, 2, 2, np.nan, np.nan], "day": [1, 1, 2, 2, 2, 3, 3],
         "time": [1000, 1005, 2000, 2020, 2040, 7, 9.0]}
    )  # fmt: skip
    result = _fit(["time"] >> ops.DifferenceLag("user", shift=[1, -1]), frame).transform(frame)
    nan = np.nan
    lag, lead = result["time_difference_lag_1"], result["time_difference_lag_-1"]
    np.testing.assert_array_equal(lag, [nan, 5, 995, nan, 20, nan, nan])
    np.testing.assert_array_equal(lead, [-5, -995, nan, -20, nan, nan, nan])
    assert lag.dtype == np.float32
    two = _fit(["time"] >> ops.DifferenceLag(["user", "day"]), frame).transform(frame)
    np.testing.assert_array_equal(two["time_difference_lag_1"], [nan, 5, nan, nan, 20, nan, nan])


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_log_of_too_little_is_told() -> None:
    frame = pd.DataFrame({"x": [-1.0, 2.0, -5.0, np.nan], "l": [[0.5, -2.0], [], [1.0], [3.0]]})
    with pytest.warns(UserWarning, match="LogOp: column") as caught:
        _fit(["x", "l"] >> ops.LogOp(), frame).transform(frame)
    texts = "\n".join(str(warning.message) for warning in caught)
    assert "LogOp: column x: 2 of 4 values are -1 or less (smallest -5)" in texts
    assert "LogOp: column l: 1 of 4 values are -1 or less (smallest -2)" in texts
    assert "Clip(min_value=0)" in texts
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fine = pd.DataFrame({"x": [-0.5, 0.0, np.nan]})
        ops.LogOp().transform(nvtabular.ColumnSelector(["x"]), fine)


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value", "ignore:LogOp")
@pytest.mark.parametrize("values", [[-1.0, 2.0, 3.0], [2.0, -1.0], [np.inf, 1.0]])
def test_infinity_does_not_spread_over_a_column(values: list[float]) -> None:
    frame = pd.DataFrame({"x": values, "y": 1.0})
    with pytest.raises(SchemaError, match=rf"column x: the mean of its {len(values)} values is"):
        _fit(["x", "y"] >> ops.LogOp() >> ops.Normalize(), frame)
    missing = pd.DataFrame({"x": [np.nan] * 3})  # nothing to spread
    assert _fit(["x"] >> ops.Normalize(), missing).transform(missing)["x"].isna().all()


_DTYPES = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float64"]


@pytest.mark.parametrize("options", [{}, {"max_size": 9, "num_buckets": 4}], ids=str)
def test_categorify_on_arrays(tmp_path: Path, options: dict) -> None:
    """As Triton's servers call it: the ids are those of frames, hashed ones too."""
    rng = np.random.default_rng(0)
    arrays = {dtype: rng.integers(0, 9, 60).astype(dtype) for dtype in _DTYPES}
    arrays["text"] = rng.choice(["a", "bé", "c"], 60)
    node = list(arrays) >> ops.Categorify(out_path=str(tmp_path), **options)
    workflow = _fit(node, pd.DataFrame(arrays))
    operator = workflow.output_node.op.inference_initialize(node.input_columns, {})
    assert operator.supported_formats & DataFormats.NUMPY_DICT_ARRAY
    asked = {
        name: rng.integers(0, 20, 40).astype(name) if name != "text" else rng.choice(["a", "z"], 40)
        for name in arrays
    }
    asked["float64"][3] = np.nan
    expected = workflow.transform(pd.DataFrame(asked))
    found = operator.transform(node.input_columns, asked)
    assert len({*found["int64"][found["int64"] < 6]}) > 1 or not options
    for name in arrays:
        assert found[name].dtype == np.int64
        assert found[name].tolist() == expected[name].tolist()
    assert found["float64"][3] == 1


def test_lists_on_arrays(tmp_path: Path) -> None:
    frame = pd.DataFrame({"l": [np.array([5, 5]), np.array([], int), np.array([7])]})
    node = ["l"] >> ops.Categorify(out_path=str(tmp_path))
    operator = _fit(node, frame).output_node.op.inference_initialize(node.input_columns, {})
    values, offsets = operator.transform(
        node.input_columns, {"l": (np.array([7, 5, 9]), np.array([0, 1, 1, 3]))}
    )["l"]
    assert values.tolist() == [4, 3, 2]
    assert offsets.tolist() == [0, 1, 1, 3]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_fill_missing_on_arrays(dtype: str) -> None:
    columns = nvtabular.ColumnSelector(["x", "n"])
    operator = ops.FillMissing(7).inference_initialize(columns, {})
    given = {"x": np.array([1, np.nan], dtype), "n": np.array([1, 2])}
    found = operator.transform(columns, given)
    assert found["x"].tolist() == [1, 7]
    assert found["x"].dtype == dtype
    assert found["n"].tolist() == [1, 2]
    assert np.isnan(given["x"][1])


def test_what_needs_more_than_a_column_is_transformed_as_a_frame() -> None:
    columns = nvtabular.ColumnSelector(["x"])
    assert ops.FillMissing(add_binary_cols=True).inference_initialize(columns, {}) is None
    assert ops.Categorify(encode_type="combo").inference_initialize(columns, {}) is None


@pytest.mark.parametrize("rows", [1, 40, 41])
def test_the_median_of_all_partitions(rows: int) -> None:
    rng = np.random.default_rng(rows)
    frame = pd.DataFrame({"x": rng.lognormal(3, 2, rows), "n": rng.integers(0, 9, rows) / 1})
    frame.loc[rng.random(rows) < 0.3, "x"] = np.nan
    frame["empty"] = np.nan
    operator = ops.FillMedian()
    dataset = nvtabular.Dataset(dd.from_pandas(frame, npartitions=7, sort=False), cpu=True)
    nvtabular.Workflow(list(frame) >> operator).fit(dataset)
    assert pd.Series(operator.medians).equals(frame.median())


def test_a_missing_value_has_no_bucket() -> None:
    columns = nvtabular.ColumnSelector(["x"])
    with pytest.raises(SchemaError, match=r"column x: 1 of 2 values are missing(.|\n)*FillMissing"):
        ops.Bucketize([3]).transform(columns, pd.DataFrame({"x": [1.0, np.nan]}))


@pytest.mark.parametrize("operator", [ops.HashBucket(5), ops.ListSlice(1, pad=True)])
def test_lists_keep_the_index(operator) -> None:
    frame = pd.DataFrame({"l": [np.array([5, 5]), np.array([], int)]}, index=[7, 3])
    result = operator.transform(nvtabular.ColumnSelector(["l"]), frame.copy())
    assert result.index.tolist() == [7, 3]
    assert {len(row) for row in result["l"]} == (
        {2, 0} if operator.__class__ is ops.HashBucket else {1}
    )
